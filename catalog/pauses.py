"""Pause a subscription for a command: no worker runs meanwhile.

The pause is stored, so that the daemon ends the workers, and it belongs to a lock that the command's process holds: the kernel, or the
catalog's server, lets go of it when that process ends, however it ends.  The daemon ends a pause whose lock is free.

    command   lock ─► paused ─► workers have ended ─► its work ─► not paused ─► unlock
    killed    lock ─► paused ─► workers have ended ─► its ╳        the daemon: the lock is free ─► not paused

Two commands of one subscription exclude each other by it; the later one waits, as for PostgreSQL's lock of the object
(subscriptioncmds.c: AlterSubscription, LockSharedObject).  On PostgreSQL it is an advisory lock of a session of its own, beside a
catalog in a file a lock on another file.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from sqlalchemy import select

from catalog import schema
from catalog.catalog_lock import Holder
from catalog.database import failures, typed
from catalog.home_lock import try_lock
from catalog.subscriptions import Subscriptions
from pubsub.errors import PubsubError, UndefinedObject

#: How often a command looks whether an earlier one has ended, in seconds.
_LOOK: Final = 0.1

#: The key's upper half is the oid of the node's table, by which the schemas of a database differ; the daemon's lock has two keys.
_TRY: Final = "SELECT pg_catalog.pg_try_advisory_lock('pubsub_node'::regclass::oid::int8 << 32 | {})"

_T = schema.subscription

Unlock = Callable[[], Awaitable[None]]


class Pauses(Subscriptions, Holder):
    """The part of the catalog by which commands pause subscriptions."""

    @asynccontextmanager
    async def pause(self, oid: int, command: str) -> AsyncIterator[None]:
        """Store that `command` pauses the subscription, as long as the body runs; wait for another such command first.

        Each of both raises the subscription's generation.  Raises UndefinedObject.
        """
        unlock = await self._lock_pause(oid)
        try:
            paused = f'{command} of process {os.getpid()} on host "{socket.gethostname()}"'
            try:
                # Inside: a command that is interrupted here has stored it all the same.
                await self.alter_subscription(oid, paused=paused)
                yield
            finally:
                with suppress(UndefinedObject):  # DROP SUBSCRIPTION
                    await self.alter_subscription(oid, paused=None)
        finally:
            await unlock()

    async def end_abandoned_pause(self, oid: int) -> str | None:
        """End the subscription's pause if its command has ended without doing so; return what paused it, None if nothing was ended."""
        unlock = await self._try_pause_lock(oid)
        if unlock is None:
            return None
        try:
            async with self._read() as connection:
                found = await connection.execute(select(_T.c.paused).where(_T.c.oid == oid))
                paused: str | None = found.scalar_one_or_none()
            if paused is not None:
                await self.alter_subscription(oid, paused=None)
            return paused
        finally:
            await unlock()

    async def _lock_pause(self, oid: int) -> Unlock:
        while True:
            unlock = await self._try_pause_lock(oid)
            if unlock is not None:
                return unlock
            await asyncio.sleep(_LOOK)

    async def _try_pause_lock(self, oid: int) -> Unlock | None:
        """Take the lock of the subscription's pause; return what gives it back, None if another holds it."""
        if self._engine.dialect.name != "postgresql":
            path = Path(str(self._engine.url.database))
            return _lock(path.with_name(f"{path.name}.{oid}.lock"))
        session = await self._connect()

        async def unlock() -> None:
            await self._end_session(session)

        try:
            async with self._answering():
                if (await session.exec_driver_sql(_TRY.format(oid))).scalar_one():
                    return unlock
        except failures(self._engine) as error:
            await unlock()
            raise typed(error) from error
        except BaseException:
            await unlock()
            raise
        await unlock()
        return None


def _lock(path: Path) -> Unlock | None:
    """Lock the file, and make it.  It is removed before the lock is given back, so a lock on a removed file is none."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PubsubError(f'could not open lock file "{path}": {error.strerror}', sqlstate="58030") from error
        try:
            if not try_lock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                return None
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    break
        except OSError as error:
            os.close(descriptor)
            raise PubsubError(f'could not lock file "{path}": {error.strerror}', sqlstate="58030") from error
        os.close(descriptor)

    async def unlock() -> None:
        _unlock(path, descriptor)

    return unlock


def _unlock(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    # Closing is not enough: a child between fork and exec still has the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
