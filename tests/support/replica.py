"""A node with workers in the test's process, and a database that it subscribes to, for the scenarios."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

from catalog.records import SubscriptionRel
from pubsub.delta.spark import spark_session
from pubsub.errors import PubsubError
from pubsub.node.node import CatchupTimeoutError, Node
from pubsub.protocol.lsn import Lsn
from pubsub.settings import Settings
from pubsub.sql.identifiers import parse_qualified_name, quote_literal, quote_qualified
from pubsub.testing.compare import compare_tables
from pubsub.testing.fault_points import Faults
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import stores
from tests.support.readers import assert_read_alike

T = TypeVar("T")

#: When a test gives up waiting, in seconds, on however slow a machine; waits end as soon as their condition holds.
PATIENCE = 300.0

#: Short intervals for polling and retries; everything else has its default.
SETTINGS: dict[str, Any] = {
    "wal_retrieve_retry_interval": "300ms",
    "catalog_poll_interval": "200ms",
    "max_logical_replication_workers": 10,
    "max_sync_workers_per_subscription": 3,
}


def wait_until(condition: Callable[[], T], what: str, patience: float = PATIENCE) -> T:
    """Wait until `condition` returns something true, and return that."""
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        assert waited < patience, f"{what}: not within {patience:g} s; at last it was {found!r}"
        # Many a condition is a query to the node, which has work to do.
        time.sleep(min(0.01 + waited / 10, 0.25))
    return found


class BorrowedSpark:
    """Lends the test process's Spark to a node, since a process can have only one."""

    def __init__(self, spark: spark_session.Spark) -> None:
        self._spark = spark

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    @property
    def session(self) -> Any:
        return self._spark.session

    @property
    def jvm_pid(self) -> int | None:
        return self._spark.jvm_pid

    def heap(self) -> Any:
        return self._spark.heap()

    def alive(self) -> bool:
        return self._spark.alive()

    def cancel(self, group: str) -> None:
        self._spark.cancel(group)

    def fence(self) -> None:
        """Do nothing: no JVM of an earlier process knows the node's tables."""

    def running(self) -> Any:
        return self._spark.running()

    @contextmanager
    def killed_if_hung(self) -> Iterator[None]:
        """Kill nothing: later nodes use it again."""
        yield

    def kill_if_hung(self) -> None:
        """Kill nothing: later nodes use it again."""

    def stop(self) -> None:
        """Do nothing: later nodes use it again."""


