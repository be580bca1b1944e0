"""Spark behind asyncio: work is handed to a few threads, each with a scheduler pool of its own.

Commits to several tables run side by side (speed.md: four threads take 60 % of the time of one); the event loop only waits.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from apply.delta.session import Spark

_THREADS: Final = 4
_pools = itertools.count(1)
_groups = itertools.count(1)


P = ParamSpec("P")
T = TypeVar("T")


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

    @property
    def jvm_pid(self) -> int | None:
        """The JVM's process id while it runs."""
        return self._spark.jvm_pid

    async def start(self) -> None:
        """Start the JVM if it does not run; an earlier one that died is replaced.  Raises as Spark.start does."""
        async with self._starting:
            if not self._spark.alive():
                await asyncio.to_thread(self._restart)

    async def fence(self) -> None:
        """Wait until no JVM of an earlier process can commit any more.  Raises ObjectInUse."""
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
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancel()
            while not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    continue
            if not future.cancelled():
                future.exception()  # that it was cancelled is no news
            raise

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
