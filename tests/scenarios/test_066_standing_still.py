"""Locks on the publisher, worker slots, a publisher that is away: what waits says why, and nothing else waits."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from launcher.worker_slots import MESSAGE
from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.bad_network import BadNetwork
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import chunk_reader
from tests.support.captured_logs import captured_logs
from tests.support.replica import Faults, Replica, RunningNode, wait_until

#: More tables than there ever were threads for copies.
LOCKED = [f"locked{number}" for number in range(5)]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node that copies many tables of a subscription at a time."""
    home = tmp_path_factory.mktemp("node")
    with RunningNode(home, spark, max_logical_replication_workers=20, max_sync_workers_per_subscription=8) as node:
        yield node


@pytest.fixture
def other(node: RunningNode, replica: Replica) -> Iterator[Replica]:
    """Another database of the server, with a subscription of its own."""
    name = f"other_{next(_numbers)}"
    replica.database.server.create_database(name)
    other = Replica(node, Database(replica.database.server, name))
    other.execute("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE TABLE u (id int PRIMARY KEY)")
    other.execute("INSERT INTO t SELECT g, 0 FROM generate_series(1, 100) g; CREATE PUBLICATION p FOR TABLE t, u")
    yield other
    if other.created:
        other.drop()


def table(replica: Replica, name: str) -> dict[str, Any]:
    found = replica.node.status_json(replica.name)["tables"]
    return next(one for one in found if one["name"] == f"public.{name}")


def waits(replica: Replica, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = table(replica, name)["waiting"]
    return found


def says(replica: Replica, name: str, part: str) -> dict[str, Any]:
    """Wait until the table waits for something whose message contains `part`; return that wait."""

    def told() -> dict[str, Any] | None:
        found = waits(replica, name)
        return found if found is not None and part in found["message"] else None

    return wait_until(told, f"{name} to wait for {part!r}")


def test_copies_that_wait_for_locks_hold_up_nobody_else(replica: Replica, other: Replica, fault: Faults) -> None:
    """Four such copies once stopped the commits of all subscriptions, and nothing said why."""
    replica.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)" for name in LOCKED))
    replica.execute("CREATE TABLE early (id int PRIMARY KEY)")
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join([*LOCKED, 'early'])}")
    other.subscribe()
    other.assert_equal("t", "u")
    for name in LOCKED:
        fault.arm(f"copy planned public.{name}")
    replica.subscribe()
    for name in LOCKED:
        fault.wait(f"copy planned public.{name}")
    with ExitStack() as stack:
        entries = stack.enter_context(captured_logs())
        holder = stack.enter_context(psycopg.connect(replica.conninfo, application_name="forgotten"))
        holder.execute(f"LOCK TABLE {', '.join(LOCKED)} IN ACCESS EXCLUSIVE MODE")
        pid = holder.info.backend_pid
        for name in LOCKED:
            fault.release(f"copy planned public.{name}")
        for name in LOCKED:
            told = says(replica, name, "lock")
            assert told["message"] == f"waits for a lock on table public.{name}"
            assert f'for process {pid} of "forgotten"' in told["detail"]
            assert "AccessExclusiveLock" in told["detail"]
            assert str(pid) in told["hint"]
        for number in range(3):
            other.execute(f"UPDATE t SET n = {number}", f"INSERT INTO u VALUES ({number})")
            other.assert_equal("t", "u")
        replica.execute("INSERT INTO early VALUES (1)")
        wait_until(lambda: replica.rows("early") == [{"id": 1}], "the changes of a table beside them")
        holder.rollback()
    replica.assert_equal(*LOCKED, "early")
    assert waits(replica, LOCKED[0]) is None
    logged = [e for e in entries if e.get("reason") == f"waits for a lock on table public.{LOCKED[0]}"]
    assert [(e["log_level"], e["subscription"]) for e in logged] == [("warning", replica.name)]
    assert str(pid) in logged[0]["hint"]


