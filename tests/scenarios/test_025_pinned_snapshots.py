"""`pubsub snapshot --pin`: the versions stay readable, whatever cleans up, until the pin is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder

from catalog.records import PinnedSnapshot
from pubsub.delta import pins
from pubsub.delta import table as delta
from pubsub.delta.spark import spark_session
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import DuplicateObject, UndefinedFile, UndefinedObject
from pubsub.node.node import Node
from pubsub.node.snapshot import Snapshot
from pubsub.settings import Settings
from tests.scenarios.test_036_snapshots import load
from tests.support.replica import SETTINGS, BorrowedSpark, Replica, RunningNode, read, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a SELECT g, 'first' FROM generate_series(1, 100) g;
INSERT INTO b SELECT * FROM a;
CREATE PUBLICATION p FOR TABLE a, b
"""
#: Nothing that is removed from the table stays for long.
SHORT = {
    "delta.deletedFileRetentionDuration": "interval 0 hours",
    "delta.logRetentionDuration": "interval 0 hours",
    "delta.checkpointInterval": "2",
}


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node that cleans nothing up, so that the tests say when: nothing else keeps what is not pinned yet."""
    with RunningNode(tmp_path_factory.mktemp("node"), spark, housekeeping={"enabled": False}) as node:
        yield node


class Pins:
    """The pins of a replica's node, and its two tables, of which our files write one and a statement the other."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.session: Any = replica.node.spark.session.newSession()
        # Otherwise VACUUM lists the directory in a job of ten thousand tasks.
        self.session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")
        replica.execute(TABLES)
        replica.subscribe()
        replica.caught_up()
        self.paths = {name: replica.path(name) for name in "ab"}
        for name, path in self.paths.items():
            more = {"delta.enableChangeDataFeed": "true"} if name == "b" else {}
            self.set(path, {**SHORT, **more})

    def set(self, path: str, properties: dict[str, str]) -> None:
        listed = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
        self.session.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ({listed})")

    def retention(self) -> dict[str, dict[str, str]]:
        """Return, by table, the properties that a pin touches."""
        return {
            name: {key: value for key, value in delta.properties(path).items() if key in (*pins.HELD, pins.PROPERTY)}
            for name, path in self.paths.items()
        }

    def change(self, word: str) -> None:
        """Change all rows, of which earlier versions then need files of their own."""
        for table in self.paths:
            self.replica.execute(f"UPDATE {table} SET t = '{word}'", f"DELETE FROM {table} WHERE id % 7 = 0")
        self.replica.caught_up()

    def snapshot(self, at: Any = None, pin: str | None = None) -> Snapshot:
        return self.replica.node.run(self.replica.node._node.snapshot(self.replica.name, at, pin=pin))

    def drop(self, name: str) -> None:
        self.replica.node.run(self.replica.node._node.drop_snapshot(name))

    def listed(self) -> tuple[PinnedSnapshot, ...]:
        return self.replica.node.run(self.replica.node._node.pinned_snapshots())

    def clean_up(self) -> None:
        """Remove what the tables' properties allow: as another Spark does, and as deltalake does."""
        for path in self.paths.values():
            self.session.sql(f"OPTIMIZE delta.`{path}`")
            self.session.sql(f"VACUUM delta.`{path}`")
            DeltaTable(path).vacuum(dry_run=False, full=True)
            DeltaTable(path).create_checkpoint()
            DeltaTable(path).cleanup_metadata()

    def words(self, snapshot: Snapshot) -> dict[str, set[str]]:
        """Return the words that each table has at its version, as Spark and deltalake read them."""
        found = {}
        for name, (version, path) in snapshot.tables.items():
            builder = QueryBuilder().register("t", DeltaTable(path, version=version))
            rows = read(builder.execute("SELECT * FROM t"))
            by_spark = self.session.sql(f"SELECT * FROM delta.`{path}` VERSION AS OF {version}").collect()
            assert sorted(map(str, rows)) == sorted(str(row.asDict()) for row in by_spark)
            found[name] = {row["t"] for row in rows}
        return found


@pytest.mark.soak
def test_a_pinned_snapshot_stays_readable_until_it_is_dropped(replica: Replica) -> None:
    tables = Pins(replica)
    before = tables.retention()
    first = tables.snapshot(pin="first")
    tables.change("second")
    second = tables.snapshot(pin="second")
    with pytest.raises(DuplicateObject, match=r'^pinned snapshot "first" already exists$'):
        tables.snapshot(pin="first")
    tables.change("third")
    tables.clean_up()
    assert tables.words(first) == {"public.a": {"first"}, "public.b": {"first"}}
    assert tables.words(second) == {"public.a": {"second"}, "public.b": {"second"}}
    assert [(one.name, one.lsn, one.complete) for one in tables.listed()] == [
        ("first", first.lsn, True),
        ("second", second.lsn, True),
    ]
    tables.drop("first")
    tables.clean_up()
    assert tables.words(second) == {"public.a": {"second"}, "public.b": {"second"}}, "the other pin holds"
    tables.drop("second")
    with pytest.raises(UndefinedObject, match=r'^pinned snapshot "second" does not exist$'):
        tables.drop("second")
    assert tables.retention() == before
    tables.clean_up()
    for snapshot in (first, second):
        with pytest.raises(
            Exception, match=r"not found|Not Found|No such file|does not exist|missing|No files in log segment"
        ):
            tables.words(snapshot)
    replica.assert_equal("a", "b")
    assert [one.foreign for one in replica.node.relations(replica.name)] == [None, None]


