"""The catalog's database: engine, short transactions, errors.

SQLite runs in WAL mode with synchronous = FULL: commits survive a power cut, and readers never wait for a writer.  The
command line and the daemon are different processes on one file, so every write transaction takes the write lock at its
beginning (BEGIN IMMEDIATE) and waits for it up to `BUSY_TIMEOUT`; inside one process an asyncio lock hands it on in
order of arrival.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import event, insert, literal, select, text, update
from sqlalchemy import inspect as inspect_schema
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateColumn
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from catalog import schema
from catalog.from_rows import SCHEMA_VERSION
from pubsub.concurrency import finish, uncancelled
from pubsub.errors import DataCorrupted, FeatureNotSupported, NoCatalog, ObjectInUse, PubsubError
from pubsub.reorderbuffer import files
from pubsub.texts import first_line

#: How long a write waits for another process's transaction, in seconds.
BUSY_TIMEOUT: Final = 30.0

#: How long a transaction on a server may take, in seconds, by default.
TIMEOUT: Final = 30.0

#: How long a server may take to end all sessions, in seconds.
_CLOSING: Final = 5.0

#: The least that a server is given to answer, in seconds.
_LEAST: Final = 1.0

NOT_OURS: Final = "another daemon has taken over the catalog"
NOT_OURS_HINT: Final = "This one ends: what it has not committed is the other's to receive."

_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_WRITE: Final = "pubsub_write"
#: An arbitrary advisory lock: on PostgreSQL it keeps two processes from creating the schema at once.
_SCHEMA_LOCK: Final = 0x70756273_7562


def new_node_id() -> str:
    """Return a new 64-bit system identifier: seconds in the upper half, random bits in the lower.

    xlog.c: BootStrapXLOG fills the lower half from microseconds and the process id; two nodes made at once by one
    script would then be close.
    """
    return str((int(time.time()) & 0xFFFFFFFF) << 32 | secrets.randbits(32))


def now() -> datetime:
    """Return the wall clock in UTC, for people to read: no decision depends on it."""
    return datetime.now(UTC)


class Database:
    """Transactions on the catalog.  The classes that mix it in hold the statements.

    Each of their public methods is one transaction and runs to completion despite cancellation.  Methods marked
    `interruptible` are exempt, since they wait for other processes.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if name[0] != "_" and inspect.iscoroutinefunction(method) and not hasattr(method, "interruptible"):
                setattr(cls, name, uncancelled(method))

    timeout: float = TIMEOUT

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # The epoch of this process's daemon; a write requires that it is still the catalog's, or one of those that share it.
        # None: no daemon, no check.
        self._epoch: int | None = None
        self._is_sharing = False
        self._writer = engine.execution_options(**_writing(engine))
        self._write_lock = asyncio.Lock()
        self._deadline: float | None = None

    def end_within(self, seconds: float) -> None:
        """Give a server that does not answer up sooner from now on: after `seconds` each call has one second.

        The daemon's end calls several times, and would wait each time anew.
        """
        self._deadline = asyncio.get_running_loop().time() + seconds

    @property
    def url(self) -> str:
        """The catalog's URL, without a password."""
        return self._engine.url.render_as_string(hide_password=True)

    @property
    def connect_args(self) -> dict[str, Any]:
        """The arguments for connections to a server."""
        return {"timeout": self.timeout or None}

    @uncancelled
    async def close(self) -> None:
        """Close every connection.  A server that does not answer is waited for a moment: it has nothing left to do."""
        await _dispose(self._engine)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Give up a server that does not answer within `timeout`.

        SQLite is exempt: its waits have a bound of their own (BUSY_TIMEOUT), and its statements run in threads, where a
        cancelled one would leave its transaction open (pubsub.concurrency).
        """
        seconds = self.timeout
        if self._deadline is not None:
            left = max(self._deadline - asyncio.get_running_loop().time(), _LEAST)
            seconds = min(seconds or left, left)
        async with _limited(self._engine, seconds):
            yield

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[AsyncConnection]:
        """Open one read transaction on a consistent snapshot (SQLite: WAL; PostgreSQL: REPEATABLE READ)."""
        try:
            async with self._answering(), self._engine.connect() as connection, connection.begin():
                yield connection
        except failures(self._engine) as error:
            raise typed(error) from error

    @asynccontextmanager
    async def _write(self, *, bump: bool) -> AsyncIterator[AsyncConnection]:
        """Open one write transaction; `bump` raises the change counter, which makes pollers look again.

        Raises ObjectInUse when this process was the catalog's daemon and another has taken over.
        """
        try:
            async with self._answering(), self._write_lock, self._writer.begin() as connection:
                if bump:
                    counter = schema.node.c.change_counter
                    await connection.execute(update(schema.node).values({counter: counter + 1}))
                # The row lock makes the next daemon wait for the end of this transaction.
                if self._epoch is not None and not await self._has_catalog(connection, lock=True):
                    raise ObjectInUse(NOT_OURS, hint=NOT_OURS_HINT)
                yield connection
        except IntegrityError:
            raise
        except failures(self._engine) as error:
            raise typed(error) from error

    async def _has_catalog(self, connection: AsyncConnection, *, lock: bool) -> bool:
        """Return whether this process's daemon still is the catalog's, or one of those that share it; `lock` keeps it so."""
        found = select(schema.node.c.daemon_epoch)
        if self._is_sharing:
            found = select(schema.daemon.c.id).where(schema.daemon.c.id == self._epoch)
        if lock:
            # Of a daemon's row only the deletion has to wait; it is written to all the time.
            found = found.with_for_update(read=True, key_share=self._is_sharing)
        return (await connection.execute(found)).scalar_one_or_none() == self._epoch


async def connect(
    location: str | Path, timeout: float = TIMEOUT, *, make: bool = True, upgrade: bool = True
) -> AsyncEngine:
    """Return an engine for a SQLite file or a URL, and create, upgrade or check the schema.

    `timeout` is in seconds.  Without `upgrade` an older catalog stays as it is: few statements work on it.
    Raises NoCatalog if there is no catalog and `make` is false, and other PubsubErrors.
    """
    engine = _engine(location, timeout, make=make)
    trying = asyncio.ensure_future(_try(engine, timeout, make=make, upgrade=upgrade))
    try:
        # A connection to SQLite that is given up while it opens leaves its thread, which outlives the event loop.
        if engine.dialect.name == "sqlite":
            await finish(trying)
        else:
            await trying
    except failures(engine) as error:
        await uncancelled(_dispose)(engine)
        raise typed(error) from error
    except BaseException:
        await uncancelled(_dispose)(engine)
        raise
    return engine


async def _try(engine: AsyncEngine, timeout: float, *, make: bool, upgrade: bool) -> None:
    async with _limited(engine, timeout):
        found = None if make else await _version(engine)
        if found is None or found > SCHEMA_VERSION or (upgrade and found < SCHEMA_VERSION):
            await prepare(engine)


async def _version(engine: AsyncEngine) -> int:
    """Return the catalog's schema version.  Only reads.  Raises NoCatalog."""
    async with engine.connect() as connection:
        if schema.node.name not in await connection.run_sync(lambda sync: inspect_schema(sync).get_table_names()):
            raise NoCatalog("the catalog has not been made")
        found = (await connection.execute(select(schema.node.c.schema_version))).scalar_one_or_none()
    if found is None:
        raise NoCatalog("the catalog has not been made")
    return int(found)


