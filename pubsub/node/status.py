"""The status that `pubsub status` shows: subscriptions, their tables, and how far they lag behind, as of one moment.

Everything comes from the catalog, where the daemon writes it once a second.  Without a daemon the workers' last figures
are not shown, since they may no longer be true.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from catalog.figures import (
    CopyProgress,
    PublisherStatus,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    Warned,
    WorkerStats,
)
from catalog.records import State, Subscription, SubscriptionRel, subscriptions_of
from catalog.states import RelState
from pubsub.memory import Memory
from pubsub.protocol.lsn import INVALID_LSN, Lsn

#: A table's states in words.
STATE_WORDS: Final = MappingProxyType(
    {
        "i": "waiting to be copied",
        "d": "being copied",
        "f": "copied",
        "w": "waiting for apply",
        "c": "catching up",
        "s": "synchronized",
        "r": "ready",
    }
)


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table's status.

    `lsn`: the table holds every change up to it; None before its copy is made.  `rows`: how many rows the table held at
    its last commit.  `rows_copied`, `rows_estimated`: the rows that the initial copy has read, and the publisher's
    estimate when it began.  `stopped`: the table stopped alone, at the transaction that finished at `error_lsn` if one
    caused it.  `foreign_commit`: what another writer last did to the Delta table.
    """

    name: str
    state: str
    lsn: Lsn | None
    rows_copied: int | None
    rows_estimated: int | None
    error: str | None
    hint: str | None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    waiting: Warned | None = None
    """What the table's copy waits for, here or on the publisher."""
    stopped: bool = False
    error_lsn: Lsn | None = None
    foreign_commit: str | None = None
    rows: int | None = None
    live_bytes: int | None = None
    """The data files of its newest version, when they were last looked at; None: not yet."""
    retained_bytes: int | None = None
    """Older files, which are kept for the table's retention."""
    log_bytes: int | None = None
    files: int | None = None
    """Its data files, those of them that are small, and the rows in them that deletion vectors take out."""
    small_files: int | None = None
    deleted_rows: int | None = None
    last_vacuum: datetime | None = None
    verification: Verification | None = None
    """The last comparison with the publisher's table (pubsub.node.verify), if one was made of its present copy."""


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A subscription's status.  An LSN or lag of None is not known, for example without a worker.

    `lag_unknown_since`: when the publisher was last heard, if it does not answer.  `retained_wal_bytes`: WAL that the
    slot retains on the publisher.  `safe_wal_bytes`: WAL that may still be written before max_slot_wal_keep_size
    invalidates the slot (None: no limit).
    """

    name: str
    enabled: bool
    slot: str | None
    received_lsn: Lsn | None
    flush_lsn: Lsn | None
    publisher_lsn: Lsn | None
    lag_bytes: int | None
    lag_seconds: float | None
    retained_wal_bytes: int | None
    error: str | None
    detail: str | None
    hint: str | None
    workers: int
    rows_applied: int
    tables: tuple[TableStatus, ...]
    safe_wal_bytes: int | None = None
    wal_status: str | None = None
    warnings: tuple[Warned, ...] = ()
    waiting: Warned | None = None
    """What the apply worker waits for."""
    lag_unknown_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """One of the daemons that share a catalog, and the subscriptions that it has."""

    pid: int
    host: str
    home: str
    started: datetime
    memory: Memory | None
    subscriptions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"started": self.started.isoformat()}


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's status; `daemon` is the daemon's process id, or of one of them, None when none runs."""

    node: str
    daemon: int | None
    time: datetime
    subscriptions: tuple[SubscriptionStatus, ...]
    memory: Memory | None = None
    """What the daemon takes; None without one, and in its first seconds."""
    daemons: tuple[DaemonStatus, ...] = ()
    """Those that share the catalog; none where one has it for itself."""

    def as_json(self) -> dict[str, Any]:
        """Return the document that `pubsub status --json` prints.  Later versions may add keys but never rename one."""
        return {
            "node": self.node,
            "daemon": self.daemon,
            "time": self.time.isoformat(),
            "memory": None if self.memory is None else asdict(self.memory),
            "daemons": [one.as_json() for one in self.daemons],
            "subscriptions": [
                subscription_json(one) | {"tables": [table_json(table) for table in one.tables]}
                for one in self.subscriptions
            ],
        }


def from_state(state: State, daemon: int | None) -> NodeStatus:
    """Build the status from a state of the catalog and the daemon's process id."""
    return NodeStatus(
        node=state.node.node_id,
        daemon=daemon,
        time=datetime.now(UTC),
        subscriptions=tuple(_subscription(state, one, daemon is not None) for one in state.subscriptions),
        memory=next((one.memory for one in state.daemons if one.pid == daemon), None),
        daemons=_daemons(state) if daemon is not None else (),
    )