class RunningNode:
    """A Node with workers, on an event loop in a thread of its own, so that the test may block."""

    def __init__(self, home: Path, spark: spark_session.Spark, /, *, shared: bool = False, **settings: Any) -> None:
        self.home = home
        self.spark = spark
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node", daemon=True)
        self._node = Node(
            home,
            workers=True,
            shared=shared,
            settings=Settings.read({**SETTINGS, **stores.settings(home), **settings}, home),
        )
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(spark_session, "Spark", BorrowedSpark(spark))

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._node.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._node.__aexit__(kind, error, trace))
        finally:
            self._end()

    def _end(self) -> None:
        self._patch.undo()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], patience: float = PATIENCE + 30) -> T:
        """Run a coroutine in the node's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patience)

    def execute(self, sql: str) -> list[Any]:
        return self.run(self._node.execute(sql))

    def fetch(self, sql: str) -> list[dict[str, Any]]:
        return self.run(self._node.fetch(sql))

    def wait_for_catchup(self, name: str, timeout: float = PATIENCE) -> None:
        try:
            self.run(self._node.wait_for_catchup(name, timeout=timeout))
        except CatchupTimeoutError as error:
            pytest.fail(error.report())

    def relations(self, name: str) -> list[SubscriptionRel]:
        async def read() -> list[SubscriptionRel]:
            subscription = await self._node.catalog.subscription(name)
            return await self._node.catalog.relations(subscription.oid)

        return self.run(read())

    def statistics(self, name: str) -> dict[str, Any]:
        (row,) = self.fetch(f"SELECT * FROM pg_stat_subscription_stats WHERE subname = {quote_literal(name)}")
        return row

    def status_json(self, name: str) -> dict[str, Any]:
        """Return what `pubsub status --json` shows of a subscription."""
        found = self.run(self._node.status()).as_json()["subscriptions"]
        return next(one for one in found if one["name"] == name)


_numbers = itertools.count(1)


class Replica:
    """A database to which the node subscribes, by default to its publication `p`."""

    def __init__(self, node: RunningNode, database: Database) -> None:
        self.node = node
        self.database = database
        self.name = f"s{next(_numbers)}"
        self.created = False

    @property
    def conninfo(self) -> str:
        return self.database.conninfo

    def execute(self, *statements: str) -> None:
        """Run statements on the publisher, each in a transaction of its own."""
        for statement in statements:
            self.database.execute(statement)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.database.query(statement)

    def subscribe(self, publication: str = "p", **options: object) -> None:
        """Run CREATE SUBSCRIPTION, with a low batch_age."""
        given = {"batch_age": "'20ms'", **options}
        listed = ", ".join(f"{name} = {value}" for name, value in given.items())
        self.node.execute(
            f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(self.conninfo)} "
            f"PUBLICATION {publication} WITH ({listed})"
        )
        self.created = True

    def alter(self, action: str) -> None:
        self.node.execute(f"ALTER SUBSCRIPTION {self.name} {action}")

    def drop(self) -> None:
        self.node.execute(f"DROP SUBSCRIPTION {self.name}")
        self.created = False

    def caught_up(self) -> None:
        self.node.wait_for_catchup(self.name)

    def relation(self, table: str) -> SubscriptionRel:
        """Return the catalog's row of a table, which is named as in SQL."""
        wanted = parse_qualified_name(table)
        (found,) = [
            r for r in self.node.relations(self.name) if (r.schema, r.name) == (wanted.schema or "public", wanted.name)
        ]
        return found

    def received_lsn(self) -> Lsn:
        """Return up to where the apply worker has received the stream."""
        (row,) = self.node.fetch(
            f"SELECT received_lsn FROM pg_stat_subscription WHERE subname = '{self.name}' AND relid IS NULL"
        )
        return Lsn.parse(row["received_lsn"] or "0/0")

    def states(self) -> dict[str, str]:
        return {r.qualified_name: r.state.value for r in self.node.relations(self.name)}

    def until_ready(self) -> None:
        """Wait until all tables are in r."""
        wait_until(lambda: set(self.states().values()) == {"r"}, "all tables to be ready")

    def until_copied(self, table: str, after: int) -> None:
        """Wait until a copy of the table later than the generation `after` is in r."""

        def copied() -> bool:
            relation = self.relation(table)
            return relation.copy_generation > after and relation.state.value == "r"

        wait_until(copied, f"another copy of {table}")

    def refused(self, options: str, publication: str = "p") -> PubsubError:
        """Return the error of CREATE SUBSCRIPTION with these options."""
        with pytest.raises(PubsubError) as refused:
            self.node.execute(
                f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(self.conninfo)} "
                f"PUBLICATION {publication} WITH ({options})"
            )
        return refused.value

    def assert_refused(self, options: str, sqlstate: str, message: str) -> None:
        """Check that CREATE SUBSCRIPTION refuses these options with this SQLSTATE, and a message that has this in it."""
        error = self.refused(options)
        assert error.sqlstate == sqlstate, error
        assert message in error.message

    def path(self, table: str) -> str:
        return self.relation(table).path

    def version(self, table: str) -> int:
        """Return the newest version of the Delta table."""
        from deltalake import DeltaTable

        return int(DeltaTable(self.path(table)).version())

    def batches(self, table: str) -> int:
        """Return the number of commits to the Delta table in which rows have changed; housekeeping merges files at any time."""
        from deltalake import DeltaTable

        return sum(one["operation"] == "WRITE" for one in DeltaTable(self.path(table)).history())

    def rows(self, table: str, what: str = "*") -> list[dict[str, Any]]:
        """Return what DataFusion reads from the Delta table, `delta_t`; `what` may contain FROM, WHERE and ORDER BY."""
        from deltalake import DeltaTable, QueryBuilder

        what = what if " FROM " in what else f"{what} FROM delta_t"
        return read(QueryBuilder().register("delta_t", DeltaTable(self.path(table))).execute(f"SELECT {what}"))

    def assert_equal(
        self, *tables: str, columns: Sequence[str] | None = None, where: str | None = None, caught_up: bool = True
    ) -> None:
        """Compare all rows of these tables, and all columns by default, once the node has caught up."""
        if caught_up:
            self.caught_up()
        for table in tables:
            name = parse_qualified_name(table)
            qualified = quote_qualified(name.schema or "public", name.name)
            difference = compare_tables(self.conninfo, qualified, self.path(table), columns=columns, where=where)
            assert difference is None, str(difference)

    def assert_read_alike(self, *tables: str) -> None:
        """Every reader finds the same in the Delta tables."""
        for table in tables:
            assert_read_alike(self.path(table), self.node.spark)

    def leave(self) -> None:
        """Drop the subscription, if there is one, whatever its publisher has become: the slot goes with the server."""
        if self.created:
            self.alter("DISABLE")
            self.alter("SET (slot_name = NONE)")
            self.drop()

    def drop_slot(self) -> None:
        """Drop the subscription's slot on the publisher, and end the stream that uses it."""
        self.database.server.drop_slot(self.name)

    def slots(self) -> list[str]:
        """Return the replication slots of this database."""
        return [
            name
            for (name,) in self.query(
                "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
            )
        ]

    def error(self) -> str:
        """Wait until a worker of the subscription has failed; return the text of the last failure."""
        return str(wait_until(lambda: self.node.statistics(self.name)["error"], "a worker's failure"))