@pytest.mark.full
@pytest.mark.parametrize("noticed", [True, False], ids=["before the job", "by its tasks"])
def test_a_job_that_meets_a_lock_leaves_spark_to_others(
    replica: Replica, other: Replica, fault: Faults, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its tasks would hold all of Spark's places, and other subscriptions' statements would never get one."""
    replica.execute("CREATE TABLE big (id int PRIMARY KEY, filler text)", "CREATE PUBLICATION p FOR TABLE big")
    replica.execute("INSERT INTO big SELECT g, repeat(md5(g::text), 30) FROM generate_series(1, 5000) g")
    # Spark writes this table, because its key is a float.
    other.execute("CREATE TABLE f (x float8 PRIMARY KEY, n int)", "ALTER PUBLICATION p ADD TABLE f")
    other.subscribe()
    other.assert_equal("t", "u", "f")
    fault.arm("copy planned public.big")
    replica.subscribe()
    fault.wait("copy planned public.big")
    holder = psycopg.connect(replica.conninfo, application_name="forgotten")
    with holder:
        holder.execute("LOCK TABLE big IN ACCESS EXCLUSIVE MODE")
        if not noticed:
            looked = iter([True])
            ask = chunk_reader.wait_sql
            monkeypatch.setattr(
                chunk_reader, "wait_sql", lambda source: "SELECT" if next(looked, False) else ask(source)
            )
        fault.release("copy planned public.big")
        assert str(holder.info.backend_pid) in says(replica, "big", "waits for a lock on table public.big")["hint"]
        for number in range(2):
            other.execute(f"INSERT INTO f VALUES ({number}, 0)", "UPDATE f SET n = n + 1", "UPDATE t SET n = n + 1")
            other.assert_equal("f", "t")
        assert table(replica, "big")["error"] is None
        holder.rollback()
    replica.assert_equal("big")
    assert replica.node.statistics(replica.name)["sync_error_count"] == 0


@pytest.mark.full
def test_a_copy_that_waits_for_a_prepared_transaction_s_lock(node: RunningNode, fault: Faults) -> None:
    with EmbeddedPostgres("15", settings={"max_prepared_transactions": 5}) as server:
        server.execute(
            "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t"
        )
        replica = Replica(node, Database(server, "postgres"))
        fault.arm("copy planned public.t")
        replica.subscribe(target="'prepared'")
        fault.wait("copy planned public.t")
        holder = server.connect()
        try:
            holder.execute("BEGIN")
            holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            holder.execute("PREPARE TRANSACTION 'left behind'")
            fault.release("copy planned public.t")
            told = says(replica, "t", "waits for a lock on table public.t")
            assert 'the transaction prepared as "left behind"' in told["detail"]
            assert "ROLLBACK PREPARED" in told["hint"]
        finally:
            holder.execute("COMMIT PREPARED 'left behind'")
            holder.close()
        replica.assert_equal("t")
        replica.drop()


def test_lag_is_unknown_while_the_publisher_is_away(node: RunningNode) -> None:
    with EmbeddedPostgres("18") as server:
        server.execute(
            "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t"
        )
        replica = Replica(node, Database(server, "postgres"))
        replica.subscribe(target="'away'")
        replica.assert_equal("t")
        wait_until(lambda: node.status_json(replica.name)["lag_seconds"] == 0.0, "the lag of an idle subscription")
        assert node.status_json(replica.name)["lag_unknown_since"] is None
        before = datetime.now(UTC)
        server.stop()

        def unknown() -> dict[str, Any] | None:
            found = node.status_json(replica.name)
            return found if found["lag_unknown_since"] is not None else None

        found = wait_until(unknown, "an unknown lag")
        assert (found["lag_bytes"], found["lag_seconds"]) == (None, None)
        since = datetime.fromisoformat(found["lag_unknown_since"])
        assert abs((since - before).total_seconds()) < 60
        assert [(one["lag_bytes"], one["lag_seconds"]) for one in found["tables"]] == [(None, None)]
        (row,) = node.fetch(f"SELECT lag_bytes, lag_seconds FROM pg_stat_subscription WHERE subname = '{replica.name}'")
        assert row == {"lag_bytes": None, "lag_seconds": None}
        wait_until(lambda: node.status_json(replica.name)["error"], "a try to connect again")
        assert node.status_json(replica.name)["lag_seconds"] is None
        server.start()
        wait_until(lambda: node.status_json(replica.name)["lag_seconds"] == 0.0, "the lag to be known again")
        assert unknown() is None
        replica.drop()


@pytest.mark.full
def test_rows_and_lsn_come_from_the_table(replica: Replica, other: Replica) -> None:
    other.subscribe()
    other.assert_equal("t", "u")
    assert (table(other, "t")["rows"], table(other, "u")["rows"]) == (100, 0)
    copied = table(other, "t")["lsn"]

    def rows(name: str, count: int) -> None:
        wait_until(lambda: table(other, name)["rows"] == count, f"{count} rows of {name}")

    other.execute("INSERT INTO u SELECT generate_series(1, 30)", "DELETE FROM t WHERE id <= 10")
    other.execute("UPDATE t SET n = 1 WHERE id > 50")
    rows("u", 30)
    rows("t", 90)
    ((there,),) = other.query("SELECT pg_current_wal_lsn()")
    other.caught_up()

    def reached() -> bool:
        ((passed,),) = other.query(f"SELECT '{table(other, 't')['lsn']}'::pg_lsn >= '{there}'::pg_lsn")
        return bool(passed)

    wait_until(reached, "the table's LSN")
    ((later,),) = other.query(f"SELECT '{table(other, 'u')['lsn']}'::pg_lsn > '{copied}'::pg_lsn")
    assert later
    assert table(other, "t")["rows_copied"] == 100
    other.execute("UPDATE t SET id = id + 1000 WHERE id > 90", "TRUNCATE u")
    rows("t", 90)
    rows("u", 0)
    other.alter("RESYNC TABLE t")
    other.assert_equal("t", "u")
    rows("t", 90)
    # The rows of a table that Spark writes are counted, too.
    other.execute(
        "CREATE TABLE f (x float8 PRIMARY KEY); INSERT INTO f VALUES (1.5)", "ALTER PUBLICATION p ADD TABLE f"
    )
    other.alter("REFRESH PUBLICATION")
    other.caught_up()
    other.execute("INSERT INTO f VALUES (2.5), (3.5)", "DELETE FROM f WHERE x = 1.5")
    other.assert_equal("f")
    rows("f", 2)


@pytest.mark.full
def test_a_table_waits_its_turn_and_a_subscription_for_a_slot(
    spark: Spark, tmp_path: Any, replica: Replica, other: Replica, fault: Faults
) -> None:
    """One slot: the first subscription applies and copies; the other's wait is reported, and ends when it may begin."""
    replica.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)" for name in "ab"))
    replica.execute("CREATE PUBLICATION p FOR TABLE a, b")
    with (
        captured_logs() as entries,
        RunningNode(tmp_path, spark, max_logical_replication_workers=1, max_sync_workers_per_subscription=2) as small,
    ):
        first, second = Replica(small, replica.database), Replica(small, other.database)
        for name in "ab":
            fault.arm(f"copy planned public.{name}")
        first.subscribe()
        wait_until(
            lambda: fault.is_reached("copy planned public.a") or fault.is_reached("copy planned public.b"), "a copy"
        )
        copied, behind = ("a", "b") if fault.is_reached("copy planned public.a") else ("b", "a")
        told = says(first, behind, "out of logical replication worker slots")
        assert f'apply worker of "{first.name}"' in told["detail"]
        assert f"sync worker for public.{copied}" in told["detail"]
        assert told["hint"] == 'You might need to increase "max_logical_replication_workers".'
        second.subscribe()
        says(second, "t", "out of logical replication worker slots")
        one = small.status_json(second.name)
        assert one["waiting"]["message"] == "out of logical replication worker slots"
        assert f'apply worker of "{first.name}"' in one["waiting"]["detail"]
        for name in "ab":
            fault.release(f"copy planned public.{name}")
        first.assert_equal("a", "b")
        second.alter("DISABLE")  # even while it waits
        assert "enabled" in says(second, "t", "until the subscription is enabled")["message"]
        second.alter("ENABLE")
        says(second, "t", "out of logical replication worker slots")
        first.drop()
        second.assert_equal("t", "u")
        # What status shows of a worker is stored once a second.
        wait_until(lambda: small.status_json(second.name)["waiting"] is None, "the wait's end to be shown")
        second.drop()
    logged = [e for e in entries if e["event"] == "worker waits" and e["reason"] == MESSAGE]
    assert {e["log_level"] for e in logged} == {"warning"}
    # One entry each time a subscription begins to wait, and one for the tables that wait together.
    assert [(e["subscription"], e["relation"]) for e in logged[:3]] == [
        (first.name, f"public.{behind}"),
        (second.name, None),
        (second.name, None),
    ]
    assert len(logged) <= 4


