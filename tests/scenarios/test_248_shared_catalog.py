"""Several daemons share a catalog on PostgreSQL, and divide its subscriptions (pubsub daemon --shared)."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from sqlalchemy import event

import launcher.tenure
from catalog.database import now
from catalog.records import OF_NODE, PreparedXact
from catalog.store import Catalog
from launcher.share import Share
from launcher.tenure import Tenure
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.memory import Memory
from pubsub.node.node import Node
from pubsub.settings import Settings
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.catalog import new
from tests.support.replica import Replica, RunningNode, wait_until

_numbers = itertools.count(1)


@pytest.fixture
def location(publisher: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database."""
    name = f"shared_{next(_numbers)}"
    publisher.create_database(name)
    yield f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/{name}"
    publisher.drop_database(name)


class Member:
    """A daemon's part of sharing, without workers; `busy`: the oids of which something runs."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.share = Share(leased=frozenset())
        self.busy: set[int] = set()
        self.tenure = Tenure(catalog, self.share, lambda: self.busy)

    async def look(self) -> None:
        await self.catalog.prove()
        await self.tenure.see_to(await self.catalog.change_counter())

    @property
    def has(self) -> set[int]:
        """The oids of the subscriptions that it has, to run or to give up."""
        return set(self.share.leased or ()) - {OF_NODE}


class Members:
    """Daemons on one catalog, each of a home of its own, if no other is given."""

    def __init__(self, location: str, stack: AsyncExitStack) -> None:
        self._location, self._stack = location, stack
        self._names = itertools.count(1)

    async def open(self) -> Catalog:
        return await self._stack.enter_async_context(await Catalog.open(self._location))

    async def join(self, home: str | None = None) -> Member:
        number = next(self._names)
        catalog = await self.open()
        await catalog.join(Path(home or f"/home{number}"), number)
        self._stack.push_async_callback(catalog.let_go)
        return Member(catalog)


@pytest.fixture
async def members(location: str) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        yield Members(location, stack)


async def look(*daemons: Member, times: int = 3) -> None:
    for _ in range(times):
        for one in daemons:
            await one.look()


async def subscribe(catalog: Catalog, count: int) -> set[int]:
    return {(await catalog.create_subscription(replace(new(), name=f"s{n}"))).oid for n in range(count)}


async def test_a_catalog_is_one_daemon_s_or_several_s(members: Members) -> None:
    first, second = await members.join(), await members.join()
    alone = await members.open()
    with pytest.raises(ObjectInUse, match="a daemon is already running on catalog") as caught:
        await alone.hold(Path("/alone"))
    assert "--shared" in (caught.value.hint or "")
    assert await alone.has_daemon()
    for one in (first, second):
        await one.catalog.clear_daemon()
        await one.catalog.let_go()
    assert not await alone.has_daemon()
    await alone.hold(Path("/alone"))
    with pytest.raises(ObjectInUse, match="a daemon is already running on catalog"):
        await members.join()
    await alone.let_go()


async def test_they_divide_what_there_is(members: Members) -> None:
    first = await members.join()
    oids = await subscribe(first.catalog, 5)
    await look(first)
    assert first.has == oids
    assert first.share.is_first
    second = await members.join()
    await look(first, second)
    assert sorted(map(len, (first.has, second.has))) == [2, 3]
    assert first.has | second.has == oids
    assert not second.share.is_first, "the node's own work stays where it is"
    # Another one is made, and one is dropped.
    (more,) = await subscribe_more(second.catalog)
    await look(first, second)
    assert first.has | second.has == {*oids, more}
    await second.catalog.drop_subscription(more)
    await look(first, second)
    assert first.has | second.has == oids
    assert {one.unit for one in (await first.catalog.state()).leases} == {*oids, OF_NODE}
    # One ends in order: the other takes over at once.
    await first.catalog.clear_daemon()
    await first.catalog.let_go()
    await look(second)
    assert second.has == oids
    assert second.share.is_first


async def test_who_looks_in_vain_asks_for_little(members: Members) -> None:
    """Of fifty daemons with a thousand subscriptions each one looks once a second."""
    first, second = await members.join(), await members.join()
    await first.catalog.put_memory(Memory(jvm=1))
    oids = await subscribe(first.catalog, 4)
    await look(first, second)
    assert (first.has, second.has) == (oids, set())
    asked: list[str] = []

    @event.listens_for(first.catalog._engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    await look(first)
    assert asked
    assert not [one for one in asked if re.search("FROM pubsub_(subscription|lease)", one)]
    # What moves no counter is seen all the same: another daemon's Spark has started.
    await second.catalog.put_memory(Memory(jvm=1))
    await look(first, second)
    assert (len(first.has), len(second.has)) == (2, 2)


async def test_a_division_that_could_not_be_stored_is_worked_out_again(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the catalog had changed since, and the subscriptions would have stayed without a daemon."""
    first = await members.join()
    oids = await subscribe(first.catalog, 2)

    async def fails(*_: object) -> None:
        raise PubsubError("the connection is lost")

    with monkeypatch.context() as broken:
        broken.setattr(first.catalog, "lease", fails)
        with pytest.raises(PubsubError, match="is lost"):
            await first.look()
    await look(first)
    assert first.has == oids


