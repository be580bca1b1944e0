"""One daemon per catalog, even if several homes use the same catalog, or several that share it by agreement.

The lock of a home (catalog.home_lock) does not exclude the daemon of another home.

On PostgreSQL the daemon keeps a session that only holds an advisory lock: the server releases the lock when the session
ends, however it ends.  So the daemon must check that its session lives (`prove`) before it commits anything:

    session answers                          the lock is held
    session is gone, the lock is free        take it again; the epoch is unchanged, so no other daemon ran meanwhile
    session is gone, and the epoch moved     another daemon took over: this one ends

Each new daemon raises the epoch, and every write of a daemon to the catalog requires the epoch to be its own
(catalog.database).  A daemon that wakes up late therefore stores nothing.

Daemons that share a catalog (`join`) hold that lock in share mode, and each a lock of its own.  The others take one whose lock
has been free for a while for dead, and delete its row (catalog.leases): it stores nothing from then on.

A catalog in a file has a lock file beside it, since another home may name the catalog by its URL.  A copy of the file
has a lock of its own but names the same Delta tables and slots.  The catalog therefore stores its own path and inode,
which distinguish a copy from a file that was moved.  If the file was moved, the paths of tables in its directory follow.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Insert, delete, event, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from catalog import schema
from catalog.database import NOT_OURS, Database, failures, keep_alive, now, typed
from catalog.home_lock import DaemonLock, running_daemon
from pubsub.errors import ObjectInUse, PubsubError

#: An arbitrary advisory lock; its second key is the oid of the node's table, by which schemas of a database differ.
_LOCK: Final = 0x70756273
_SESSION: Final = """
SELECT set_config(name, CASE name WHEN 'application_name' THEN 'pubsub daemon' ELSE '0' END, false)
  FROM pg_catalog.pg_settings
 WHERE name IN ('application_name', 'idle_session_timeout')
"""
#: What a daemon holds besides while it starts again with other settings.
_RESERVED: Final = _LOCK + 1
_TRY: Final = f"SELECT pg_catalog.pg_try_advisory_lock({_LOCK}, 'pubsub_node'::regclass::oid::int8::bit(32)::int4)"
_RESERVE: Final = _TRY.replace(str(_LOCK), str(_RESERVED))
_TRY_SHARED: Final = _TRY.replace("_lock(", "_lock_shared(")
#: The keys of the daemons that share a catalog: the upper half as in catalog.command_locks, and the lower one's highest bit set.
MEMBER_KEY: Final = "('pubsub_node'::regclass::oid::int8 << 32 | 2147483648 | {})"
_IS_HELD: Final = f"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_locks
                WHERE locktype = 'advisory' AND classid IN ({_LOCK}, {_RESERVED})
                      AND objid = 'pubsub_node'::regclass::oid AND objsubid = 2 AND granted
                      AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
"""
_HINT: Final = (
    "Stop it first, or give this node a catalog of its own: a catalog has one daemon at a time, or several that were all started "
    "with --shared."
)

_T = schema.node