def _daemons(state: State) -> tuple[DaemonStatus, ...]:
    if not state.leases:
        return ()
    return tuple(
        DaemonStatus(one.pid, one.host, one.home, one.started, one.memory, subscriptions_of(state, one.id))
        for one in state.daemons
    )


def _subscription(state: State, subscription: Subscription, alive: bool) -> SubscriptionStatus:
    oid = subscription.oid
    workers = [w for w in state.workers if w.subid == oid] if alive else []
    apply = next((w for w in workers if w.worker_type == "apply"), WorkerStats(oid, None))
    statistics = next((s for s in state.statistics if s.subid == oid), SubscriptionStats(oid))
    origin = next((o.remote_lsn for o in state.origins if o.subid == oid and o.relid is None), INVALID_LSN)
    syncing = {w.relid: w for w in workers if w.relid is not None}
    copies = {c.relid: c for c in state.copies if c.subid == oid}
    rows = {r.relid: r for r in state.rows if r.subid == oid}
    storage = {one.relid: one for one in state.storage if one.subid == oid}
    verified = {one.relid: one for one in state.verifications if one.subid == oid}
    publisher = state.publishers.get(oid, PublisherStatus()) if alive else PublisherStatus()

    def table(relation: SubscriptionRel) -> TableStatus:
        worker = syncing.get(relation.relid)
        follower = apply if relation.state in (RelState.SYNCDONE, RelState.READY) else worker
        return _table(
            relation,
            copies.get(relation.relid),
            rows.get(relation.relid),
            storage.get(relation.relid),
            verified.get(relation.relid),
            worker,
            follower,
            origin,
            _waiting(relation, publisher, subscription, alive),
            apply.publisher_lsn or publisher.current_lsn,
        )

    return SubscriptionStatus(
        name=subscription.name,
        enabled=subscription.enabled,
        slot=subscription.slot_name,
        received_lsn=apply.received_lsn,
        flush_lsn=max(apply.flush_lsn or INVALID_LSN, origin) or None,
        publisher_lsn=apply.publisher_lsn or publisher.current_lsn,
        # Without a worker the lag is what the publisher has written since the origin.
        lag_bytes=_behind(apply, publisher, origin),
        lag_seconds=apply.lag_seconds,
        retained_wal_bytes=publisher.retained_wal_bytes,
        safe_wal_bytes=publisher.safe_wal_bytes,
        wal_status=publisher.wal_status,
        warnings=publisher.warnings,
        error=statistics.error,
        detail=statistics.error_detail,
        hint=statistics.error_hint,
        workers=len(workers),
        rows_applied=statistics.rows_inserted + statistics.rows_updated + statistics.rows_deleted,
        tables=tuple(table(r) for r in state.relations if r.subid == oid),
        waiting=_paused(subscription) or publisher.waits.get(0),
        lag_unknown_since=publisher.away_since,
    )


def _paused(subscription: Subscription) -> Warned | None:
    if subscription.paused is None:
        return None
    return Warned(
        f"is paused by {subscription.paused}",
        "No worker runs until the command has ended, and the slot retains WAL.",
        "If that process was killed, the daemon ends the pause within seconds.",
    )


def _waiting(
    relation: SubscriptionRel, publisher: PublisherStatus, subscription: Subscription, alive: bool
) -> Warned | None:
    """Return what keeps a table from being copied, if that is known."""
    if relation.stopped or relation.state in (RelState.SYNCDONE, RelState.READY):
        return None
    if not alive:
        return Warned("waits for a daemon: none runs", hint="Start one with pubsub daemon.")
    if not subscription.enabled:
        return Warned("waits until the subscription is enabled", hint="ALTER SUBSCRIPTION ... ENABLE.")
    return _paused(subscription) or publisher.waits.get(relation.relid)


def _behind(apply: WorkerStats, publisher: PublisherStatus, origin: Lsn) -> int | None:
    if publisher.away_since is not None:
        return None
    if apply.lag_bytes is not None or publisher.current_lsn is None or not origin:
        return apply.lag_bytes
    return max(0, int(publisher.current_lsn) - int(origin))