async def subscribe_more(catalog: Catalog) -> Collection[int]:
    return [(await catalog.create_subscription(replace(new(), name="more"))).oid]


async def test_nothing_is_given_up_while_something_of_it_runs(members: Members) -> None:
    first = await members.join()
    oids = await subscribe(first.catalog, 2)
    await look(first)
    first.busy = set(oids)
    second = await members.join()
    await look(first, second)
    assert first.has == oids
    (leaving,) = first.share.leaving
    assert not first.share.may_begin(leaving)
    assert second.has == set()
    first.busy.discard(leaving)
    await look(first, second)
    assert second.has == {leaving}
    assert first.has == oids - {leaving}
    assert not first.share.may_begin(leaving)
    assert second.share.may_begin(leaving)


async def test_sources_stay_together(members: Members) -> None:
    first, second = await members.join(), await members.join()
    for name in "abc":
        given = new()
        await first.catalog.create_subscription(replace(given, name=name, options=replace(given.options, source=name)))
    await subscribe(first.catalog, 2)
    await look(first, second)
    assert sorted(map(len, (first.has, second.has))) == [2, 3]
    of_sources = {s.oid for s in await first.catalog.subscriptions() if s.options.source is not None}
    assert of_sources in (first.has, second.has)


async def test_prepared_transactions_keep_their_home(members: Members) -> None:
    import socket

    first = await members.join()
    oids = await subscribe(first.catalog, 2)
    await look(first)
    first.busy = set(oids)
    second = await members.join()
    await look(first, second)
    (leaving,) = first.share.leaving
    # It is prepared while the worker still drains.
    prepared = PreparedXact(7, "g", now(), socket.gethostname(), f"/home1/prepared/{leaving}")
    await first.catalog.set_prepared(leaving, [prepared])
    first.busy.clear()
    await look(first, second)
    assert leaving in first.has
    assert first.share.may_begin(leaving)
    assert len(second.has) == 1, "the other one has gone there instead"
    await first.catalog.set_prepared(leaving, [])


def sessions(publisher: EmbeddedPostgres, location: str) -> list[int]:
    """The sessions of daemons that hold locks, the oldest first."""
    rows = publisher.query(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'pubsub daemon'"
        f" AND datname = '{location.rpartition('/')[2]}' ORDER BY backend_start"
    )
    return [int(str(pid)) for (pid,) in rows]


