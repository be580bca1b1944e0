"""What the catalog gives out and takes: immutable rows.

LSNs are `Lsn`, times are aware datetimes in UTC, sizes bytes, lags seconds.  A row is a snapshot: reading it again may
give another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypedDict

from catalog.states import RelState
from pubsub.protocol.lsn import Lsn
from pubsub.sql.options import SubscriptionOptions

WorkerType = Literal["apply", "table synchronization", "parallel apply"]


@dataclass(frozen=True, slots=True)
class NodeRow:
    """The node: its 64-bit system identifier (decimal text) and when it was made."""

    node_id: str
    created: datetime


@dataclass(frozen=True, slots=True)
class DaemonRow:
    """The daemon that last said it runs; whether it still does is told by its lock (catalog.daemon)."""

    pid: int
    host: str
    started: datetime


@dataclass(frozen=True, slots=True)
class NewSubscription:
    """What CREATE SUBSCRIPTION stores.  `conninfo` may hold a password: it is kept out of the repr."""

    name: str
    conninfo: str = field(repr=False)
    publications: tuple[str, ...]
    options: SubscriptionOptions
    target: str
    slot_name: str | None
    enabled: bool = True
    publisher_system_identifier: str | None = None
    publisher_timeline: int | None = None
    publisher_database: str | None = None
    owner: str = "pubsub"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A row of pg_subscription, with ours.

    `generation` rises by one at each change of this row.  `skip_lsn` is the finish LSN of the transaction to skip (0:
    none). `dropping` is set while DROP SUBSCRIPTION takes workers and slots away: no worker is started for it.
    `publisher_timeline_start` is where the timeline began: two servers may both have one of that number.  None: not known yet.
    """

    oid: int
    name: str
    enabled: bool
    conninfo: str = field(repr=False)
    slot_name: str | None
    publications: tuple[str, ...]
    options: SubscriptionOptions
    target: str
    publisher_system_identifier: str | None
    publisher_timeline: int | None
    publisher_database: str | None
    skip_lsn: Lsn
    owner: str
    generation: int
    dropping: bool
    publisher_timeline_start: Lsn | None = None


class SubscriptionChanges(TypedDict, total=False):
    """The fields that `Catalog.alter_subscription` takes.

    A function makes the new value of what is stored when it is carried out: others may have altered it since it was read.
    """

    name: str
    enabled: bool
    conninfo: str
    slot_name: str | None
    publications: tuple[str, ...] | Callable[[tuple[str, ...]], tuple[str, ...]]
    options: SubscriptionOptions | Callable[[SubscriptionOptions], SubscriptionOptions]
    target: str
    publisher_system_identifier: str | None
    publisher_timeline: int | None
    publisher_database: str | None
    skip_lsn: Lsn
    owner: str
    dropping: bool


@dataclass(frozen=True, slots=True)
class NewRelation:
    """A table that joins a subscription.  `path` is where its Delta table lies; `definition` JSON text."""

    relid: int
    schema: str
    name: str
    path: str
    state: RelState = RelState.INIT
    lsn: Lsn | None = None
    definition: str | None = None
    estimated_rows: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignCommit:
    """A commit to a table's Delta log that is not this node's and can change rows: its version, and what it says of itself."""

    version: int
    operation: str
    engine: str

    def __str__(self) -> str:
        return f"version {self.version}, {self.operation} by {self.engine}"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How copy number `generation` of a table is made, and up to where the stream must be followed for it to be whole.

    `start` is the sync slot's consistent point; `until` is past every snapshot that was copied under (tablesync.window), and
    is `start` while that is the slot's alone.  `version` is the Delta table's when the copy began.  `edges` are the first
    blocks of its chunks, none for a table that is copied whole.  `snapshot` is the slot's, as pg_current_snapshot() has it.
    `fingerprint` says what must not change until the copy is resumed; None: it can not be.  `attempts` name the data
    files that the copy's attempts have written.
    """

    generation: int
    start: Lsn
    until: Lsn
    version: int
    edges: tuple[int, ...]
    snapshot: str
    fingerprint: str | None
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionRel:
    """A row of pg_subscription_rel, with ours.

    `lsn` is where the sync worker stopped (`s`, `r`), or where it was (`f`).  `copy_generation` counts the copies
    begun: 0 before the first.  `definition` is the table as decided at the copy (columns, key), JSON text.  `error`
    stands while the table is stopped or its worker failed last time.  `stopped`: it stopped alone (on_table_error = isolate), at
    the transaction that finished at `error_lsn` if one is to blame; only a new copy brings it back.  `foreign`: the last commit by
    others since the copy.  `look_again`: how often REFRESH has asked to compare its columns with the publisher's, and nobody has
    answered.
    """

    subid: int
    relid: int
    schema: str
    name: str
    state: RelState
    lsn: Lsn | None
    copy_generation: int
    sync_slot: str | None
    path: str
    error: str | None
    error_hint: str | None
    definition: str | None
    estimated_rows: int | None
    stopped: bool = False
    error_lsn: Lsn | None = None
    foreign: ForeignCommit | None = None
    look_again: int = 0

    @property
    def qualified_name(self) -> str:
        """schema.name, unquoted: for people and for JSON keys, not for SQL."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class OriginStatus:
    """A row of pg_replication_origin_status: `remote_lsn` is the restart point (architecture.md, Invariants)."""

    subid: int
    relid: int | None
    remote_lsn: Lsn
    local_lsn: Lsn | None

    @property
    def external_id(self) -> str:
        """The origin's name: pg_<subid>, or pg_<subid>_<relid> (worker.c: ReplicationOriginNameForLogicalRep)."""
        return f"pg_{self.subid}" if self.relid is None else f"pg_{self.subid}_{self.relid}"


