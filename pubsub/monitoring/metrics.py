"""A picture of the node as metrics.

    pg_VIEW_COLUMN            what a view of PostgreSQL has, or one of ours beside it: pg_stat_subscription_stats_spill_bytes
    debezium_metrics_NAME     what Debezium's metrics for PostgreSQL have, with their labels and units
    pubsub_…                  everything else

LSNs are numbers of bytes, times seconds.  What is not known has no sample.  A counter of the catalog lasts for ever (until
pg_stat_reset_subscription_stats); one of a worker, which is not stored, begins anew with it.  No label and no value is taken from a
connection string.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from prometheus_client.core import (
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from apply.worker_statistics import Distribution
from catalog.figures import Counters, PublisherStatus, WorkerStats
from catalog.states import RelState
from pubsub import __version__, processor_time
from pubsub.memory import resident
from pubsub.monitoring.picture import Live, Picture, Served
from pubsub.monitoring.samples import Labels, Sample, counter, gauge
from pubsub.monitoring.served_metrics import slots, streams
from pubsub.node.status import SubscriptionStatus, TableStatus
from pubsub.protocol.lsn import Lsn

_SUB: Final = ("subname",)
_TABLE: Final = ("subname", "relation")
_DEBEZIUM: Final = ("plugin", "name", "context")

_HEAP: Final = {
    "heap_used": "The JVM's heap in use, garbage included.",
    "heap_committed": "The JVM's heap, as taken from the system.",
    "heap_max": "As large as the JVM's heap may get (spark.driver.memory).",
}

#: Every counter of pg_stat_subscription_stats.
_COUNTERS: Final = {
    "apply_error_count": "Errors while changes were applied.",
    "sync_error_count": "Errors during initial copies.",
    "sync_seq_error_count": "Errors during the synchronization of sequences.",
    "confl_insert_exists": "Conflicts: a row to be inserted was there.",
    "confl_update_origin_differs": "Conflicts: a row to be updated had been written by others.",
    "confl_update_exists": "Conflicts: the new key of a row was there.",
    "confl_update_missing": "Conflicts: a row to be updated was missing.",
    "confl_delete_origin_differs": "Conflicts: a row to be deleted had been written by others.",
    "confl_delete_missing": "Conflicts: a row to be deleted was missing.",
    "confl_multiple_unique_conflicts": "Conflicts with several keys.",
    "transactions": "Transactions committed to Delta.",
    "batches": "Batches committed to Delta.",
    "commits": "Commits to single Delta tables.",
    "rows_inserted": "Rows inserted into Delta tables.",
    "rows_updated": "Rows updated in Delta tables.",
    "rows_deleted": "Rows deleted from Delta tables.",
    "truncates": "Tables truncated.",
    "bytes_received": "Bytes received from the publisher.",
    "spill_txns": "Transactions spilled to disk.",
    "spill_count": "Spills to disk.",
    "spill_bytes": "Bytes spilled to disk.",
    "stream_txns": "Transactions received while in progress.",
    "stream_count": "Blocks of transactions in progress received.",
    "stream_bytes": "Bytes of transactions in progress received.",
}
assert frozenset(_COUNTERS) == Counters.__optional_keys__


def exposition(make: Callable[[], Iterator[Metric]], accept: str) -> tuple[str, bytes]:
    """Return content type and body: OpenMetrics, or Prometheus's older text for clients that accept that alone."""
    collected = _Families(make)
    if "application/openmetrics-text" not in accept and ("text/plain" in accept or "text/html" in accept):
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(collected)
    return openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest(collected)  # type: ignore[no-untyped-call]