class Holder(Database):
    """The part of the catalog by which a process becomes its daemon."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self._proving = asyncio.Lock()
        self._session: AsyncConnection | None = None
        self._file_lock: DaemonLock | None = None
        # Whether another process holds the catalog, which has started this one.
        self._is_held_elsewhere = False

    @property
    def epoch(self) -> int | None:
        """The epoch of this process's daemon; None in a client, and where the catalog is a file."""
        return self._epoch

    @property
    def is_sharing(self) -> bool:
        """Whether this process's daemon is one of several."""
        return self._is_sharing

    def belong_to(self, epoch: int | None, *, sharing: bool = False) -> None:
        """Be a process of the daemon of this epoch, which holds the catalog, or is one of those that share it."""
        self._epoch, self._is_sharing, self._is_held_elsewhere = epoch, sharing, True

    async def hold(self, home: Path, pid: int | None = None) -> None:
        """Become the catalog's daemon, until `let_go`.  The caller must hold the lock of the home.

        Raises ObjectInUse, which names the daemon that runs, or the catalog that this one is a copy of.
        """
        if self.is_shared:
            await self._begin(home, pid, sharing=False)
            return
        path = self._file
        self._file_lock = DaemonLock.acquire(path.parent, file=_lock_file(path), what=f'catalog "{path}"', hint=_HINT)
        try:
            await self._check_place(path)
            async with self._write(bump=True) as connection:
                await connection.execute(delete(schema.daemon))
                await connection.execute(_registered(0, home, pid))
        except BaseException:
            await self.let_go()
            raise

    async def join(self, home: Path, pid: int | None = None) -> None:
        """Become one of the daemons that share the catalog, until `let_go`.  The caller must hold the lock of the home.

        Raises ObjectInUse if one has it for itself.
        """
        await self._begin(home, pid, sharing=True)

    async def _begin(self, home: Path, pid: int | None, *, sharing: bool) -> None:
        self._is_sharing = sharing
        self._session = await self._connect()
        try:
            if not await self._try_catalog():
                raise await self._taken(f'a daemon is already running on catalog "{self.url}"')
            self._epoch = await self._next_epoch()
            if not await self._try_own():
                raise PubsubError("could not lock the catalog: the lock of a new daemon is held", sqlstate="55006")
            async with self._answering(), self._write_lock, self._writer.begin() as connection:
                # Daemons that were killed.  Of those that share it the lock of the home tells for that home's alone.
                gone, d = delete(schema.daemon), schema.daemon.c
                if sharing:
                    gone = gone.where(d.host == socket.gethostname(), d.home == str(home))
                await connection.execute(gone)
                await connection.execute(_registered(self._epoch, home, pid))
                counter = schema.node.c.change_counter
                await connection.execute(update(schema.node).values({counter: counter + 1}))
        except failures(self._engine) as error:
            await self.let_go()
            raise typed(error) from error
        except BaseException:
            await self.let_go()
            raise

    async def clear_daemon(self) -> None:
        """Remove the registration of this process's daemon, which ends in order."""
        async with self._write(bump=True) as connection:
            await connection.execute(delete(schema.daemon).where(schema.daemon.c.id == (self._epoch or 0)))

    @property
    def is_shared(self) -> bool:
        """Whether processes on other machines can have this catalog, too."""
        return self._engine.dialect.name == "postgresql"

    async def has_daemon(self) -> bool:
        """Return whether a process, of whatever home, is the catalog's daemon, or is about to be again."""
        if not self.is_shared:
            return running_daemon(self._file.parent, file=_lock_file(self._file)) is not None
        async with self._read() as connection:
            return bool((await connection.exec_driver_sql(_IS_HELD)).scalar_one())

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """Keep daemons that stand by waiting while this one lets go of the catalog and holds it again.

        It outlasts `close`.  Raises PubsubError if the catalog's server does not answer.  Nothing for a catalog in a file.
        """
        if not self.is_shared:
            yield
            return
        session = await self._connect()
        try:
            try:
                async with self._answering():
                    await session.exec_driver_sql(_RESERVE)
            except failures(self._engine) as error:
                raise typed(error) from error
            yield
        finally:
            await self._end_session(session)

    async def prove(self) -> None:
        """Check that this process still is the catalog's daemon.

        Does nothing in a process without an epoch: a client, or a daemon whose catalog is a file.  Raises ObjectInUse
        when another process has become the daemon, and PubsubError while that cannot be known.
        """
        if self._epoch is None:
            return
        if self._is_held_elsewhere:
            await self._check_epoch()
            return
        async with self._proving:
            if self._session is not None:
                try:
                    async with self._answering():
                        await self._session.exec_driver_sql("SELECT 1")
                    return
                except self._lost:
                    await self._drop_session()
            self._session = await self._connect()
            try:
                held = await self._try_catalog() and await self._try_own()
                # Another daemon, if one ran meanwhile, has raised it.
                await self._check_epoch()
                if not held:
                    raise PubsubError(
                        "could not access the catalog: an earlier session of this daemon still holds its lock",
                        sqlstate="55006",
                        hint="The catalog's server lets go of it as soon as it finds that session's connection broken.",
                    )
            except BaseException:
                # Also if the lock was free: another daemon has had it meanwhile, and the next one may.
                await self._drop_session()
                raise

    async def let_go(self) -> None:
        """Release the catalog: another process may become its daemon."""
        self._epoch, self._is_sharing = None, False
        if self._session is not None:
            await self._drop_session()
        if self._file_lock is not None:
            self._file_lock.release()
            self._file_lock = None

    @property
    def _file(self) -> Path:
        """The file of a catalog on SQLite."""
        return Path(str(self._engine.url.database))

    async def _connect(self) -> AsyncConnection:
        """Open the session for the lock.  Keepalives let the server notice soon that this process is unreachable."""
        engine = create_async_engine(
            self._engine.url,
            hide_parameters=True,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=self.connect_args,
        )
        event.listen(engine.sync_engine, "connect", keep_alive)
        try:
            async with self._answering(), AsyncExitStack() as unfinished:
                connection = await engine.connect()
                unfinished.push_async_callback(self._end_session, connection)
                await connection.exec_driver_sql(_SESSION)
                unfinished.pop_all()
                return connection
        except failures(self._engine) as error:
            raise typed(error) from error

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        """The exceptions of a session that is gone or does not answer."""
        return (PubsubError, *failures(self._engine))

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._end_session(session)

    async def _end_session(self, session: AsyncConnection) -> None:
        try:
            async with self._answering():
                # Invalidated, not closed in order: that would wait for a connection which does not answer.
                await session.invalidate()
                await session.close()
        except self._lost:
            return  # it is gone already

    async def _try_catalog(self) -> bool:
        return await self._try(_TRY_SHARED if self._is_sharing else _TRY)

    async def _try_own(self) -> bool:
        """Take the lock by which the daemons that share the catalog know that this one lives; nothing if there is one only."""
        if not self._is_sharing:
            return True
        return await self._try(f"SELECT pg_catalog.pg_try_advisory_lock({MEMBER_KEY.format(self._epoch)})")

    async def _try(self, lock: str) -> bool:
        assert self._session is not None
        try:
            async with self._answering():
                return bool((await self._session.exec_driver_sql(lock)).scalar_one())
        except failures(self._engine) as error:
            raise typed(error) from error

    async def _next_epoch(self) -> int:
        """Raise the epoch in the session that holds the lock: one that is gone must not end the daemon that has it now."""
        assert self._session is not None
        epoch = func.coalesce(_T.c.daemon_epoch, 0) + 1
        try:
            async with self._answering():
                raised = await self._session.execute(update(_T).values(daemon_epoch=epoch).returning(_T.c.daemon_epoch))
                return int(raised.scalar_one())
        except failures(self._engine) as error:
            raise typed(error) from error

    async def _check_epoch(self) -> None:
        async with self._read() as connection:
            if await self._has_catalog(connection, lock=False):
                return
        raise await self._taken(NOT_OURS)

    async def _taken(self, message: str) -> ObjectInUse:
        d = schema.daemon.c
        async with self._read() as connection:
            found = await connection.execute(select(d.pid, d.host, d.started).order_by(d.id.desc()).limit(1))
            row = found.one_or_none()
        detail = "It is just starting."
        if row is not None:
            since = row.started.isoformat(sep=" ", timespec="seconds")
            detail = f'Its process id is {row.pid} on host "{row.host}", started at {since}.'
        return ObjectInUse(message, detail=detail, hint=_HINT)

    async def _check_place(self, path: Path) -> None:
        """Store where the file lies; raise ObjectInUse if it is a copy of a catalog that still exists.

        A file that was moved within a file system keeps its inode; one that was moved to another leaves no original.
        """
        found = await asyncio.to_thread(path.stat)
        here = {"catalog_path": str(path), "catalog_file": f"{found.st_dev}:{found.st_ino}"}
        async with self._write(bump=False) as connection:
            row = (await connection.execute(select(_T.c.node_id, _T.c.catalog_path, _T.c.catalog_file))).one()
            if row.catalog_path not in (None, here["catalog_path"]) and row.catalog_file != here["catalog_file"]:
                original = Path(row.catalog_path)
                if await asyncio.to_thread(_is_catalog_of, original, row.node_id):
                    raise ObjectInUse(
                        f'catalog "{path}" is a copy of "{original}", which is still there',
                        detail="Both would follow the same replication slots, and write the same Delta tables.",
                        hint=f'Run the daemon on the node in "{original.parent}".  To go on with the copy in its place, '
                        "remove that one first.",
                    )
            await connection.execute(update(_T).values(**here))
            if row.catalog_path not in (None, here["catalog_path"]):
                await _move(connection, f"{Path(row.catalog_path).parent}/", f"{path.parent}/")