class WorkerFields(TypedDict, total=False):
    """What `Catalog.put_worker_stats` takes; what is not given stays."""

    worker_type: WorkerType
    pid: int | None
    leader_pid: int | None
    received_lsn: Lsn | None
    last_msg_send_time: datetime | None
    last_msg_receipt_time: datetime | None
    latest_end_lsn: Lsn | None
    latest_end_time: datetime | None
    publisher_lsn: Lsn | None
    flush_lsn: Lsn | None
    lag_seconds: float | None
    sync_state: str | None
    sync_lsn: Lsn | None


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A running worker, as pg_stat_subscription shows it; `relid` is None for apply."""

    subid: int
    relid: int | None
    worker_type: WorkerType = "apply"
    pid: int | None = None
    leader_pid: int | None = None
    received_lsn: Lsn | None = None
    last_msg_send_time: datetime | None = None
    last_msg_receipt_time: datetime | None = None
    latest_end_lsn: Lsn | None = None
    latest_end_time: datetime | None = None
    publisher_lsn: Lsn | None = None
    flush_lsn: Lsn | None = None
    lag_seconds: float | None = None
    sync_state: str | None = None
    """w or c, which no table's row holds, with its LSN; None when the worker is in neither."""
    sync_lsn: Lsn | None = None

    @property
    def lag_bytes(self) -> int | None:
        """WAL that the publisher has and Delta has not, in bytes; None before both are known."""
        if self.publisher_lsn is None or self.flush_lsn is None:
            return None
        return max(0, int(self.publisher_lsn) - int(self.flush_lsn))


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """A copy that runs, or the last one of its table."""

    subid: int
    relid: int
    tuples_processed: int
    tuples_total: int | None
    bytes_processed: int
    bytes_total: int | None
    finished: bool


@dataclass(frozen=True, slots=True)
class TableRows:
    """How many rows a Delta table held when its commit at `lsn` was made, by a writer of copy number `generation`."""

    subid: int
    relid: int
    generation: int
    rows: int
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning with PostgreSQL's fields."""

    message: str
    detail: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """How a subscription's publisher looked a moment ago, and what its workers wait for, there or here.

    `waits`: by table, 0 standing for the apply worker.  `away_since`: when it was last heard, if it does not answer.
    `safe_wal_bytes`: how much WAL may still be written before the slot can be lost; None: no limit is set.
    """

    current_lsn: Lsn | None = None
    retained_wal_bytes: int | None = None
    safe_wal_bytes: int | None = None
    wal_status: str | None = None
    warnings: tuple[Warned, ...] = ()
    waits: Mapping[int, Warned] = field(default_factory=dict)
    away_since: datetime | None = None


class Counters(TypedDict, total=False):
    """What `Catalog.add_counters` adds to."""

    apply_error_count: int
    sync_error_count: int
    confl_insert_exists: int
    confl_update_origin_differs: int
    confl_update_exists: int
    confl_update_missing: int
    confl_delete_origin_differs: int
    confl_delete_missing: int
    confl_multiple_unique_conflicts: int
    transactions: int
    batches: int
    commits: int
    rows_inserted: int
    rows_updated: int
    rows_deleted: int
    truncates: int
    bytes_received: int
    spill_txns: int
    spill_count: int
    spill_bytes: int
    stream_txns: int
    stream_count: int
    stream_bytes: int


@dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """Counters since `stats_reset`, and the last failure that has not been overcome."""

    subid: int
    apply_error_count: int = 0
    sync_error_count: int = 0
    confl_insert_exists: int = 0
    confl_update_origin_differs: int = 0
    confl_update_exists: int = 0
    confl_update_missing: int = 0
    confl_delete_origin_differs: int = 0
    confl_delete_missing: int = 0
    confl_multiple_unique_conflicts: int = 0
    transactions: int = 0
    batches: int = 0
    commits: int = 0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    truncates: int = 0
    bytes_received: int = 0
    spill_txns: int = 0
    spill_count: int = 0
    spill_bytes: int = 0
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    error: str | None = None
    error_detail: str | None = None
    error_hint: str | None = None
    error_sqlstate: str | None = None
    error_time: datetime | None = None
    stats_reset: datetime | None = None


@dataclass(frozen=True, slots=True)
class PreparedXact:
    """A prepared transaction without an outcome: the publisher's xid and gid, and when it was prepared there."""

    xid: int
    gid: str
    prepared: datetime


@dataclass(frozen=True, slots=True)
class Request:
    """What a command asks of the daemon: `kind` names it, `payload` is JSON."""

    id: int
    kind: str
    subid: int | None
    payload: dict[str, Any]
    created: datetime


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was carried out: its tag and its text, without passwords."""

    id: int
    tag: str
    statement: str
    executed: datetime


@dataclass(frozen=True, slots=True)
class State:
    """What `status` shows, read in one transaction."""

    node: NodeRow
    daemon: DaemonRow | None
    subscriptions: tuple[Subscription, ...]
    relations: tuple[SubscriptionRel, ...]
    origins: tuple[OriginStatus, ...]
    workers: tuple[WorkerStats, ...]
    copies: tuple[CopyProgress, ...]
    statistics: tuple[SubscriptionStats, ...]
    prepared: tuple[tuple[int, PreparedXact], ...] = ()
    """With their subscriptions' oids."""
    publishers: Mapping[int, PublisherStatus] = field(default_factory=dict)
    """By subscription."""
    rows: tuple[TableRows, ...] = ()
