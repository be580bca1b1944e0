"""The daemon's worker processes (the setting worker_processes): starts them, and starts again those that die.

    daemon, share 0 ─┬─► the JVM ◄──────────────────┐
                     ├─► worker process, share 1 ───┤   each with a launcher of its own (worker_process.py)
                     └─► worker process, share 2 ───┘

One that dies costs its subscriptions a restart.  A commit that it had given to the JVM may still be made: its table's next
commit finds that another one was made under its application id, and its worker starts again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from apply.worker_statistics import Figures
from launcher import process_messages as p
from launcher.failures import foreseen, traced, typed
from launcher.share import Share
from pubsub.delta.spark.jvm_address import JvmAddress
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.forks import fence
from pubsub.forks.channel import Channel
from pubsub.memory import resident
from pubsub.processor_time import together
from pubsub.settings import Settings

if TYPE_CHECKING:
    from catalog.store import Catalog
    from pubsub.delta.spark.spark_session import Spark

_LOCK: Final = "workers.lock"
_EARLIER: Final = 60.0
"""Seconds that processes of an earlier daemon, which was killed, are waited for."""
_AGAIN: Final = 1.0
"""Seconds after one has died, before it is started again."""
_LATE: Final = 60.0
"""Seconds that one may take to end beyond drain_timeout, before it is killed."""

logger = structlog.get_logger()


class _Process:
    """One of them, while it runs."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.figures: dict[int, Figures] = {}
        self.spent: dict[str, float] = {}
        self.failure: PubsubError | None = None


