"""Pause a subscription for a command: no worker runs meanwhile.

The pause is stored, so that the daemon ends the workers, and it belongs to a lock that the command's process holds
(catalog.command_locks).  The daemon ends a pause whose lock is free.

    command   lock ─► paused ─► workers have ended ─► its work ─► not paused ─► unlock
    killed    lock ─► paused ─► workers have ended ─► its ╳        the daemon: the lock is free ─► not paused

A command whose session there is gone has no lock: it ends with an error, before the daemon's workers run beside it for long.

Two commands of one subscription exclude each other by it; the later one waits, as for PostgreSQL's lock of the object
(subscriptioncmds.c: AlterSubscription, LockSharedObject).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from sqlalchemy import select

from catalog import schema
from catalog.command_locks import CommandLock, CommandLocks, LockLost, proven
from catalog.subscriptions import Subscriptions
from pubsub.errors import UndefinedObject

#: How often a command looks whether an earlier one has ended, in seconds.
_LOOK: Final = 0.1

_T = schema.subscription


class Pauses(Subscriptions, CommandLocks):
    """The part of the catalog by which commands pause subscriptions."""

    @asynccontextmanager
    async def pause(self, oid: int, command: str) -> AsyncIterator[None]:
        """Store that `command` pauses the subscription, as long as the body runs; wait for another such command first.

        Each of both raises the subscription's generation.  Raises UndefinedObject, and LockLost: the body is cancelled then.
        """
        lock = await self._lock_pause(oid)
        try:
            paused = f'{command} of process {os.getpid()} on host "{socket.gethostname()}"'
            try:
                async with proven(lock):
                    # Inside: a command that is interrupted here has stored it all the same.
                    await self.alter_subscription(oid, paused=paused)
                    yield
            except LockLost:
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
        lock = await self._try_command_lock("pause", oid)
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

    async def _lock_pause(self, oid: int) -> CommandLock:
        while True:
            lock = await self._try_command_lock("pause", oid)
            if lock is not None:
                return lock
            await asyncio.sleep(_LOOK)