@pytest.mark.full
def test_a_table_that_apply_waits_for_does_not_wait_for_copies(
    spark: Spark, tmp_path: Any, replica: Replica, fault: Faults
) -> None:
    """Its sync worker failed in state c and lost its place to a copy, for which all commits then waited."""
    names = ["early", "a", "b"]
    replica.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)" for name in names))
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    with RunningNode(tmp_path, spark, max_logical_replication_workers=1, max_sync_workers_per_subscription=1) as small:
        one = Replica(small, replica.database)
        fault.arm("copy finished public.a")
        fault.arm("copy planned public.b")
        one.subscribe()
        fault.wait("copy finished public.a")
        # What apply has decided is past the copy of a, so its sync worker must follow its slot.
        one.execute("INSERT INTO early VALUES (2)")
        wait_until(lambda: len(one.rows("early")) == 2, "a commit of apply")
        ((slot,),) = one.query("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE '%_sync_%'")
        server = replica.database.server
        thief = psycopg.connect(server.conninfo(replica.database.name, replication="database"), autocommit=True)
        try:
            options = "(proto_version '1', publication_names 'p')"
            thief.pgconn.send_query(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 {options}".encode())
            active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
            wait_until(lambda: one.query(active) == [(True,)], "the thief")
            fault.release("copy finished public.a")
            fault.wait("copy planned public.b")
            assert "is active" in table(one, "a")["error"]
            # A worker that is past this point by now still fails, since the thief has the slot; the next one stops here.
            fault.arm("catchup public.a")
            fault.wait("catchup public.a")
        finally:
            thief.close()
        one.execute("INSERT INTO a VALUES (2)", "INSERT INTO early VALUES (3)")
        wait_until(
            lambda: (
                "waits for table public.a" in (small.status_json(one.name)["waiting"] or {"message": ""})["message"]
            ),
            "apply to say what it waits for",
        )
        fault.release("catchup public.a")
        wait_until(lambda: (len(one.rows("a")), len(one.rows("early"))) == (2, 3), "the commits of apply")
        assert fault.is_reached("copy planned public.b")
        assert table(one, "b")["rows"] in (None, 0)
        fault.release("copy planned public.b")
        one.assert_equal(*names)
        one.drop()


@pytest.mark.parametrize(
    ("number", "action"),
    [
        pytest.param(signal.SIGKILL, "RESYNC TABLE t, u", marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, "RESYNC TABLE t", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, "DROP", marks=pytest.mark.full),
    ],
)
def test_a_subscription_goes_on_when_a_command_is_killed(
    other: Replica, fault: Faults, number: signal.Signals, action: str
) -> None:
    """It stayed without workers, without a word, while the slot retained WAL."""
    other.subscribe()
    other.assert_equal("t", "u")
    fault.arm("commit public.t")
    other.execute("UPDATE t SET n = 1")
    fault.wait("commit public.t")  # so the command waits for the worker to end
    statement = f"DROP SUBSCRIPTION {other.name}" if action == "DROP" else f"ALTER SUBSCRIPTION {other.name} {action}"
    home = other.node._node.settings.home
    client = subprocess.Popen(
        [sys.executable, "-m", "pubsub.cli", "--home", str(home), "sql", statement], stderr=subprocess.PIPE
    )

    def paused() -> bool:
        told = other.node.status_json(other.name)["waiting"]
        return told is not None and f"of process {client.pid} on host" in told["message"]

    wait_until(paused, "the pause")
    client.send_signal(number)
    _, said = client.communicate()
    assert client.returncode == -number, said
    fault.release("commit public.t")
    other.execute("UPDATE t SET n = 2", "INSERT INTO u VALUES (7)")
    wait_until(lambda: not paused(), "the pause to end")
    other.execute("UPDATE t SET n = 3")
    other.assert_equal("t", "u")


@pytest.mark.full
def test_a_copy_that_connects_to_a_silent_publisher_holds_no_command_up(other: Replica, fault: Faults) -> None:
    server = other.database.server
    with BadNetwork(server.port) as network:
        fault.arm("copy planned public.t")
        through = server.conninfo(other.database.name, port=network.port)
        other.node.execute(f"CREATE SUBSCRIPTION {other.name} CONNECTION '{through}' PUBLICATION p")
        other.created = True
        fault.wait("copy planned public.t")
        network.delay = 1e5
        known = network.connections
        fault.release("copy planned public.t")
        wait_until(lambda: network.connections > known, "a connection that nobody answers")
        (result,) = other.node.execute(f"ALTER SUBSCRIPTION {other.name} DISABLE")
        assert result.notices == ()
    other.alter(f"CONNECTION '{other.conninfo}'")
    other.alter("ENABLE")
    other.assert_equal("t", "u")
