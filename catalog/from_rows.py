"""Build the catalog's records from its rows; needs no SQLAlchemy, so that a file can be read without it (catalog.file).

A row maps the names of a table's columns to Python's values: LSNs, aware times, booleans, and what JSON holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from catalog.figures import (
    CopyProgress,
    PublisherStatus,
    Registration,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    Warned,
    WorkerStats,
)
from catalog.records import (
    DaemonRow,
    ForeignCommit,
    Lease,
    NodeRow,
    OriginStatus,
    PinnedSnapshot,
    PinnedTable,
    PreparedXact,
    Subscription,
    SubscriptionRel,
    SubscriptionSequence,
)
from catalog.states import RelState
from pubsub.errors import DataCorrupted
from pubsub.memory import Memory
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.identifiers import decode_path, encode_path
from pubsub.sql.options import COMMAND_OPTIONS, SubscriptionOptions

Row = Mapping[Any, Any]

#: Raised with every added column or table; opening an older catalog adds the ones it lacks.
SCHEMA_VERSION: Final = 13

#: Fields of SubscriptionOptions that have a column of their own, or are not stored at all.
_NOT_IN_JSON: Final = COMMAND_OPTIONS | {"enabled", "slot_name", "target", "specified"}
OPTION_NAMES: Final = frozenset(field.name for field in fields(SubscriptionOptions)) - _NOT_IN_JSON
"""The options that are stored as JSON."""


def node(row: Row) -> NodeRow:
    """Build the node's record."""
    return NodeRow(row["node_id"], row["created"])


def daemon(row: Row) -> DaemonRow:
    """Build a daemon's record."""
    memory = row["memory"]
    return DaemonRow(
        row["id"], row["pid"], row["host"], row["home"], row["started"], None if memory is None else Memory(**memory)
    )


def lease(row: Row) -> Lease:
    """Build a lease."""
    return Lease(row["unit"], row["daemon"], row["leaving"])


def subscription(row: Row) -> Subscription:
    """Build a subscription.  Raises DataCorrupted for an option that this program does not know."""
    values = {name: row[name] for name in Subscription.__slots__}
    stored = dict(row["options"])
    unknown = stored.keys() - OPTION_NAMES
    if unknown:
        raise DataCorrupted(f"the catalog holds an unknown subscription option {min(unknown)!r}")
    if stored.get("stop_lsn") is not None:
        stored["stop_lsn"] = Lsn(stored["stop_lsn"])
    stored["continues_at"] = Lsn(stored.get("continues_at", INVALID_LSN))
    stored["resynced_at"] = tuple(stored.get("resynced_at", ()))
    options = replace(
        SubscriptionOptions(**stored), enabled=row["enabled"], slot_name=row["slot_name"], target=row["target"]
    )
    return Subscription(**values | {"options": options, "publications": tuple(row["publications"])})


def stored_path(path: str, source: str | None) -> str:
    """Return what the catalog has as the path of a table, or of the rows of one source of it: each has one owner."""
    return path if source is None else f"{path}\n{encode_path(source)}"


def divided_path(stored: str) -> tuple[str, str | None]:
    """Return the path and the source, as `stored_path` got them."""
    path, newline, source = stored.rpartition("\n")
    # A line may end in the warehouse's name, which others follow.
    return (path, decode_path(source)) if newline and "/" not in source else (stored, None)


def relation(row: Row) -> SubscriptionRel:
    """Build a table of a subscription from its row and that of its incident (every column None if it has none)."""
    return SubscriptionRel(
        subid=row["subid"],
        relid=row["relid"],
        schema=row["schema_name"],
        name=row["name"],
        state=RelState(row["state"]),
        lsn=row["lsn"],
        copy_generation=row["copy_generation"],
        sync_slot=row["sync_slot"],
        path=divided_path(row["path"])[0],
        known_source=divided_path(row["path"])[1],
        error=row["error"],
        error_hint=row["error_hint"],
        definition=row["definition"],
        estimated_rows=row["estimated_rows"],
        stopped=bool(row["stopped"]),
        error_lsn=row["error_lsn"],
        foreign=None
        if row["foreign_version"] is None
        else ForeignCommit(row["foreign_version"], row["foreign_operation"], row["foreign_engine"]),
        look_again=row["look_again"] or 0,
        joined_generation=row["joined_generation"] or 0,
    )


def sequence(row: Row) -> SubscriptionSequence:
    """Build a sequence of a subscription."""
    values = {name: row[name] for name in SubscriptionSequence.__slots__ if name != "schema"}
    return SubscriptionSequence(**values | {"schema": row["schema_name"], "state": RelState(row["state"])})


def origin(row: Row) -> OriginStatus:
    """Build a replication origin."""
    return OriginStatus(row["subid"], row["relid"] or None, row["remote_lsn"], row["local_lsn"])


def worker(row: Row) -> WorkerStats:
    """Build a worker's figures."""
    relid = row["relid"]
    return WorkerStats(**dict(row) | {"relid": relid if relid > 0 else None})


def copy(row: Row) -> CopyProgress:
    """Build a copy's progress."""
    return CopyProgress(**row)


def statistics(row: Row) -> SubscriptionStats:
    """Build a subscription's counters and last failure."""
    return SubscriptionStats(**row)


def table_rows(row: Row) -> TableRows:
    """Build the count of a table's rows."""
    return TableRows(**row)


def table_storage(row: Row) -> TableStorage:
    """Build what a table takes on disk."""
    return TableStorage(**row)


def registration(row: Row) -> Registration:
    """Build a table's name in a catalog."""
    return Registration(**dict(row) | {"name": None if row["name"] is None else tuple(row["name"])})


def verification(row: Row) -> Verification:
    """Build the last comparison of a table."""
    return Verification(**row)


def prepared(row: Row) -> tuple[int, PreparedXact]:
    """Build a prepared transaction, with its subscription's oid."""
    return row["subid"], PreparedXact(**{name: row[name] for name in PreparedXact.__slots__})


def pinned_snapshot(row: Row) -> PinnedSnapshot:
    """Build a pinned snapshot."""
    return PinnedSnapshot(**dict(row) | {"tables": tuple(PinnedTable(**one) for one in row["tables"])})


def publisher(row: Row) -> tuple[int, PublisherStatus]:
    """Build a publisher's status, with its subscription's oid."""
    values = {name: row[name] for name in PublisherStatus.__slots__}
    values["warnings"] = tuple(Warned(**one) for one in row["warnings"])
    # JSON's keys are strings.
    values["waits"] = {int(relid): Warned(**one) for relid, one in row["waits"].items() if relid.isdecimal()}
    return int(row["subid"]), PublisherStatus(**values)
