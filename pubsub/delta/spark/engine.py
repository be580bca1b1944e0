"""Run blocking work for asyncio, with or without Spark, in threads that each have a Spark scheduler pool.

Work may wait long: a copy for a lock on the publisher, a statement for Spark.  So no work waits for another's thread;
if none is idle, a new one is started.  The callers bound their number: a sync worker makes one copy at a time, and a
commit needs a place first (one worker's commits run up to four at a time, which takes 60 % of the time of one at a time).

A place is the right to hand one commit to a thread of the engine.  A batch of many tables commits several of them in
parallel while shared places are free.  A worker with many commits, or with commits that wait for Spark, never takes
another worker's own place.  So at most one commit per worker and `shared` more run at a time.

    worker A, 100 tables   own [t1]   shared [t2] [t3] [t4]   96 wait
    worker B, 1 table      own [u1]                           runs at once
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

from pubsub import concurrency
from pubsub.delta.spark.jvm_transactions import SparkTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.memory import Heap, Memory, resident

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Concurrent commits beyond the one that each worker may always run.
_SHARED_PLACES: Final = 3
#: More threads than there can be workers and places, so that no work waits for a thread.
_THREADS: Final = 1 << 16
#: How long the JVM may take to tell of its heap, in seconds; it is not waited for longer, but asked no second time meanwhile.
_HEAP_SECONDS: Final = 1.0
_pools = itertools.count(1)
_groups = itertools.count(1)


P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """One node's threads and Spark.  Several tasks may await `start`; the first starts the JVM."""

    def __init__(self, spark: Spark) -> None:
        self._spark = spark
        self.transactions = SparkTransactions(spark)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="spark")
        self._local = threading.local()
        self._starting = asyncio.Lock()
        self._fencing = asyncio.Lock()
        self._places = Places(_SHARED_PLACES)
        self._asked_for_heap: asyncio.Future[Heap | None] | None = None

    @property
    def jvm_pid(self) -> int | None:
        """The JVM's process id while it runs."""
        return self._spark.jvm_pid

    async def memory(self) -> Memory:
        """Measure this process and its JVM.  The heap of a JVM that does not answer within a second is not known."""
        heap = await self._heap()
        of_heap = (None, None, None) if heap is None else (heap.used, heap.committed, heap.max)
        return Memory(resident(os.getpid()), resident(self.jvm_pid), *of_heap)

    async def _heap(self) -> Heap | None:
        if self._asked_for_heap is None:
            self._asked_for_heap = asyncio.get_running_loop().run_in_executor(self._executor, self._spark.heap)
        done, _ = await asyncio.wait({self._asked_for_heap}, timeout=_HEAP_SECONDS)
        if not done:
            return None
        answered, self._asked_for_heap = self._asked_for_heap, None
        return answered.result()

    def lane(self) -> Lane:
        """Return a new worker's lane for its commits."""
        return Lane(self, self._places)

    async def start(self) -> bool:
        """Start the JVM if it is not running, or replace one that died; return whether this call did.

        Raises as Spark.running does.
        """
        async with self._starting:
            if self._spark.alive():
                return False
            await asyncio.to_thread(self._spark.running)
            return True

    async def fence(self) -> None:
        """Wait until no JVM of an earlier process can commit any more.  Raises ObjectInUse.

        However many workers wait, they occupy only one of the threads that staging and look-ups need.
        """
        async with self._fencing:
            await asyncio.to_thread(self._spark.fence)

    async def run(self, work: Callable[Concatenate[SparkSession, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work(session, …)` in a thread, starting Spark if necessary.

        Returns or raises only when the work has ended, even if the caller is cancelled (then its Spark jobs are
        cancelled, too).  Otherwise an abandoned commit could land after another worker has read the table's version.
        """
        await self.start()
        group = f"pubsub-{os.getpid()}-{next(_groups)}"

        def in_thread() -> T:
            session = self._session()
            session.sparkContext.setJobGroup(group, work.__qualname__, interruptOnCancel=True)
            return work(session, *args, **kwargs)

        def cancel() -> None:
            # In a thread that nobody waits for: the JVM may hang.
            threading.Thread(target=self._spark.cancel, args=(group,), daemon=True).start()

        return await self._finish(in_thread, cancel)

    async def run_without_spark(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work(…)` in such a thread without Spark.  Returns only when it has ended, even if cancelled."""
        return await self.run_until_stopped(lambda: None, work, *args, **kwargs)

    async def run_until_stopped(
        self, stop: Callable[[], None], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run as `run_without_spark` does, for work that may take long: on cancellation `stop()` makes it fail soon."""
        return await self._finish(lambda: work(*args, **kwargs), stop)

    async def _finish(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        return await concurrency.finish(future, cancelled=cancel)

    async def kill_if_hung(self) -> None:
        """Kill a JVM that does not answer, which takes 20 seconds to find out; whatever waits for it fails then."""
        await asyncio.to_thread(self._spark.kill_if_hung)

    async def stop(self) -> None:
        """Wait for running work to end, then end the JVM."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._spark.stop()

    def _session(self) -> SparkSession:
        session = self._spark.running()  # it may have stopped by itself, though its JVM lives
        if getattr(self._local, "session", None) is not session:
            session.sparkContext.setLocalProperty("spark.scheduler.pool", f"pubsub-{os.getpid()}-{next(_pools)}")
            self._local.session = session
        return session


class Places:
    """A node's shared places, and the lanes waiting for one.  Use it from one event loop."""

    def __init__(self, shared: int) -> None:
        self._free = shared
        self._waiting: deque[tuple[Lane, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, lane: Lane) -> AsyncIterator[None]:
        """Hold a place while the body runs: the lane's own, or a shared one in order of arrival."""
        if not self._take(lane):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((lane, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._waiting.remove((lane, turn))
                else:
                    self._give_back(lane)
                raise
        try:
            yield
        finally:
            self._give_back(lane)

    def _take(self, lane: Lane) -> bool:
        if lane.running:
            if not self._free:
                return False
            self._free -= 1
        lane.running += 1
        return True

    def _give_back(self, lane: Lane) -> None:
        lane.running -= 1
        if lane.running:
            self._free += 1
        still = deque[tuple[Lane, asyncio.Future[None]]]()
        for waiting, turn in self._waiting:
            if not turn.done() and self._take(waiting):
                turn.set_result(None)
            else:
                still.append((waiting, turn))
        self._waiting = still


class Lane:
    """One worker's access to the engine for its commits."""

    def __init__(self, engine: Engine, places: Places) -> None:
        self.running = 0
        self._engine = engine
        self._places = places

    async def run(self, work: Callable[Concatenate[SparkSession, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See Engine.run."""
        async with self._places.held(self):
            return await self._engine.run(work, *args, **kwargs)

    async def run_without_spark(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See Engine.run_without_spark."""
        async with self._places.held(self):
            return await self._engine.run_without_spark(work, *args, **kwargs)
