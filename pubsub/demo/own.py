"""The demo on the user's own database: copy it, follow it for a while, compare, without disturbing its users.

The objects that it creates there are named `pubsub_demo_…` and removed at the end: a publication, a subscription's
slots, and during the comparison a temporary slot.  Tables are only read.  Tables without a replica identity are left
out: once published, they would refuse UPDATEs and DELETEs.

Writers need not stop for the comparison.  The node is paused, and a temporary slot provides a snapshot of the database
with its LSN.  The node then applies up to exactly that LSN (stop_lsn) and pauses again, and both sides are read as of
that LSN.

    writers   ──A──B──────────C──D──E──F──►
    node      ──A──B── paused  C  D│ paused         compared: the snapshot, which shows A to D,
    snapshot               made at │                with the tables, which hold A to D
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo as libpq_conninfo
from psycopg import sql

from pubsub.demo import figures, reading
from pubsub.demo.comparison import Source, compare, show_comparison
from pubsub.demo.interruption import Interruption
from pubsub.demo.node import DemoFailed, DemoNode
from pubsub.demo.progress import Waiter
from pubsub.demo.publisher import DemoPublisher
from pubsub.demo.report import Figures, report
from pubsub.demo.screen import Screen
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.conninfo import parse_conninfo
from pubsub.publisher.session_settings import session_settings_sql
from pubsub.publisher.snapshots import begin_session_under
from pubsub.sql.conninfo import mask_conninfo
from pubsub.sql.identifiers import quote_literal

_T = TypeVar("_T")
_CONNECT_SECONDS: Final = 15
_SNAPSHOT_SECONDS: Final = 120.0
_SHOWN: Final = 10

# Replica identities as in relcache.c: the primary key if it is immediate, a named index, or the whole row.  Partitions
# are published themselves, since a partitioned table has no rows.  Tables of extensions are left out.
_CANDIDATES: Final = """
SELECT n.nspname, c.relname, c.reltuples::bigint,
       pg_catalog.has_table_privilege(c.oid, 'SELECT'),
       pg_catalog.pg_has_role(c.relowner, 'USAGE'),
       c.relpersistence = 'p',
       CASE c.relreplident
           WHEN 'f' THEN true
           WHEN 'd' THEN EXISTS (SELECT FROM pg_catalog.pg_index i
                                 WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate AND i.indisvalid)
           WHEN 'i' THEN EXISTS (SELECT FROM pg_catalog.pg_index i
                                 WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid)
           ELSE false
       END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND c.oid >= 16384
  AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
                  WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The run's options: a libpq `conninfo`; `seconds` to follow; `tables` named as for regclass, empty for all."""

    home: Path
    conninfo: str
    seconds: int
    tables: tuple[str, ...]
    walsender: bool = False
    """Our own server stands between: all of the demo's connections lead to it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table of the database; `reason` says why it cannot be followed, None if it can."""

    schema: str
    name: str
    rows: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Followed:
    """Measurements from `began` (Unix time) on; `applied` is the number of row changes applied before."""

    clock: figures.WalClock
    memory: figures.Memory
    began: float
    applied: int


