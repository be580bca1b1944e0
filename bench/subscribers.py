"""The two measured subscribers behind one interface: PostgreSQL's own, and a node's daemon in its own process.

Both follow the same publisher.  Progress is read in the same way from both: remote_lsn of the subscription's origin,
which each advances when a transaction is visible in its tables (ours: and durable).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import psycopg
from psycopg import sql

from bench import machine
from bench.workload import Dataset
from catalog import schema
from catalog.home_lock import running_daemon
from pubsub.delta.places import Place, place, remove_tree
from pubsub.errors import PubsubError
from pubsub.node.node import Node
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.settings import FILE_NAME
from pubsub.testing import watcher
from pubsub.testing.compare import compare_tables
from pubsub.testing.servers import EmbeddedPostgres

if TYPE_CHECKING:
    from catalog.records import SubscriptionRel

_T = TypeVar("_T")

_POLL: Final = 0.02
_PATIENCE: Final = 60.0
# The daemon sees another process's commands when it next polls the catalog: kept short, since that is not part of a
# rate.
_SETTINGS: Final = 'catalog_poll_interval = "100ms"\n'


class Failed(Exception):
    """A scenario cannot be measured; the message says what the subscriber did instead."""


class Subscriber(Protocol):
    """A subscriber of the publisher, with at most one subscription for each dataset."""

    name: str

    def prepare(self, data: Dataset) -> None:
        """Prepare for CREATE SUBSCRIPTION: create empty tables, if the subscriber needs them."""

    def create(self, data: Dataset) -> None:
        """Run CREATE SUBSCRIPTION with the initial copy."""

    def drop(self, data: Dataset) -> None:
        """Run DROP SUBSCRIPTION, and remove the tables' contents."""

    def enable(self, data: Dataset) -> None:
        """Run ALTER SUBSCRIPTION … ENABLE."""

    def disable(self, data: Dataset) -> None:
        """Run ALTER SUBSCRIPTION … DISABLE, and wait until its workers have ended."""

    def wait_until_copied(self, data: Dataset, timeout: float) -> None:
        """Wait until every table's state is s or r."""

    def wait_until_ready(self, data: Dataset, timeout: float) -> None:
        """Wait until every table's state is r."""

    def applied(self, data: Dataset) -> Lsn:
        """Return the origin's LSN: the end of the last transaction visible in the tables."""

    def difference(self, data: Dataset) -> str | None:
        """Return how the tables differ from the publisher's, None if they are equal; the publisher must be idle."""

    def cpu(self) -> dict[str, float]:
        """Return the processor seconds so far, by process."""

    def settle(self) -> None:
        """Finish what earlier scenarios left to do in the background, so that it is not measured."""

    def details(self, data: Dataset) -> dict[str, int]:
        """Return further counts for a run's results; they only grow."""

    def failure(self) -> str:
        """Return the subscriber's status and log, to explain a subscription that does not progress."""


class Stock:
    """A PostgreSQL server of the publisher's version and settings."""

    name = "stock"

    def __init__(self, publisher: EmbeddedPostgres, server: EmbeddedPostgres) -> None:
        self._publisher = publisher
        self.server = server
        self._connections: dict[str, psycopg.Connection] = {}

    def prepare(self, data: Dataset) -> None:
        if not self.server.query(f"SELECT 1 FROM pg_database WHERE datname = '{data.database}'"):
            self.server.create_database(data.database)
        data.create_tables(self.server)

    def create(self, data: Dataset) -> None:
        conninfo = sql.Literal(self._publisher.conninfo(data.database)).as_string(None)
        self._execute(
            data, f"CREATE SUBSCRIPTION {self._subscription(data)} CONNECTION {conninfo} PUBLICATION {data.publication}"
        )

    def drop(self, data: Dataset) -> None:
        self._execute(data, f"DROP SUBSCRIPTION {self._subscription(data)}")
        self._execute(data, f"TRUNCATE {', '.join(data.tables)}")

    def enable(self, data: Dataset) -> None:
        self._execute(data, f"ALTER SUBSCRIPTION {self._subscription(data)} ENABLE")

    def disable(self, data: Dataset) -> None:
        self._execute(data, f"ALTER SUBSCRIPTION {self._subscription(data)} DISABLE")
        wait(
            lambda: (
                not self.server.query(
                    f"SELECT 1 FROM pg_stat_subscription WHERE subname = '{self._subscription(data)}' AND pid IS NOT NULL",
                    data.database,
                )
            ),
            _PATIENCE,
            "the stock subscriber's workers did not end",
        )

    def wait_until_copied(self, data: Dataset, timeout: float) -> None:
        self._wait_for_states(data, "'s', 'r'", timeout)

    def wait_until_ready(self, data: Dataset, timeout: float) -> None:
        self._wait_for_states(data, "'r'", timeout)

    def applied(self, data: Dataset) -> Lsn:
        if data.database not in self._connections:
            self._connections[data.database] = self.server.connect(data.database)
        # With false, the progress does not wait for a flush: other sessions see a transaction once it is applied.
        row = (
            self._connections[data.database]
            .execute(
                "SELECT pg_replication_origin_progress('pg_' || oid, false) FROM pg_subscription WHERE subname = %s",
                [self._subscription(data)],
            )
            .fetchone()
        )
        return Lsn.parse(row[0]) if row is not None and row[0] is not None else INVALID_LSN

    def difference(self, data: Dataset) -> str | None:
        for table in data.tables:
            sums = [_checksum(server, data.database, table) for server in (self._publisher, self.server)]
            if sums[0] != sums[1]:
                return f"{table}: {sums[0][0]} rows at the publisher, {sums[1][0]} at the subscriber, sums differ"
        return None

    def cpu(self) -> dict[str, float]:
        # The workers are children of the postmaster, whose own time includes them only once they have ended.
        return {"server": machine.tree_seconds(self.server.pid)}

    def settle(self) -> None:
        settle(self.server)

    def details(self, data: Dataset) -> dict[str, int]:
        return {}

    def failure(self) -> str:
        return self.server.read_log()[-2000:]

    def _subscription(self, data: Dataset) -> str:
        return f"{self.name}_{data.database}"

    def _execute(self, data: Dataset, statement: str) -> None:
        self.server.execute(statement, data.database)

    def _wait_for_states(self, data: Dataset, states: str, timeout: float) -> None:
        with self.server.connect(data.database) as connection:

            def done() -> bool:
                row = connection.execute(
                    f"SELECT count(*), count(*) FILTER (WHERE srsubstate IN ({states})) FROM pg_subscription_rel".encode()
                ).fetchone()
                return row is not None and row[0] == row[1] == len(data.tables)

            wait(done, timeout, "the stock subscriber's tables are not ready", self.failure)


