"""The catalog in a PostgreSQL database: its own tests pass there as on SQLite, and a node runs on it.

tests/unit/catalog/test_catalog_files.py stays out: its tests look at SQLite's files.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from catalog.command_locks import LockLost
from catalog.store import Catalog
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import DuplicateObject, ObjectInUse, PubsubError
from pubsub.memory import Memory
from pubsub.node.node import Node
from pubsub.settings import Settings
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.catalog import new
from tests.support.replica import Replica, RunningNode, wait_until
from tests.unit.catalog import test_catalog, test_catalog_processes, test_upgrade

HOME = Path("/home")
_numbers = itertools.count(1)

for _module in (test_catalog, test_catalog_processes, test_upgrade):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and {"catalog", "location"} & inspect.signature(_test).parameters.keys():
            globals()[_name] = _test


@pytest.fixture
def location(publisher: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database."""
    name = f"catalog_{next(_numbers)}"
    publisher.create_database(name)
    yield f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/{name}"
    publisher.drop_database(name)


@pytest.fixture
async def catalog(location: str) -> AsyncIterator[Catalog]:
    async with await Catalog.open(location) as opened:
        yield opened


async def test_an_unreachable_catalog_is_a_typed_error_without_the_password() -> None:
    with pytest.raises(PubsubError, match="could not access the catalog") as caught:
        await Catalog.open("postgresql://someone:geheim@127.0.0.1:1/nowhere")
    assert "geheim" not in caught.value.report(verbose=True)


async def test_a_refused_role_is_a_typed_error(publisher: EmbeddedPostgres) -> None:
    with pytest.raises(PubsubError, match="no-such-role"):
        await Catalog.open(f"postgresql://no-such-role@{publisher.host}:{publisher.port}/postgres")


def sessions(publisher: EmbeddedPostgres, location: str) -> list[int]:
    """Return the process ids of the daemons' own sessions."""
    database = location.rpartition("/")[2]
    rows = publisher.query(
        f"SELECT pid FROM pg_stat_activity WHERE datname = '{database}' AND application_name = 'pubsub daemon'"
    )
    return [pid for (pid,) in rows]


async def test_a_daemon_that_lost_its_session_proves_itself_again(
    catalog: Catalog, location: str, publisher: EmbeddedPostgres
) -> None:
    await catalog.hold(HOME)
    counter = await catalog.change_counter()
    (session,) = sessions(publisher, location)
    publisher.query(f"SELECT pg_terminate_backend({session}, 10000)")
    await catalog.prove()
    assert len(sessions(publisher, location)) == 1
    async with await Catalog.open(location) as other:
        with pytest.raises(ObjectInUse):
            await other.hold(HOME)
        assert await catalog.change_counter() == counter, "the one that was refused has moved nothing"
    await catalog.put_memory(Memory(1))
    await catalog.let_go()


async def test_a_command_that_lost_its_lock_goes_no_further(
    catalog: Catalog, location: str, publisher: EmbeddedPostgres
) -> None:
    """The daemon has ended its pause, and runs workers again; another command's pause stays."""
    sub = await catalog.create_subscription(new())

    async def lose_lock() -> None:
        assert await catalog.end_abandoned_pause(sub.oid) is None
        (session,) = sessions(publisher, location)
        publisher.query(f"SELECT pg_terminate_backend({session}, 10000)")
        assert "RESYNC" in str(await catalog.end_abandoned_pause(sub.oid))
        async with await Catalog.open(location) as other:
            await other.alter_subscription(sub.oid, paused="ANOTHER")

    losing: list[asyncio.Task[None]] = []

    async def resync() -> None:
        async with catalog.pause(sub.oid, "RESYNC"):
            # On a slow machine the command may find out before the other one's pause is stored.
            losing.append(asyncio.create_task(lose_lock()))
            await asyncio.shield(losing[0])
            async with asyncio.timeout(300):
                await asyncio.Event().wait()

    with pytest.raises(LockLost, match="lost its lock"):
        await resync()
    await losing[0]
    assert (await catalog.subscription(sub.oid)).paused == "ANOTHER"

    # What a command raises itself comes as it is, and ends the pause.
    async def refresh() -> None:
        async with catalog.pause(sub.oid, "REFRESH"):
            raise DuplicateObject("its own")

    with pytest.raises(DuplicateObject):
        await refresh()
    assert (await catalog.subscription(sub.oid)).paused is None


