"""The views that SELECT sees: PostgreSQL's columns first, then further ones.

The columns follow PostgreSQL 18: catalogs/pg_subscription.h, pg_subscription_rel.h and system_views.sql.  What 19 adds
stands after them, under its name there.
Their rows come from one state of the catalog; pubsub.node.select runs SQL on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from catalog.beside import shown_oid
from catalog.figures import Registration
from catalog.records import State, Subscription, SubscriptionRel, SubscriptionSequence, subscriptions_of
from catalog.states import RelState
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.conninfo import mask_conninfo
from pubsub.sql.identifiers import quote_identifier, quote_qualified
from pubsub.sql.layouts import TableName
from pubsub.sql.options import RECEIVER_TIMEOUT

Value = str | int | float | bool | datetime | tuple[str, ...] | None
Row = tuple[Value, ...]


class Type(Enum):
    """A column's type, by PostgreSQL's name; a pg_lsn's values are strings such as "0/16B3748"."""

    OID = "oid"
    TEXT = "text"
    BIGINT = "bigint"
    DOUBLE = "double precision"
    BOOL = "boolean"
    LSN = "pg_lsn"
    TIME = "timestamp with time zone"
    TEXTS = "text[]"


@dataclass(frozen=True, slots=True)
class View:
    """A view: its columns in order, and how its rows come from the catalog's state."""

    name: str
    columns: tuple[tuple[str, Type], ...]
    rows: Callable[[State], Iterator[Row]]


def _columns(text: str) -> tuple[tuple[str, Type], ...]:
    """Parse lines that hold a type's name in capitals and then the names of columns."""
    found: list[tuple[str, Type]] = []
    for line in text.split("\n"):
        type_name, _, names = line.strip().partition(" ")
        found += [(name, Type[type_name]) for name in names.split()]
    return tuple(found)


#: A node has one database; its oid is that of PostgreSQL's template1, the owner's oid that of the bootstrap superuser.
_DATABASE: Final = 1
_OWNER: Final = 10
_NOT_REGISTERED: Final = Registration(0, 0, "", None)


