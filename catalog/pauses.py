"""Pause a subscription for a command: no worker runs meanwhile.

The pause is stored, so that the daemon ends the workers, and it belongs to a lock that the command's process holds: the kernel, or the
catalog's server, lets go of it when that process ends, however it ends.  The daemon ends a pause whose lock is free.

    command   lock ─► paused ─► workers have ended ─► its work ─► not paused ─► unlock
    killed    lock ─► paused ─► workers have ended ─► its ╳        the daemon: the lock is free ─► not paused

A command whose session there is gone has no lock: it ends with an error, before the daemon's workers run beside it for long.

Two commands of one subscription exclude each other by it; the later one waits, as for PostgreSQL's lock of the object
(subscriptioncmds.c: AlterSubscription, LockSharedObject).  On PostgreSQL it is an advisory lock of a session of its own, beside a
catalog in a file a lock on another file.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from sqlalchemy import select

from catalog import schema
from catalog.catalog_lock import Holder
from catalog.database import failures, typed
from catalog.home_lock import try_lock
from catalog.subscriptions import Subscriptions
from pubsub.errors import PubsubError, UndefinedObject

#: How often a command looks whether an earlier one has ended, in seconds.
_LOOK: Final = 0.1
#: How often a command's session is asked whether it is still there, in seconds.
_PROVE: Final = 0.5

#: The key's upper half is the oid of the node's table, by which the schemas of a database differ; the daemon's lock has two keys.
_TRY: Final = "SELECT pg_catalog.pg_try_advisory_lock('pubsub_node'::regclass::oid::int8 << 32 | {})"

_T = schema.subscription


@dataclass(frozen=True, slots=True)
class PauseLock:
    """The lock of a pause: `unlock` gives it back; `prove` raises once it is gone, of itself."""

    unlock: Callable[[], Awaitable[None]]
    prove: Callable[[], Coroutine[Any, Any, object]]


class PauseLost(PubsubError):
    """A command's pause may have been ended while it ran."""

    default_sqlstate = "08006"


class Pauses(Subscriptions, Holder):
    """The part of the catalog by which commands pause subscriptions."""

    @asynccontextmanager
    async def pause(self, oid: int, command: str) -> AsyncIterator[None]:
        """Store that `command` pauses the subscription, as long as the body runs; wait for another such command first.

        Each of both raises the subscription's generation.  Raises UndefinedObject, and PauseLost: the body is cancelled then.
        """
        lock = await self._lock_pause(oid)
        try:
            paused = f'{command} of process {os.getpid()} on host "{socket.gethostname()}"'
            try:
                async with _proven(lock):
                    # Inside: a command that is interrupted here has stored it all the same.
                    await self.alter_subscription(oid, paused=paused)
                    yield
            except PauseLost:
                # The daemon ends it, and has perhaps done so: another command's may be stored by now.
                raise
            except BaseException:
                await self._end_pause(oid)
                raise
            await self._end_pause(oid)
        finally:
            await lock.unlock()

    async def _end_pause(self, oid: int) -> None:
        with suppress(UndefinedObject):  # DROP SUBSCRIPTION
            await self.alter_subscription(oid, paused=None)

    async def end_abandoned_pause(self, oid: int) -> str | None:
        """End the subscription's pause if its command has ended without doing so; return what paused it, None if nothing was ended."""
        lock = await self._try_pause_lock(oid)
        if lock is None:
            return None
        try:
            async with self._read() as connection:
                found = await connection.execute(select(_T.c.paused).where(_T.c.oid == oid))
                paused: str | None = found.scalar_one_or_none()
            if paused is not None:
                await self.alter_subscription(oid, paused=None)
            return paused
        finally:
            await lock.unlock()

    async def _lock_pause(self, oid: int) -> PauseLock:
        while True:
            lock = await self._try_pause_lock(oid)
            if lock is not None:
                return lock
            await asyncio.sleep(_LOOK)

    async def _try_pause_lock(self, oid: int) -> PauseLock | None:
        """Take the lock of the subscription's pause; return None if another holds it."""
        if self._engine.dialect.name != "postgresql":
            path = Path(str(self._engine.url.database))
            return _lock(path.with_name(f"{path.name}.{oid}.lock"))
        session = await self._connect()

        async def unlock() -> None:
            await self._end_session(session)

        async def prove() -> NoReturn:
            while True:
                await asyncio.sleep(_PROVE)
                try:
                    async with self._answering():
                        await session.exec_driver_sql("SELECT 1")
                except self._lost as error:
                    raise PauseLost(
                        "the command has lost its lock in the catalog, and cannot go on",
                        detail="The session that held it has ended, or its server does not answer.",
                        hint="Look at what the command has done, and give it again.",
                    ) from error

        try:
            async with self._answering():
                if (await session.exec_driver_sql(_TRY.format(oid))).scalar_one():
                    return PauseLock(unlock, prove)
        except failures(self._engine) as error:
            await unlock()
            raise typed(error) from error
        except BaseException:
            await unlock()
            raise
        await unlock()
        return None


@asynccontextmanager
async def _proven(lock: PauseLock) -> AsyncIterator[None]:
    """Cancel the body, and raise PauseLost, once the lock is gone."""
    try:
        async with asyncio.TaskGroup() as group:
            proving = group.create_task(lock.prove())
            yield
            proving.cancel()
    except BaseExceptionGroup as errors:
        lost, others = errors.split(PauseLost)
        raise next(iter((lost or others or errors).exceptions)) from None


async def never_lost() -> Any:
    """A lock of the kernel's is there as long as the process."""
    await asyncio.Event().wait()


def _lock(path: Path) -> PauseLock | None:
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

    return PauseLock(unlock, never_lost)


def _unlock(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    # Closing is not enough: a child between fork and exec still has the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
