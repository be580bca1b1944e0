"""The catalog on a SQLite database in memory, in the loop's own thread: transactions as they are, without aiosqlite's threads."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import StaticPool

from catalog import database
from catalog.command_locks import CommandLock, Purpose, never_lost
from catalog.store import Catalog
from tests.simulation import sessions
from tests.simulation.life import Life


class _Connection:
    """Has of AsyncConnection what the catalog uses."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def execute(self, *args: Any) -> Any:
        return self._connection.execute(*args)

    async def exec_driver_sql(self, *args: Any) -> Any:
        return self._connection.exec_driver_sql(*args)

    async def run_sync(self, function: Any, *args: Any) -> Any:
        return function(self._connection, *args)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Connection]:
        with self._connection.begin():
            yield self


class CatalogEngine:
    """Has of AsyncEngine what the catalog uses; each transaction takes some time, and may fail before or after it.

    Nothing waits inside a transaction, so one connection serves all.  `server`: the catalog is to be taken for one in
    PostgreSQL, whose daemons exclude each other by a lock that a broken connection loses.
    """

    def __init__(self, engine: Engine, life: Life | None, *, server: bool = False) -> None:
        self._engine, self._life = engine, life
        self.dialect = SimpleNamespace(name="postgresql" if server else "sqlite")
        self.url = engine.url

    def execution_options(self, **_: Any) -> CatalogEngine:
        return self

    async def dispose(self) -> None: ...

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[_Connection]:
        if self._life is not None:
            await self._life.step("reading the catalog")
        with self._engine.connect() as connection:
            yield _Connection(connection)
        if self._life is not None:
            await self._life.wait()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Connection]:
        life = self._life
        if life is not None:
            await life.step("writing the catalog")
        with self._engine.connect() as connection:
            with connection.begin():
                yield _Connection(connection)
                if life is not None:
                    life.writes("before a commit to the catalog")
        _READ.clear()
        _WRITES[0] += 1
        if life is not None:
            life.writes("after a commit to the catalog")
            await life.step("writing the catalog, though it was stored,")


class _LockSession:
    """The session that holds the catalog's lock for a daemon (catalog.catalog_lock)."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store, self.life = store, life
        life.ends.append(self._end)

    async def exec_driver_sql(self, sql: str) -> Any:
        await self.life.step("the catalog's lock")
        if sql != "SELECT 1":
            if self._store.holder is None:
                self._store.holder = self
            return _One(self._store.holder is self)
        if self._store.holder is not self:
            raise OSError("the connection was closed")
        return None

    async def execute(self, statement: Any) -> Any:
        await self.life.step("the catalog's lock")
        if self._store.holder is not self:
            raise OSError("the connection was closed")
        _READ.clear()
        _WRITES[0] += 1
        with _ENGINE.begin() as connection:
            return _One(connection.execute(statement).scalar_one())

    async def invalidate(self) -> None:
        self._end()

    async def close(self) -> None: ...

    def _end(self) -> None:
        if self._store.holder is self:
            self._store.holder = None


class _One:
    def __init__(self, value: object) -> None:
        self._value = value

    def scalar_one(self) -> object:
        return self._value


_READ: dict[tuple[object, ...], Any] = {}
"""What was read since the last write, by method and arguments: SQLAlchemy would take most of a history's time."""
_WRITES = [0]


