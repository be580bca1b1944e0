"""Spark behind asyncio: work is handed to threads, each with a scheduler pool of its own; the event loop only waits.

What is handed over may wait long: a copy for a lock on the publisher, a statement for Spark.  So nothing waits for another's thread:
a thread is started for whoever finds none idle.  How many there are is bounded by those who hand over: a sync worker has one
copy at a time, and commits have a place first (lanes.py: four of one worker side by side, which take 60 % of the time of one).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import structlog

from pubsub import concurrency
from pubsub.delta.lanes import Lane, Places
from pubsub.delta.spark_session import Spark

#: Commits beside the one that each worker may always have.
_SHARED_PLACES: Final = 3
#: More threads than there are workers and places: nobody waits for one.
_THREADS: Final = 1 << 16
_pools = itertools.count(1)
_groups = itertools.count(1)


P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()


def said(error: BaseException) -> str:
    """The line of an error that says what happened; py4j's own, "An error occurred while calling o70.save.", is before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling "):
        del lines[0]
    return lines[0].removeprefix(": ") if lines else type(error).__name__


class Engine:
    """One node's Spark.  `start` may be awaited by many; the first starts the JVM."""

    def __init__(self, spark: Spark) -> None:
        self._spark = spark
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="spark")
        self._local = threading.local()
        self._starting = asyncio.Lock()
        self._fencing = asyncio.Lock()
        self._places = Places(_SHARED_PLACES)

    @property
    def jvm_pid(self) -> int | None:
        """The JVM's process id while it runs."""
        return self._spark.jvm_pid

    def lane(self) -> Lane:
        """A worker's way to hand over its commits."""
        return Lane(self, self._places)

    async def start(self) -> None:
        """Start the JVM if it does not run; an earlier one that died is replaced.  Raises as Spark.start does."""
        async with self._starting:
            if not self._spark.alive():
                log.info("Spark is starting")
                began = time.monotonic()
                await asyncio.to_thread(self._restart)
                log.info("Spark has started", seconds=round(time.monotonic() - began, 1))

    async def fence(self) -> None:
        """Wait until no JVM of an earlier process can commit any more.  Raises ObjectInUse.

        However many workers wait, they take one of the threads that staging and look-ups need.
        """
        async with self._fencing:
            await asyncio.to_thread(self._spark.fence)

    async def run(self, work: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(session, …)` in one of Spark's threads.

        Returns or raises only when the work has ended, also when the caller is cancelled (its jobs are then cancelled too):
        a commit that nobody waits for could land after the table's version was read.
        """
        await self.start()
        group = f"pubsub-{next(_groups)}"

        def in_thread() -> T:
            session = self._session()
            session.sparkContext.setJobGroup(group, work.__qualname__, interruptOnCancel=True)
            return work(session, *args, **kwargs)

        return await self._finish(in_thread, lambda: self._spark.cancel(group))

    async def run_without_spark(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(…)` in one of the same threads, with or without a JVM.  Cancelled, it ends before this returns."""
        return await self.run_until_told(lambda: None, work, *args, **kwargs)

    async def run_until_told(
        self, stop: Callable[[], None], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`run_without_spark` for work that may take long: cancelled, `stop()` makes it fail soon."""
        return await self._finish(lambda: work(*args, **kwargs), stop)

    async def _finish(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        return await concurrency.finish(future, cancelled=cancel)

    async def stop(self) -> None:
        """Wait for the work under way, then end the JVM."""
        await asyncio.to_thread(self._stop)

    def _restart(self) -> None:
        self._spark.stop()
        self._spark.start()

    def _stop(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._spark.stop()

    def _session(self) -> Any:
        session = self._spark.session
        if getattr(self._local, "session", None) is not session:
            session.sparkContext.setLocalProperty("spark.scheduler.pool", f"pubsub-{next(_pools)}")
            self._local.session = session
        return session