def _engine(location: str | Path, timeout: float, *, make: bool = True) -> AsyncEngine:
    try:
        if isinstance(location, Path):
            parsed = URL.create("sqlite", database=str(location.absolute()))
        else:
            parsed = make_url(location)
    except ArgumentError:
        raise PubsubError("the catalog's URL cannot be read", sqlstate="22023", hint=_URL_HINT) from None
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.drivername == "sqlite+aiosqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise PubsubError("a catalog in SQLite must be a file", sqlstate="22023", hint=_URL_HINT)
        path = Path(parsed.database)
        if make:
            _make_private(path)
        elif not _is_there(path):
            raise NoCatalog(f'there is no catalog "{path}"')
        elif not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            parsed = _read_only(parsed, path)
        # Each connection has a thread, and opening one costs more than most transactions, so they are pooled.  None
        # returns to the pool in the middle of a transaction: transactions run to their end (pubsub.concurrency).
        engine = create_async_engine(parsed, hide_parameters=True, pool_size=4, connect_args={"timeout": BUSY_TIMEOUT})
        if make:
            event.listen(engine.sync_engine, "connect", _keep_a_log)
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    if parsed.drivername == "postgresql+asyncpg":
        engine = create_async_engine(
            parsed,
            hide_parameters=True,
            pool_pre_ping=True,
            pool_size=4,
            isolation_level="REPEATABLE READ",
            connect_args={"timeout": timeout or None},
        )
        event.listen(engine.sync_engine, "connect", keep_alive)
        return engine
    raise FeatureNotSupported(f'catalogs of kind "{parsed.drivername}" are not supported', hint=_URL_HINT)


_KEEPALIVES: Final = """
SELECT set_config(name, CASE name WHEN 'tcp_keepalives_count' THEN '3' WHEN 'tcp_keepalives_idle' THEN '5' ELSE '4' END, false)
  FROM pg_catalog.pg_settings
 WHERE name IN ('tcp_keepalives_count', 'tcp_keepalives_idle', 'tcp_keepalives_interval')
"""
_URL_HINT: Final = 'Use "sqlite:////path/to/catalog.db" or "postgresql://user@host/database".'


def _writing(engine: AsyncEngine) -> dict[str, Any]:
    """Return the execution options of a write: on PostgreSQL it waits for rows that others lock, instead of failing."""
    return {_WRITE: True} | ({"isolation_level": "READ COMMITTED"} if engine.dialect.name == "postgresql" else {})


