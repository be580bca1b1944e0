"""Slots and streams as metrics: those that this program serves, and publishers' slots as their monitors saw them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import Metric, StateSetMetricFamily

from catalog.figures import PublisherStatus
from pubsub.monitoring.picture import Served
from pubsub.monitoring.samples import Labels, gauge
from pubsub.protocol.lsn import Lsn

_SLOT: Final = ("server", "slot_name", "subname", "plugin", "database")
_STREAM: Final = ("server", "pid", "usename", "application_name", "client_addr", "state")
_WAL_STATES: Final = ("reserved", "extended", "unreserved", "lost")


def slots(served: Served, theirs: Sequence[tuple[Labels, PublisherStatus]]) -> Iterator[Metric]:
    """Yield the slots of publishers, and those that this program has."""
    ours = [((server, row["slot_name"], "", row["plugin"], row["database"] or ""), row) for server, row in served.slots]
    yield gauge(
        "pg_replication_slots_retained_bytes",
        "WAL that the slot retains.",
        _SLOT,
        [
            *((n, p.retained_wal_bytes) for n, p in theirs),
            *((n, _retained(served, row)) for n, row in ours if n[0] == "walsender"),
        ],
    )
    yield gauge(
        "pg_replication_slots_safe_wal_size",
        "WAL in bytes that may still be written before the slot can be lost; no sample without a limit.",
        _SLOT,
        [*((n, p.safe_wal_bytes) for n, p in theirs), *((n, row.get("safe_wal_size")) for n, row in ours)],
    )
    states = StateSetMetricFamily("pg_replication_slots_wal_status", "What has become of the slot's WAL.", labels=_SLOT)
    known = [*((n, p.wal_status) for n, p in theirs), *((n, row["wal_status"]) for n, row in ours)]
    for name, status in known:
        if status is not None:
            states.add_metric(name, {one: one == status for one in _WAL_STATES})
    yield states
    yield gauge(
        "pg_replication_slots_active", "Whether a client uses the slot.", _SLOT, [(n, row["active"]) for n, row in ours]
    )
    for column in ("restart_lsn", "confirmed_flush_lsn"):
        yield gauge(
            f"pg_replication_slots_{column}",
            f"{column} of the slot, in bytes.",
            _SLOT,
            [(n, _parsed(row[column])) for n, row in ours],
        )
    yield gauge(
        "pubsub_walsender_received_lsn",
        "Up to where the upstream server's WAL was received, in bytes.",
        (),
        [((), served.upstream_position)],
    )
    yield gauge(
        "pubsub_walsender_upstream_up",
        "Whether the upstream server's WAL comes.",
        (),
        [((), None if served.upstream_position is None else float(served.failing is None))],
    )


def _retained(served: Served, row: Mapping[str, Any]) -> float | None:
    restart = _parsed(row["restart_lsn"])
    if restart is None or served.upstream_position is None:
        return None
    return max(0.0, served.upstream_position - restart)


def streams(served: Served) -> Iterator[Metric]:
    """Yield how far the clients of this program's servers are."""
    every = [((server, *(str(row.get(name) or "") for name in _STREAM[1:])), row) for server, row in served.streams]
    for column in ("sent_lsn", "write_lsn", "flush_lsn", "replay_lsn"):
        yield gauge(
            f"pg_stat_replication_{column}",
            f"{column} of the stream, in bytes.",
            _STREAM,
            [(name, _parsed(row.get(column))) for name, row in every],
        )


def _parsed(text: str | None) -> float | None:
    return None if text is None else float(int(Lsn.parse(text)))