def read(result: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    return list(pa.table(result.read_all()).to_pylist())


class Stock:
    """The same tables in a PostgreSQL subscriber on another server."""

    def __init__(self, replica: Replica, server: EmbeddedPostgres, ddl: str) -> None:
        self.replica = replica
        self.server = server
        self.name = replica.database.name
        server.create_database(self.name)
        server.execute(ddl, self.name)

    def subscribe(self, publication: str = "p", **options: object) -> None:
        listed = "".join(f", {name} = {value}" for name, value in options.items())
        self.server.execute(
            f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(self.replica.conninfo)} "
            f"PUBLICATION {publication} WITH (slot_name = stock_{self.name}{listed})",
            self.name,
        )

    def caught_up(self) -> None:
        (lsn,) = self.replica.query("SELECT pg_current_wal_lsn()")[0]
        wait_until(
            lambda: (
                self.server.query("SELECT 1 FROM pg_subscription_rel HAVING bool_and(srsubstate = 'r')", self.name)
                and self.replica.query(
                    f"SELECT 1 FROM pg_replication_slots WHERE slot_name = 'stock_{self.name}' "
                    f"AND confirmed_flush_lsn >= '{lsn}'"
                )
            ),
            "the stock subscriber's catch-up",
        )

    def assert_equal(self, *tables: str) -> None:
        """Compare the Delta tables with the PostgreSQL subscriber's."""
        self.caught_up()
        self.replica.caught_up()
        for table in tables:
            difference = compare_tables(self.server.conninfo(self.name), f"public.{table}", self.replica.path(table))
            assert difference is None, f"beside a stock subscriber: {difference}"

    def close(self) -> None:
        self.server.execute(f"ALTER SUBSCRIPTION {self.name} DISABLE", self.name)
        self.server.execute(f"ALTER SUBSCRIPTION {self.name} SET (slot_name = NONE)", self.name)
        self.server.execute(f"DROP SUBSCRIPTION {self.name}", self.name)
        self.server.drop_database(self.name)


@contextmanager
def faults(directory: Path) -> Iterator[Faults]:
    """Enable pubsub.faults in this process."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PUBSUB_FAULT", str(directory))
    found = Faults(directory)
    try:
        yield found
    finally:
        found.clear()
        patch.undo()