def _lsn(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


def _subscription(state: State) -> Iterator[Row]:
    for sub in state.subscriptions:
        o = sub.options
        yield (
            sub.oid, _DATABASE, _lsn(sub.skip_lsn), sub.name, _OWNER, sub.enabled, o.binary,
            {"off": "f", "on": "t", "parallel": "p"}[o.streaming], o.two_phase_state, o.disable_on_error,
            o.password_required, o.run_as_owner, o.failover, mask_conninfo(sub.conninfo), sub.slot_name,
            o.synchronous_commit, sub.publications, o.origin,
            sub.owner, sub.target, sub.publisher_system_identifier, sub.publisher_timeline, sub.publisher_database,
            o.create_tables, o.types, o.on_table_error, o.schema_changes, o.dropped_columns,
            o.batch_rows, o.batch_bytes, o.batch_age,
            _lsn(o.stop_lsn), o.wal_archive, o.on_slot_loss, o.new_tables,
            o.copy_first, o.partition_by, o.cluster_by, o.table_properties, o.mode, o.deletes,
            o.truncate, o.metadata, o.columns, o.exclude, o.mask, o.rename, o.where, o.register, o.comments,
            o.source, o.source_column if o.sharing else None, o.gather,
            o.retain_dead_tuples, o.max_retention_duration,
            "-1" if o.wal_receiver_timeout is None else RECEIVER_TIMEOUT.show(round(o.wal_receiver_timeout * 1000)),
        )  # fmt: skip


def _subscription_rel(state: State) -> Iterator[Row]:
    registrations = {(one.subid, one.relid): one for one in state.registrations}
    for rel in state.relations:
        registration = registrations.get((rel.subid, rel.relid), _NOT_REGISTERED)
        yield (
            rel.subid, shown_oid(rel.subid, rel.relid), rel.state.value, _lsn(rel.lsn),
            _name(rel), rel.copy_generation, rel.sync_slot, rel.path, rel.error, rel.error_hint, rel.estimated_rows,
            rel.stopped, _lsn(rel.error_lsn), str(rel.foreign) if rel.foreign else None, rel.mode,
            ", ".join(rel.left_out), ", ".join(rel.masked),
            ", ".join(f"{quote_identifier(one)} {quote_identifier(other)}" for one, other in rel.renamed),
            rel.kept_rows,
            rel.deletes, ", ".join(name for _, name in rel.metadata),
            rel.truncate, rel.whose,
            None if registration.name is None else str(TableName(*registration.name)),
            registration.error, registration.error_hint,
        )  # fmt: skip

    for sequence in state.sequences:
        yield (
            sequence.subid, sequence.relid, sequence.state.value,
            _lsn(sequence.lsn) if sequence.state is RelState.READY else None, _sequence_name(sequence), 0, None,
            sequence.path, None, None, None, False, *[None] * 14,
        )  # fmt: skip


def _sequences(state: State) -> Iterator[Row]:
    """Yield the sequences as they were last synchronized."""
    names = {sub.oid: sub.name for sub in state.subscriptions}
    for one in state.sequences:
        yield (
            one.subid, names[one.subid], one.relid, one.schema, one.name, one.state.value, one.last_value,
            one.is_called, _lsn(one.lsn),
        )  # fmt: skip


def _stat_subscription(state: State) -> Iterator[Row]:
    """Yield a row for each worker, and one for each subscription without workers, as PostgreSQL's outer join does."""
    names = _by_table(state)
    for sub in state.subscriptions:
        statistics = next((s for s in state.statistics if s.subid == sub.oid), None)
        error, hint = (statistics.error, statistics.error_hint) if statistics else (None, None)
        retained = state.publishers[sub.oid].retained_wal_bytes if sub.oid in state.publishers else None
        workers = [worker for worker in state.workers if worker.subid == sub.oid]
        for w in workers:
            relation = names.get((w.subid, w.relid or 0))
            yield (
                sub.oid, sub.name, w.worker_type, w.pid, None if w.relid is None else shown_oid(w.subid, w.relid),
                w.leader_pid, _lsn(w.received_lsn),
                w.last_msg_send_time, w.last_msg_receipt_time, _lsn(w.latest_end_lsn), w.latest_end_time,
                _name(relation) if relation else None, _lsn(w.flush_lsn), _lsn(w.publisher_lsn), w.lag_bytes,
                w.lag_seconds, retained, w.sync_state, error, hint,
            )  # fmt: skip
        if not workers:
            yield (sub.oid, sub.name, *[None] * 14, retained, None, error, hint)


def _stat_subscription_stats(state: State) -> Iterator[Row]:
    names = {sub.oid: sub.name for sub in state.subscriptions}
    for s in state.statistics:
        yield (
            s.subid, names[s.subid], s.apply_error_count, s.sync_error_count, s.confl_insert_exists,
            s.confl_update_origin_differs, s.confl_update_exists, s.confl_update_missing,
            s.confl_delete_origin_differs, s.confl_delete_missing, s.confl_multiple_unique_conflicts, s.stats_reset,
            s.transactions, s.batches, s.commits, s.rows_inserted, s.rows_updated, s.rows_deleted, s.truncates,
            s.bytes_received, s.spill_txns, s.spill_count, s.spill_bytes, s.stream_txns, s.stream_count, s.stream_bytes,
            s.error, s.error_detail, s.error_hint, s.error_sqlstate, s.error_time,
            s.sync_error_count, s.sync_seq_error_count,
        )  # fmt: skip


def _origin_status(state: State) -> Iterator[Row]:
    for local_id, origin in enumerate(state.origins, start=1):
        yield local_id, origin.external_id, str(origin.remote_lsn), str(origin.local_lsn or INVALID_LSN)


def _progress_copy(state: State) -> Iterator[Row]:
    """Yield the running copies."""
    relations = _by_table(state)
    workers = {(worker.subid, worker.relid): worker for worker in state.workers}
    names = {sub.oid: sub for sub in state.subscriptions}
    for copy in state.copies:
        relation = relations.get((copy.subid, copy.relid))
        if copy.finished or relation is None or relation.state is not RelState.DATASYNC:
            continue
        worker = workers.get((copy.subid, copy.relid))
        sub: Subscription = names[copy.subid]
        yield (
            worker.pid if worker else None, _DATABASE, sub.target, shown_oid(copy.subid, copy.relid), "COPY FROM", "CALLBACK",
            copy.bytes_processed, copy.bytes_total or 0, copy.tuples_processed, 0, 0,
            copy.subid, _name(relation), copy.tuples_total,
        )  # fmt: skip


def _prepared_xacts(state: State) -> Iterator[Row]:
    """Yield the publisher's prepared transactions that have no outcome yet; here each is a file."""
    subs = {sub.oid: sub for sub in state.subscriptions}
    for subid, xact in state.prepared:
        if subid in subs:
            yield (xact.xid, xact.gid, xact.prepared, subs[subid].owner, subs[subid].target)


def _verification(state: State) -> Iterator[Row]:
    """Yield the last comparison of each table's present copy."""
    relations, names = _by_table(state), {sub.oid: sub.name for sub in state.subscriptions}
    for v in state.verifications:
        relation = relations.get((v.subid, v.relid))
        if relation is None or relation.copy_generation != v.generation:
            continue
        yield (
            v.subid, names[v.subid], shown_oid(v.subid, v.relid), _name(relation), v.outcome, _lsn(v.lsn), v.started,
            v.finished, v.equal_at,
            v.differed_at, v.sampled, v.rows, v.delta_rows, v.missing, v.extra, v.different, v.ranges_left, v.repaired,
            v.reason, v.hint,
        )  # fmt: skip


def _daemons(state: State) -> Iterator[Row]:
    """Yield the daemons that have not ended in order, and what each has."""
    for one in state.daemons:
        yield one.id, one.pid, one.host, one.home, one.started, subscriptions_of(state, one.id)


def _by_table(state: State) -> dict[tuple[int, int], SubscriptionRel]:
    return {(rel.subid, rel.relid): rel for rel in state.relations}


def _name(relation: SubscriptionRel) -> str:
    return quote_qualified(relation.schema, relation.name)


def _sequence_name(sequence: SubscriptionSequence) -> str:
    return quote_qualified(sequence.schema, sequence.name)


VIEWS: Final = {
    view.name: view
    for view in (
        View(
            "pg_subscription",
            _columns(
                """OID oid subdbid
                LSN subskiplsn
                TEXT subname
                OID subowner
                BOOL subenabled subbinary
                TEXT substream subtwophasestate
                BOOL subdisableonerr subpasswordrequired subrunasowner subfailover
                TEXT subconninfo subslotname subsynccommit
                TEXTS subpublications
                TEXT suborigin owner target publisher_system_identifier
                BIGINT publisher_timeline
                TEXT publisher_database
                BOOL create_tables
                TEXT types on_table_error schema_changes dropped_columns
                BIGINT batch_rows batch_bytes
                DOUBLE batch_age
                LSN stop_lsn
                TEXT wal_archive on_slot_loss new_tables copy_first partition_by cluster_by table_properties mode deletes
                TEXT truncate metadata columns exclude mask rename where register
                BOOL comments
                TEXT source source_column gather
                BOOL subretaindeadtuples
                BIGINT submaxretention
                TEXT subwalrcvtimeout"""
            ),
            _subscription,
        ),
        View(
            "pg_subscription_rel",
            _columns(
                """OID srsubid srrelid
                TEXT srsubstate
                LSN srsublsn
                TEXT relation
                BIGINT copy_generation
                TEXT sync_slot path error error_hint
                BIGINT estimated_rows
                BOOL stopped
                LSN error_lsn
                TEXT foreign_commit mode left_out masked renamed kept_rows deletes metadata truncate source registered
                TEXT register_error register_error_hint"""
            ),
            _subscription_rel,
        ),
        View(
            "pg_stat_subscription",
            _columns(
                """OID subid
                TEXT subname worker_type
                BIGINT pid
                OID relid
                BIGINT leader_pid
                LSN received_lsn
                TIME last_msg_send_time last_msg_receipt_time
                LSN latest_end_lsn
                TIME latest_end_time
                TEXT relation
                LSN flush_lsn publisher_lsn
                BIGINT lag_bytes
                DOUBLE lag_seconds
                BIGINT retained_wal_bytes
                TEXT sync_state
                TEXT error error_hint"""
            ),
            _stat_subscription,
        ),
        View(
            "pg_stat_subscription_stats",
            _columns(
                """OID subid
                TEXT subname
                BIGINT apply_error_count sync_error_count confl_insert_exists confl_update_origin_differs
                BIGINT confl_update_exists confl_update_missing confl_delete_origin_differs confl_delete_missing
                BIGINT confl_multiple_unique_conflicts
                TIME stats_reset
                BIGINT transactions batches commits rows_inserted rows_updated rows_deleted truncates bytes_received
                BIGINT spill_txns spill_count spill_bytes stream_txns stream_count stream_bytes
                TEXT error error_detail error_hint error_sqlstate
                TIME error_time
                BIGINT sync_table_error_count sync_seq_error_count"""
            ),
            _stat_subscription_stats,
        ),
        View(
            "pg_replication_origin_status",
            _columns(
                """OID local_id
                TEXT external_id
                LSN remote_lsn local_lsn"""
            ),
            _origin_status,
        ),
        View(
            "pg_stat_progress_copy",
            _columns(
                """BIGINT pid
                OID datid
                TEXT datname
                OID relid
                TEXT command type
                BIGINT bytes_processed bytes_total tuples_processed tuples_excluded tuples_skipped
                OID subid
                TEXT relation
                BIGINT tuples_total"""
            ),
            _progress_copy,
        ),
        View(
            "pg_prepared_xacts",
            _columns(
                """OID transaction
                TEXT gid
                TIME prepared
                TEXT owner database"""
            ),
            _prepared_xacts,
        ),
        View(
            "pubsub_sequences",
            _columns(
                """OID subid
                TEXT subname
                OID relid
                TEXT schema_name sequence_name state
                BIGINT last_value
                BOOL is_called
                LSN page_lsn"""
            ),
            _sequences,
        ),
        View(
            "pubsub_verification",
            _columns(
                """OID subid
                TEXT subname
                OID relid
                TEXT relation outcome
                LSN lsn
                TIME started finished equal_at differed_at
                BOOL sampled
                BIGINT rows delta_rows missing extra different ranges_left repaired
                TEXT reason hint"""
            ),
            _verification,
        ),
        View(
            "pubsub_daemons",
            _columns(
                """BIGINT id pid
                TEXT host home
                TIME started
                TEXTS subscriptions"""
            ),
            _daemons,
        ),
    )
}