class WorkerProcesses:
    """All but the daemon's own.  `run` lasts until `stop`, or `kill`.

    Where another daemon has taken over the catalog, they end, and can do nothing when they are started again; the daemon's own
    launcher finds the same.
    """

    def __init__(self, settings: Settings, catalog: Catalog, spark: Spark, lock: int) -> None:
        self._settings = settings
        self._epoch = catalog.epoch
        self._is_sharing = catalog.is_sharing
        self._spark = spark
        self._running: dict[int, _Process] = {}
        self._stopping = asyncio.Event()
        # The processor time of those that have ended.
        self._spent: dict[str, float] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._lock = lock
        # What ends them with this process, however it ends.
        self._lifeline = os.pipe()

    @classmethod
    async def open(cls, settings: Settings, catalog: Catalog, spark: Spark) -> Self:
        """Wait for the processes of an earlier daemon to end; `run` starts those of this one.  Raises ObjectInUse."""
        return cls(settings, catalog, spark, await asyncio.to_thread(_locked, settings.home / _LOCK))

    async def run(self) -> None:
        """Keep them running."""
        async with asyncio.TaskGroup() as group:
            for number in range(1, self._settings.worker_processes):
                group.create_task(self._keep(number), name=f"worker process {number}")

    def figures(self) -> dict[int, Figures]:
        """Return the figures of their apply workers, by subscription's oid."""
        return {oid: one for process in self._running.values() for oid, one in process.figures.items()}

    def spent(self) -> dict[str, float]:
        """Return the seconds of processor time that they have had, also those that have ended, by part (processor_time)."""
        return together(self._spent, *(one.spent for one in self._running.values()))

    def memory(self) -> int:
        """Return the bytes of memory that they take."""
        return sum(resident(one.process.pid) or 0 for one in self._running.values())

    def wake(self) -> None:
        """Have them look at the catalog at once."""
        self._tell(p.WAKE)

    def reload(self) -> None:
        """Have them take over the settings, which have changed in place."""
        self._tell(p.RELOAD, p.packed(self._settings))

    def stop(self) -> None:
        """Have them drain; `run` returns when they have ended."""
        self._stopping.set()
        self._tell(p.STOP)

    def kill(self) -> None:
        """End them at once."""
        self._stopping.set()
        for one in self._running.values():
            with suppress(ProcessLookupError):
                one.process.kill()

    def close(self) -> None:
        """Let go of what ends them with this process; they have ended."""
        for descriptor in (*self._lifeline, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline, self._lock = (-1, -1), -1

    def _tell(self, kind: bytes, contents: bytes = b"") -> None:
        for one in self._running.values():
            one.channel.send(kind, contents)

    async def _keep(self, number: int) -> None:
        """Run one, again when it has died."""
        while not self._stopping.is_set():
            try:
                failed: Exception = await self._run_one(number)
            except Exception as error:
                # Whatever it is: the other processes go on, and this one's subscriptions must not stand still without a word.
                failed = error
            if self._stopping.is_set():
                return
            known = typed(failed)
            trace = None if foreseen(failed) or isinstance(failed, OSError) else traced(failed)
            logger.error("worker process is started again", reason=known.message, detail=known.detail, exception=trace)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN):
                    await self._stopping.wait()

    async def _run_one(self, number: int) -> PubsubError:
        """Run one to its end, and return why it has ended.  Raises OSError if it cannot be started."""
        running = await self._start(number)
        try:
            code = await self._until_ended(running)
        finally:
            del self._running[number]
            self._spent = together(self._spent, running.spent)
            running.channel.close()
        return running.failure or PubsubError(f"it has ended with exit code {code}")

    async def _until_ended(self, running: _Process) -> int:
        ended = asyncio.create_task(running.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait({ended}, timeout=self._settings.drain_timeout + _LATE)
            if not ended.done():
                logger.warning("a worker process did not end in time: it is killed", pid=running.process.pid)
                running.process.kill()
            return await ended
        finally:
            stopping.cancel()
            if not ended.done():
                running.process.kill()
                await ended

    async def _start(self, number: int) -> _Process:
        share = Share(number, self._settings.worker_processes, frozenset() if self._is_sharing else None)
        level = logging.DEBUG if logger.is_enabled_for(logging.DEBUG) else logging.INFO
        task = p.packed(p.Task(self._settings, share, self._epoch, level))
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._lifeline[0], self._lock)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "launcher.worker_process", *map(str, descriptors[:2])),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=descriptors,
                )
            except BaseException:
                ours.close()
                raise
        channel = Channel(ours, lambda kind, contents, _: self._message(running, kind, contents), lambda: None)
        running = self._running[number] = _Process(process, channel)
        channel.send(p.TASK, task)
        if self._stopping.is_set():
            channel.send(p.STOP)
        logger.info("worker process has started", pid=process.pid)
        return running

    def _message(self, running: _Process, kind: bytes, contents: bytes) -> None:
        if kind == p.FIGURES:
            told: p.Told = p.unpacked(contents)
            running.figures, running.spent = told.figures, told.spent
        elif kind == p.EVENT:
            method, fields = p.unpacked(contents)
            _log(method, fields)
        elif kind == p.FAILURE:
            running.failure = PubsubError(**p.unpacked(contents))
        elif kind == p.JVM:
            task = asyncio.create_task(self._answer(running))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, running: _Process) -> None:
        """Tell a process where the JVM is, which is started if need be."""
        try:
            answer = p.Answer(await asyncio.to_thread(JvmAddress.of, self._spark))
        except Exception as error:
            # Whatever it is: a thread of that process waits.
            answer = p.Answer(None, typed(error).fields())
        running.channel.send(p.JVM, p.packed(answer))


def _log(method: str, fields: dict[str, Any]) -> None:
    text = fields.pop("event", "")
    getattr(logger, method, logger.info)(text, **fields)


def _locked(path: Path) -> int:
    """Lock a file that the processes of an earlier daemon hold; return its descriptor.  Blocks.  Raises ObjectInUse."""
    try:
        return fence.acquire(
            path, _EARLIER, lambda: logger.info("waiting for an earlier daemon's worker processes to end")
        )
    except TimeoutError as error:
        raise ObjectInUse(
            "worker processes of an earlier daemon are still running",
            detail=f'They have held "{path}" for more than {_EARLIER:.0f} s.',
            hint="End the processes of launcher.worker_process that a daemon killed earlier left behind.",
        ) from error