def _registered(epoch: int, home: Path, pid: int | None) -> Insert:
    """Return the statement that registers this process, or `pid`, as a running daemon; only its lock proves that it runs."""
    row = {"id": epoch, "pid": pid or os.getpid(), "host": socket.gethostname(), "home": str(home), "started": now()}
    return insert(schema.daemon).values(**row)


async def _move(connection: AsyncConnection, old: str, new: str) -> None:
    """Update the paths of the Delta tables in a directory that was moved, those of pinned snapshots, too."""
    moved = schema.relation.c
    for row in (await connection.execute(select(moved.subid, moved.relid, moved.path))).all():
        if row.path.startswith(old):
            here = (moved.subid == row.subid) & (moved.relid == row.relid)
            path = new + row.path.removeprefix(old)
            await connection.execute(update(schema.relation).where(here).values(path=path))
    pinned = schema.pinned_snapshot.c
    for name, stored in (await connection.execute(select(pinned.name, pinned.tables))).all():
        tables = [
            table | {"path": new + table["path"].removeprefix(old)} if table["path"].startswith(old) else table
            for table in stored
        ]
        await connection.execute(update(schema.pinned_snapshot).where(pinned.name == name).values(tables=tables))


def _is_catalog_of(path: Path, node_id: str) -> bool:
    """Return whether the file at `path` is a catalog of that node."""
    import sqlite3

    if not os.access(path, os.R_OK):
        return False
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            found: Any = connection.execute("SELECT node_id FROM pubsub_node").fetchone()
        finally:
            connection.close()
    except sqlite3.Error:
        return False
    return found is not None and found[0] == node_id


def _lock_file(catalog: Path) -> str:
    return f"{catalog.name}.pid"
