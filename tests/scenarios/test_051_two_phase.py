"""Prepared transactions (src/test/subscription/t/021 and 023), on PostgreSQL 15 to 19.

Nothing of one is in a table before its outcome, and the outcome finds it whatever happened in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Faults, Replica, RunningNode, Stock, wait_until

DDL = """
CREATE TABLE a (id int PRIMARY KEY, n int, t text);
CREATE TABLE b (n int, t text);
INSERT INTO a SELECT g, 0, md5(g::text) FROM generate_series(1, 500) g;
CREATE PUBLICATION p FOR TABLE a;
CREATE PUBLICATION q FOR TABLE b WITH (publish = 'insert, truncate');
"""
SMALL = (
    "BEGIN; INSERT INTO a VALUES ({0}, 1, 'p'); UPDATE a SET n = n + 1 WHERE id < 5; INSERT INTO b VALUES ({0}, 'p'); "
)
LARGE = """BEGIN; INSERT INTO a SELECT g, 1, repeat('p', 60) FROM generate_series({0}, {0} + 1500) g; SAVEPOINT s;
DELETE FROM a WHERE id > 100; INSERT INTO b SELECT g, 'lost' FROM generate_series(1, 800) g; ROLLBACK TO SAVEPOINT s;
UPDATE a SET n = n + 1 WHERE id < 300; INSERT INTO b SELECT g, 'p' FROM generate_series(1, 800) g; """


@pytest.fixture(params=["15", "17", "18", "19"])
def publisher(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A server of this version, "18, wheel" for the wheel's release of 18."""
    version, wheel = request.param[:2], request.param == "18, wheel"
    with EmbeddedPostgres(version, wheel=wheel, settings={"max_prepared_transactions": 20}) as server:
        server.create_database("two_phase")
        server.execute("ALTER DATABASE two_phase SET logical_decoding_work_mem = '64kB'", "two_phase")
        server.execute(DDL, "two_phase")
        yield Database(server, "two_phase")


def state(replica: Replica) -> str:
    (row,) = replica.node.fetch(f"SELECT subtwophasestate FROM pg_subscription WHERE subname = '{replica.name}'")
    return str(row["subtwophasestate"])


def prepared(replica: Replica) -> list[str]:
    return sorted(row["gid"] for row in replica.node.fetch("SELECT gid FROM pg_prepared_xacts"))


