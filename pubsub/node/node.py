"""A node in this process: SQL, the workers, and the replicated tables.

    async with Node("pubsub-node") as node:
        await node.execute("CREATE SUBSCRIPTION s CONNECTION 'host=…' PUBLICATION p")
        await node.wait_for_catchup("s")
        rows = await node.fetch("SELECT * FROM pg_stat_subscription")

The workers run in this process, unless a daemon or another Node runs them: then this Node is its client, and they
communicate through the catalog.  Heavy packages (Spark, Arrow, sqlglot, SQLAlchemy) are imported when they are first
needed, since every command of the command line imports this module.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, assert_never

from catalog.home_lock import running_daemon
from catalog.records import PinnedSnapshot, State, Subscription
from catalog.states import RelState
from launcher.notices import Notice
from pubsub import object_stores
from pubsub.concurrency import in_thread
from pubsub.errors import (
    ConnectionFailure,
    NoCatalog,
    NotInPrerequisiteState,
    ObjectInUse,
    PubsubError,
    UndefinedObject,
)
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.reorderbuffer import files
from pubsub.settings import Settings
from pubsub.sql.parser import parse_statement, script_statements
from pubsub.sql.statements import (
    AlterSubscription,
    CreateSubscription,
    DropSubscription,
    Select,
    Show,
    Statement,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from catalog.store import Catalog
    from launcher.service import Service
    from pubsub.delta.spark.spark_session import Spark
    from pubsub.node.snapshot import Snapshot
    from pubsub.node.status import NodeStatus
    from pubsub.node.verify.report import Report
    from pubsub.node.verify.verification import Status

DEFAULT_HOME: Final = "pubsub-node"

_POLL: Final = 0.1
#: How long the daemon may take for the commits of a pin, its JVM's start included.
_PIN_SECONDS: Final = 600.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one statement: command tag, notices, and a query's columns and rows (otherwise both empty)."""

    tag: str
    notices: tuple[Notice, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    @property
    def is_query(self) -> bool:
        """Whether the statement returns rows, even if there are none."""
        return bool(self.columns)


class CatchupTimeoutError(PubsubError, TimeoutError):
    """A subscription did not reach an LSN in time.

    The detail says what lags; the message and hint include the workers' failure, if any.
    """

    default_sqlstate = "57014"


def home_directory(home: str | os.PathLike[str] | None = None) -> Path:
    """Return the node's directory: `home` if given, else $PUBSUB_HOME, else ./pubsub-node."""
    return Path(home or os.environ.get("PUBSUB_HOME") or DEFAULT_HOME).absolute()


class Node:
    """One node; an async context manager.

    `workers`: None runs the workers here unless a daemon does; True requires it (ObjectInUse if a daemon does); False
    never does.  Unless it is False, a daemon of another home with the same catalog is refused (ObjectInUse).
    `shared`: its workers divide the catalog's subscriptions with other daemons that were started so; a catalog on PostgreSQL.
    `service`: the workers that run in this process already; they are used, and not ended.
    `settings` replace the file pubsub.toml in `home`.  `make`: whether to create a missing node at once.  If False (for
    a client without `workers`), the first DDL statement creates it, and until then other uses raise NoCatalog.  Such a
    client opens its catalog when it first needs more of it than `state` reads.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        workers: bool | None = None,
        settings: Settings | None = None,
        make: bool = True,
        shared: bool = False,
        service: Service | None = None,
    ) -> None:
        self.home = home_directory(home)
        self._make = make
        self._is_open = False
        self._workers = workers
        self._is_shared = shared
        self._given = settings
        self._settings: Settings | None = None
        self._catalog: Catalog | None = None
        self._service = service
        self._is_service_ours = service is None
        self._reader: Spark | None = None
        self._reader_home: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        if self._make:
            make_home(self.home)
        self._settings = self._given or Settings.load(self.home)
        object_stores.configure(self._settings.spark.conf)
        self._is_open = True
        if self._workers is False and not self._make:
            return self
        await self._look_for_node(make=self._make)
        if self._catalog is None:
            return self
        try:
            await self._start_workers(self._settings, self._catalog)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    @property
    def settings(self) -> Settings:
        """The node's settings."""
        return _open(self._settings)

    @property
    def catalog(self) -> Catalog:
        """The node's catalog, once it is open.  Raises NoCatalog if the node does not exist yet."""
        if self._catalog is None and self._is_open:
            raise self._no_node()
        return _open(self._catalog)

    def _no_node(self) -> NoCatalog:
        return NoCatalog(
            f'no node at "{self.home}"',
            hint="Name the node's directory with --home or $PUBSUB_HOME; pubsub daemon and CREATE SUBSCRIPTION make a node.",
        )

    async def _look_for_node(self, *, make: bool = False) -> None:
        """Open the catalog if it exists by now; create it if `make`."""
        if self._catalog is None and self._is_open:
            from catalog.store import Catalog

            if make:
                make_home(self.home)
            with suppress(NoCatalog):
                self._catalog = await Catalog.open(
                    self.settings.catalog_location, self.settings.catalog_timeout, make=make
                )

    async def state(self) -> State:
        """Return the whole catalog as of one moment.  Raises NoCatalog if the node does not exist yet."""
        if self._catalog is None and self._is_open and isinstance(self.settings.catalog_location, Path):
            from catalog.file import read_state

            found = await asyncio.to_thread(read_state, self.settings.catalog_location)
            if found is not None:
                return found
        await self._look_for_node()
        return await self.catalog.state()

    @property
    def service(self) -> Service | None:
        """The service that runs the workers in this process; None for a client."""
        return self._service

    async def execute(self, sql: str) -> list[Result]:
        """Run statements in order.  The first that fails raises its PubsubError; those before it have taken effect."""
        return [result async for result in self.results(sql)]

    async def results(self, sql: str, notify: Callable[[Notice], None] | None = None) -> AsyncIterator[Result]:
        """Run statements like `execute`, but yield each result at once; `notify` gets notices the moment they arise."""
        for text in script_statements(sql):
            notices: list[Notice] = []

            def tell(notice: Notice, notices: list[Notice] = notices) -> None:
                notices.append(notice)
                if notify is not None:
                    notify(notice)

            cut: list[str] = []
            statement = parse_statement(text, cut)
            for message in cut:
                tell(Notice(message))
            if statement is not None:
                tag, columns, rows = await self._run(statement, tell)
                yield Result(tag, tuple(notices), columns, rows)

    async def fetch(self, sql: str) -> list[dict[str, Any]]:
        """Run statements and return the last one's rows as dicts.  Raises PubsubError if the last is not a query."""
        last: Result | None = None
        async for result in self.results(sql):
            last = result
        if last is None or not last.is_query:
            raise PubsubError("the statement is not a query", sqlstate="42809")
        return [dict(zip(last.columns, row, strict=True)) for row in last.rows]

    async def wait_for_catchup(self, name: str, lsn: Lsn | str | None = None, timeout: float = 60.0) -> Lsn:
        """Wait until every table that has not stopped is ready and holds all commits up to `lsn`; return that LSN.

        `lsn` None: the end of the publisher's WAL now.  `timeout` is in seconds.  Raises CatchupTimeoutError, which
        says what lags and how the workers failed; NotInPrerequisiteState if it is disabled or no daemon runs.
        """
        deadline = time.monotonic() + timeout
        await self._look_for_node()
        subscription = await self.catalog.subscription(name)
        if lsn is None:
            wanted = await self._publisher_lsn(subscription)
        else:
            wanted = Lsn.parse(lsn) if isinstance(lsn, str) else lsn
        while True:
            state = await self.catalog.state()
            subscription = _find(state, name)
            await self._check_worked_for(subscription)
            lagging = _lagging(state, subscription, wanted)
            if not lagging:
                return wanted
            if time.monotonic() >= deadline:
                raise _late(state, subscription, wanted, lagging, timeout)
            await asyncio.sleep(_POLL)

    def table(self, name: str, at: Lsn | str | None = None) -> DataFrame:
        """Return a replicated table by Spark.

        `name` is written as in SQL; `at` is an LSN that one of the table's versions shows exactly, else
        NotInPrerequisiteState is raised.  Blocks while Spark starts; a client starts a Spark of its own.
        """
        from pubsub.node.query import find_relation
        from pubsub.sql.identifiers import parse_qualified_name

        parsed = parse_qualified_name(name)
        state = _run_blocking(self._read_state)
        relation = find_relation(state, parsed.schema or "public", parsed.name)
        version = None
        if at is not None and relation.whose is not None:
            raise NotInPrerequisiteState(
                f'table "{relation.qualified_name}" has the rows of several sources, whose LSNs are those of several publishers',
                hint="pubsub snapshot has the version that shows an LSN of one subscription's source.",
            )
        if at is not None:
            from pubsub.node.snapshot import version_at

            origins = {o.subid: o.remote_lsn for o in state.origins if o.relid is None}
            asked = Lsn.parse(at) if isinstance(at, str) else at
            origin = origins.get(relation.subid, INVALID_LSN)
            version = version_at(state.node.node_id, relation, origin, asked)
        reader = self._spark().session.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(relation.path)

    async def status(self) -> NodeStatus:
        """Return the status that `pubsub status` shows."""
        from pubsub.node.status import from_state

        state = await self.state()
        daemon = running_daemon(self.home)
        if (
            daemon is None
            and state.daemon is not None
            and self._catalog is not None
            and await self._catalog.has_daemon()
        ):
            # Another home's.
            daemon = state.daemon.pid
        return from_state(state, daemon)

    async def snapshot(self, name: str, at: Lsn | str | None = None, *, pin: str | None = None) -> Snapshot:
        """Return the versions of the subscription's tables that together show one LSN (pubsub.node.snapshot).

        `pin`: a name under which they stay readable until `drop_snapshot`.  Then it raises DuplicateObject for a name
        that is taken, and UndefinedFile if a version cannot be read any more; without a daemon, Spark is started.
        """
        from pubsub.node import snapshot

        asked = Lsn.parse(at) if isinstance(at, str) else at
        state = await self.state()
        if pin is None:
            return await asyncio.to_thread(snapshot.take, state, _find(state, name), asked)
        from pubsub.node import pinned_snapshots

        pinned_snapshots.require_name(pin)
        found = await asyncio.to_thread(snapshot.take, state, _find(state, name), asked)
        await self._look_for_node()
        await pinned_snapshots.pin(self.catalog, self._change_pins, found, pin)
        return found

    async def pinned_snapshots(self) -> tuple[PinnedSnapshot, ...]:
        """Return the snapshots that `snapshot` has pinned, the oldest first."""
        return (await self.state()).pinned_snapshots

    async def drop_snapshot(self, pin: str) -> None:
        """Let go of the versions that are pinned under this name.  Raises UndefinedObject."""
        from pubsub.node import pinned_snapshots

        await self._look_for_node()
        await pinned_snapshots.drop(self.catalog, self._change_pins, pin)

    async def pin_paths(self, kind: str, name: str, paths: Sequence[str]) -> None:
        """Pin Delta tables under a name ("pin"), or release them ("release")."""
        if paths:
            await self._change_pins(kind, name, paths)

    async def verify(
        self,
        name: str,
        tables: Sequence[str] = (),
        *,
        at: Lsn | str | None = None,
        sample: bool = False,
        repair: bool = False,
        show: int = 20,
        tell: Callable[[Status], None] = lambda _: None,
    ) -> Report:
        """Compare the subscription's tables with the publisher's at one LSN, while both move (pubsub.node.verify).

        `tables`: written as in SQL, all by default.  `at`: the least LSN; the publisher can show none of the past, so the
        first from there on that it can show is taken.  `sample`: only some rows.  `repair`: copy the rows that differ
        anew.  `show`: how many rows of each table that differ are part of the report.  `tell` is called with the progress.
        Raises NotInPrerequisiteState if no daemon runs, or nothing can be compared; UndefinedTable; ObjectInUse while
        another process verifies the subscription.
        """
        from launcher.client_session import Session
        from pubsub.node.verify.verification import Bounds, Verification, Wanted

        await self._look_for_node()
        subscription = await self.catalog.subscription(name)
        await self._check_worked_for(subscription)
        session = Session(self.settings, self.catalog, lambda _: None, self._wake_workers)
        bounds = Bounds.of(self.settings.verify)
        verification = Verification(self.catalog, subscription, bounds, session.ask_daemon, self._change_pins, tell)
        asked = Lsn.parse(at) if isinstance(at, str) else at
        return await verification.run(Wanted(tuple(tables), asked, sample, repair, show))

    async def _verify_by_itself(self, name: str, tables: Sequence[str], sample: bool) -> Mapping[str, Any]:
        return (await self.verify(name, tables, sample=sample, show=0)).as_json()

    async def _change_pins(self, kind: str, name: str, paths: Sequence[str]) -> None:
        """Pin or release tables: by the daemon that has them, or else by a Spark of this process."""
        for subid, some in _by_daemon(await self.state(), paths).items():
            await self._change_pins_of(subid, kind, name, some)

    async def _change_pins_of(self, subid: int | None, kind: str, name: str, paths: Sequence[str]) -> None:
        from launcher.client_session import Session
        from launcher.pin_requests import carry_out

        session = Session(self.settings, self.catalog, lambda _: None, self._wake_workers)
        payload = {"name": name, "paths": list(paths)}
        if await session.ask_daemon(kind, subid, payload, timeout=_PIN_SECONDS) is None:
            from pubsub import logs
            from pubsub.delta.spark.jvm_transactions import SparkTransactions

            logs.configure_unless_done()
            # To the end: a pin that is interrupted is released afterwards, and Spark is stopped.
            spark = await in_thread(self._spark)
            await in_thread(lambda: carry_out(SparkTransactions(spark), kind, payload))

    def _wake_workers(self) -> None:
        if self._service is not None:
            self._service.wake()

    async def _start_workers(self, settings: Settings, catalog: Catalog) -> None:
        if (
            self._service is not None
            or self._workers is False
            or (self._workers is None and running_daemon(settings.home) is not None)
        ):
            return
        from launcher.service import Service
        from pubsub import logs

        logs.configure_unless_done()
        try:
            self._service = await Service.start(settings, catalog, self._verify_by_itself, sharing=self._is_shared)
        except ObjectInUse:
            # Fine if this home's daemon has just started; an error if another home's daemon holds the catalog.
            if self._workers or running_daemon(settings.home) is None:
                raise

    async def _close(self) -> None:
        service, catalog, reader, home = self._service, self._catalog, self._reader, self._reader_home
        self._service = self._catalog = self._reader = self._reader_home = None
        self._is_open = False
        try:
            if service is not None and self._is_service_ours:
                await service.stop()
        finally:
            if reader is not None:
                await asyncio.to_thread(reader.stop)
            if home is not None:
                home.cleanup()
            if catalog is not None:
                await catalog.close()

    async def _run(
        self, statement: Statement, tell: Callable[[Notice], None]
    ) -> tuple[str, tuple[str, ...], tuple[tuple[Any, ...], ...]]:
        match statement:
            case CreateSubscription() | AlterSubscription() | DropSubscription():
                from launcher.client_session import Session
                from launcher.subscriptioncmds import execute

                await self._look_for_node(make=True)
                session = Session(self.settings, self.catalog, tell, self._wake_workers)
                return await execute(session, statement), (), ()
            case Show(name=name):
                if name is None:
                    return "SHOW", ("name", "setting", "description"), tuple(self.settings.describe_all())
                return "SHOW", (name,), ((self.settings.show(name),),)
            case Select():
                columns, rows = await self._select(statement)
                return f"SELECT {len(rows)}", columns, rows
            case _:
                assert_never(statement)

    async def _select(self, statement: Select) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
        from pubsub.node import query

        found = await query.select_and_reset(await self.state(), statement.sql, self._reset_statistics)
        return found.columns, tuple(found.rows)

    async def _reset_statistics(self, subid: int | None) -> None:
        await self._look_for_node()
        await self.catalog.reset_statistics(subid)

    async def _publisher_lsn(self, subscription: Subscription) -> Lsn:
        from pubsub.publisher import slots
        from pubsub.publisher.connection import Connection

        try:
            async with await Connection.connect(subscription.conninfo) as connection:
                return await slots.current_wal_lsn(connection)
        except ConnectionFailure as error:
            error.message = f'subscription "{subscription.name}" {error.message}'
            raise

    async def _check_worked_for(self, subscription: Subscription) -> None:
        if not subscription.enabled:
            raise NotInPrerequisiteState(
                f'subscription "{subscription.name}" is disabled',
                hint="Use ALTER SUBSCRIPTION ... ENABLE.",
            )
        # Of a catalog in a database, the daemon may be one of another home.
        if self._service is None and running_daemon(self.home) is None and not await self.catalog.has_daemon():
            raise NotInPrerequisiteState(f'no daemon runs on node "{self.home}"', hint="Start one: pubsub daemon.")

    async def _read_state(self) -> State:
        from catalog.store import Catalog

        try:
            catalog = await Catalog.open(self.settings.catalog_location, self.settings.catalog_timeout, make=False)
        except NoCatalog:
            raise self._no_node() from None
        async with catalog:
            return await catalog.state()

    def _spark(self) -> Spark:
        """Return the workers' Spark, started, or for a client its own.

        The client's Spark keeps its files in a temporary directory, since the node's directory is the daemon's.
        """
        if self._service is not None:
            self._service.spark.running()
            return self._service.spark
        if self._reader is None:
            from pubsub.delta.spark.spark_session import Spark

            spark = self.settings.spark
            conf = spark.session_conf()
            self._reader_home = tempfile.TemporaryDirectory(prefix="pubsub-reader-")
            self._reader = Spark(
                Path(self._reader_home.name), master=spark.master, conf=conf, warehouse=self.settings.warehouse_uri
            )
        self._reader.running()
        return self._reader


def _open(value: _T | None) -> _T:
    if value is None:
        raise NotInPrerequisiteState("the node is not open", hint="Use it in: async with Node(…) as node.")
    return value


def make_home(home: Path) -> None:
    """Create the node's directory, durably and accessible to this user only.  Raises PubsubError."""
    try:
        files.make_missing(home)
    except OSError as error:
        raise PubsubError(f'could not create directory "{home}": {error.strerror}', sqlstate="58030") from error


def _run_blocking(read: Callable[[], Coroutine[Any, Any, State]]) -> State:
    """Run `read()` on an event loop in a thread of its own: the caller may be inside a running event loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        state: State = thread.submit(lambda: asyncio.run(read())).result()
        return state


def _by_daemon(state: State, paths: Sequence[str]) -> dict[int | None, list[str]]:
    """Return the Delta tables at `paths` by the subscription whose daemon is asked to pin them; all at once if there is one.

    A daemon deletes the files of the tables that it has, and takes turns with its own pins.
    """
    if not state.leases:
        return {None: list(paths)}
    owners = {one.path: one.subid for one in state.relations} | {one.path: one.subid for one in state.sequences}
    found: dict[int | None, list[str]] = {}
    for path in paths:
        found.setdefault(owners.get(path), []).append(path)
    return found


def _find(state: State, name: str) -> Subscription:
    for subscription in state.subscriptions:
        if subscription.name == name:
            return subscription
    raise UndefinedObject(f'subscription "{name}" does not exist')


def _lagging(state: State, subscription: Subscription, wanted: Lsn) -> list[str]:
    """Describe what is missing; return an empty list when the subscription has caught up."""
    relations = [r for r in state.relations if r.subid == subscription.oid]
    lagging = [
        f'table "{r.qualified_name}" is in state {r.state.value}' + (f" ({r.error})" if r.error else "")
        for r in relations
        if r.state is not RelState.READY and not r.stopped
    ]
    origin = next((o.remote_lsn for o in state.origins if o.subid == subscription.oid and o.relid is None), INVALID_LSN)
    if origin < wanted:
        lagging.append(f"the origin is at {origin}")
    return lagging


def _late(
    state: State, subscription: Subscription, wanted: Lsn, lagging: list[str], timeout: float
) -> CatchupTimeoutError:
    statistics = next((s for s in state.statistics if s.subid == subscription.oid), None)
    failure = statistics.error if statistics is not None else None
    shown = lagging[:5] + ([f"{len(lagging) - 5} more"] if len(lagging) > 5 else [])
    return CatchupTimeoutError(
        f'subscription "{subscription.name}" did not reach LSN {wanted} within {timeout:g} seconds'
        + (f": {failure}" if failure else ""),
        detail="; ".join(shown)[:1].upper() + "; ".join(shown)[1:] + ".",
        hint=statistics.error_hint if statistics is not None else None,
    )
