"""Who waits for whom among copies and commits: nobody for another's lock."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pubsub.delta.spark import engine as engine_module
from pubsub.delta.spark import spark_session
from pubsub.delta.spark.engine import Engine, Lane, Places
from pubsub.errors import PubsubError
from pubsub.memory import Heap
from tests.support.virtual_time import run

#: More than an engine ever had threads for copies.
COPIES = 20
PATIENCE = 300


class FakeSpark:
    jvm_pid = None
    session = None

    def __init__(self) -> None:
        self.may_fence = threading.Event()
        self.fencing = 0

    def alive(self) -> bool:
        return True

    def running(self) -> None:
        return

    def fence(self) -> None:
        self.fencing += 1
        self.may_fence.wait()

    def stop(self) -> None:
        return


def engine(spark: Any = None) -> Engine:
    return Engine(spark or FakeSpark())


def test_copies_that_wait_for_locks_hold_up_no_commit() -> None:
    """Four of them once stopped every subscription of the node, without a word."""

    async def main() -> None:
        one = engine()
        released = threading.Event()
        there = threading.Barrier(COPIES + 1)

        def copy() -> None:
            there.wait()
            released.wait()

        copies = [asyncio.create_task(one.run_until_stopped(released.set, copy)) for _ in range(COPIES)]
        try:
            async with asyncio.timeout(60):
                await asyncio.to_thread(there.wait)
                assert await one.lane().run_without_spark(lambda: 7) == 7
        finally:
            there.abort()
            released.set()
            await asyncio.gather(*copies, return_exceptions=True)
            await one.stop()

    asyncio.run(main())


def test_a_jvm_that_does_not_tell_of_its_heap_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeSpark):
        jvm_pid = os.getpid()
        asked = 0
        answers = threading.Event()

        def heap(self) -> Heap:
            self.asked += 1
            self.answers.wait()
            return Heap(1, 2, 3)

    async def main() -> None:
        monkeypatch.setattr(engine_module, "_HEAP_SECONDS", 0)
        spark = Hanging()
        one = engine(spark)
        for _ in range(3):
            found = await one.memory()
            assert (found.heap_used, found.heap_committed, found.heap_max) == (None, None, None)
            assert min(found.python or 0, found.jvm or 0) > 1 << 20
        assert spark.asked == 1
        spark.answers.set()
        monkeypatch.setattr(engine_module, "_HEAP_SECONDS", PATIENCE)
        found = await one.memory()
        assert (found.heap_used, found.heap_committed, found.heap_max) == (1, 2, 3)
        await one.stop()

    asyncio.run(main())


def test_workers_that_wait_for_the_fence_leave_threads_to_others() -> None:
    async def main() -> None:
        spark = FakeSpark()
        one = engine(spark)
        waiting = [asyncio.create_task(one.fence()) for _ in range(100)]
        await asyncio.sleep(0)  # all of them have asked
        try:
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(lambda: 7) == 7
        finally:
            spark.may_fence.set()
            await asyncio.gather(*waiting)
            await one.stop()
        assert spark.fencing == 100

    asyncio.run(main())


def test_the_fence_does_not_wait_for_the_jvm_that_starts_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers need the fence; for the half minute of a JVM's start most of them have no use."""
    launching, fenced = threading.Event(), threading.Event()
    meanwhile: list[bool] = []

    def launch(self: spark_session.Spark, descriptor: int) -> None:
        launching.set()
        meanwhile.append(fenced.wait(60))

    monkeypatch.setattr(spark_session.Spark, "_launch", launch)
    monkeypatch.setattr(spark_session.Spark, "session", None)
    monkeypatch.setattr(spark_session.jars, "require_java", lambda: None)
    spark = spark_session.Spark(tmp_path)
    starting = threading.Thread(target=spark.running)
    starting.start()
    launching.wait()
    asking = threading.Thread(target=lambda: (spark.fence(), fenced.set()))
    asking.start()
    asking.join()
    starting.join()
    assert meanwhile == [True]
    spark.stop()