def enabled(replica: Replica) -> None:
    wait_until(lambda: state(replica) == "e", "two-phase commit to be enabled")
    wait_until(
        lambda: replica.query(f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{replica.name}'")[0][0],
        "the slot to have it too",
    )


def test_prepared_transactions(publisher: Database, spark: Spark, tmp_path: Path) -> None:
    with RunningNode(tmp_path, spark, logical_decoding_work_mem="64kB") as node:
        replica = Replica(node, publisher)
        replica.subscribe("p, q", two_phase="true")
        replica.caught_up()
        enabled(replica)
        # Whole and streamed, committed and rolled back; others commit meanwhile.
        for text in (SMALL, LARGE):
            for outcome in ("COMMIT", "ROLLBACK"):
                publisher.execute(text.format(10000) + "PREPARE TRANSACTION 'it''s one'")
                wait_until(lambda: prepared(replica) == ["it's one"], "the transaction to be listed")
                replica.execute("UPDATE a SET t = 'meanwhile' WHERE id = 400", "INSERT INTO b VALUES (0, 'meanwhile')")
                replica.assert_equal("a", "b")
                replica.execute(f"{outcome} PREPARED 'it''s one'")
                replica.assert_equal("a", "b")
                wait_until(lambda: not prepared(replica), "the transaction to be gone")
                replica.execute("DELETE FROM a WHERE id >= 10000")
        # Two at once, an empty one, and the same gid again.
        publisher.execute("BEGIN; PREPARE TRANSACTION 'empty'")
        publisher.execute("BEGIN; INSERT INTO a VALUES (20000, 1, 'x'); PREPARE TRANSACTION 'one'")
        publisher.execute("BEGIN; INSERT INTO a VALUES (20001, 1, 'x'); PREPARE TRANSACTION 'two'")
        replica.execute("COMMIT PREPARED 'two'", "COMMIT PREPARED 'empty'")
        publisher.execute("BEGIN; INSERT INTO a VALUES (20002, 1, 'x'); PREPARE TRANSACTION 'two'")
        replica.execute("ROLLBACK PREPARED 'one'", "COMMIT PREPARED 'two'")
        publisher.execute("BEGIN; TRUNCATE b; INSERT INTO b VALUES (1, 'after'); PREPARE TRANSACTION 'truncate'")
        replica.execute("COMMIT PREPARED 'truncate'", "INSERT INTO b VALUES (2, 'later')")
        replica.assert_equal("a", "b")
        publisher.execute(LARGE.format(30000) + "PREPARE TRANSACTION 'kept'")
        wait_until(lambda: prepared(replica) == ["kept"], "the transaction to be listed")
        (oid,) = (row["oid"] for row in node.fetch("SELECT oid FROM pg_subscription"))
    # It survives the node's stop, and is committed while no node runs.
    assert len(list((tmp_path / "prepared" / str(oid)).iterdir())) == 1
    replica.execute("COMMIT PREPARED 'kept'", "UPDATE a SET n = -1 WHERE id = 30001")
    with RunningNode(tmp_path, spark) as node:
        replica.node = node
        replica.assert_equal("a", "b")
        wait_until(lambda: not prepared(replica), "the transaction to be gone")
        assert list((tmp_path / "prepared" / str(oid)).iterdir()) == []
        replica.drop()
    assert not (tmp_path / "prepared" / str(oid)).exists()
    assert replica.slots() == []


@pytest.mark.parametrize("publisher", ["15", "18, wheel"], indirect=True)
def test_a_prepared_transaction_that_has_only_locked_rows(publisher: Database, spark: Spark, tmp_path: Path) -> None:
    """18.4 sends PREPARE without BEGIN PREPARE, and the outcome; 15 the outcome alone; 18.6 nothing."""
    with RunningNode(tmp_path, spark) as node:
        replica = Replica(node, publisher)
        replica.subscribe("p, q", two_phase="true")
        replica.caught_up()
        enabled(replica)
        for gid in ("committed", "undone", "over a restart"):
            publisher.execute(f"BEGIN; SELECT FROM a WHERE id = 1 FOR UPDATE; PREPARE TRANSACTION '{gid}'")
            replica.execute("UPDATE a SET n = n + 1 WHERE id = 2")
            replica.assert_equal("a")
            if gid == "over a restart":
                replica.alter("DISABLE")
            replica.execute("ROLLBACK PREPARED 'undone'" if gid == "undone" else f"COMMIT PREPARED '{gid}'")
            if gid == "over a restart":
                replica.alter("ENABLE")
            replica.execute("UPDATE a SET n = n + 1 WHERE id = 1")
            replica.assert_equal("a")
        assert prepared(replica) == []
        assert node.statistics(replica.name)["apply_error_count"] == 0
        replica.drop()


@pytest.mark.full
@pytest.mark.parametrize("publisher", ["15", "18"], indirect=True)
@pytest.mark.parametrize("statements", [SMALL, LARGE], ids=["small", "large"])
def test_a_transaction_prepared_before_two_phase_was_enabled(
    publisher: Database, spark: Spark, tmp_path: Path, fault: Faults, statements: str
) -> None:
    """It is sent at its outcome, with the LSNs of its PREPARE, which the stream has passed long before."""
    with RunningNode(tmp_path, spark, logical_decoding_work_mem="64kB") as node:
        replica = Replica(node, publisher)
        fault.arm("copy planned public.a")
        replica.subscribe("p, q", two_phase="true")
        fault.wait("copy planned public.a")
        publisher.execute(statements.format(10000) + "PREPARE TRANSACTION 'before'")
        publisher.execute("BEGIN; SELECT FROM a WHERE id = 500 FOR UPDATE; PREPARE TRANSACTION 'locks'")
        replica.execute("UPDATE a SET t = 'meanwhile' WHERE id = 400")
        assert state(replica) == "p"
        fault.release("copy planned public.a")
        enabled(replica)
        replica.execute("UPDATE a SET t = 'later' WHERE id = 401")
        replica.assert_equal("a", "b")
        assert prepared(replica) == []
        replica.execute("COMMIT PREPARED 'before'", "COMMIT PREPARED 'locks'", "UPDATE a SET n = n + 1 WHERE id = 1")
        replica.assert_equal("a", "b")
        assert prepared(replica) == []
        assert node.statistics(replica.name)["apply_error_count"] == 0
        replica.drop()


@pytest.mark.full
def test_two_phase_is_altered_while_disabled(publisher: Database, spark: Spark, tmp_path: Path) -> None:
    """18's rules: two_phase is altered only while disabled, and not to off while a prepared transaction waits."""
    if publisher.server.version != "18":
        pytest.skip("a slot's two_phase is altered from 18 on")
    with RunningNode(tmp_path, spark) as node:
        replica = Replica(node, publisher)
        replica.subscribe("p, q")
        replica.caught_up()
        assert state(replica) == "d"
        with pytest.raises(PubsubError, match='cannot set option "two_phase" for enabled subscription'):
            replica.alter("SET (two_phase = true)")
        replica.alter("DISABLE")
        replica.alter("SET (two_phase = true)")
        assert state(replica) == "p"
        publisher.execute(SMALL.format(40000) + "PREPARE TRANSACTION 'early'")
        replica.alter("ENABLE")
        enabled(replica)
        publisher.execute(SMALL.format(40001).replace("id < 5", "id BETWEEN 10 AND 15") + "PREPARE TRANSACTION 'late'")
        wait_until(lambda: "late" in prepared(replica), "the transaction to be listed")
        replica.alter("DISABLE")
        with pytest.raises(PubsubError, match='cannot disable "two_phase" when prepared transactions exist'):
            replica.alter("SET (two_phase = false)")
        replica.alter("ENABLE")
        replica.execute("COMMIT PREPARED 'early'", "COMMIT PREPARED 'late'")
        replica.assert_equal("a", "b")
        wait_until(lambda: not prepared(replica), "the transactions to be gone")
        replica.alter("DISABLE")
        replica.alter("SET (two_phase = false)")
        assert state(replica) == "d"
        assert replica.query("SELECT two_phase FROM pg_replication_slots") == [(False,)]
        replica.alter("ENABLE")
        publisher.execute(SMALL.format(40002) + "PREPARE TRANSACTION 'off'")
        replica.execute("COMMIT PREPARED 'off'")
        replica.assert_equal("a", "b")
        assert prepared(replica) == []
        replica.drop()


@pytest.mark.full
@pytest.mark.parametrize("publisher", ["18"], indirect=True)
def test_the_outcome_never_comes_as_the_slot_is_gone(publisher: Database, spark: Spark, tmp_path: Path) -> None:
    """Its file and its row in pg_prepared_xacts once stayed, and two_phase could never be turned off."""
    with RunningNode(tmp_path, spark) as node:
        replica = Replica(node, publisher)
        replica.subscribe("p, q", two_phase="true")
        replica.caught_up()
        enabled(replica)
        publisher.execute(SMALL.format(50000) + "PREPARE TRANSACTION 'gone'")
        publisher.execute(SMALL.format(50001).replace("id < 5", "id > 490") + "PREPARE TRANSACTION 'committed'")
        wait_until(lambda: len(prepared(replica)) == 2, "the transactions to be listed")
        replica.alter("DISABLE")
        publisher.server.drop_slot(replica.name)
        replica.execute("ROLLBACK PREPARED 'gone'", "COMMIT PREPARED 'committed'")
        assert prepared(replica) == ["committed", "gone"]
        replica.alter("ENABLE")
        wait_until(replica.error, "an error")
        replica.alter("RESYNC TABLE a, b")
        replica.execute("UPDATE a SET n = n + 1")
        replica.assert_equal("a", "b")
        wait_until(lambda: not prepared(replica), "the transactions to be forgotten")
        assert not [*(tmp_path / "prepared").rglob("*.prepared")]
        replica.alter("DISABLE")
        replica.alter("SET (two_phase = false)")
        replica.drop()


@pytest.mark.full
@pytest.mark.parametrize("publisher", ["15", "18"], indirect=True)
def test_a_prepared_transaction_of_another_home(publisher: Database, spark: Spark, tmp_path: Path) -> None:
    """With a catalog in PostgreSQL the daemon may start in any home; the files are in one."""
    server = publisher.server
    server.create_database("kept")
    url = f"postgresql://postgres@{server.host}:{server.port}/kept"
    common = {"catalog": {"url": url}, "warehouse": str(tmp_path / "warehouse")}

    with RunningNode(tmp_path / "one", spark, **common) as node:
        replica = Replica(node, publisher)
        replica.subscribe("p, q", two_phase="true")
        replica.caught_up()
        enabled(replica)
        publisher.execute(SMALL.format(60000) + "PREPARE TRANSACTION 'kept'")
        wait_until(lambda: prepared(replica) == ["kept"], "the transaction to be listed")
    with RunningNode(tmp_path / "two", spark, **common) as node:
        replica.node = node
        wait_until(lambda: "is kept in another home" in replica.error(), "the refusal")
        assert prepared(replica) == ["kept"]
    replica.execute("COMMIT PREPARED 'kept'")
    with RunningNode(tmp_path / "one", spark, **common) as node:
        replica.node = node
        replica.assert_equal("a", "b")
        publisher.execute(SMALL.format(60001) + "PREPARE TRANSACTION 'lost'")
        wait_until(lambda: prepared(replica) == ["lost"], "the transaction to be listed")
    with RunningNode(tmp_path / "two", spark, **common) as node:
        # The other home is lost: the hint's way.
        replica.node = node
        wait_until(lambda: "is kept in another home" in replica.error(), "the refusal")
        replica.execute("COMMIT PREPARED 'lost'")
        replica.alter("RESYNC TABLE a, b")
        replica.execute("UPDATE a SET n = n + 1")
        replica.assert_equal("a", "b")
        wait_until(lambda: not prepared(replica), "the transaction to be forgotten")
        replica.drop()


@pytest.mark.full
def test_beside_a_stock_subscriber(spark: Spark, tmp_path: Path) -> None:
    """Small and large ones, committed and rolled back; two sessions' in turn; one that is committed after a restart."""
    settings: dict[str, str | int] = {"max_prepared_transactions": 20}
    with (
        EmbeddedPostgres("16", settings=settings) as server,
        EmbeddedPostgres("16", settings=settings) as other,
        RunningNode(tmp_path, spark, logical_decoding_work_mem="64kB") as node,
    ):
        server.create_database("two_phase")
        server.execute("ALTER DATABASE two_phase SET logical_decoding_work_mem = '64kB'", "two_phase")
        server.execute(DDL, "two_phase")
        publisher = Database(server, "two_phase")
        replica = Replica(node, publisher)
        stock = Stock(
            replica, other, "CREATE TABLE a (id int PRIMARY KEY, n int, t text); CREATE TABLE b (n int, t text)"
        )
        replica.subscribe("p, q", two_phase="true")
        stock.subscribe("p, q", two_phase="true", streaming="on")
        replica.caught_up()
        enabled(replica)
        stock.caught_up()
        wait_until(
            lambda: publisher.query("SELECT count(*) FROM pg_replication_slots WHERE two_phase") == [(2,)],
            "two-phase commit to be enabled at both",
        )
        for first, text in ((10_000, SMALL), (20_000, LARGE)):
            publisher.execute(text.format(first) + "PREPARE TRANSACTION 'kept'")
            publisher.execute(f"BEGIN; INSERT INTO a VALUES ({first + 5000}, 2, 'x'); PREPARE TRANSACTION 'beside'")
            wait_until(lambda: prepared(replica) == ["beside", "kept"], "both to be listed")
            replica.execute("UPDATE a SET t = 'meanwhile' WHERE id = 400", "COMMIT PREPARED 'beside'")
            stock.assert_equal("a", "b")
            server.restart()
            replica.execute("COMMIT PREPARED 'kept'")
            stock.assert_equal("a", "b")
            publisher.execute(text.format(first + 6000) + "PREPARE TRANSACTION 'undone'")
            replica.execute("ROLLBACK PREPARED 'undone'")
            stock.assert_equal("a", "b")
            replica.assert_equal("a", "b")
        replica.drop()
        stock.close()