class Ours:
    """`pubsub daemon` in its own directory, controlled through the node's catalog like the command line."""

    def __init__(
        self, publisher: EmbeddedPostgres, home: Path, name: str, settings: str = "", *, polls: bool = True
    ) -> None:
        """`name`: of its subscriptions.  `settings`: further ones, as in pubsub.toml.  `polls`: often, for commands."""
        self.name = name
        self._publisher = publisher
        self.home = home
        self._settings = (_SETTINGS if polls else "") + settings
        self._watcher: subprocess.Popen[str] | None = None
        self._runner = asyncio.Runner()
        self._node: Node | None = None
        self._reader: sqlite3.Connection | None = None
        self._oids: dict[str, int] = {}
        self._paths: dict[str, list[Place]] = {}
        self.pid = 0

    def __enter__(self) -> Self:
        (self.home / FILE_NAME).write_text(self._settings)
        self._start_daemon()
        try:
            self._node = self._run(Node(self.home, workers=False).__aenter__())
        except BaseException:
            self._stop_daemon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._reader is not None:
                self._reader.close()
            if self._node is not None:
                self._run(self._node.__aexit__(None, None, None))
        finally:
            self._stop_daemon()
            self._runner.close()

    def read_log(self) -> str:
        """Return the daemon's log."""
        path = self.home / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def jvm_pid(self) -> int | None:
        """Return the process id of Spark's JVM, if it is running."""
        return next((pid for pid, name in machine.descendants(self.pid).items() if name == "java"), None)

    def prepare(self, data: Dataset) -> None:
        """Do nothing: the subscription creates the Delta tables."""

    def create(self, data: Dataset) -> None:
        conninfo = sql.Literal(self._publisher.conninfo(data.database)).as_string(None)
        self.execute(
            f"CREATE SUBSCRIPTION {self._subscription(data)} CONNECTION {conninfo} PUBLICATION {data.publication}"
        )
        self._paths[data.database] = [place(relation.path) for relation in self._relations(data)]

    def drop(self, data: Dataset) -> None:
        self.execute(f"DROP SUBSCRIPTION {self._subscription(data)}")
        self._oids.pop(data.database, None)
        for path in self._paths.pop(data.database):
            remove_tree(path)

    def enable(self, data: Dataset) -> None:
        self.execute(f"ALTER SUBSCRIPTION {self._subscription(data)} ENABLE")

    def disable(self, data: Dataset) -> None:
        self.execute(f"ALTER SUBSCRIPTION {self._subscription(data)} DISABLE")

    def wait_until_copied(self, data: Dataset, timeout: float) -> None:
        self._wait_for_states(data, "sr", timeout)

    def wait_until_ready(self, data: Dataset, timeout: float) -> None:
        self._wait_for_states(data, "r", timeout)

    def applied(self, data: Dataset) -> Lsn:
        statement = f"SELECT remote_lsn FROM {schema.origin.name} WHERE subid = ? AND relid = 0"
        rows = self.catalog_rows(statement, self._oid(data))
        return Lsn.parse(rows[0][0]) if rows else INVALID_LSN

    def difference(self, data: Dataset) -> str | None:
        for relation in self._relations(data):
            found = compare_tables(self._publisher.conninfo(data.database), relation.qualified_name, relation.path)
            if found is not None:
                return str(found)
        return None

    def cpu(self) -> dict[str, float]:
        jvm = self.jvm_pid()
        return {"daemon": machine.cpu_seconds(self.pid), "jvm": machine.cpu_seconds(jvm) if jvm is not None else 0.0}

    def settle(self) -> None:
        """Do nothing: housekeeping is part of what it does."""

    def details(self, data: Dataset) -> dict[str, int]:
        paths = self.paths(data)
        return {"delta_commits": sum(len(list((path / "_delta_log").glob("*.json"))) for path in paths)}

    def paths(self, data: Dataset) -> list[Place]:
        """Return the directories of the Delta tables; none before `create`."""
        return self._paths.get(data.database, [])

    @property
    def _open(self) -> Node:
        assert self._node is not None
        return self._node

    def _subscription(self, data: Dataset) -> str:
        return f"{self.name}_{data.database}"

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def execute(self, statement: str) -> None:
        """Run a statement on the node."""
        try:
            self._run(self._open.execute(statement))
        except PubsubError as error:
            raise Failed(f"{error.report()}\nSTATEMENT:  {statement}") from error

    def _relations(self, data: Dataset) -> list[SubscriptionRel]:
        async def read() -> list[SubscriptionRel]:
            catalog = self._open.catalog
            return list(await catalog.relations((await catalog.subscription(self._subscription(data))).oid))

        return self._run(read())

    def _oid(self, data: Dataset) -> int:
        if data.database not in self._oids:
            subscription = self._run(self._open.catalog.subscription(self._subscription(data)))
            self._oids[data.database] = subscription.oid
        return self._oids[data.database]

    def catalog_rows(self, statement: str, *values: int) -> list[tuple[Any, ...]]:
        """Query the catalog's file directly: polling must cost almost nothing, and the async engine would cost more."""
        if self._reader is None:
            self._reader = sqlite3.connect(f"file:{self.home}/catalog.db?mode=ro", uri=True, isolation_level=None)
        return self._reader.execute(statement, values).fetchall()

    def _wait_for_states(self, data: Dataset, states: str, timeout: float) -> None:
        statement = f"SELECT state FROM {schema.relation.name} WHERE subid = ?"

        def done() -> bool:
            return all(state in states for (state,) in self.catalog_rows(statement, self._oid(data)))

        wait(done, timeout, "the node's tables are not ready", self.failure)

    def failure(self) -> str:
        try:
            rows = self._run(self._open.fetch("SELECT subname, error, hint FROM pg_stat_subscription"))
            shown = [json.dumps(row, default=str) for row in rows]
        except PubsubError as error:
            shown = [error.report()]
        return "\n".join([*shown, self.read_log()[-4000:]])

    def _start_daemon(self) -> None:
        config = {
            "command": [sys.executable, "-m", "pubsub.cli", "--home", str(self.home), "daemon"],
            "cwd": str(Path(__file__).parent.parent),
            "environment": dict(os.environ),
            "log": str(self.home / "daemon.log"),
            "uid": None,
            "gid": None,
            "remove": str(self.home),
        }
        # Started by the watcher, so that no daemon outlives a benchmark that was killed.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._watcher.stdout is not None
        self.pid = int(self._watcher.stdout.readline())
        watching = self._watcher

        def started() -> bool:
            if watching.poll() is not None:
                raise Failed(f"the daemon ended\n{self.read_log()[-4000:]}")
            return running_daemon(self.home) == self.pid

        wait(started, _PATIENCE, "the daemon did not start", self.read_log)

    def _stop_daemon(self) -> None:
        if self._watcher is None:
            return
        if self._watcher.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            self._watcher.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self._watcher.wait()
        for pipe in (self._watcher.stdin, self._watcher.stdout):
            if pipe is not None:
                pipe.close()


def settle(server: EmbeddedPostgres) -> None:
    """Run VACUUM and CHECKPOINT."""
    for (database,) in server.query("SELECT datname FROM pg_database WHERE NOT datistemplate"):
        server.execute("VACUUM", database)
    server.execute("CHECKPOINT")


def _checksum(server: EmbeddedPostgres, database: str, table: str) -> tuple[Any, ...]:
    """Return a table's row count, and a sum of hashes of the rows' texts, which does not depend on their order."""
    return server.query(
        f"SELECT count(*), sum(hashtextextended(t::text, 0)::numeric) FROM {table} t",
        database,
    )[0]


def wait(done: Callable[[], bool], timeout: float, what: str, why: Callable[[], str] = lambda: "") -> None:
    """Wait until `done`; raise Failed, which says `what` has not come, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise Failed(f"{what} after {timeout:.0f} s\n{why()}")
        time.sleep(_POLL)