@pytest.mark.soak
def test_what_a_pin_meets(replica: Replica) -> None:
    """The table is altered, truncated, copied anew; its subscription is dropped: the version is still what it was."""
    tables = Pins(replica)
    pinned = tables.snapshot(pin="kept")
    replica.execute(
        "ALTER TABLE a ADD COLUMN n int DEFAULT 5",
        "TRUNCATE b",
        "INSERT INTO b VALUES (1, 'again')",
        "INSERT INTO a VALUES (1000, 'again')",
    )
    replica.assert_equal("a", "b")
    replica.execute("ALTER TABLE b ALTER COLUMN id TYPE bigint")
    replica.alter("RESYNC TABLE a, b")
    replica.assert_equal("a", "b")
    tables.clean_up()
    assert tables.words(pinned) == {"public.a": {"first"}, "public.b": {"first"}}
    replica.drop()
    tables.clean_up()
    assert tables.words(pinned) == {"public.a": {"first"}, "public.b": {"first"}}
    (listed,) = tables.listed()
    assert (listed.name, listed.subscription) == ("kept", replica.name)
    tables.drop("kept")
    assert tables.listed() == ()


@pytest.mark.full
def test_a_version_of_the_past(replica: Replica) -> None:
    """It can be pinned as long as its files are there; otherwise nothing is."""
    tables = Pins(replica)
    first = tables.snapshot().lsn
    tables.change("second")
    second = tables.snapshot().lsn
    tables.change("third")
    pinned = tables.snapshot(first, pin="past")
    tables.clean_up()
    assert tables.words(pinned) == {"public.a": {"first"}, "public.b": {"first"}}
    tables.drop("past")
    before = tables.retention()
    tables.session.sql(f"VACUUM delta.`{tables.paths['b']}`")
    with pytest.raises(UndefinedFile, match=r'^version \d+ of table "public.b" can no longer be read$') as raised:
        tables.snapshot(second, pin="lost")
    assert "does not exist" in (raised.value.detail or "")
    assert tables.listed() == ()
    assert tables.retention() == before


@pytest.mark.soak
def test_what_the_user_sets_meanwhile_is_the_users(replica: Replica) -> None:
    tables = Pins(replica)
    tables.snapshot(pin="kept")
    # Delta wants the log to be kept for as long as the files.
    tables.set(tables.paths["a"], {**SHORT, "delta.logRetentionDuration": "interval 3 days"})
    assert pins.holds(tables.paths["b"], "kept")
    assert not pins.holds(tables.paths["a"], "kept"), "shown by pubsub snapshot --list"
    tables.drop("kept")
    found = tables.retention()
    assert found["a"] == {
        "delta.deletedFileRetentionDuration": "interval 0 hours",
        "delta.logRetentionDuration": "interval 3 days",
    }
    assert found["b"]["delta.logRetentionDuration"] == "interval 0 hours"


@pytest.mark.soak
def test_pins_come_and_go_while_batches_are_committed(replica: Replica) -> None:
    replica.execute(
        """
        CREATE TABLE accounts (aid int PRIMARY KEY, abalance int DEFAULT 0);
        CREATE TABLE tellers (tid int PRIMARY KEY, tbalance int DEFAULT 0);
        CREATE TABLE branches (bid int PRIMARY KEY, bbalance int DEFAULT 0);
        CREATE TABLE history (tid int, bid int, aid int, delta int);
        INSERT INTO accounts SELECT g FROM generate_series(1, 1000) g;
        INSERT INTO tellers SELECT g FROM generate_series(1, 10) g;
        INSERT INTO branches VALUES (1);
        CREATE PUBLICATION p FOR TABLE accounts, tellers, branches, history
        """
    )
    replica.subscribe()
    replica.caught_up()
    node = replica.node._node
    with load(replica.conninfo) as transactions:
        for number in range(4):
            seen = transactions()
            taken = replica.node.run(node.snapshot(replica.name, pin=f"pin {number}"))
            wait_until(lambda seen=seen: transactions() > seen + 5, "the load")
            replica.node.run(node.drop_snapshot(f"pin {number}"))
            sums = set()
            for table, column in {"accounts": "abalance", "tellers": "tbalance", "history": "delta"}.items():
                version, path = taken.tables[f"public.{table}"]
                builder = QueryBuilder().register("t", DeltaTable(path, version=version))
                (row,) = read(builder.execute(f"SELECT coalesce(sum({column}), 0) AS sum FROM t"))
                sums.add(row["sum"])
            assert len(sums) == 1
    replica.assert_equal("accounts", "tellers", "branches", "history")
    assert {one.foreign for one in replica.node.relations(replica.name)} == {None}
    assert replica.node.statistics(replica.name)["apply_error_count"] == 0


@pytest.mark.soak
def test_a_command_without_a_daemon_has_a_spark_of_its_own(
    replica: Replica, spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Pins(replica)
    pinned = tables.snapshot(pin="other")
    monkeypatch.setattr(spark_session, "Spark", BorrowedSpark(spark))

    async def command() -> tuple[PinnedSnapshot, ...]:
        settings = Settings.read(SETTINGS, tmp_path / "home")
        async with Node(tmp_path / "home", workers=False, settings=settings) as client:
            from pubsub.node import pinned_snapshots

            await pinned_snapshots.pin(client.catalog, client._change_pins, pinned, "mine")
            found = await client.pinned_snapshots()
            assert all(pins.holds(path, "mine") for path in tables.paths.values())
            await client.drop_snapshot("mine")
            assert await client.pinned_snapshots() == ()
            return found

    (found,) = asyncio.run(command())
    assert (found.name, found.complete, {one.path for one in found.tables}) == ("mine", True, {*tables.paths.values()})
    assert all(pins.holds(path, "other") for path in tables.paths.values())
    assert not any(pins.holds(path, "mine") for path in tables.paths.values())
    tables.drop("other")
