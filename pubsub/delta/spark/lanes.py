"""Limit concurrent commits: every worker has one place of its own, and may use more that all workers share.

A place is the right to hand one commit to a thread of the engine.  A batch of many tables commits several of them in
parallel while shared places are free.  A worker with many commits, or with commits that wait for Spark, never takes
another worker's own place.  So at most one commit per worker and `shared` more run at a time.

    worker A, 100 tables   own [t1]   shared [t2] [t3] [t4]   96 wait
    worker B, 1 table      own [u1]                           runs at once
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pubsub.delta.spark.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


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