async def test_one_that_was_lost_is_expelled_and_stores_nothing(
    members: Members, publisher: EmbeddedPostgres, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await members.join(), await members.join()
    oids = await subscribe(first.catalog, 4)
    await look(first, second)
    of_second = set(second.has)
    # A session that is lost is no death: the daemon has its lock again before the others take it for dead.
    (_, session) = sessions(publisher, location)
    publisher.query(f"SELECT pg_terminate_backend({session}, 10000)")
    await look(first)
    assert first.has == oids - of_second
    await look(second, first)
    assert second.has == of_second
    # What another has begun keeps it from being expelled, and so does a lock that is held.
    me = (await second.catalog.fleet()).me
    assert not await first.catalog.expel(me)
    monkeypatch.setattr(launcher.tenure, "_LOST", 0.0)
    (_, session) = sessions(publisher, location)
    publisher.query(f"SELECT pg_terminate_backend({session}, 10000)")
    await look(first)
    assert first.has == oids
    for write in (
        second.catalog.put_memory(Memory(1)),
        second.catalog.create_subscription(replace(new(), name="late")),
        second.catalog.prove(),
    ):
        with pytest.raises(ObjectInUse, match="another daemon has taken over the catalog"):
            await write
    await look(first)
    assert [one.pid for one in (await first.catalog.state()).daemons] == [1]


async def test_one_that_is_started_again_need_not_wait_for_its_own_death(members: Members) -> None:
    """The lock of its home, which it holds, says that the one before is gone."""
    first, second = await members.join(), await members.join()
    oids = await subscribe(first.catalog, 4)
    await look(first, second)
    again = await members.join("/home2")
    with pytest.raises(ObjectInUse, match="another daemon has taken over the catalog"):
        await second.catalog.put_memory(Memory(1))
    await look(first, again)
    assert first.has | again.has == oids
    assert len(again.has) == 2


async def test_sessions_end_soon_after_their_machine(members: Members) -> None:
    """Those that hold the locks of daemons, and those in whose transactions rows are locked."""
    catalog = (await members.join()).catalog
    assert catalog._session is not None
    for connection in (catalog._session, await catalog._engine.connect()):
        shown = [
            (await connection.exec_driver_sql(f"SHOW tcp_keepalives_{name}")).scalar_one()
            for name in ("idle", "interval", "count")
        ]
        assert shown == ["5", "4", "3"]
        if connection is not catalog._session:
            await connection.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, 'a daemon that shares its catalog needs a warehouse, and parameter "warehouse" is not set'),
        ({"warehouse": "/srv/lake"}, "a daemon that shares its catalog needs a catalog on PostgreSQL"),
    ],
)
async def test_who_cannot_share(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    with pytest.raises(PubsubError, match=says):
        async with Node(tmp_path, shared=True, workers=True, settings=Settings.read(settings, tmp_path)):
            pass


def test_two_nodes(tmp_path: Path, spark: Spark, location: str, databases: list[Database]) -> None:
    """Copies, changes, commands from either for what the other has, a pin, and the end of one."""
    # The catalog's writes are those of a neighbour on the publisher's server: positions are stored with each status.
    settings = {
        "catalog": {"url": location},
        "warehouse": str(tmp_path / "warehouse"),
        "wal_receiver_status_interval": "1s",
    }
    (tmp_path / "warehouse").mkdir()
    with ExitStack() as both:
        one = both.enter_context(RunningNode(tmp_path / "one", spark, shared=True, **settings))
        replicas = [Replica(one, database) for database in databases]
        for replica in replicas:
            replica.execute(
                "CREATE TABLE t (a int PRIMARY KEY, b text); INSERT INTO t SELECT g, g::text FROM generate_series(1, 500) g",
                "CREATE PUBLICATION p FOR TABLE t",
            )
            replica.subscribe()
        for replica in replicas:
            replica.until_ready()
        with RunningNode(tmp_path / "two", spark, shared=True, **settings) as two:

            def divided() -> dict[str, list[str]]:
                rows = one.fetch("SELECT home, subscriptions FROM pubsub_daemons")
                return {Path(row["home"]).name: list(row["subscriptions"]) for row in rows}

            found = wait_until(
                lambda: all(divided().values()) and len(divided()) == 2 and divided(), "both to have one"
            )
            assert sorted(itertools.chain(*found.values())) == sorted(replica.name for replica in replicas)
            wait_until(lambda: len(two._node.service.figures()) == 1, "its worker")  # type: ignore[union-attr]
            for replica in replicas:
                replica.execute("UPDATE t SET b = 'x' WHERE a % 7 = 0; DELETE FROM t WHERE a < 10")
                replica.assert_equal("t")
            # Commands of each node, for what the other one has.
            other = next(replica for replica in replicas if replica.name in found["two"])
            generation = other.relation("t").copy_generation
            other.alter("RESYNC TABLE t")
            other.until_copied("t", generation)
            other.assert_equal("t")
            DeltaTable(other.path("t")).delete("a % 2 = 0")
            report = one.run(one._node.verify(other.name, repair=True))
            assert [(table.outcome, table.repaired > 0) for table in report.tables] == [("equal", True)]
            other.assert_equal("t")
            own = next(replica for replica in replicas if replica.name in found["one"])
            two.execute(f"ALTER SUBSCRIPTION {own.name} DISABLE")
            own.execute("INSERT INTO t VALUES (1000, 'while it is disabled')")
            two.execute(f"ALTER SUBSCRIPTION {own.name} ENABLE")
            own.assert_equal("t")
            for replica in replicas:
                one.run(one._node.snapshot(replica.name, pin=f"pin_{replica.name}"))
            status = two.run(two._node.status()).as_json()
            assert {
                Path(daemon["home"]).name: list(daemon["subscriptions"]) for daemon in status["daemons"]
            } == divided()
        # What it had comes back.
        wait_until(lambda: len(one._node.service.figures()) == 2, "the workers of both")  # type: ignore[union-attr]
        assert list(divided()) == ["one"]
        for replica in replicas:
            replica.execute("INSERT INTO t VALUES (2000, 'by one alone')")
            replica.assert_equal("t")
            one.run(one._node.drop_snapshot(f"pin_{replica.name}"))
            replica.drop()
