"""The catalog's tables (SQLAlchemy Core), the same on SQLite and on PostgreSQL.

The names have a prefix of their own: on PostgreSQL the server's pg_subscription would hide a table of that name.
LSNs are stored as "00000000/016B3748", at a fixed width, so that the texts sort as the 64-bit positions do.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator

from pubsub.protocol.lsn import Lsn

#: Oids below belong to the system, as in PostgreSQL (access/transam.h: FirstNormalObjectId).
FIRST_OID: Final = 16384


class LsnType(TypeDecorator[Lsn]):
    """An LSN as text of fixed width, which SQL compares as it would the positions."""

    impl = String(17)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        # Other collations of PostgreSQL may ignore the slash.
        return dialect.type_descriptor(String(17, collation="C" if dialect.name == "postgresql" else None))

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else f"{value >> 32:08X}/{value & 0xFFFFFFFF:08X}"

    def process_result_value(self, value: str | None, dialect: Dialect) -> Lsn | None:
        return None if value is None else Lsn.parse(value)


class UtcTime(TypeDecorator[datetime]):
    """An aware time, stored in UTC, since SQLite has no time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value if value is None or value.tzinfo is not None else value.replace(tzinfo=UTC)


_Identity = BigInteger().with_variant(Integer(), "sqlite")
metadata: Final = MetaData()