@pytest.mark.parametrize("stays", [True, False])
async def test_a_daemon_that_another_has_taken_over_from_stores_nothing(
    catalog: Catalog, location: str, publisher: EmbeddedPostgres, stays: bool
) -> None:
    """Whether or not the other daemon still runs, what this one has read is outdated."""
    await catalog.hold(HOME, 1)
    (session,) = sessions(publisher, location)
    publisher.query(f"SELECT pg_terminate_backend({session}, 10000)")
    async with await Catalog.open(location) as other:
        await other.hold(HOME, 2)
        if not stays:
            await other.let_go()
        with pytest.raises(ObjectInUse, match="another daemon has taken over the catalog") as caught:
            await catalog.prove()
        assert "process id is 2 on host" in (caught.value.detail or "")
        for write in (catalog.put_memory(Memory(3)), catalog.clear_daemon(), catalog.create_subscription(new())):
            with pytest.raises(ObjectInUse, match="another daemon has taken over the catalog"):
                await write
        assert [found.pid for found in (await catalog.state()).daemons] == [2]
        await other.let_go()
        # The one that was superseded has kept no lock.
        await other.hold(HOME, 3)
        await other.let_go()


class Proxy:
    """Forwards connections to a server.  While stopped, it neither refuses nor answers anything."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._to = (server.host, server.port)
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self.go_on()
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._to)
                self._open += (here, there)
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(publisher: EmbeddedPostgres) -> Iterator[Proxy]:
    made = Proxy(publisher)
    yield made
    made.close()


def through(proxy: Proxy, location: str) -> str:
    """Return the URL that leads through the proxy."""
    before, _, name = location.rpartition("/")
    return f"{before.partition('@')[0]}@127.0.0.1:{proxy.port}/{name}"


@pytest.mark.full
async def test_a_server_that_does_not_answer_is_given_up(proxy: Proxy, location: str) -> None:
    async with await Catalog.open(through(proxy, location), timeout=1.0) as catalog:
        await catalog.hold(HOME)
        await catalog.create_subscription(new())
        proxy.stall()
        calls = (catalog.state, catalog.prove, catalog.change_counter, catalog.clear_daemon, catalog.subscriptions)
        for call in (*calls, *calls):
            with pytest.raises(PubsubError, match="did not answer within 1 seconds") as caught:
                async with asyncio.timeout(20):
                    await call()
            assert "catalog_timeout" in (caught.value.hint or "")
        proxy.go_on()
        await catalog.prove()
        assert [s.name for s in await catalog.subscriptions()] == ["sub"]
        await catalog.let_go()
        # Idle connections are closed in order, which a server that hangs never answers.
        proxy.stall()
        async with asyncio.timeout(20):
            await catalog.close()
    with pytest.raises(PubsubError, match="did not answer within"):
        async with asyncio.timeout(20):
            await Catalog.open(through(proxy, location), timeout=1.0)


@pytest.mark.full
@pytest.mark.parametrize("patience", ["1min", "3s"], ids=["a hang", "a hang that is given up"])
def test_a_catalog_that_hangs(spark: Spark, location: str, proxy: Proxy, tmp_path: Path, patience: str) -> None:
    """The publisher, which is impatient, still gets its replies.

    A hang that is given up is a failure like any other, and the worker tries again.
    """
    with EmbeddedPostgres("18", settings={"wal_sender_timeout": "2s"}) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION p FOR TABLE t"
        )
        settings = {"catalog": {"url": through(proxy, location)}, "catalog_timeout": patience}
        with RunningNode(tmp_path / "node", spark, **settings) as node:
            replica = Replica(node, database)
            replica.subscribe(target=f"'hang_{next(_numbers)}'")
            replica.assert_equal("t")
            walsender = "SELECT pid FROM pg_stat_replication WHERE state = 'streaming'"
            (before,) = wait_until(lambda: server.query(walsender), "the stream")
            proxy.stall()
            replica.execute("UPDATE t SET n = 2", "INSERT INTO t VALUES (2, 2)")
            if patience == "1min":
                # Replies that were sent three times wal_sender_timeout later.
                ((until,),) = server.query("SELECT clock_timestamp() + interval '6 s'")
                asked = f"SELECT pid FROM pg_stat_replication WHERE reply_time > '{until}'"
                wait_until(lambda: server.query(asked), "a reply")
                assert server.query(walsender) == [before]
            else:
                wait_until(lambda: server.query(walsender) == [], "the worker's failure")
            proxy.go_on()
            replica.assert_equal("t")
            if patience == "1min":
                assert server.query(walsender) == [before]
            replica.drop()


@pytest.mark.full
def test_a_node_ends_though_its_catalog_hangs(
    spark: Spark, location: str, proxy: Proxy, database: Database, tmp_path: Path
) -> None:
    """Its end asks the catalog for a dozen things, one after the other."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE PUBLICATION p FOR TABLE t")
    settings = {"catalog": {"url": through(proxy, location)}, "catalog_timeout": "3s", "drain_timeout": "3s"}
    node = RunningNode(tmp_path / "node", spark, **settings)
    node.__enter__()
    replica = Replica(node, database)
    replica.subscribe()
    replica.assert_equal("t")
    replica.execute("INSERT INTO t VALUES (1, 1)")
    proxy.stall()
    began = time.monotonic()
    with pytest.raises(PubsubError, match="did not answer within"):
        node.__exit__(None, None, None)
    assert time.monotonic() - began < 60
    proxy.go_on()
    with RunningNode(tmp_path / "node", spark, **settings) as again:
        replica.node = again
        replica.assert_equal("t")
        replica.drop()


