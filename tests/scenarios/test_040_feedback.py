"""Only what is durable is reported to the publisher; and connections that break."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres, StopMode
from tests.support.replica import Faults, Replica, RunningNode, wait_until

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node that reports every second."""
    with RunningNode(tmp_path_factory.mktemp("node"), spark, wal_receiver_status_interval="1s") as node:
        yield node


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server that can be stopped and started, with a short wal_sender_timeout."""
    with EmbeddedPostgres("18", settings={"wal_sender_timeout": "3s"}) as server:
        yield server


@pytest.fixture
def own(node: RunningNode, own_server: EmbeddedPostgres) -> Iterator[Replica]:
    name = f"own_{next(_numbers)}"  # the name of its folder in the warehouse, too
    own_server.create_database(name)
    replica = Replica(node, Database(own_server, name))
    yield replica
    if replica.created:
        replica.drop()
    assert replica.slots() == []


def make(replica: Replica, **options: object) -> None:
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, n int); INSERT INTO a SELECT g, 0 FROM generate_series(1, 100) g; "
        "CREATE TABLE b (id int PRIMARY KEY, n int); CREATE TABLE unpublished (n int); CREATE PUBLICATION p FOR TABLE a, b"
    )
    replica.subscribe(**options)
    replica.assert_equal("a", "b")


def current_lsn(replica: Replica) -> str:
    return str(replica.query("SELECT pg_current_wal_lsn()")[0][0])


def confirmed(replica: Replica, comparison: str) -> bool:
    return bool(
        replica.query(
            f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{replica.name}' AND confirmed_flush_lsn {comparison}"
        )
    )


def walsender(replica: Replica) -> dict[str, Any]:
    """Return the slot's walsender: pid, reported LSNs, and when its last reply was sent; {} if there is none."""
    row = replica.query(
        "SELECT r.pid, r.write_lsn::text, r.flush_lsn::text, r.reply_time FROM pg_stat_replication r "
        f"JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = '{replica.name}'"
    )
    return dict(zip(("pid", "write_lsn", "flush_lsn", "reply_time"), row[0], strict=True)) if row else {}


def replies_for(replica: Replica, seconds: float) -> None:
    """Wait for a reply that the receiver has sent `seconds` from now or later."""
    (until,) = replica.query(f"SELECT clock_timestamp() + interval '{seconds} s'")[0]
    wait_until(lambda: (found := walsender(replica)) and found["reply_time"] > until, "a reply")


def test_reported_positions_are_durable(replica: Replica, fault: Faults) -> None:
    make(replica)
    for held, other in (("commit public.a", "b"), ("committed public.a", "b"), ("batch committed", "b")):
        before = current_lsn(replica)
        fault.arm(held)
        replica.execute(
            f"INSERT INTO {other} VALUES ((SELECT count(*) FROM {other}), 0); UPDATE a SET n = n + 1 WHERE id < 10"
        )
        fault.wait(held)
        # Another change, and WAL that would advance the slot if nothing were pending.
        replica.execute("UPDATE a SET n = n + 1", "INSERT INTO unpublished VALUES (1)")
        replies_for(replica, 1.5)
        assert confirmed(replica, f"<= '{before}'"), held
        after = current_lsn(replica)
        fault.release(held)
        wait_until(lambda after=after: confirmed(replica, f">= '{after}'"), "the slot to advance")
        replica.assert_equal("a", "b", caught_up=False)


def test_unpublished_wal_advances_the_feedback_too(replica: Replica) -> None:
    make(replica)
    for _ in range(3):
        replica.execute("INSERT INTO unpublished SELECT g FROM generate_series(1, 1000) g")
        after = current_lsn(replica)
        wait_until(lambda after=after: confirmed(replica, f">= '{after}'"), "the slot to advance")
    (origin,) = replica.node.fetch(
        f"SELECT remote_lsn FROM pg_replication_origin_status WHERE external_id = 'pg_{replica.relation('a').subid}'"
    )
    assert replica.query(f"SELECT '{origin['remote_lsn']}'::pg_lsn >= '{after}'") == [(True,)]


@pytest.mark.full
@pytest.mark.parametrize(
    "rows", [10, pytest.param(500_000, marks=pytest.mark.full)], ids=["a full batch", "an open batch"]
)
def test_a_commit_longer_than_wal_sender_timeout(own: Replica, fault: Faults, rows: int) -> None:
    """Keepalives are answered with the old flush LSN, whether or not the next batch has room."""
    make(own, batch_rows=rows)
    before, sender = current_lsn(own), walsender(own)
    fault.arm("commit public.a")
    own.execute("UPDATE a SET n = n + 1")
    fault.wait("commit public.a")
    own.execute(
        "UPDATE a SET n = n + 1", "UPDATE a SET n = n + 1", "INSERT INTO b SELECT g, g FROM generate_series(1, 50000) g"
    )
    replies_for(own, 7)
    assert walsender(own)["pid"] == sender["pid"]
    assert confirmed(own, f"<= '{before}'")
    fault.release("commit public.a")
    own.assert_equal("a", "b")
    assert walsender(own)["pid"] == sender["pid"]


