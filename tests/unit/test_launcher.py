"""Launcher: runners start, end and are restarted; a failure to write to the catalog does not end it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launcher.launcher
from apply.figures import Figures
from launcher.launcher import Launcher
from pubsub.errors import PubsubError
from pubsub.settings import Settings
from tests.virtual_time import run

SETTINGS = Settings(home=Path("/nonexistent"))
Step = Callable[["FakeRunner"], Any]


class FakeCatalog:
    """The part of the catalog that the launcher uses."""

    def __init__(self, *subscriptions: Any) -> None:
        self.counter = 1
        self.listed = list(subscriptions)
        self.requests: list[Any] = []
        self.answers: dict[int, PubsubError | None] = {}
        self.statistics: list[list[Any]] = []
        self.failures: list[PubsubError] = []

    async def change_counter(self) -> int:
        return self.counter

    async def subscriptions(self) -> list[Any]:
        return list(self.listed)

    async def pending_requests(self) -> list[Any]:
        return [request for request in self.requests if request.id not in self.answers]

    async def answer(self, number: int, error: PubsubError | None) -> None:
        self.answers[number] = error

    async def clear_worker_stats(self) -> None:
        return

    async def clear_subscription_error(self, oid: int) -> None:
        return

    async def put_statistics(self, workers: list[Any], counters: list[Any], publishers: Any) -> None:
        if self.failures:
            raise self.failures.pop()
        self.statistics.append(workers)


class FakeRunner:
    """`Runner`: each takes its outcome from `script`; after that they run until drained."""

    made: list[FakeRunner]
    script: list[Step]

    def __init__(self, subscription: Any, around: Any, handover: Any) -> None:
        self.subscription, self.handover = subscription, handover
        self.apply: Any = SimpleNamespace(figures=Figures())
        self.syncing: dict[int, Any] = {}
        self.error_cleared = False
        self.lasting: dict[str, Any] = {}
        self.changes = 0
        self.ended = asyncio.Event()
        self.number = len(FakeRunner.made)
        self.started_at = asyncio.get_running_loop().time()
        FakeRunner.made.append(self)

    async def run(self) -> None:
        step = FakeRunner.script.pop(0) if FakeRunner.script else None
        if step is not None:
            await step(self)
        else:
            await self.ended.wait()

    def drain(self) -> None:
        self.ended.set()

    def tables_changed(self) -> None:
        self.changes += 1


class FakeMonitors:
    def watch(self, subscriptions: list[Any]) -> None:
        return

    def looks(self) -> dict[int, Any]:
        return {}

    async def close(self) -> None:
        return


def subscription(oid: int, *, generation: int = 1, enabled: bool = True) -> Any:
    return SimpleNamespace(oid=oid, name=f"s{oid}", generation=generation, enabled=enabled, dropping=False)


async def started(catalog: FakeCatalog) -> tuple[Launcher, asyncio.Task[None]]:
    launched = Launcher(SETTINGS, catalog, None, None, "1")  # type: ignore[arg-type]
    task = asyncio.create_task(launched.run())
    await asyncio.sleep(0.1)
    return launched, task


def virtual(test: Callable[[], Any]) -> Callable[[], None]:
    def wrapper() -> None:
        FakeRunner.made, FakeRunner.script = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher.launcher, "Runner", FakeRunner)
            patch.setattr(launcher.launcher, "Monitors", FakeMonitors)
            run(test(), launcher.launcher)

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


@virtual
async def test_one_runner_for_each_enabled_subscription() -> None:
    catalog = FakeCatalog(subscription(1), subscription(2, enabled=False))
    launched, task = await started(catalog)
    assert [r.subscription.oid for r in FakeRunner.made] == [1]
    catalog.listed = [subscription(1), subscription(2)]
    catalog.counter += 1
    await asyncio.sleep(2)
    assert [r.subscription.oid for r in FakeRunner.made] == [1, 2]
    assert FakeRunner.made[0].changes == 1
    launched.stop()
    await task
    assert all(r.ended.is_set() for r in FakeRunner.made)


@virtual
async def test_an_altered_subscription_gets_a_new_runner_and_the_same_promises() -> None:
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog)
    catalog.listed = [subscription(1, generation=2)]
    catalog.counter += 1
    await asyncio.sleep(2)
    assert [r.subscription.generation for r in FakeRunner.made] == [1, 2]
    assert FakeRunner.made[0].handover is FakeRunner.made[1].handover
    launched.stop()
    await task


@virtual
async def test_a_runner_that_failed_is_started_again_after_a_rest() -> None:
    """It once stayed away if nothing changed in the catalog."""

    async def fail(runner: FakeRunner) -> None:
        await asyncio.sleep(3)
        raise RuntimeError("the catalog could not be read")

    FakeRunner.script = [fail, fail]
    launched, task = await started(FakeCatalog(subscription(1)))
    await asyncio.sleep(40)
    assert len(FakeRunner.made) == 3
    starts = [r.started_at for r in FakeRunner.made]
    rest = SETTINGS.wal_retrieve_retry_interval
    assert all(later - sooner >= 3 + rest for sooner, later in itertools.pairwise(starts))
    assert not task.done()
    launched.stop()
    await task


@virtual
async def test_a_stop_is_answered_when_the_workers_have_ended() -> None:
    catalog = FakeCatalog(subscription(1))
    slow = asyncio.Event()

    async def slowly(runner: FakeRunner) -> None:
        await runner.ended.wait()
        await slow.wait()

    FakeRunner.script = [slowly]
    launched, task = await started(catalog)
    catalog.listed = [subscription(1, generation=2, enabled=False)]
    catalog.requests = [SimpleNamespace(id=5, kind="stop", subid=1), SimpleNamespace(id=6, kind="dance", subid=1)]
    catalog.counter += 1
    await asyncio.sleep(3)
    assert not catalog.answers
    slow.set()
    await asyncio.sleep(3)
    assert catalog.answers[5] is None
    assert "dance" in str(catalog.answers[6])
    launched.stop()
    await task


@virtual
async def test_late_workers_are_cancelled_at_the_deadline() -> None:
    async def never(runner: FakeRunner) -> None:
        await asyncio.sleep(10**6)

    FakeRunner.script = [never]
    launched, task = await started(FakeCatalog(subscription(1)))
    launched.stop()
    await task
    assert asyncio.get_running_loop().time() <= SETTINGS.drain_timeout + 2


@virtual
async def test_statistics_that_can_not_be_stored_end_nothing() -> None:
    catalog = FakeCatalog(subscription(1))
    catalog.failures = [PubsubError("database is locked")] * 2
    launched, task = await started(catalog)
    await asyncio.sleep(5)
    assert not task.done()
    assert catalog.statistics
    launched.stop()
    await task