def test_two_homes_on_it(spark: Spark, location: str, tmp_path: Path) -> None:
    with RunningNode(tmp_path / "one", spark, catalog={"url": location}) as one:
        for workers in (True, None):
            settings = Settings.read({"catalog": {"url": location}}, tmp_path / "other")

            async def start(workers: bool | None = workers, settings: Settings = settings) -> None:
                async with Node(settings.home, workers=workers, settings=settings):
                    pass

            with pytest.raises(ObjectInUse, match="a daemon is already running on catalog") as caught:
                asyncio.run(start())
            assert f"process id is {os.getpid()} on host" in (caught.value.detail or "")
        assert one.fetch("SELECT 1 AS one") == [{"one": 1}]


def test_a_command_from_another_home_waits_for_the_workers(
    spark: Spark, location: str, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    settings = Settings.read({"catalog": {"url": location}}, tmp_path / "other")

    async def disable(name: str) -> dict[int, object]:
        async with Node(settings.home, workers=False, settings=settings) as other:
            await other.wait_for_catchup(name, timeout=300)
            status = await other.status()
            assert (status.daemon, status.subscriptions[0].error) == (os.getpid(), None)
            await other.execute(f"ALTER SUBSCRIPTION {name} DISABLE")
            assert node._node._service is not None
            return dict(node._node._service.launcher.runners)

    # The daemon looks at its catalog late.
    with RunningNode(tmp_path / "node", spark, catalog={"url": location}, catalog_poll_interval="2s") as node:
        replica = Replica(node, database)
        replica.subscribe()
        replica.assert_equal("t")
        assert asyncio.run(disable(replica.name)) == {}
        replica.drop()


def test_a_node_lives_on_it(spark: Spark, location: str, database: Database, tmp_path: Path) -> None:
    """Copy, apply, a restart, every view, and DROP: nothing of the node's state is in its directory."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION p FOR TABLE t"
    )
    with RunningNode(tmp_path / "node", spark, catalog={"url": location}) as node:
        replica = Replica(node, database)
        replica.subscribe()
        replica.execute("UPDATE t SET n = 2", "INSERT INTO t VALUES (2, 2)")
        replica.assert_equal("t")
    replica.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3, 3)")
    with RunningNode(tmp_path / "node", spark, catalog={"url": location}) as node:
        replica.node = node
        replica.assert_equal("t")
        for view in ("pg_subscription", "pg_subscription_rel", "pg_stat_subscription", "pg_stat_subscription_stats"):
            assert node.fetch(f"SELECT * FROM {view}")
        replica.drop()
        assert replica.slots() == []
    assert not (tmp_path / "node" / "catalog.db").exists()
