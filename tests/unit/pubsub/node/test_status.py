"""What status shows: of tables that stopped alone, or that others write; what is waited for; what is not known."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from catalog.figures import CopyProgress, PublisherStatus, TableRows, TableStorage, Warned, WorkerStats
from catalog.records import (
    OF_NODE,
    DaemonRow,
    ForeignCommit,
    Lease,
    NodeRow,
    OriginStatus,
    State,
    Subscription,
    SubscriptionRel,
)
from catalog.states import RelState
from pubsub.cli.status import picture
from pubsub.memory import Memory
from pubsub.node.status import NodeStatus, from_state
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions


def relation(relid: int, name: str) -> SubscriptionRel:
    return SubscriptionRel(5, relid, "public", name, RelState.READY, Lsn(16), 1, None, name, None, None, None, None)


def test_a_table_that_stopped_and_one_that_others_write() -> None:
    options = SubscriptionOptions(on_table_error="isolate")
    given = (5, "s", True, "", "s", ("p",), options, "t", "7", 1, "d", INVALID_LSN, "o", 1, False)
    stopped = replace(
        relation(1, "a"), stopped=True, error="it does not fit", error_hint="RESYNC TABLE a", error_lsn=Lsn(0x500)
    )
    written = replace(relation(2, "b"), foreign=ForeignCommit(7, "UPDATE", "an engine"))
    worker = WorkerStats(5, None, publisher_lsn=Lsn(0x700), flush_lsn=Lsn(0x600), lag_seconds=1.0)
    state = State(
        NodeRow("9", datetime.now(UTC)), (), (Subscription(*given),), (stopped, written), (), (worker,), (), ()
    )
    found = from_state(state, 1)
    (subscription,) = found.as_json()["subscriptions"]
    a, b = subscription["tables"]
    assert (a["stopped"], a["error_lsn"], a["error"], a["hint"]) == (True, "0/500", "it does not fit", "RESYNC TABLE a")
    assert (a["lag_bytes"], b["lag_bytes"]) == (None, 0x100)
    assert (b["stopped"], b["foreign_commit"]) == (False, "version 7, UPDATE by an engine")
    shown = io.StringIO()
    Console(file=shown, width=200).print(picture(found, "home"))
    for line in (
        "public.a    stopped",
        "ERROR:  public.a, at 0/500: it does not fit",
        "HINT:  RESYNC TABLE a",
        "WARNING:  public.b: written by others (version 7, UPDATE by an engine)",
    ):
        assert line in shown.getvalue(), shown.getvalue()


def subscription(*, enabled: bool = True) -> Subscription:
    return Subscription(
        5, "s", enabled, "", "s", ("p",), SubscriptionOptions(), "t", "7", 1, "d", INVALID_LSN, "o", 1, False
    )


def shown(found: NodeStatus) -> str:
    text = io.StringIO()
    Console(file=text, width=250).print(picture(found, "home"))
    return text.getvalue()


def test_what_the_daemon_takes_of_the_memory() -> None:
    memory = Memory(300 << 20, 900 << 20, 100 << 20, 500 << 20, 2 << 30)
    daemon = DaemonRow(1, 1, "h", "/home", datetime.now(UTC), memory)
    state = State(NodeRow("9", datetime.now(UTC)), (daemon,), (), (), (), (), (), ())
    assert "memory: Python 300.0 MB, JVM 900.0 MB, heap 100.0 MB of 2.0 GB" in shown(from_state(state, 1))
    assert from_state(state, 1).as_json()["memory"]["heap_committed"] == 500 << 20
    # One that was killed has left its row.
    assert "memory" not in shown(from_state(state, None))
    assert from_state(state, None).as_json()["memory"] is None
    starting = replace(state, daemons=(replace(daemon, memory=Memory(300 << 20)),))
    assert "memory: Python 300.0 MB, JVM -\n" in shown(from_state(starting, 1)).replace("  ", "")


def test_which_daemon_has_which_subscriptions() -> None:
    time, memory = datetime.now(UTC), Memory(300 << 20)
    daemons = (DaemonRow(3, 11, "alpha", "/a", time, memory), DaemonRow(4, 12, "beta", "/b", time))
    leases = (Lease(OF_NODE, 4, leaving=False), Lease(5, 3, leaving=False))
    state = State(NodeRow("9", time), daemons, (subscription(),), (), (), (), (), (), leases=leases)
    found = from_state(state, 12)
    text = shown(found)
    assert "2 daemons" in text
    assert "daemon 11 on alpha, Python 300.0 MB, JVM -: s\n" in text
    assert "daemon 12 on beta: no subscriptions\n" in text
    document = found.as_json()
    assert [(one["pid"], one["home"], one["subscriptions"]) for one in document["daemons"]] == [
        (11, "/a", ("s",)),
        (12, "/b", ()),
    ]
    assert document["memory"] is None, "the daemon's that is asked"
    assert from_state(state, None).daemons == ()
    assert from_state(replace(state, leases=()), 11).daemons == ()


def table(found: NodeStatus, name: str) -> dict[str, Any]:
    (one,) = found.as_json()["subscriptions"]
    return next(table for table in one["tables"] if table["name"] == f"public.{name}")


SLOTS = Warned(
    "out of logical replication worker slots",
    'All 1 are held: apply worker of "t".',
    'You might need to increase "max_logical_replication_workers".',
)


def waiting(waits: dict[int, Warned], *, alive: bool = True, enabled: bool = True) -> NodeStatus:
    """A ready table and twelve that are to be copied."""
    tables = [relation(1, "ready")]
    tables += [replace(relation(n, f"t{n}"), state=RelState.INIT, lsn=None) for n in range(2, 14)]
    state = State(
        NodeRow("9", datetime.now(UTC)), (), (subscription(enabled=enabled),), tuple(tables), (), (), (), (),
        publishers={5: PublisherStatus(waits=waits)},
    )  # fmt: skip
    return from_state(state, 1 if alive else None)


def test_status_names_what_a_worker_waits_for() -> None:
    lock = Warned("waits for a lock on table public.t2", "Process 7 holds it.", "End it.")
    spark = Warned("waits for Spark to start")
    turn = Warned("waits for one of 2 sync workers", "They are at work on public.t2 and public.t3.")
    found = waiting({2: lock, 3: spark, **dict.fromkeys(range(4, 14), turn)})
    assert table(found, "t2")["waiting"] == {
        "message": lock.message, "detail": lock.detail, "hint": lock.hint,
    }  # fmt: skip
    assert table(found, "t3")["waiting"]["message"] == "waits for Spark to start"
    assert table(found, "ready")["waiting"] is None
    text = shown(found)
    assert "WARNING:  public.t2: waits for a lock on table public.t2" in text
    assert "HINT:  End it." in text
    assert "    public.t3: waits for Spark to start" in text
    assert "public.t4, public.t5, public.t6, public.t7, public.t8 and 5 more: waits for one of 2 sync workers" in text


def test_a_subscription_without_a_slot_is_reported_once() -> None:
    found = waiting(dict.fromkeys(range(14), SLOTS))
    (one,) = found.as_json()["subscriptions"]
    assert one["waiting"]["message"] == SLOTS.message
    assert table(found, "t2")["waiting"] == one["waiting"]
    assert shown(found).count(SLOTS.message) == 1
    assert f"WARNING:  apply worker: {SLOTS.message}" in shown(found)


def test_no_daemon_and_a_disabled_subscription() -> None:
    found = waiting({2: SLOTS}, alive=False)
    assert "none runs" in table(found, "t2")["waiting"]["message"]
    assert table(found, "ready")["waiting"] is None
    found = waiting({}, enabled=False)
    assert table(found, "t2")["waiting"]["hint"] == "ALTER SUBSCRIPTION ... ENABLE."


def lagging(publisher: PublisherStatus, *workers: WorkerStats) -> NodeStatus:
    origin = OriginStatus(5, None, Lsn(0x500), None)
    state = State(
        NodeRow("9", datetime.now(UTC)), (), (subscription(),), (relation(1, "a"),), (origin,), workers, (), (),
        publishers={5: publisher},
    )  # fmt: skip
    return from_state(state, 1)


def test_lag_is_unknown_since_the_publisher_was_heard() -> None:
    since = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    worker = WorkerStats(5, None, flush_lsn=Lsn(0x600))
    found = lagging(PublisherStatus(away_since=since), worker)
    (one,) = found.as_json()["subscriptions"]
    assert (one["lag_bytes"], one["lag_seconds"]) == (None, None)
    assert one["lag_unknown_since"] == "2026-03-04T05:06:07+00:00"
    assert "lag unknown since 2026-03-04 05:06:07 UTC" in shown(found)
    # It answers; only the worker fails.
    found = lagging(PublisherStatus(current_lsn=Lsn(0x700)))
    (one,) = found.as_json()["subscriptions"]
    assert (one["lag_bytes"], one["lag_seconds"], one["lag_unknown_since"]) == (0x200, None, None)
    assert "lag 512 B " in shown(found)


def test_what_the_retention_costs() -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    state = State(
        NodeRow("9", time), (), (subscription(),), tuple(relation(n, f"t{n}") for n in range(1, 5)), (), (), (), (),
        storage=(
            TableStorage(5, 1, 1, 9, 2, 1024, 3 * 1024, 512, time),
            TableStorage(5, 2, 1, 9, 2, 1024, 1024, 512),
            TableStorage(5, 3, 0, 9, 2, 1 << 30, 1 << 30, 1 << 30),  # of an earlier copy
        ),
    )  # fmt: skip
    found = from_state(state, 1)
    names = ("live_bytes", "retained_bytes", "log_bytes", "last_vacuum")
    said = [tuple(t[name] for name in names) for t in found.as_json()["subscriptions"][0]["tables"]]
    assert said == [
        (1024, 3072, 512, "2026-01-02T03:04:05+00:00"),
        (1024, 1024, 512, None),
        (None, None, None, None),
        (None, None, None, None),
    ]
    assert "Delta 2.0 kB, old files 4.0 kB, logs 1.0 kB" in shown(found)


def test_rows_and_lsn_come_from_the_table() -> None:
    tables = (
        relation(1, "quiet"),
        relation(2, "busy"),
        replace(relation(3, "stopped"), stopped=True, error="no"),
        replace(relation(4, "copied_again"), copy_generation=2, state=RelState.DATASYNC, lsn=None),
        replace(relation(5, "joined"), copy_generation=0),
    )
    state = State(
        NodeRow("9", datetime.now(UTC)), (), (subscription(),), tables, (OriginStatus(5, None, Lsn(0x500), None),), (),
        tuple(CopyProgress(5, n, 100, 100, 0, None, finished=n != 4) for n in range(1, 5)), (),
        rows=(
            TableRows(5, 2, 1, 150, Lsn(0x510)),
            TableRows(5, 3, 1, 120, Lsn(0x80)),
            TableRows(5, 4, 1, 170, Lsn(0x510)),
        ),
    )  # fmt: skip
    found = from_state(state, 1)
    said = {
        t["name"][7:]: (t["rows"], t["rows_copied"], t["lsn"]) for t in found.as_json()["subscriptions"][0]["tables"]
    }
    assert said == {
        "quiet": (100, 100, "0/500"),  # all up to the origin is in it
        "busy": (150, 100, "0/510"),  # its commit is made, the origin is not yet stored
        "stopped": (120, 100, "0/80"),
        "copied_again": (None, 100, None),
        "joined": (None, None, "0/500"),
    }
    text = shown(found)
    for line in (
        "r ready         0/500       100",
        "r ready         0/510       150",
        "stopped         0/80        120",
    ):
        assert line.split() in [
            part.split()[1:5] if "ready" in part else part.split()[1:4] for part in text.splitlines()
        ]