class _Families(Collector):
    def __init__(self, make: Callable[[], Iterator[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def families(picture: Picture) -> Iterator[Metric]:
    """Yield every metric.  Reads the memory of this process and the JVM; blocks for no other."""
    subscriptions = {one.oid: status for one, status in _with_status(picture)}
    named = {oid: status.name for oid, status in subscriptions.items()}
    yield from _process(picture)
    yield from _subscriptions(picture, tuple(subscriptions.values()))
    yield from _stream_positions(picture, subscriptions)
    yield from _counters(picture, named)
    yield from _live(picture, named)
    yield from _tables([(s.name, table) for s in subscriptions.values() for table in s.tables])
    yield from _changes(picture, named)
    yield from _verifications(picture, [(s.name, table) for s in subscriptions.values() for table in s.tables])
    yield from _copies(picture, named)
    yield from slots(picture.served, _slots_elsewhere(picture, subscriptions))
    yield from streams(picture.served)
    yield from _debezium(picture, subscriptions)


def standing_by() -> Iterator[Metric]:
    """Yield the metrics of a daemon that stands by: its process's, and that it does."""
    yield _standing_by(True)
    yield from _own_process()


def of_publisher(served: Served) -> Iterator[Metric]:
    """Yield the metrics of a publisher's server without a node."""
    yield from _own_process()
    yield from slots(served, [])
    yield from streams(served)


def _standing_by(stands: bool) -> Metric:
    text = "1 for a daemon that waits to take the place of the one that has its catalog."
    return gauge("pubsub_standing_by", text, (), [((), float(stands))])


def _with_status(picture: Picture) -> Iterator[tuple[Any, SubscriptionStatus]]:
    yield from zip(picture.state.subscriptions, picture.status.subscriptions, strict=True)


def _histogram(name: str, text: str, samples: Iterable[tuple[Labels, Distribution]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_SUB)
    for labels, one in samples:
        buckets = [(_le(bound), float(count)) for bound, count in one.buckets]
        family.add_metric(labels, buckets, one.total)
    return family


def _le(bound: float) -> str:
    return str(floatToGoString(float(f"{bound:.3g}")))  # type: ignore[no-untyped-call]


def _process(picture: Picture) -> Iterator[Metric]:
    node = InfoMetricFamily("pubsub_node", "The node and its program.")
    node.add_metric((), {"node_id": picture.state.node.node_id, "version": __version__})
    yield node
    yield _standing_by(False)
    yield from _own_process()
    yield gauge(
        "pubsub_jvm_resident_memory_bytes",
        "Memory of Spark's JVM, while it runs.",
        (),
        [((), resident(picture.jvm_pid))],
    )
    yield counter(
        "pubsub_jvm_processor_seconds",
        "Processor time of Spark's JVM, while it runs.",
        (),
        [((), processor_time.of_process(picture.jvm_pid))],
    )
    spent = [((part,), picture.spent[part]) for part in processor_time.PARTS if part in picture.spent]
    yield counter("pubsub_processor_seconds", "Processor time of the daemon's Python, by part.", ("part",), spent)
    # As the daemon measured it last: the JVM is not asked for each look.
    memory = picture.status.memory
    for name, text in _HEAP.items():
        yield gauge(f"pubsub_jvm_{name}_bytes", text, (), [((), getattr(memory, name, None))])


def _own_process() -> Iterator[Metric]:
    yield from PlatformCollector(registry=None).collect()
    yield from ProcessCollector(registry=None).collect()


def _subscriptions(picture: Picture, all_of_them: Sequence[SubscriptionStatus]) -> Iterator[Metric]:
    every = [((s.name,), s) for s in all_of_them]
    of_one = partial(gauge, labels=_SUB)
    yield of_one("pg_subscription_subenabled", "Whether it is enabled.", samples=[(n, s.enabled) for n, s in every])
    yield of_one("pubsub_subscription_workers", "Workers that run for it.", samples=[(n, s.workers) for n, s in every])
    yield of_one(
        "pubsub_subscription_error",
        "Whether its last error has not been overcome.",
        samples=[(n, s.error is not None) for n, s in every],
    )
    yield of_one(
        "pubsub_subscription_waiting",
        "Whether its apply worker waits for something else than changes.",
        samples=[(n, s.waiting is not None) for n, s in every],
    )
    yield of_one(
        "pubsub_subscription_warnings", "Warnings of `status`.", samples=[(n, len(s.warnings)) for n, s in every]
    )
    yield of_one(
        "pubsub_publisher_up",
        "Whether the publisher answers.",
        samples=[(n, s.lag_unknown_since is None and s.publisher_lsn is not None) for n, s in every],
    )
    yield gauge(
        "pg_stat_subscription_lag_bytes",
        "WAL of the publisher that is not yet received, not reported as flushed, or not visible in every table.",
        (*_SUB, "stage"),
        [((s.name, stage), lag) for s in all_of_them for stage, lag in _lags(s)],
    )
    yield of_one(
        "pg_stat_subscription_lag_seconds",
        "Seconds from a commit on the publisher until it is visible in Delta; 0 with nothing to do.",
        samples=[(n, s.lag_seconds) for n, s in every],
    )
    counted = [(s.name, Counter("stopped" if t.stopped else t.state for t in s.tables)) for s in all_of_them]
    states = (*(one.value for one in RelState), "w", "c", "stopped")
    yield gauge(
        "pubsub_subscription_tables",
        "Tables by state: pg_subscription_rel.srsubstate, or stopped.",
        (*_SUB, "state"),
        [((name, one), number[one]) for name, number in counted for one in dict.fromkeys(states)],
    )


def _lags(s: SubscriptionStatus) -> Iterator[tuple[str, int | None]]:
    if s.publisher_lsn is None or s.lag_unknown_since is not None:
        return
    visible = [table.lsn for table in s.tables if not table.stopped]
    least = min((lsn for lsn in visible if lsn is not None), default=None) if None not in visible else None
    for stage, lsn in (("received", s.received_lsn), ("flushed", s.flush_lsn), ("visible", least)):
        yield stage, None if lsn is None else max(0, int(s.publisher_lsn) - int(lsn))


def _apply_workers(
    picture: Picture, subscriptions: Mapping[int, SubscriptionStatus]
) -> list[tuple[Labels, WorkerStats]]:
    return [
        ((subscriptions[one.subid].name,), one)
        for one in picture.state.workers
        if one.worker_type == "apply" and one.subid in subscriptions
    ]


def _stream_positions(picture: Picture, subscriptions: Mapping[int, SubscriptionStatus]) -> Iterator[Metric]:
    workers = _apply_workers(picture, subscriptions)
    for column, text in (
        ("received_lsn", "The last WAL position received, in bytes."),
        ("latest_end_lsn", "The last WAL position reported by the publisher, in bytes."),
        ("flush_lsn", "The WAL position reported as flushed, in bytes."),
        ("publisher_lsn", "The end of the publisher's WAL, in bytes."),
    ):
        samples = [(name, _number(getattr(one, column))) for name, one in workers]
        yield gauge(f"pg_stat_subscription_{column}", text, _SUB, samples)
    for column, text in (
        ("last_msg_send_time", "When the publisher sent its last message."),
        ("last_msg_receipt_time", "When the publisher's last message came."),
        ("latest_end_time", "When the publisher last reported its position."),
    ):
        times = [(name, _epoch(getattr(one, column))) for name, one in workers]
        yield gauge(f"pg_stat_subscription_{column}_seconds", f"{text}  Seconds since 1970.", _SUB, times)


def _counters(picture: Picture, named: Mapping[int, str]) -> Iterator[Metric]:
    kept = [((named[one.subid],), one) for one in picture.state.statistics if one.subid in named]
    for column, text in _COUNTERS.items():
        samples = [(name, getattr(one, column)) for name, one in kept]
        yield counter(f"pg_stat_subscription_stats_{column}", text, _SUB, samples)


def _live(picture: Picture, named: Mapping[int, str]) -> Iterator[Metric]:
    running = [((named[oid],), one) for oid, one in picture.live.items() if oid in named]
    yield _histogram(
        "pubsub_transaction_lag_seconds",
        "From a transaction's commit on the publisher until it was durable in Delta; of the present apply worker.",
        [(name, one.lag) for name, one in running],
    )
    yield _histogram(
        "pubsub_commit_seconds",
        "How long a commit to one Delta table took; of the present apply worker.",
        [(name, one.commit_seconds) for name, one in running],
    )
    yield _histogram(
        "pubsub_batch_rows",
        "Rows of a batch; of the present apply worker.",
        [(name, one.batch_rows) for name, one in running],
    )
    yield gauge(
        "pubsub_queue_bytes",
        "Data in memory that is received and not yet staged.",
        _SUB,
        [(name, one.queued_bytes) for name, one in running],
    )
    yield gauge(
        "pubsub_queue_limit_bytes",
        "The most of pubsub_queue_bytes (logical_decoding_work_mem).",
        _SUB,
        [(name, one.queue_limit) for name, one in running],
    )


def _tables(tables: Sequence[tuple[str, TableStatus]]) -> Iterator[Metric]:
    yield gauge(
        "pg_subscription_rel_srsubstate",
        "1 for the table's state.",
        (*_TABLE, "srsubstate"),
        [((sub, table.name, table.state), 1) for sub, table in tables],
    )
    every = [((sub, table.name), table) for sub, table in tables]
    of_one = partial(gauge, labels=_TABLE)
    yield of_one("pubsub_table_stopped", "Whether it has stopped alone.", samples=[(n, t.stopped) for n, t in every])
    yield of_one("pubsub_table_error", "Whether it has an error.", samples=[(n, t.error is not None) for n, t in every])
    yield of_one(
        "pubsub_table_lsn",
        "The WAL position up to which it has every change, in bytes.",
        samples=[(n, _number(t.lsn)) for n, t in every],
    )
    for column, text in (
        ("lag_bytes", "WAL of the publisher that its worker has not flushed."),
        ("lag_seconds", "Seconds from a commit on the publisher until it is visible in the table."),
        ("rows", "Rows after its last commit."),
        ("files", "Data files of its newest version, when last looked at."),
        ("small_files", "Those of its data files that are small, when last looked at."),
        ("deleted_rows", "Rows in its data files that deletion vectors take out, when last looked at."),
        ("live_bytes", "Data files of its newest version, when last looked at."),
        ("retained_bytes", "Older data files, which are kept for the retention."),
        ("log_bytes", "Its log."),
    ):
        yield of_one(f"pubsub_table_{column}", text, samples=[(n, getattr(t, column)) for n, t in every])
    yield of_one(
        "pubsub_table_small_file_ratio",
        "The part of its data files that is small, from 0 to 1.",
        samples=[(n, t.small_files / t.files) for n, t in every if t.files and t.small_files is not None],
    )
    yield of_one(
        "pubsub_table_deleted_row_ratio",
        "The part of the rows in its data files that deletion vectors take out, from 0 to 1.",
        samples=[
            (n, t.deleted_rows / (t.rows + t.deleted_rows))
            for n, t in every
            if t.rows is not None and t.deleted_rows is not None and t.rows + t.deleted_rows
        ],
    )
    yield of_one(
        "pubsub_table_last_vacuum_seconds",
        "When it was last vacuumed, in seconds since 1970.",
        samples=[(n, _epoch(t.last_vacuum)) for n, t in every],
    )


def _changes(picture: Picture, named: Mapping[int, str]) -> Iterator[Metric]:
    relations = {(one.subid, one.relid): one.qualified_name for one in picture.state.relations}
    found = [
        ((named[oid], relations[oid, relid]), changes)
        for oid, live in picture.live.items()
        for relid, changes in live.changes.items()
        if oid in named and (oid, relid) in relations
    ]
    yield counter(
        "pubsub_table_changes",
        "Rows committed to the table; of the present apply worker.",
        (*_TABLE, "kind"),
        [
            ((*name, kind), number)
            for name, one in found
            for kind, number in (("insert", one.inserts), ("update", one.updates), ("delete", one.deletes))
        ],
    )
    yield counter(
        "pubsub_table_commits",
        "Commits to the table; of the present apply worker.",
        _TABLE,
        [(name, one.commits) for name, one in found],
    )


def _verifications(picture: Picture, tables: Sequence[tuple[str, TableStatus]]) -> Iterator[Metric]:
    kept = [((sub, t.name), t.verification) for sub, t in tables if t.verification is not None]
    yield gauge(
        "pubsub_verification_equal",
        "Whether the last verification that could compare the table found it equal to the publisher's.",
        _TABLE,
        [(n, v.equal) for n, v in kept],
    )
    yield gauge(
        "pubsub_verification_compared_seconds",
        "When a verification last could compare the table, in seconds since 1970.",
        _TABLE,
        [(n, None if v.compared_at is None else _epoch(v.compared_at)) for n, v in kept],
    )
    yield gauge(
        "pubsub_verification_failed",
        "Whether the last verification of the table failed.",
        _TABLE,
        [(n, v.outcome == "failed") for n, v in kept],
    )
    yield gauge(
        "pubsub_verification_interval_seconds",
        "How often subscriptions are verified by themselves; not there if they are not.",
        (),
        [((), picture.verify_interval or None)],
    )
    yield gauge(
        "pubsub_verification_finished_seconds",
        "When the last verification ended, in seconds since 1970.",
        _TABLE,
        [(n, _epoch(v.finished)) for n, v in kept],
    )
    yield gauge(
        "pubsub_verification_rows",
        "Rows that differed in the last verification, if it could compare the table: missing here, extra here, or different.",
        (*_TABLE, "kind"),
        [
            ((*n, kind), getattr(v, kind))
            for n, v in kept
            if v.outcome in ("equal", "different")
            for kind in ("missing", "extra", "different")
        ],
    )


def _copies(picture: Picture, named: Mapping[int, str]) -> Iterator[Metric]:
    relations = {(one.subid, one.relid): one for one in picture.state.relations}
    running = [
        ((named[one.subid], relation.qualified_name), one)
        for one in picture.state.copies
        if not one.finished
        and one.subid in named
        and (relation := relations.get((one.subid, one.relid))) is not None
        and relation.state is RelState.DATASYNC
    ]
    for column, text in (
        ("tuples_processed", "Rows that the running copy has read."),
        ("tuples_total", "Rows of the table that is copied, as the publisher estimates."),
        ("bytes_processed", "Bytes that the running copy has read."),
        ("bytes_total", "Bytes of the table that is copied."),
    ):
        yield gauge(
            f"pg_stat_progress_copy_{column}", text, _TABLE, [(name, getattr(one, column)) for name, one in running]
        )


def _slots_elsewhere(
    picture: Picture, subscriptions: Mapping[int, SubscriptionStatus]
) -> list[tuple[Labels, PublisherStatus]]:
    """Return the slots of publishers, as their monitors saw them."""
    found: list[tuple[Labels, PublisherStatus]] = []
    for oid, s in subscriptions.items():
        publisher = picture.state.publishers.get(oid)
        if s.slot is not None and publisher is not None and publisher.away_since is None:
            found.append((("publisher", s.slot, s.name, "pgoutput", ""), publisher))
    return found


def _debezium(picture: Picture, subscriptions: Mapping[int, SubscriptionStatus]) -> Iterator[Metric]:
    """Yield what Debezium's JMX exporter has for a connector to PostgreSQL: its dashboards go on working."""
    workers = {one.subid: one for one in picture.state.workers if one.worker_type == "apply"}
    counters = {one.subid: one for one in picture.state.statistics}

    def streaming(s: SubscriptionStatus) -> Labels:
        return ("postgres", s.name, "streaming")

    def snapshot(s: SubscriptionStatus) -> Labels:
        return ("postgres", s.name, "snapshot")

    def of_all(name: str, text: str, samples: Iterable[Sample]) -> Metric:
        return gauge(f"debezium_metrics_{name}", f"{text}  As Debezium has it.", _DEBEZIUM, samples)

    every = list(subscriptions.items())
    now = picture.status.time.timestamp()
    yield of_all(
        "Connected",
        "Whether it is connected to the publisher.",
        [(streaming(s), oid in picture.live and s.lag_unknown_since is None) for oid, s in every],
    )
    yield of_all(
        "MilliSecondsBehindSource",
        "Milliseconds from a commit on the publisher until it is visible.",
        [(streaming(s), None if s.lag_seconds is None else s.lag_seconds * 1000) for _, s in every],
    )
    heard = {oid: _epoch(one.last_msg_receipt_time) for oid, one in workers.items()}
    yield of_all(
        "MilliSecondsSinceLastEvent",
        "Milliseconds since the publisher's last message.",
        [(streaming(s), max(0.0, now - at) * 1000) for oid, s in every if (at := heard.get(oid)) is not None],
    )
    for name, column, text in (
        ("NumberOfCommittedTransactions", "transactions", "Transactions."),
        ("TotalNumberOfCreateEventsSeen", "rows_inserted", "Rows inserted."),
        ("TotalNumberOfUpdateEventsSeen", "rows_updated", "Rows updated."),
        ("TotalNumberOfDeleteEventsSeen", "rows_deleted", "Rows deleted."),
        ("NumberOfErroneousEvents", "apply_error_count", "Errors."),
    ):
        found = [(streaming(s), float(getattr(counters[oid], column))) for oid, s in every if oid in counters]
        yield of_all(name, text, found)
    live: list[tuple[SubscriptionStatus, Live]] = [(s, picture.live[oid]) for oid, s in every if oid in picture.live]
    yield of_all("CurrentQueueSizeInBytes", "Bytes queued.", [(streaming(s), one.queued_bytes) for s, one in live])
    yield of_all("MaxQueueSizeInBytes", "Their bound.", [(streaming(s), one.queue_limit) for s, one in live])
    yield of_all("TotalTableCount", "Tables.", [(snapshot(s), len(s.tables)) for _, s in every])
    copied = {s.name: sum(_is_copied(table) for table in s.tables) for _, s in every}
    yield of_all(
        "RemainingTableCount",
        "Tables that are not yet copied.",
        [(snapshot(s), len(s.tables) - copied[s.name]) for _, s in every],
    )
    yield of_all(
        "SnapshotCompleted",
        "Whether every table is copied.",
        [(snapshot(s), copied[s.name] == len(s.tables)) for _, s in every],
    )
    yield of_all(
        "SnapshotRunning",
        "Whether a table is being copied.",
        [(snapshot(s), any(t.state == RelState.DATASYNC.value and not t.stopped for t in s.tables)) for _, s in every],
    )


def _is_copied(table: TableStatus) -> bool:
    return table.state not in (RelState.INIT.value, RelState.DATASYNC.value)


def _number(lsn: Lsn | None) -> float | None:
    return None if lsn is None else float(int(lsn))


def _epoch(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