class SimulatedCatalog(Catalog):
    """A process's catalog.  What only reads, reads anew after each write."""

    def __init__(self, engine: CatalogEngine, store: Store, life: Life | None) -> None:
        super().__init__(engine)  # type: ignore[arg-type]
        self._store, self._life = store, life

    async def hold(self, home: Path, pid: int | None = None) -> None:
        """As Holder.hold; of a file only the lock of its home counts here, which the world keeps."""
        if self._engine.dialect.name == "postgresql":
            await super().hold(home, pid)

    async def has_daemon(self) -> bool:
        """As Holder.has_daemon: the world has one supervisor."""
        return sessions.WORLD[0].supervisor.living is not None

    async def _known(self, read: Any, *args: object) -> Any:
        key = (read.__name__, *args)
        if key in _READ:
            found = _READ[key]
            if self._life is not None:
                await self._life.step("reading the catalog")
                await self._life.wait()
        else:
            before = _WRITES[0]
            found = await read(self, *args)
            if _WRITES[0] == before:
                _READ[key] = found
        return list(found) if isinstance(found, list) else found

    async def _try_command_lock(self, purpose: Purpose, oid: int) -> CommandLock | None:
        """As CommandLocks._try_command_lock, without a session or a file: a process that dies gives its lock back."""
        assert purpose == "pause"
        life, holders = self._life, self._store.pausing
        assert life is not None
        await life.step("the lock of a pause")
        if holders.get(oid) is not None:
            return None
        holders[oid] = life

        def end() -> None:
            if holders.get(oid) is life:
                del holders[oid]

        async def unlock() -> None:
            life.check()
            end()

        life.ends.append(end)
        return CommandLock(unlock, never_lost)

    async def _connect(self) -> Any:
        assert self._life is not None
        await self._life.step("a session for the catalog's lock")
        return _LockSession(self._store, self._life)


def _reading(read: Any) -> Any:
    async def known(self: SimulatedCatalog, *args: object) -> Any:
        return await self._known(read, *args)

    return known


def _for_people(name: str) -> Any:
    async def nothing(self: SimulatedCatalog, *_: object, **__: object) -> Any:
        if self._life is not None:
            await self._life.step(f"{name} in the catalog")
        return []

    return nothing


for _name in (
    "change_counter",
    "copy_plan",
    "node",
    "origin",
    "pending_requests",
    "relation",
    "relations",
    "sequences",
    "state",
):
    setattr(SimulatedCatalog, _name, _reading(getattr(Catalog, _name)))
for _name in ("subscription", "subscriptions"):
    setattr(SimulatedCatalog, _name, _reading(getattr(Catalog, _name)))
# What is stored for people alone, and decides nothing.
for _name in ("clear_worker_stats", "put_statistics", "put_copy_progress", "clear_daemon"):
    setattr(SimulatedCatalog, _name, _for_people(_name))
for _name in ("note_command", "take_commands"):
    setattr(SimulatedCatalog, _name, _for_people(_name))

_CONNECTION: Final = sqlite3.connect(":memory:", check_same_thread=False)
_ENGINE: Final = create_engine("sqlite://", creator=lambda: _CONNECTION, poolclass=StaticPool)
_TEMPLATE: list[bytes] = []


def prepare() -> None:
    """Make the database that each history begins with, once."""
    if not _TEMPLATE:
        asyncio.run(database.prepare(CatalogEngine(_ENGINE, None)))  # type: ignore[arg-type]
        # The node's identifier is part of slots' names.
        _CONNECTION.execute("UPDATE pubsub_node SET node_id = '4711'")
        _CONNECTION.commit()
        _TEMPLATE.append(_CONNECTION.serialize())


class Store:
    """The catalog's database, which outlives the processes.  `holder`: the session that has the lock of one in PostgreSQL."""

    def __init__(self, *, server: bool) -> None:
        prepare()
        _CONNECTION.deserialize(_TEMPLATE[0])
        _READ.clear()
        self.holder: _LockSession | None = None
        self.pausing: dict[int, Life] = {}
        self._server = server

    def holder_of(self) -> Life | None:
        """Return the process that has the lock."""
        return None if self.holder is None else self.holder.life

    def opened(self, life: Life | None) -> SimulatedCatalog:
        """Return the catalog as a process has it open; None: as the oracle has."""
        return SimulatedCatalog(CatalogEngine(_ENGINE, life, server=self._server), self, life)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return what is stored, at once."""
        return _CONNECTION.execute(sql, values).fetchall()
