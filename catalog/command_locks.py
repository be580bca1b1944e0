"""Locks that a command's process holds while it works at a subscription.

The kernel, or the catalog's server, lets go of one when that process ends, however it ends.  On PostgreSQL it is an advisory lock of a
session of its own, so it holds among processes on any machine; beside a catalog in a file it is a lock on another file.

    pause     the subscription is paused by the command (catalog.pauses)
    verify    the subscription is being verified
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from catalog.catalog_lock import Holder
from catalog.database import failures, typed
from catalog.home_lock import try_lock
from pubsub.errors import ObjectInUse, PubsubError

#: How often a command's session is asked whether it is still there, in seconds.
_PROVE: Final = 0.5

Purpose = Literal["pause", "verify"]

#: The key's upper half is the oid of the node's table, by which the schemas of a database differ; the daemon's lock has two keys.
#: The lower one is the subscription's oid, with a bit for the purpose; its highest bit is a daemon's (catalog.catalog_lock).
_TRY: Final = "SELECT pg_catalog.pg_try_advisory_lock('pubsub_node'::regclass::oid::int8 << 32 | {})"
_BITS: Final[dict[Purpose, int]] = {"pause": 0, "verify": 1 << 30}
_SUFFIXES: Final[dict[Purpose, str]] = {"pause": "", "verify": ".verify"}


@dataclass(frozen=True, slots=True)
class CommandLock:
    """A lock that is held: `unlock` gives it back; `prove` raises once it is gone, of itself."""

    unlock: Callable[[], Awaitable[None]]
    prove: Callable[[], Coroutine[Any, Any, object]]


class LockLost(PubsubError):
    """A command's lock was lost while it ran: what it excludes may have begun."""

    default_sqlstate = "08006"


class CommandLocks(Holder):
    """The part of the catalog by which commands exclude others."""

    @asynccontextmanager
    async def verifying(self, oid: int, name: str) -> AsyncIterator[None]:
        """Be the only one to verify the subscription, as long as the body runs.

        Raises ObjectInUse, which has its `name`, while another process does; LockLost: the body is cancelled then.
        """
        lock = await self._try_command_lock("verify", oid)
        if lock is None:
            raise ObjectInUse(f'subscription "{name}" is being verified by another process', hint="Wait for its end.")
        try:
            async with proven(lock):
                yield
        finally:
            await lock.unlock()

    async def _try_command_lock(self, purpose: Purpose, oid: int) -> CommandLock | None:
        """Take the subscription's lock for this purpose; return None if another holds it."""
        if self._engine.dialect.name != "postgresql":
            path = Path(str(self._engine.url.database))
            return _lock(path.with_name(f"{path.name}.{oid}{_SUFFIXES[purpose]}.lock"))
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
                    raise LockLost(
                        "the command has lost its lock in the catalog, and cannot go on",
                        detail="The session that held it has ended, or its server does not answer.",
                        hint="Look at what the command has done, and give it again.",
                    ) from error

        try:
            async with self._answering():
                if (await session.exec_driver_sql(_TRY.format(oid | _BITS[purpose]))).scalar_one():
                    return CommandLock(unlock, prove)
        except failures(self._engine) as error:
            await unlock()
            raise typed(error) from error
        except BaseException:
            await unlock()
            raise
        await unlock()
        return None


@asynccontextmanager
async def proven(lock: CommandLock) -> AsyncIterator[None]:
    """Cancel the body, and raise LockLost, once the lock is gone."""
    try:
        async with asyncio.TaskGroup() as group:
            proving = group.create_task(lock.prove())
            yield
            proving.cancel()
    except BaseExceptionGroup as errors:
        lost, others = errors.split(LockLost)
        raise next(iter((lost or others or errors).exceptions)) from None


async def never_lost() -> Any:
    """A lock of the kernel's is there as long as the process."""
    await asyncio.Event().wait()


def _lock(path: Path) -> CommandLock | None:
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

    return CommandLock(unlock, never_lost)


def _unlock(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    # Closing is not enough: a child between fork and exec still has the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
