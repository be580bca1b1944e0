"""One daemon per catalog, even if several homes use the same catalog.

The lock of a home (catalog.home_lock) does not exclude the daemon of another home.

On PostgreSQL the daemon keeps a session that only holds an advisory lock: the server releases the lock when the session
ends, however it ends.  So the daemon must check that its session lives (`prove`) before it commits anything:

    session answers                          the lock is held
    session is gone, the lock is free        take it again; the epoch is unchanged, so no other daemon ran meanwhile
    session is gone, and the epoch moved     another daemon took over: this one ends

Each new daemon raises the epoch, and every write of a daemon to the catalog requires the epoch to be its own
(catalog.database).  A daemon that wakes up late therefore stores nothing.

A catalog in a file has a lock file beside it, since another home may name the catalog by its URL.  A copy of the file
has a lock of its own but names the same Delta tables and slots.  The catalog therefore stores its own path and inode,
which distinguish a copy from a file that was moved.  If the file was moved, the paths of tables in its directory follow.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from catalog import schema
from catalog.database import NOT_OURS, Database, failures, typed
from catalog.home_lock import DaemonLock, running_daemon
from pubsub.errors import ObjectInUse, PubsubError

#: An arbitrary advisory lock; its second key is the oid of the node's table, by which schemas of a database differ.
_LOCK: Final = 0x70756273
_SESSION: Final = """
SELECT set_config(name, CASE name WHEN 'tcp_keepalives_count' THEN '3' WHEN 'tcp_keepalives_idle' THEN '5'
                                  WHEN 'tcp_keepalives_interval' THEN '5' WHEN 'application_name' THEN 'pubsub daemon'
                                  ELSE '0' END, false)
  FROM pg_catalog.pg_settings
 WHERE name IN ('application_name', 'idle_session_timeout', 'tcp_keepalives_count', 'tcp_keepalives_idle',
                'tcp_keepalives_interval')
"""
#: What a daemon holds besides while it starts again with other settings.
_RESERVED: Final = _LOCK + 1
_TRY: Final = f"SELECT pg_catalog.pg_try_advisory_lock({_LOCK}, 'pubsub_node'::regclass::oid::int8::bit(32)::int4)"
_RESERVE: Final = _TRY.replace(str(_LOCK), str(_RESERVED))
_IS_HELD: Final = f"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_locks
                WHERE locktype = 'advisory' AND classid IN ({_LOCK}, {_RESERVED})
                      AND objid = 'pubsub_node'::regclass::oid AND objsubid = 2 AND granted
                      AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
"""
_HINT: Final = "Stop it first, or give this node a catalog of its own: a catalog has one daemon at a time."

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

    def belong_to(self, epoch: int | None) -> None:
        """Be a process of the daemon of this epoch, which holds the catalog."""
        self._epoch, self._is_held_elsewhere = epoch, True

    async def hold(self) -> None:
        """Become the catalog's daemon, until `let_go`.  The caller must hold the lock of the home.

        Raises ObjectInUse, which names the daemon that runs, or the catalog that this one is a copy of.
        """
        if self.is_shared:
            self._session = await self._connect()
            try:
                if not await self._try():
                    raise await self._taken(f'a daemon is already running on catalog "{self.url}"')
                self._epoch = await self._next_epoch()
            except BaseException:
                await self.let_go()
                raise
            return
        path = self._file
        self._file_lock = DaemonLock.acquire(path.parent, file=_lock_file(path), what=f'catalog "{path}"', hint=_HINT)
        try:
            await self._check_place(path)
        except BaseException:
            await self.let_go()
            raise

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
            held = False
            try:
                held = await self._try()
                # Another daemon, if one ran meanwhile, has raised it.
                await self._check_epoch()
                if not held:
                    raise PubsubError(
                        "could not access the catalog: an earlier session of this daemon still holds its lock",
                        sqlstate="55006",
                        hint="The catalog's server lets go of it as soon as it finds that session's connection broken.",
                    )
            finally:
                if not held:
                    await self._drop_session()

    async def let_go(self) -> None:
        """Release the catalog: another process may become its daemon."""
        self._epoch = None
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
        try:
            async with self._answering():
                connection = await engine.connect()
                await connection.exec_driver_sql(_SESSION)
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

    async def _try(self) -> bool:
        assert self._session is not None
        try:
            async with self._answering():
                return bool((await self._session.exec_driver_sql(_TRY)).scalar_one())
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
            epoch = (await connection.execute(select(_T.c.daemon_epoch))).scalar_one()
        if epoch != self._epoch:
            raise await self._taken(NOT_OURS)

    async def _taken(self, message: str) -> ObjectInUse:
        async with self._read() as connection:
            row = (await connection.execute(select(_T.c.daemon_pid, _T.c.daemon_host, _T.c.daemon_started))).one()
        detail = "It is just starting."
        if row.daemon_pid is not None:
            since = row.daemon_started.isoformat(sep=" ", timespec="seconds")
            detail = f'Its process id is {row.daemon_pid} on host "{row.daemon_host}", started at {since}.'
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
