"""`pubsub daemon` as a process of its own, and a database that it follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from pubsub.node.node import CatchupTimeoutError, Node
from pubsub.sql.identifiers import quote_literal
from pubsub.testing import daemon
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from tests.running import logs
from tests.support import stores
from tests.support.replica import PATIENCE, Faults, wait_until

SETTINGS = f"max_sync_workers_per_subscription = 2\n{daemon.SETTINGS}"

_numbers = itertools.count(1)


class Daemon(daemon.Daemon):
    """A node's home, and its daemon, which can be started, killed and started again."""

    def __init__(self, home: Path) -> None:
        where = "".join(f'{name} = "{value}"\n' for name, value in stores.settings(home).items())
        super().__init__(home, where + SETTINGS)
        logs.show(self)
        self._began = 0

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def ensure(self) -> None:
        if not self.running:
            self.start()

    def start(self, *options: str) -> None:
        self.mark()
        super().start(*options)

    def jvm(self) -> psutil.Process:
        """Wait for the daemon's JVM and return it."""

        def find() -> psutil.Process | None:
            return next((c for c in self.process.children(recursive=True) if c.name() == "java"), None)

        return wait_until(find, "the JVM")

    def mark(self) -> None:
        """Let `said` look at what is logged from now on."""
        self._began = self.log.stat().st_size if self.log.exists() else 0

    def said(self, text: str) -> bool:
        """Return whether the daemon has logged `text` since its last start, or `mark`."""
        return text.encode() in self.log.read_bytes()[self._began :]


class Subscribed:
    """Tables `a` and `keyless` of a database, and a subscription to them."""

    def __init__(self, daemon: Daemon, database: Database) -> None:
        self.daemon = daemon
        self.database = database
        self.name = f"s{next(_numbers)}"
        self.writes = itertools.count(1)
        self._created = False
        database.execute(
            """
            CREATE TABLE a (id int PRIMARY KEY, n int, t text);
            CREATE TABLE keyless (n int);
            INSERT INTO a SELECT g, 0, md5(g::text) FROM generate_series(1, 2000) g;
            INSERT INTO keyless SELECT g % 10 FROM generate_series(1, 500) g;
            CREATE PUBLICATION p FOR TABLE a, keyless
            """
        )

    def subscribe(self, **options: str) -> None:
        given = "".join(f", {name} = {quote_literal(value)}" for name, value in options.items())
        self.daemon.execute(
            f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(self.database.conninfo)} PUBLICATION p "
            f"WITH (batch_age = '20ms'{given})"
        )
        self._created = True

    def write(self, times: int = 1) -> None:
        """Run transactions over all tables in which a change that is applied twice, or not at all, shows."""
        for _ in range(times):
            number = next(self.writes)
            self.database.execute(
                f"""
                UPDATE a SET n = n + 1 WHERE id % 10 = {number % 10};
                INSERT INTO a VALUES (100000 + {number}, 0, 'inserted');
                DELETE FROM a WHERE id = {number};
                UPDATE a SET id = 200000 + {number} WHERE id = 1000 + {number};
                INSERT INTO keyless VALUES ({number}), ({number})
                """
            )

    def killed_at(self, fault: Faults, points: Sequence[str], write: Callable[[], object], before: int = 1) -> None:
        """Have the daemon killed at one point after the other, having written `before` times; then let it catch up."""
        for point in points:
            fault.clear()
            fault.arm(point, "kill")
            self.daemon.start()
            for _ in range(before):
                write()
            self.daemon.killed_by_fault()
            write()
        fault.clear()
        self.daemon.start()
        write()
        self.caught_up()

    def grow(self) -> None:
        """Make `a` so large that a copy of it takes a Spark job."""
        self.database.execute("INSERT INTO a SELECT g, 0, repeat('x', 1000) FROM generate_series(300001, 303000) g")

    def caught_up(self) -> None:
        try:
            self.daemon.client(lambda node: node.wait_for_catchup(self.name, timeout=PATIENCE))
        except CatchupTimeoutError as error:
            raise AssertionError(f"{error.report()}\n{self.daemon.stands()}") from error

    def relations(self) -> dict[str, Any]:
        async def read(node: Node) -> dict[str, Any]:
            oid = (await node.catalog.subscription(self.name)).oid
            return {r.name: r for r in await node.catalog.relations(oid)}

        return dict(self.daemon.client(read))

    def state(self, table: str) -> str:
        return str(self.relations()[table].state.value)

    def assert_equal(self, tables: Sequence[str] = ("a", "keyless")) -> None:
        """Assert that the tables equal the publisher's, no sync slot is left, and nothing staged is left over."""
        self.caught_up()
        relations = self.relations()
        for table in tables:
            difference = compare_tables(self.database.conninfo, f"public.{table}", relations[table].path)
            assert difference is None, f"{difference}\n{self.daemon.tail()}"
        # A sync worker's slot is dropped a moment after its table is ready.
        wait_until(lambda: self.slots() == [self.name], "the sync slots to be dropped")
        assert {name: r.sync_slot for name, r in relations.items() if r.state.value != "r"} == {}
        assert list((self.daemon.home / "spill").glob("stage/*")) == []  # the daemon makes it only when it needs it

    def slots(self) -> list[str]:
        rows = self.database.query(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
        )
        return [name for (name,) in rows]

    def drop(self) -> None:
        if self._created:
            self.daemon.execute(f"DROP SUBSCRIPTION {self.name}")
            self._created = False