def _table(
    relation: SubscriptionRel,
    copy: CopyProgress | None,
    rows: TableRows | None,
    storage: TableStorage | None,
    verification: Verification | None,
    worker: WorkerStats | None,
    follower: WorkerStats | None,
    origin: Lsn,
    waiting: Warned | None,
    publisher_lsn: Lsn | None,
) -> TableStatus:
    """Build a table's status.  Its state is the stored one, or its sync worker's w or c while f is stored.

    `follower` is the worker that applies the stream to the table, if any: the table lags as that worker does.  A table
    that has stopped has none.  A table that apply writes holds every change up to the `origin`.
    """
    table_state, lsn = relation.state.value, relation.lsn
    if relation.stopped:
        follower = None
    elif relation.state in (RelState.SYNCDONE, RelState.READY):
        lsn = max(lsn or INVALID_LSN, origin) or None
    if rows is not None and rows.generation != relation.copy_generation:
        rows = None
    if storage is not None and storage.generation != relation.copy_generation:
        storage = None
    if verification is not None and verification.generation != relation.copy_generation:
        verification = None
    if rows is not None and lsn is not None:
        lsn = max(lsn, rows.lsn)
    held = rows.rows if rows is not None else None
    if held is None and copy is not None and copy.finished and relation.state not in (RelState.INIT, RelState.DATASYNC):
        held = copy.tuples_processed
    if worker is not None and worker.sync_state is not None and relation.state is RelState.FINISHEDCOPY:
        table_state, lsn = worker.sync_state, worker.sync_lsn
    estimated = copy.tuples_total if copy is not None and copy.tuples_total is not None else relation.estimated_rows
    return TableStatus(
        name=relation.qualified_name,
        state=table_state,
        lsn=lsn,
        rows_copied=copy.tuples_processed if copy is not None else None,
        rows_estimated=estimated,
        error=relation.error,
        hint=relation.error_hint,
        lag_bytes=(lag := _lag(publisher_lsn, follower)),
        lag_seconds=follower.lag_seconds if follower is not None and lag is not None else None,
        waiting=waiting,
        stopped=relation.stopped,
        error_lsn=relation.error_lsn,
        foreign_commit=str(relation.foreign) if relation.foreign is not None else None,
        rows=held,
        live_bytes=storage.live_bytes if storage is not None else None,
        retained_bytes=storage.retained_bytes if storage is not None else None,
        log_bytes=storage.log_bytes if storage is not None else None,
        files=storage.files if storage is not None else None,
        small_files=storage.small_files if storage is not None else None,
        deleted_rows=storage.deleted_rows if storage is not None else None,
        last_vacuum=storage.last_vacuum if storage is not None else None,
        verification=verification,
    )


def _lag(publisher_lsn: Lsn | None, follower: WorkerStats | None) -> int | None:
    if follower is None or follower.flush_lsn is None or publisher_lsn is None:
        return None
    return max(0, int(publisher_lsn) - int(follower.flush_lsn))


def subscription_json(one: SubscriptionStatus) -> dict[str, Any]:
    """Return what `NodeStatus.as_json` has of a subscription, but for its tables."""
    return {
        "name": one.name,
        "enabled": one.enabled,
        "slot": one.slot,
        "received_lsn": _text(one.received_lsn),
        "flush_lsn": _text(one.flush_lsn),
        "publisher_lsn": _text(one.publisher_lsn),
        "lag_bytes": one.lag_bytes,
        "lag_seconds": one.lag_seconds,
        "lag_unknown_since": one.lag_unknown_since.isoformat() if one.lag_unknown_since is not None else None,
        "waiting": asdict(one.waiting) if one.waiting is not None else None,
        "retained_wal_bytes": one.retained_wal_bytes,
        "safe_wal_bytes": one.safe_wal_bytes,
        "wal_status": one.wal_status,
        "warnings": [asdict(warning) for warning in one.warnings],
        "error": one.error,
        "detail": one.detail,
        "hint": one.hint,
        "workers": one.workers,
        "rows_applied": one.rows_applied,
    }


def table_json(table: TableStatus) -> dict[str, Any]:
    """Return what `NodeStatus.as_json` has of a table."""
    return {
        "name": table.name,
        "state": table.state,
        "lsn": _text(table.lsn),
        "rows_copied": table.rows_copied,
        "rows_estimated": table.rows_estimated,
        "rows": table.rows,
        "error": table.error,
        "hint": table.hint,
        "lag_bytes": table.lag_bytes,
        "lag_seconds": table.lag_seconds,
        "waiting": asdict(table.waiting) if table.waiting is not None else None,
        "stopped": table.stopped,
        "error_lsn": _text(table.error_lsn),
        "foreign_commit": table.foreign_commit,
        "live_bytes": table.live_bytes,
        "retained_bytes": table.retained_bytes,
        "log_bytes": table.log_bytes,
        "files": table.files,
        "small_files": table.small_files,
        "deleted_rows": table.deleted_rows,
        "last_vacuum": table.last_vacuum.isoformat() if table.last_vacuum is not None else None,
        "verification": _verification_json(table.verification),
    }


def _verification_json(one: Verification | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "outcome": one.outcome,
        "lsn": _text(one.lsn),
        "finished": one.finished.isoformat(),
        "equal_at": one.equal_at.isoformat() if one.equal_at is not None else None,
        "equal": one.equal,
        "differed_at": one.differed_at.isoformat() if one.differed_at is not None else None,
        "sampled": one.sampled,
        "missing": one.missing,
        "extra": one.extra,
        "different": one.different,
        "repaired": one.repaired,
        "reason": one.reason,
        "hint": one.hint,
    }


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)
