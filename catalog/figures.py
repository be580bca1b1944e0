"""Rows of what runs, and how it goes: workers, copies, tables' rows and sizes, comparisons, publishers, counters; they are immutable.

Replication needs none of them.  LSNs are `Lsn`, times are aware datetimes in UTC, sizes bytes, lags seconds.  A row is as of the
moment it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypedDict

from pubsub.protocol.lsn import Lsn

#: Stands for the worker that synchronizes a subscription's sequences where others have the oid of a table.
OF_SEQUENCES: Final = -1

WorkerType = Literal["apply", "table synchronization", "sequence synchronization", "parallel apply"]


class WorkerFields(TypedDict, total=False):
    """The fields that `Catalog.put_worker_stats` takes; those not given keep their values."""

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
    """A running worker, as pg_stat_subscription shows it; `relid` is None unless it synchronizes a table."""

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
    """w or c, which the catalog's table state cannot hold; None in other states.  `sync_lsn` goes with it."""
    sync_lsn: Lsn | None = None

    @property
    def lag_bytes(self) -> int | None:
        """WAL that the publisher has written and Delta lacks, in bytes; None before both positions are known."""
        if self.publisher_lsn is None or self.flush_lsn is None:
            return None
        return max(0, int(self.publisher_lsn) - int(self.flush_lsn))


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a table's running or last copy."""

    subid: int
    relid: int
    tuples_processed: int
    tuples_total: int | None
    bytes_processed: int
    bytes_total: int | None
    finished: bool


@dataclass(frozen=True, slots=True)
class TableRows:
    """How many rows a Delta table held after its commit at `lsn`, made by a writer of copy number `generation`."""

    subid: int
    relid: int
    generation: int
    rows: int
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class TableStorage:
    """What the Delta table of copy number `generation` took on disk at its version `version`, in bytes.

    `live_bytes`: the `files` data files of that version, and their deletion vectors.  `retained_bytes`: older ones,
    which are kept for the table's retention.  `log_bytes`: its log.  `small_files`: those that are merged with more of
    their size.  `deleted_rows`: rows in the files that deletion vectors take out.  `due`: when something more can be deleted; None:
    nothing can until the table is written again.
    """

    subid: int
    relid: int
    generation: int
    version: int
    files: int
    live_bytes: int
    retained_bytes: int
    log_bytes: int
    last_vacuum: datetime | None = None
    due: datetime | None = None
    small_files: int = 0
    deleted_rows: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """That the Delta table at `path` has a name in one of Spark's catalogs: catalog, schema and table; None: it has none.

    `error` and `error_hint` say why it could not get the name that it is to have, or lose this one.
    """

    subid: int
    relid: int
    path: str
    name: tuple[str, ...] | None
    error: str | None = None
    error_hint: str | None = None


Outcome = Literal["equal", "different", "not compared", "failed"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The last comparison of a table, of copy number `generation`, with its publisher's at `lsn` (pubsub.node.verify).

    not compared: the table was not ready, had stopped, or cannot be compared; failed: the comparison was not finished;
    `reason` and `hint` say why.  `rows` and `delta_rows`: how many each side has (of a sample, how many were looked at).
    `missing`: rows that only the publisher has, `extra`: only Delta, `different`: of one key.  `ranges_left`: ranges that
    differ and were not looked at.  `repaired`: rows that were copied anew.  `equal_at`: when the sides were last found equal,
    `differed_at`: when not.
    """

    subid: int
    relid: int
    generation: int
    started: datetime
    finished: datetime
    lsn: Lsn | None
    outcome: Outcome
    sampled: bool = False
    rows: int = 0
    delta_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    ranges_left: int = 0
    repaired: int = 0
    reason: str | None = None
    hint: str | None = None
    equal_at: datetime | None = None
    differed_at: datetime | None = None

    @property
    def compared_at(self) -> datetime | None:
        """When a comparison was last finished; None if none was."""
        # Catalogs of earlier versions have no time for a difference.
        if self.outcome in ("equal", "different"):
            return self.finished
        return max((one for one in (self.equal_at, self.differed_at) if one is not None), default=None)

    @property
    def equal(self) -> bool | None:
        """Whether the sides were equal when a comparison was last finished; None if none was."""
        if self.outcome in ("equal", "different"):
            return self.outcome == "equal"
        return None if self.compared_at is None else self.compared_at != self.differed_at


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning with PostgreSQL's fields."""

    message: str
    detail: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """The status of a subscription's publisher a moment ago, and what the workers wait for, there or here.

    `waits`: by table, 0 for the apply worker.  `away_since`: when the publisher was last heard, if it does not answer.
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
    """The counters that `Catalog.add_counters` adds to."""

    apply_error_count: int
    sync_error_count: int
    sync_seq_error_count: int
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
    """Counters since `stats_reset`, and the last failure unless it was overcome."""

    subid: int
    apply_error_count: int = 0
    sync_error_count: int = 0
    sync_seq_error_count: int = 0
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