def test_a_start_that_comes_after_the_stop_starts_no_jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's start, cancelled with its worker, went on in its thread: its JVM outlived the daemon."""
    looked = threading.Event()
    launched: list[int] = []

    monkeypatch.setattr(spark_session.Spark, "_launch", lambda _, descriptor: launched.append(descriptor))
    monkeypatch.setattr(spark_session.Spark, "session", None)
    monkeypatch.setattr(spark_session.jars, "require_java", looked.set)
    spark = spark_session.Spark(tmp_path)
    starting = threading.Thread(target=spark.running)
    starting.start()
    looked.wait()
    spark.stop()
    starting.join()
    before = len(launched)
    with pytest.raises(PubsubError, match="Spark was stopped"):
        spark.running()
    assert len(launched) == before == 1


class SlowEngine:
    """Work ends when the test says so; `running` has what runs, `most` how many ran at a time."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}

    async def run_without_spark(self, work: str) -> None:
        self.running[work] = asyncio.Event()
        try:
            await self.running[work].wait()
        finally:
            del self.running[work]

    async def end(self, work: str) -> None:
        self.running[work].set()
        await asyncio.sleep(1)


def lanes(slow: SlowEngine, count: int) -> list[Any]:
    places = Places(3)
    return [Lane(slow, places) for _ in range(count)]  # type: ignore[arg-type]


def test_each_worker_has_a_place_and_four_at_most_while_it_is_alone() -> None:
    async def main() -> None:
        slow = SlowEngine()
        a, b, c = lanes(slow, 3)
        tasks = [asyncio.create_task(a.run_without_spark(f"a{number}")) for number in range(10)]
        await asyncio.sleep(1)
        assert set(slow.running) == {"a0", "a1", "a2", "a3"}
        tasks += [asyncio.create_task(b.run_without_spark(f"b{number}")) for number in range(2)]
        tasks.append(asyncio.create_task(c.run_without_spark("c0")))
        await asyncio.sleep(1)
        assert set(slow.running) == {"a0", "a1", "a2", "a3", "b0", "c0"}
        await slow.end("b0")  # its own place is for its own next
        assert set(slow.running) == {"a0", "a1", "a2", "a3", "b1", "c0"}
        await slow.end("a1")  # a shared one goes to the first that waits
        assert set(slow.running) == {"a0", "a4", "a2", "a3", "b1", "c0"}
        tasks[5].cancel()
        await slow.end("a2")
        assert set(slow.running) == {"a0", "a4", "a6", "a3", "b1", "c0"}
        tasks[0].cancel()
        await asyncio.sleep(1)
        assert set(slow.running) == {"a7", "a4", "a6", "a3", "b1", "c0"}
        for name in ("a7", "a4", "a6", "a3", "b1", "c0", "a8", "a9"):
            await slow.end(name)
        assert not slow.running
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results].count(True) == 2
        assert (a.running, b.running, c.running) == (0, 0, 0)
        again = [asyncio.create_task(b.run_without_spark(f"b{number}")) for number in range(5)]
        await asyncio.sleep(1)
        assert len(slow.running) == 4
        for name in ("b0", "b1", "b2", "b3", "b4"):
            await slow.end(name)
        await asyncio.gather(*again)

    run(main())


def test_a_turn_given_to_a_cancelled_worker_goes_to_the_next() -> None:
    async def main() -> None:
        slow = SlowEngine()
        places = Places(0)
        lane = Lane(slow, places)  # type: ignore[arg-type]
        async with places.held(lane):
            given, next_one = [asyncio.create_task(lane.run_without_spark(name)) for name in ("given", "next")]
            await asyncio.sleep(1)
        given.cancel()  # it has the place, and has not run since
        await asyncio.sleep(1)
        assert set(slow.running) == {"next"}
        await slow.end("next")
        await next_one
        assert given.cancelled()
        assert lane.running == 0

    run(main())