def _make_private(path: Path) -> None:
    """Create the file before SQLite does, so that others can never read it; its -wal and -shm take its mode.

    A file that is there is not opened: closing it would free the locks that this process's other connections hold on it
    (fcntl(2)), and another process, which then takes itself for the last one, removes the -wal file under them.
    """
    try:
        files.make_missing(path.parent)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise _unopened(path, error) from error


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unopened(path, error) from error
    return True


def _unopened(path: Path, error: OSError) -> PubsubError:
    return PubsubError(f'could not open the catalog "{path}": {error.strerror}', sqlstate="58030")


def _read_only(url: URL, path: Path) -> URL:
    """Return a URL that opens the file read-only.

    Without a -wal file beside it nobody writes the file, so it is opened as immutable: SQLite then need not create one.
    """
    unwritten = not path.with_name(path.name + "-wal").exists()
    query = {"mode": "ro", "uri": "true"} | ({"immutable": "1"} if unwritten else {})
    return url.set(database=f"file:{quote(str(path))}", query=query)


def _keep_a_log(connection: Any, _record: object) -> None:
    """Switch the file to WAL mode, which persists in it; not done for files that are only opened, not made."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.close()


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we begin transactions ourselves
    cursor = connection.cursor()
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def keep_alive(connection: Any, _record: object) -> None:
    """Have the server notice within seconds that this machine is gone: a session holds locks that others wait for."""
    cursor = connection.cursor()
    cursor.execute(_KEEPALIVES)
    cursor.close()
    connection.commit()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


async def prepare(engine: AsyncEngine) -> None:
    """Create the schema, or add what an older one lacks, in one transaction.  Raises DataCorrupted for a newer one."""
    version = select(schema.node.c.schema_version)
    async with engine.execution_options(**_writing(engine)).begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))
        have = await connection.run_sync(lambda sync: set(inspect_schema(sync).get_table_names()))
        if schema.node.name not in have:
            await connection.run_sync(schema.metadata.create_all)
        found = (await connection.execute(version)).scalar_one_or_none()
        if found is None:
            await connection.execute(
                insert(schema.node).values(
                    id=1,
                    schema_version=SCHEMA_VERSION,
                    node_id=new_node_id(),
                    created=now(),
                    next_oid=schema.FIRST_OID,
                    change_counter=0,
                )
            )
        elif found < SCHEMA_VERSION:
            await connection.run_sync(_add_what_is_missing)
            await connection.execute(update(schema.node).values(schema_version=SCHEMA_VERSION))
        elif found > SCHEMA_VERSION:
            raise DataCorrupted(
                f"the catalog has version {found}, this program reads version {SCHEMA_VERSION}",
                hint="Use the version of this program that made it, or a later one, or a backup of the older version.",
            )


def present(connection: Connection) -> dict[str, frozenset[str]]:
    """Return the names of the columns that the catalog has, by those of its tables."""
    inspector = inspect_schema(connection)
    ours = set(inspector.get_table_names()) & schema.metadata.tables.keys()
    return {name: frozenset(column["name"] for column in inspector.get_columns(name)) for name in ours}


def _add_what_is_missing(connection: Connection) -> None:
    """Add the tables and columns that an earlier version's catalog lacks, with the columns' defaults."""
    schema.metadata.create_all(connection)
    have = present(connection)
    for table in schema.metadata.sorted_tables:
        for column in table.columns:
            if column.name not in have[table.name]:
                definition = str(CreateColumn(column).compile(dialect=connection.dialect))
                if isinstance(column.default, ScalarElementColumnDefault):
                    value = literal(column.default.arg, column.type)
                    compiled = value.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
                    definition += f" DEFAULT {compiled}"
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {definition}")


def failures(engine: AsyncEngine) -> tuple[type[Exception], ...]:
    """Return the exceptions that a transaction may raise; SQLAlchemy does not wrap those of asyncpg's connect."""
    if engine.dialect.name != "postgresql":
        return (SQLAlchemyError,)
    import asyncpg

    return (SQLAlchemyError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


async def _dispose(engine: AsyncEngine) -> None:
    """Close every connection; break those that a server has not ended in time."""
    if engine.dialect.name == "postgresql":
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSING

        def closing(connection: Any, _record: object) -> None:
            loop.call_at(deadline, connection.driver_connection.terminate)

        event.listen(engine.sync_engine, "close", closing)
    await engine.dispose()


@asynccontextmanager
async def _limited(engine: AsyncEngine, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds if seconds and engine.dialect.name == "postgresql" else None):
            yield
    except TimeoutError as error:
        raise PubsubError(
            f"could not access the catalog: its server did not answer within {seconds:.3g} seconds",
            sqlstate="08006",
            hint='Look whether the catalog\'s server and the network work; parameter "catalog_timeout" says how long is waited.',
        ) from error


def typed(error: Exception) -> PubsubError:
    """Return a PubsubError in the driver's words, without statement and parameters, which may hold a password."""
    cause = getattr(error, "orig", None) or error
    message = re.sub(r"^<class '[^']*'>: ", "", first_line(cause))
    return PubsubError(f"could not access the catalog: {message}", sqlstate="58030")