@pytest.mark.parametrize("level", ["on", pytest.param("remote_apply", marks=pytest.mark.full)])
def test_a_publisher_that_waits_for_the_subscription(
    own: Replica, own_server: EmbeddedPostgres, fault: Faults, level: str
) -> None:
    """synchronous_standby_names names application_name: the subscription's name (worker.c: run_apply_worker)."""
    make(own, slot_name="'a_slot_of_another_name'")
    standbys = own.query("SELECT application_name FROM pg_stat_replication WHERE state = 'streaming'")
    assert standbys == [(own.name,)]
    own_server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{own.name}'")
    own_server.query("SELECT pg_reload_conf()")
    try:
        synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: own.query(synchronous), "the subscription to be a synchronous standby")
        # Backends wait as soon as the checkpointer knows of the standby (SyncRepWaitForLSN: sync_standbys_defined).
        own_server.execute("CHECKPOINT")
        fault.arm("commit public.a")
        statement = f"SET synchronous_commit = {level}; UPDATE a SET n = 7; INSERT INTO a VALUES (1000, 7)"
        writing = threading.Thread(target=own.execute, args=[statement])
        writing.start()
        fault.wait("commit public.a")
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: own.query(waits), "the commit to wait")
        ((until,),) = own.query("SELECT clock_timestamp() + interval '1.5 s'")
        replied = f"SELECT 1 FROM pg_stat_replication WHERE application_name = '{own.name}' AND reply_time > '{until}'"
        wait_until(lambda: own.query(replied), "a reply")
        assert writing.is_alive(), "the commit ended before Delta had it"
        fault.release("commit public.a")
        writing.join()
        assert {row["n"] for row in own.rows("a")} == {7}, "the commit ended before Delta had it"
        assert len(own.rows("a")) == 101
    finally:
        own_server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        own_server.query("SELECT pg_reload_conf()")


@pytest.mark.full
def test_nothing_is_reported_unasked(spark: Spark, tmp_path: Path) -> None:
    """wal_receiver_status_interval = 0: only requests are answered (worker.c: send_feedback)."""
    with (
        EmbeddedPostgres("18") as server,
        RunningNode(tmp_path / "node", spark, wal_receiver_status_interval=0) as node,
    ):
        server.execute("ALTER SYSTEM SET wal_sender_timeout = 0")
        server.query("SELECT pg_reload_conf()")
        replica = Replica(node, Database(server, "postgres"))
        make(replica, target="'quiet'")
        replica.execute("UPDATE a SET n = n + 1")
        replica.assert_equal("a", "b")
        assert server.query("SELECT reply_time FROM pg_stat_replication WHERE state = 'streaming'") == [(None,)]
        after = current_lsn(replica)
        assert confirmed(replica, f"< '{after}'")
        server.execute("ALTER SYSTEM SET wal_sender_timeout = '2s'")
        server.query("SELECT pg_reload_conf()")
        wait_until(lambda: confirmed(replica, f">= '{after}'"), "an answer")
        replica.execute("UPDATE a SET n = n + 1")
        replica.assert_equal("a", "b")
        replica.drop()


@pytest.mark.full
def test_the_publisher_restarts(own: Replica, own_server: EmbeddedPostgres) -> None:
    make(own)
    modes: tuple[StopMode | None, ...] = ("fast", "immediate", None)
    for mode in modes:
        own.execute("UPDATE a SET n = n + 1", "INSERT INTO b SELECT count(*), 0 FROM b")
        if mode is None:
            own_server.kill()
        else:
            own_server.stop(mode)
        own.error()
        own_server.start()
        own.execute("UPDATE a SET n = n + 1 WHERE id % 2 = 0")
        own.assert_equal("a", "b")
    wait_until(lambda: own.node.statistics(own.name)["error"] is None, "the error to be cleared")


@pytest.mark.full
def test_the_walsender_is_killed(replica: Replica, fault: Faults) -> None:
    """A commit that is under way is completed, and its changes are not applied again."""
    make(replica)
    terminate = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
    for point in ("commit public.a", "committed public.a", "batch committed"):
        fault.arm(point)
        replica.execute("UPDATE a SET n = n + 1", "INSERT INTO b SELECT count(*), 0 FROM b")
        fault.wait(point)
        errors = replica.node.statistics(replica.name)["apply_error_count"]
        replica.query(terminate)
        replica.execute("UPDATE a SET n = n + 1 WHERE id % 2 = 0")
        fault.release(point)
        wait_until(
            lambda errors=errors: replica.node.statistics(replica.name)["apply_error_count"] > errors, "the failure"
        )
        replica.assert_equal("a", "b")


def test_a_slot_that_is_gone_stops_with_its_name(replica: Replica) -> None:
    make(replica)
    replica.drop_slot()
    replica.execute("UPDATE a SET n = n + 1")
    wait_until(lambda: f'replication slot "{replica.name}" does not exist' in replica.error(), "the reason")
    assert replica.version("a") == 1, "nothing of it is in Delta"
    replica.alter("DISABLE")
    replica.alter("SET (slot_name = NONE)")