def _oid_of_subscription() -> Column[int]:
    return Column(
        "subid",
        BigInteger,
        ForeignKey("pubsub_subscription.oid", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    )


def _relid() -> Column[int]:
    return Column("relid", BigInteger, primary_key=True, autoincrement=False)


node: Final = Table(
    "pubsub_node",
    metadata,
    # The check and the key allow one row only.
    Column("id", Integer, CheckConstraint("id = 1", name="pubsub_node_one_row"), primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("node_id", String(20), nullable=False),
    Column("created", UtcTime, nullable=False),
    Column("next_oid", BigInteger, nullable=False),
    Column("change_counter", BigInteger, nullable=False),
    # How often the catalog has had a new daemon.
    Column("daemon_epoch", BigInteger),
    Column("catalog_path", Text),
    Column("catalog_file", Text),
)

#: The daemons that run, or were killed (catalog.records.DaemonRow); `id`: the epoch that each began.
daemon: Final = Table(
    "pubsub_daemon",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("pid", BigInteger, nullable=False),
    Column("host", Text, nullable=False),
    Column("home", Text, nullable=False),
    Column("started", UtcTime, nullable=False),
    Column("memory", JSON(none_as_null=True)),
)

#: What each of the daemons that share the catalog does (catalog.leases); `unit`: a subscription's oid, OF_NODE or OF_SOURCES.
lease: Final = Table(
    "pubsub_lease",
    metadata,
    Column("unit", BigInteger, primary_key=True, autoincrement=False),
    Column("daemon", BigInteger, ForeignKey("pubsub_daemon.id", ondelete="CASCADE"), nullable=False),
    Column("leaving", Boolean, nullable=False),
)

subscription: Final = Table(
    "pubsub_subscription",
    metadata,
    Column("oid", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False, unique=True),
    Column("enabled", Boolean, nullable=False),
    Column("conninfo", Text, nullable=False),
    Column("slot_name", Text),
    Column("publications", JSON, nullable=False),
    Column("options", JSON, nullable=False),
    Column("target", Text, nullable=False),
    Column("publisher_system_identifier", String(20)),
    Column("publisher_timeline", BigInteger),
    Column("publisher_timeline_start", LsnType),
    Column("publisher_lost_at", LsnType),
    Column("publisher_database", Text),
    Column("skip_lsn", LsnType, nullable=False),
    Column("owner", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("dropping", Boolean, nullable=False),
    Column("paused", Text),
    # The greatest copy generation of the tables that have left; a table that joins again continues after it.
    Column("left_generation", Integer),
)

relation: Final = Table(
    "pubsub_subscription_rel",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("schema_name", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column(
        "state",
        String(1),
        CheckConstraint("state IN ('i', 'd', 'f', 's', 'r')", name="pubsub_rel_state"),
        nullable=False,
    ),
    Column("lsn", LsnType),
    Column("copy_generation", BigInteger, nullable=False),
    # The copy generation with which the table joined; NULL: 0.
    Column("joined_generation", BigInteger),
    Column("sync_slot", Text),
    Column("path", Text, nullable=False),
    Column("error", Text),
    Column("error_hint", Text),
    Column("definition", Text),
    Column("estimated_rows", BigInteger),
    # The number of REFRESH's unanswered requests to compare the table's columns with the publisher's; NULL: none.
    Column("look_again", BigInteger),
    # A Delta table has one owner, whatever the subscription, or one for each source (from_rows.stored_path).
    UniqueConstraint("path", name="pubsub_rel_path"),
)

#: The sequences of subscriptions (catalog.records.SubscriptionSequence).
sequence: Final = Table(
    "pubsub_subscription_seq",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("schema_name", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("state", String(1), CheckConstraint("state IN ('i', 'r')", name="pubsub_seq_state"), nullable=False),
    Column("asked", BigInteger, nullable=False),
    Column("leaving", Boolean, nullable=False),
    Column("path", Text, nullable=False),
    Column("definition", Text, nullable=False),
    Column("last_value", BigInteger),
    Column("is_called", Boolean),
    Column("lsn", LsnType),
)

#: What happened to a table: it stopped, or another writer changed it.  The next copy deletes the row.
incident: Final = Table(
    "pubsub_table_incident",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("stopped", Boolean, nullable=False),
    Column("error_lsn", LsnType),
    Column("foreign_version", BigInteger),
    Column("foreign_operation", Text),
    Column("foreign_engine", Text),
)

origin: Final = Table(
    "pubsub_replication_origin",
    metadata,
    _oid_of_subscription(),
    Column("relid", BigInteger, primary_key=True, autoincrement=False),  # 0: the subscription's own
    Column("remote_lsn", LsnType, nullable=False),
    Column("local_lsn", LsnType),
    # The last transaction up to remote_lsn (catalog.records.LastCommit).
    Column("commit_lsn", LsnType),
    Column("commit_time", BigInteger),
)

worker: Final = Table(
    "pubsub_worker",
    metadata,
    _oid_of_subscription(),
    _relid(),  # 0: apply
    Column("worker_type", Text, nullable=False),
    Column("pid", BigInteger),
    Column("leader_pid", BigInteger),
    Column("received_lsn", LsnType),
    Column("last_msg_send_time", UtcTime),
    Column("last_msg_receipt_time", UtcTime),
    Column("latest_end_lsn", LsnType),
    Column("latest_end_time", UtcTime),
    Column("publisher_lsn", LsnType),
    Column("flush_lsn", LsnType),
    Column("lag_seconds", Float),
    Column("sync_state", String(1)),
    Column("sync_lsn", LsnType),
)

publisher: Final = Table(
    "pubsub_publisher",
    metadata,
    _oid_of_subscription(),
    Column("current_lsn", LsnType),
    Column("retained_wal_bytes", BigInteger),
    Column("safe_wal_bytes", BigInteger),
    Column("wal_status", Text),
    Column("warnings", JSON, nullable=False),
    Column("waits", JSON, nullable=False),
    Column("away_since", UtcTime),
)

prepared: Final = Table(
    "pubsub_prepared",
    metadata,
    _oid_of_subscription(),
    Column("xid", BigInteger, primary_key=True, autoincrement=False),
    Column("gid", Text, nullable=False),
    Column("prepared", UtcTime, nullable=False),
    Column("host", Text),
    Column("directory", Text),
)

#: How a table is copied, for the next attempt of its copy (catalog.records.CopyPlan).
copy_plan: Final = Table(
    "pubsub_copy_plan",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("generation", BigInteger, nullable=False),
    Column("start_lsn", LsnType, nullable=False),
    Column("until_lsn", LsnType, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("edges", JSON, nullable=False),
    Column("snapshot", Text, nullable=False),
    Column("fingerprint", Text),
    Column("attempts", JSON, nullable=False),
)

copy: Final = Table(
    "pubsub_copy_progress",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("tuples_processed", BigInteger, nullable=False),
    Column("tuples_total", BigInteger),
    Column("bytes_processed", BigInteger, nullable=False),
    Column("bytes_total", BigInteger),
    Column("finished", Boolean, nullable=False),
)

#: How many rows a Delta table holds (catalog.figures.TableRows).
rows: Final = Table(
    "pubsub_table_rows",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("generation", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("lsn", LsnType, nullable=False),
)

#: What a Delta table takes on disk (catalog.figures.TableStorage).
storage: Final = Table(
    "pubsub_table_storage",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("generation", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("live_bytes", BigInteger, nullable=False),
    Column("retained_bytes", BigInteger, nullable=False),
    Column("log_bytes", BigInteger, nullable=False),
    Column("last_vacuum", UtcTime),
    Column("due", UtcTime),
    Column("small_files", BigInteger, nullable=False, server_default="0"),
    Column("deleted_rows", BigInteger, nullable=False, server_default="0"),
)

#: The snapshots that are kept readable (catalog.records.PinnedSnapshot).  They outlive their subscription.
pinned_snapshot: Final = Table(
    "pubsub_pinned_snapshot",
    metadata,
    Column("name", Text, primary_key=True),
    Column("subscription", Text, nullable=False),
    Column("lsn", LsnType, nullable=False),
    Column("created", UtcTime, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("tables", JSON, nullable=False),
)

#: A Delta table's name in one of Spark's catalogs (catalog.figures.Registration).
registration: Final = Table(
    "pubsub_table_registration",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("path", Text, nullable=False),
    Column("name", JSON),
    Column("error", Text),
    Column("error_hint", Text),
)

#: The last comparison of each table with its publisher's (catalog.figures.Verification).
verification: Final = Table(
    "pubsub_verification",
    metadata,
    _oid_of_subscription(),
    _relid(),
    Column("generation", BigInteger, nullable=False),
    Column("started", UtcTime, nullable=False),
    Column("finished", UtcTime, nullable=False),
    Column("lsn", LsnType),
    Column("outcome", Text, nullable=False),
    Column("sampled", Boolean, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("delta_rows", BigInteger, nullable=False),
    Column("missing", BigInteger, nullable=False),
    Column("extra", BigInteger, nullable=False),
    Column("different", BigInteger, nullable=False),
    Column("ranges_left", BigInteger, nullable=False),
    Column("repaired", BigInteger, nullable=False),
    Column("reason", Text),
    Column("hint", Text),
    Column("equal_at", UtcTime),
    Column("differed_at", UtcTime),
)

COUNTERS: Final = (
    "apply_error_count",
    "sync_error_count",
    "sync_seq_error_count",
    "confl_insert_exists",
    "confl_update_origin_differs",
    "confl_update_exists",
    "confl_update_missing",
    "confl_delete_origin_differs",
    "confl_delete_missing",
    "confl_multiple_unique_conflicts",
    "transactions",
    "batches",
    "commits",
    "rows_inserted",
    "rows_updated",
    "rows_deleted",
    "truncates",
    "bytes_received",
    "spill_txns",
    "spill_count",
    "spill_bytes",
    "stream_txns",
    "stream_count",
    "stream_bytes",
)

statistics: Final = Table(
    "pubsub_subscription_stats",
    metadata,
    _oid_of_subscription(),
    *(Column(name, BigInteger, nullable=False, default=0) for name in COUNTERS),
    Column("error", Text),
    Column("error_detail", Text),
    Column("error_hint", Text),
    Column("error_sqlstate", String(5)),
    Column("error_time", UtcTime),
    Column("stats_reset", UtcTime),
)

command: Final = Table(
    "pubsub_command",
    metadata,
    Column("id", _Identity, primary_key=True, autoincrement=True),
    Column("tag", Text, nullable=False),
    Column("statement", Text, nullable=False),
    Column("executed", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)

request: Final = Table(
    "pubsub_request",
    metadata,
    Column("id", _Identity, primary_key=True, autoincrement=True),
    Column("kind", Text, nullable=False),
    Column("subid", BigInteger),
    Column("payload", JSON, nullable=False),
    Column("created", UtcTime, nullable=False),
    Column("answered", Boolean, nullable=False),
    Column("error", JSON),
    # What the daemon found, for requests that ask for something.
    Column("result", JSON),
    sqlite_autoincrement=True,  # an id is never given out twice
)
