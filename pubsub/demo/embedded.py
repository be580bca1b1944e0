"""The demo on an embedded server: two databases are copied and followed under write load, then compared.

server starts ─► orders is filled ─► CREATE SUBSCRIPTION orders ─► Spark starts ─► copies
            └──► pgbench -i ─────────────────────────► CREATE SUBSCRIPTION pgbench ─► copies
writers: a few while tables are copied ─► a few to warm up ─► full rate ─► stop ─► caught up ─► compared
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.demo import falsify, figures, reading
from pubsub.demo.comparison import Source, compare, show_comparison
from pubsub.demo.databases import PUBLICATION, PgbenchTables, Sizes, make_orders
from pubsub.demo.interruption import Interruption
from pubsub.demo.load import Load, Rates
from pubsub.demo.node import DemoNode
from pubsub.demo.progress import Waiter
from pubsub.demo.publisher import DemoPublisher
from pubsub.demo.report import Figures, report
from pubsub.demo.screen import Screen
from pubsub.protocol.lsn import Lsn
from pubsub.sql.identifiers import table_path
from pubsub.testing.servers import EmbeddedPostgres

_NAMES: Final = ("orders", "pgbench")
#: The time of writing while tables are copied, which gives them something to catch up with; and the time of warming up.
_EARLY_SECONDS: Final = 5
_WARM_UP_SECONDS: Final = 3


@dataclass(frozen=True, slots=True)
class Options:
    """The run's options: `seconds` of full load; `falsify` changes one value in Delta before the comparison; `walsender`:
    our own server stands between."""

    home: Path
    seconds: int
    scale: int
    rates: Rates
    falsify: bool
    walsender: bool = False


class EmbeddedDemo:
    """One run of the demo."""

    def __init__(self, options: Options, interruption: Interruption, screen: Screen) -> None:
        self._options = options
        self._sizes = Sizes(options.scale)
        self._interruption = interruption
        self._screen = screen
        self._node = DemoNode(options.home, interruption, screen.say)
        self._waiter = Waiter(self._node, interruption, screen)
        self._stack = ExitStack()
        self._publisher: DemoPublisher | None = None

    def run(self) -> bool:
        """Run the demo, leaving nothing running; return whether all values are equal.

        Raises Interrupted and PubsubError.
        """
        screen, node = self._screen, self._node
        node.make_fresh()
        with self._stack as stack:
            # They end in reverse order: writers and workers before the server.
            server = EmbeddedPostgres("18", wheel=True)
            stack.callback(server.close)
            stack.callback(node.stop, drain=False)
            stack.callback(screen.end_live)
            screen.step(f"PostgreSQL 18 starts, and the node's daemon in {node.shown_home}")
            node.start_daemon()
            server.start()
            if self._options.walsender:
                screen.step("pubsub publish starts before it, and keeps the slots")
                self._publisher = DemoPublisher(node.home, server.conninfo(), self._interruption)
                stack.callback(self._publisher.stop)
                stack.callback(node.stop, drain=False)  # a worker that is ended in good order waits for its publisher
                self._publisher.start()
            self._subscribe(server)
            measured = self._follow(server)
            if self._options.falsify:
                key = falsify.falsify(self._path("orders", "customers"), "id", "name")
                screen.step(f"One value is falsified in Delta: the name of customer {key}")
            equal = self._compare(server)
            screen.say(report(measured))
            if self._publisher is not None:
                kept = server.query("SELECT count(*) FROM pg_replication_slots")[0][0]
                screen.say(f"PostgreSQL has {kept} replication slots: pubsub publish has them.")
            node.stop(drain=True)
        if equal:
            self._tell_where()
        return equal

    def _subscribe(self, server: EmbeddedPostgres) -> None:
        """Fill both databases in parallel, and subscribe to each as soon as it is ready."""
        sizes = self._sizes
        self._screen.step(f"Databases are filled: orders ({sizes.orders:,} orders), pgbench (scale {sizes.scale})")
        pgbench = PgbenchTables(server, sizes, self._interruption)
        self._stack.callback(pgbench.kill)
        self._interruption.run(lambda: make_orders(server, sizes))
        # Spark starts with the first subscription, while pgbench still makes its tables.
        self._create_subscription(server, "orders")
        pgbench.finish()
        self._create_subscription(server, "pgbench")

    def _create_subscription(self, server: EmbeddedPostgres, name: str) -> None:
        self._screen.step(f"The database {name} is subscribed to")
        conninfo = server.conninfo(name)
        if self._publisher is not None:
            conninfo = self._publisher.conninfo(conninfo)
        self._node.sql(f"CREATE SUBSCRIPTION {name} CONNECTION '{conninfo}' PUBLICATION {PUBLICATION}")

    def _follow(self, server: EmbeddedPostgres) -> Figures:
        """Copy under a light load, follow under the full load, catch up; return the figures."""
        node, screen, waiter, options = self._node, self._screen, self._waiter, self._options
        clock = figures.WalClock(server.conninfo("orders"))
        self._stack.callback(clock.stop)
        assert node.daemon_pid is not None
        memory = figures.Memory(node.daemon_pid)
        self._stack.callback(memory.stop)
        load = Load(server, self._sizes, node.home / "load", self._interruption)
        self._stack.callback(load.kill)

        screen.step(f"Tables are copied; meanwhile writers for {_EARLY_SECONDS} s: {options.rates.gentle().shown}")
        waiter.until(waiter.copying, "tables are copied")
        load.start(options.rates.gentle(), _EARLY_SECONDS)
        waiter.until(lambda: waiter.ready(_NAMES) and not load.running, "tables are copied")
        load.stop()

        screen.end_live()
        # The JVM compiles code as it runs: the first batches would measure that, not the later batches' speed.
        screen.step(f"All tables are ready; writers for {_WARM_UP_SECONDS} s first, so that the JVM is warm")
        load.start(options.rates.gentle(), _WARM_UP_SECONDS)
        waiter.until(lambda: not load.running, "warming up")
        load.stop()
        warm = _wal_end(server)
        waiter.until(lambda: waiter.caught_up(_NAMES, warm), "warming up")
        screen.end_live()
        screen.step(f"Writers for {options.seconds} s: {options.rates.shown}")
        before, began = self._applied(), time.time()
        load.transactions.clear()
        load.start(options.rates, options.seconds)
        waiter.until(lambda: not load.running, "tables are followed")
        load.stop()
        end = _wal_end(server)
        screen.end_live()
        screen.step("Writers have stopped; waiting until everything is in Delta")
        waiter.until(lambda: waiter.caught_up(_NAMES, end), "catching up")
        ended = time.time()
        screen.end_live()
        clock.stop()
        memory.stop()
        return Figures(
            copies=self._copies(),
            applied={name: count - before[name] for name, count in self._applied().items()},
            fastest={name: rate.fastest for name, rate in screen.reader.applied.items()},
            seconds=ended - began,
            lags=sorted(lag for name in _NAMES for lag in self._lags(name, clock, began)),
            transactions=sum(load.transactions.values()),
            python=memory.python,
            jvm=memory.jvm,
            workers=memory.workers,
        )

    def _applied(self) -> dict[str, int]:
        return {name: int((self._node.subscription(name) or {}).get("rows_applied") or 0) for name in _NAMES}

    def _copies(self) -> list[tuple[figures.Copy, int]]:
        rows = {
            table["name"]: int(table["rows_copied"] or 0)
            for name in _NAMES
            for table in (self._node.subscription(name) or {"tables": []})["tables"]
        }
        return [(copy, rows.get(copy.relation, 0)) for copy in figures.copies(self._node.events())]

    def _lags(self, name: str, clock: figures.WalClock, since: float) -> list[float]:
        tables = self._path(name, "orders").parent.iterdir()
        return figures.lags(clock.times, clock.lsns, figures.batches(tables), since)

    def _compare(self, server: EmbeddedPostgres) -> bool:
        """Compare both databases, which no longer change; return whether all values are equal."""
        screen = self._screen
        screen.step("Every row and every column is compared with PostgreSQL")
        at = _wal_end(server)
        waiter = self._waiter
        waiter.until(lambda: waiter.caught_up(_NAMES, at), "catching up")
        screen.end_live()
        found = []
        for name in _NAMES:
            tables = server.query("SELECT schemaname, tablename FROM pg_publication_tables ORDER BY 1, 2", name)
            source = Source(name, server.conninfo(name), tuple((str(schema), str(table)) for schema, table in tables))
            found.append(compare(self._node, source, at, self._interruption, lambda text: screen.say(f"  {text}")))
        return show_comparison(found, screen)

    def _path(self, database: str, table: str) -> Path:
        return Path(table_path(str(self._options.home.absolute() / "warehouse"), database, "public", table))

    def _tell_where(self) -> None:
        node, screen = self._node, self._screen
        orders = self._path("orders", "orders")
        query = "SELECT status, count(*) AS orders, sum(total) AS total FROM {t} GROUP BY status ORDER BY orders DESC"
        text = [
            f"The tables lie in {node.shown_home}/warehouse, as <database>/<schema>/<table>; they stay until the next demo.",
            *reading.ways(orders, query.format(t="t")),
            "This project's own command line:\n" + node.command("sql", query.format(t="orders.public.orders")),
        ]
        screen.say("\n" + "\n\n".join(text))


def _wal_end(server: EmbeddedPostgres) -> Lsn:
    return Lsn.parse(server.query("SELECT pg_current_wal_flush_lsn()::text")[0][0])