class OwnDemo:
    """One run of the demo."""

    def __init__(self, options: Options, interruption: Interruption, screen: Screen) -> None:
        self._options = options
        self._interruption = interruption
        self._screen = screen
        self._node = DemoNode(options.home, interruption, screen.say)
        self._waiter = Waiter(self._node, interruption, screen)
        self._name = f"pubsub_demo_{secrets.token_hex(4)}"
        self._left_behind: list[str] = []
        self._server = options.conninfo
        """Where the demo connects to."""

    def run(self) -> bool:
        """Run the demo; return whether all values are equal and nothing is left behind.

        Raises Interrupted and PubsubError.
        """
        screen, node = self._screen, self._node
        tables = self._choose(self._ask(_CANDIDATES))
        node.make_fresh()
        try:
            with ExitStack() as stack:
                if self._options.walsender:
                    self._put_between(stack)
                stack.callback(self._drop_publication)
                stack.callback(self._drop_subscription)
                stack.callback(node.stop, drain=False)
                stack.callback(screen.end_live)
                screen.step(f"The node's daemon starts in {node.shown_home}")
                node.start_daemon()
                self._publish(tables)
                equal = self._compare(tables, self._follow(stack))
                place = self._largest()
                node.stop(drain=True)
                screen.step(f"What was made in the database is removed: publication and slots {self._name}")
        finally:
            for text in self._left_behind:
                screen.fail(text)
        if self._left_behind:
            return False
        screen.say("          Nothing is left there.")
        if equal:
            self._tell_where(place)
        return equal

    def _put_between(self, stack: ExitStack) -> None:
        self._screen.step("pubsub publish starts before the database, and keeps the slots")
        publisher = DemoPublisher(self._node.home, self._options.conninfo, self._interruption)
        stack.callback(publisher.stop)
        publisher.start()
        self._server = publisher.conninfo(self._options.conninfo)

    # tables to follow

    def _connect(self, **more: str) -> psycopg.Connection:
        connection = psycopg.connect(self._conninfo(**more), autocommit=True)
        connection.execute(session_settings_sql(connection.info.server_version).encode())
        # The tables' names are the user's.
        connection.execute("SET search_path TO DEFAULT")
        return connection

    def _conninfo(self, **more: str) -> str:
        given = parse_conninfo(self._server)
        ours = {"connect_timeout": given.get("connect_timeout", _CONNECT_SECONDS), "application_name": "pubsub demo"}
        return libpq_conninfo.make_conninfo("", **(given | ours | more))

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        def ask() -> list[tuple[Any, ...]]:
            with self._connect() as connection:
                return connection.execute(statement.encode()).fetchall()

        return self._interruption.run(lambda: _typed(ask))

    def _choose(self, rows: Sequence[tuple[Any, ...]]) -> list[Candidate]:
        """Return the tables to follow; show the others with the reason.  Raises DemoFailed if there are none."""
        found = [candidate(row) for row in rows]
        if self._options.tables:
            literals = ", ".join(f"{quote_literal(name)}::regclass" for name in self._options.tables)
            wanted = self._ask(
                "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
                f"WHERE c.oid IN ({literals})"
            )
            found = [one for one in found if (one.schema, one.name) in {tuple(row) for row in wanted}]
        left_out = [one for one in found if one.reason is not None]
        for one in left_out[:_SHOWN]:
            self._screen.say(f"          left out: {one.schema}.{one.name}: {one.reason}")
        if len(left_out) > _SHOWN:
            self._screen.say(f"          left out: {len(left_out) - _SHOWN} more")
        chosen = [one for one in found if one.reason is None]
        if not chosen:
            raise DemoFailed(
                "the database has no table that can be followed",
                hint="A table needs a primary key or another replica identity, and publishing it needs its owner.",
            )
        self._screen.step(
            f"{len(chosen)} tables, about {sum(one.rows for one in chosen):,} rows, are copied and followed"
        )
        return chosen

    # objects created in the database, and removed

    def _publish(self, tables: Sequence[Candidate]) -> None:
        names = sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(one.schema, one.name)) for one in tables)
        statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(sql.Identifier(self._name), names)

        def publish() -> None:
            with self._connect() as connection:
                connection.execute(statement)

        self._screen.say(f"          CREATE PUBLICATION {self._name} FOR TABLE … ({len(tables)} tables)")
        # Not interruptible: it takes only a moment, and then it is known whether the publication exists.
        _typed(publish)
        conninfo = self._server
        create = "CREATE SUBSCRIPTION {} CONNECTION {} PUBLICATION {}"
        self._node.sql(
            create.format(self._name, quote_literal(conninfo), self._name),
            shown=create.format(self._name, quote_literal(mask_conninfo(conninfo)), self._name),
        )

    def _drop_subscription(self) -> None:
        failure = self._node.drop_subscription(self._name)
        slots = self._slots()
        if failure is not None or slots:
            self._left_behind.append(
                f"Replication slots were left in the database: {failure or ', '.join(slots)}\n"
                f"HINT:  When it can be reached again: {self._node.command('sql', f'DROP SUBSCRIPTION {self._name}')}\n"
                "       or: SELECT pg_drop_replication_slot('…') for each of: "
                f"SELECT slot_name FROM pg_replication_slots WHERE {self._our_slots()}"
            )

    def _our_slots(self) -> str:
        """Return a condition for the demo's slots in pg_replication_slots.

        They are the subscription's, the temporary one, and those of this node's sync workers.
        """
        node = str(self._node.status.get("node") or "none")
        return f"slot_name LIKE '{self._name}%' OR slot_name LIKE 'pg\\_%\\_sync\\_%\\_{node}'"

    def _slots(self) -> list[str]:
        try:
            with self._connect() as connection:
                statement = f"SELECT slot_name FROM pg_replication_slots WHERE {self._our_slots()}"
                return [str(row[0]) for row in connection.execute(statement.encode()).fetchall()]
        except psycopg.Error:
            return []  # a failure to drop them is reported anyway

    def _drop_publication(self) -> None:
        try:
            with self._connect() as connection:
                connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(self._name)))
        except psycopg.Error as error:
            self._left_behind.append(
                f"The publication {self._name} was left in the database: {_first_line(error)}\n"
                f"HINT:  DROP PUBLICATION {self._name}"
            )

    # copy, follow, compare

    def _follow(self, stack: ExitStack) -> _Followed:
        """Copy the tables, then follow them for the chosen time."""
        node, screen, waiter, name = self._node, self._screen, self._waiter, self._name
        clock = figures.WalClock(self._server)
        stack.callback(clock.stop)
        assert node.daemon_pid is not None
        memory = figures.Memory(node.daemon_pid)
        stack.callback(memory.stop)
        screen.step("Tables are copied")
        waiter.until(lambda: waiter.ready([name]), "tables are copied")
        screen.end_live()
        screen.step(f"All tables are ready; they are followed for {self._options.seconds} s, whatever happens there")
        followed = _Followed(clock, memory, time.time(), self._applied())
        until = time.monotonic() + self._options.seconds
        waiter.until(lambda: time.monotonic() >= until, "tables are followed", patience=self._options.seconds + 60.0)
        screen.end_live()
        clock.stop()
        return followed

    def _measured(self, followed: _Followed, ended: float) -> Figures:
        """Return the figures for the changes committed since `began`; all of them must be in Delta by now."""
        node, name, clock = self._node, self._name, followed.clock
        followed.memory.stop()
        committed = figures.batches(Path(place["path"]) for place in node.snapshot(name)["tables"].values())
        rows = self._copied()
        return Figures(
            copies=[(copy, rows.get(copy.relation, 0)) for copy in figures.copies(node.events())],
            applied={name: self._applied() - followed.applied},
            fastest={each: rate.fastest for each, rate in self._screen.reader.applied.items()},
            seconds=ended - followed.began,
            lags=figures.lags(clock.times, clock.lsns, committed, followed.began),
            transactions=None,
            python=followed.memory.python,
            jvm=followed.memory.jvm,
            workers=followed.memory.workers,
        )

    def _applied(self) -> int:
        return int((self._node.subscription(self._name) or {}).get("rows_applied") or 0)

    def _copied(self) -> dict[str, int]:
        subscription = self._node.subscription(self._name) or {"tables": []}
        return {table["name"]: int(table["rows_copied"] or 0) for table in subscription["tables"]}

    def _compare(self, tables: Sequence[Candidate], followed: _Followed) -> bool:
        """Compare as of one LSN, while writers may continue; return whether all values are equal."""
        node, screen, waiter, name = self._node, self._screen, self._waiter, self._name
        screen.step("The node rests while a snapshot of the database is taken, then goes on up to exactly its LSN")
        node.sql(f"ALTER SUBSCRIPTION {name} DISABLE")
        with ExitStack() as stack:
            at, snapshot = self._snapshot(stack)
            node.sql(f"ALTER SUBSCRIPTION {name} SET (stop_lsn = '{at}')")
            node.sql(f"ALTER SUBSCRIPTION {name} ENABLE")
            waiter.until(lambda: waiter.caught_up([name], at) and self._rests(), f"catching up to {at}")
            ended = time.time()
            screen.end_live()
            screen.step(f"Every row and every column is compared with PostgreSQL as of LSN {at}")
            source = Source(name, self._server, tuple((one.schema, one.name) for one in tables))
            found = compare(
                node, source, at, self._interruption, lambda text: screen.say(f"  {text}"), snapshot=snapshot
            )
        equal = show_comparison([found], screen)
        screen.say(report(self._measured(followed, ended)))
        return equal

    def _largest(self) -> Path:
        """Return the path of the table with the most rows."""
        rows = self._copied()
        places = self._node.snapshot(self._name)["tables"]
        return Path(places[max(places, key=lambda name: rows.get(name, 0))]["path"])

    def _rests(self) -> bool:
        return (self._node.subscription(self._name) or {}).get("enabled") is False

    def _snapshot(self, stack: ExitStack) -> tuple[Lsn, str]:
        """Return an LSN and the name of a snapshot of everything committed up to it, which lives as long as `stack`.

        A new slot starts at an LSN and exports a snapshot of the database at that LSN (snapbuild.c:
        SnapBuildInitialSnapshot).  Its creation waits for open transactions.  Raises DemoFailed after
        _SNAPSHOT_SECONDS, and Interrupted.
        """
        holder = stack.enter_context(_typed(self._connect))
        walsender = _typed(lambda: self._connect(replication="database"))
        stack.callback(walsender.close)
        task = self._interruption.start(lambda: _typed(lambda: self._take_snapshot(walsender, holder)))
        deadline = time.monotonic() + _SNAPSHOT_SECONDS
        try:
            while not task.done:
                if time.monotonic() > deadline:
                    raise DemoFailed(
                        f"no snapshot of the database within {_SNAPSHOT_SECONDS:g} seconds",
                        detail="A snapshot waits until the transactions that write are at their ends.",
                        hint="Look for old ones in pg_stat_activity, and try again.",
                    )
                self._interruption.sleep(0.05)
        except BaseException:
            # A waiting server does not notice a closed connection, and the temporary slot would remain.
            walsender.cancel()
            task.wait(5.0)
            raise
        return task.result()

    def _take_snapshot(self, walsender: psycopg.Connection, holder: psycopg.Connection) -> tuple[Lsn, str]:
        """Create the slot, adopt its snapshot in a plain transaction, export it from there, and drop the slot."""
        with walsender:
            slot = f"{self._name}_compare"
            row = walsender.execute(
                f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')".encode()
            ).fetchone()
            assert row is not None
            _, consistent_point, exported, _ = row
            begin_session_under(holder, exported)
            again = holder.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
            assert again is not None
        return Lsn.parse(consistent_point), str(again[0])

    def _tell_where(self, place: Path) -> None:
        text = [
            f"The tables lie in {self._node.shown_home}/warehouse, as <database>/<schema>/<table>, until the next demo.",
            *reading.ways(place, "SELECT count(*) AS rows FROM t"),
        ]
        self._screen.say("\n" + "\n\n".join(text))


def candidate(row: Sequence[Any]) -> Candidate:
    """Build a Candidate from a row of _CANDIDATES."""
    schema, name, rows, readable, owned, permanent, identified = row
    reason = None
    if not permanent:
        reason = "an unlogged table is not replicated"
    elif not owned:
        reason = "only its owner can publish it"
    elif not readable:
        reason = "permission denied (SELECT)"
    elif not identified:
        reason = "it has no primary key or other replica identity: published, it would refuse its UPDATEs and DELETEs"
    return Candidate(schema, name, max(0, int(rows)), reason)


def _typed(work: Callable[[], _T]) -> _T:
    """Run `work`; turn psycopg's errors into DemoFailed."""
    try:
        return work()
    except psycopg.Error as error:
        raise DemoFailed(_first_line(error), sqlstate=error.sqlstate or "08006") from error


def _first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error).strip().replace("\n", "; ")
