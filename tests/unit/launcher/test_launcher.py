"""Launcher: runners start, end and are restarted; a failure to write to the catalog does not end it."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

import launcher.launcher
from apply.worker_statistics import Figures
from catalog.figures import PublisherStatus, Warned
from catalog.records import Command
from launcher.launcher import Launcher
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.setting_tables import HousekeepingSettings
from pubsub.settings import Settings
from pubsub.sql.options import SubscriptionOptions
from tests.support.captured_logs import captured_logs
from tests.support.virtual_time import run

SETTINGS = Settings(home=Path("/nonexistent"), housekeeping=HousekeepingSettings(enabled=False))
Step = Callable[["FakeRunner"], Any]


class FakeCatalog:
    """The part of the catalog that the launcher uses."""

    is_sharing = False

    def __init__(self, *subscriptions: Any) -> None:
        self.counter = 1
        self.listed = list(subscriptions)
        self.requests: list[Any] = []
        self.commands: list[Any] = []
        self.answers: dict[int, PubsubError | None] = {}
        self.statistics: list[list[Any]] = []
        self.failures: list[PubsubError] = []
        self.unreachable: PubsubError | None = None
        self.taken: PubsubError | None = None
        self.publishers: dict[int, PublisherStatus] = {}
        self.rows: list[Any] = []

    async def prove(self) -> None:
        if self.taken is not None:
            raise self.taken

    async def change_counter(self) -> int:
        if self.unreachable is not None:
            raise self.unreachable
        return self.counter

    async def subscriptions(self) -> list[Any]:
        return list(self.listed)

    async def state(self) -> Any:
        return SimpleNamespace(subscriptions=(), relations=(), registrations=())

    async def take_commands(self) -> list[Any]:
        taken, self.commands = self.commands, []
        return taken

    async def pending_requests(self) -> list[Any]:
        return [request for request in self.requests if request.id not in self.answers]

    async def answer(self, number: int, error: PubsubError | None) -> None:
        self.answers[number] = error

    async def clear_worker_stats(self) -> None:
        return

    async def clear_subscription_error(self, oid: int) -> None:
        return

    async def put_statistics(self, workers: list[Any], counters: list[Any], publishers: Any, rows: list[Any]) -> None:
        if self.failures:
            raise self.failures.pop()
        self.statistics.append(workers)
        self.publishers = publishers
        self.rows = rows


class FakeRunner:
    """`Runner`: each takes its outcome from `script`; after that they run until drained."""

    made: list[FakeRunner]
    script: list[Step]

    def __init__(self, subscription: Any, node: Any, handover: Any) -> None:
        self.subscription, self.handover = subscription, handover
        self.apply: Any = SimpleNamespace(figures=Figures(), streaming=True)
        self.applies = True
        self.waiting: dict[int, Warned] = {}
        self.syncing: dict[int, Any] = {}
        self.sequences: Any = None
        self.error_cleared = self.failing = False
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

    def waits(self) -> dict[int, Warned]:
        return self.waiting

    def take_rows(self) -> list[Any]:
        return []


class FakeMonitors:
    """`Monitors`: `found` is each publisher's look, `heard_at` when they were heard last."""

    found: PublisherStatus | None
    heard_at: datetime

    def __init__(self, node_id: str, catalog: object) -> None:
        FakeMonitors.found = None
        FakeMonitors.heard_at = datetime.now(UTC)
        self.watched: list[int] = []

    def watch(self, subscriptions: list[Any]) -> None:
        self.watched = [one.oid for one in subscriptions]

    def looks(self) -> dict[int, Any]:
        return dict.fromkeys(self.watched, self.found)

    def heard(self, oid: int) -> datetime:
        return self.heard_at

    async def close(self) -> None:
        return


def subscription(oid: int, *, generation: int = 1, enabled: bool = True) -> Any:
    return SimpleNamespace(
        oid=oid, name=f"s{oid}", generation=generation, enabled=enabled, paused=None, options=SubscriptionOptions()
    )


async def started(catalog: FakeCatalog, engine: Any = None) -> tuple[Launcher, asyncio.Task[None]]:
    launched = Launcher(SETTINGS, catalog, engine, None, "1")  # type: ignore[arg-type]
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
async def test_a_runner_ends_by_itself_as_it_is_to_end() -> None:
    """The task that was to end it failed, which nobody was told."""
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    ending = asyncio.Event()
    FakeRunner.script = [lambda _: ending.wait()]
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog)
    catalog.listed = [subscription(1, generation=2)]
    catalog.counter += 1
    ending.set()
    await asyncio.sleep(2)
    assert [r.subscription.generation for r in FakeRunner.made] == [1, 2]
    assert not FakeRunner.made[1].ended.is_set()
    launched.stop()
    await task
    gc.collect()
    assert failures == []


@virtual
async def test_the_log_says_what_commands_have_done_and_what_became_of_the_workers() -> None:
    """A DISABLE, DROP or REFRESH from another process was in no log."""
    catalog = FakeCatalog(subscription(1))
    executed = datetime(2026, 1, 1, tzinfo=UTC)
    structlog.reset_defaults()  # a test before may have opened a node, which logs warnings alone
    with captured_logs() as said:
        launched, task = await started(catalog)
        for text in ("ALTER SUBSCRIPTION s1 REFRESH PUBLICATION", "ALTER SUBSCRIPTION s1 DISABLE"):
            catalog.commands.append(Command(1, "ALTER SUBSCRIPTION", text, executed))
        catalog.listed = [subscription(1, enabled=False)]
        catalog.counter += 1
        await asyncio.sleep(2)
        launched.stop()
        await task
    assert [(one["event"], one.get("statement") or one.get("subscription")) for one in said] == [
        ("subscription has started", "s1"),
        ("statement was executed", "ALTER SUBSCRIPTION s1 REFRESH PUBLICATION"),
        ("statement was executed", "ALTER SUBSCRIPTION s1 DISABLE"),
        ("subscription has stopped", "s1"),
    ]


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


def ends_with_event() -> asyncio.Event:
    """Have the next runner, when it is told to end, wait for the event that is returned."""
    event = asyncio.Event()

    async def slowly(runner: FakeRunner) -> None:
        await runner.ended.wait()
        await event.wait()

    FakeRunner.script = [slowly]
    return event


@virtual
async def test_a_stop_is_answered_when_the_workers_have_ended() -> None:
    catalog = FakeCatalog(subscription(1))
    slow = ends_with_event()
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
async def test_workers_that_do_not_end_hold_up_no_other_subscription() -> None:
    """What a commit waits for may hang for ever, and DISABLE waits for the commit: the launcher once waited, too."""
    asked = 0

    class Hung:
        async def kill_if_hung(self) -> None:
            nonlocal asked
            asked += 1

    async def hang(runner: FakeRunner) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await over.wait()

    over = asyncio.Event()
    FakeRunner.script = [hang]
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog, Hung())
    catalog.listed = [subscription(1, generation=2, enabled=False)]
    catalog.requests = [SimpleNamespace(id=5, kind="stop", subid=1)]
    catalog.counter += 1
    await asyncio.sleep(2)
    catalog.listed = [subscription(1, generation=2, enabled=False), subscription(2)]
    catalog.counter += 1
    await asyncio.sleep(2)
    assert [r.subscription.oid for r in FakeRunner.made] == [1, 2]
    assert asked == 0
    await asyncio.sleep(SETTINGS.drain_timeout + 5)
    assert asked > 0, "Spark, for which they may wait, is asked whether it lives"
    assert catalog.answers == {}
    over.set()
    await asyncio.sleep(2)
    assert catalog.answers == {5: None}
    launched.stop()
    await task


@virtual
async def test_a_subscription_that_is_enabled_while_it_ends_starts_again() -> None:
    """And the command that has disabled it is told that its workers have ended."""
    catalog = FakeCatalog(subscription(1))
    slow = ends_with_event()
    launched, task = await started(catalog)
    catalog.listed = [subscription(1, enabled=False)]
    catalog.requests = [SimpleNamespace(id=5, kind="stop", subid=1)]
    catalog.counter += 1
    await asyncio.sleep(2)
    catalog.listed = [subscription(1)]
    catalog.counter += 1
    await asyncio.sleep(2)
    assert catalog.answers == {}
    slow.set()
    await asyncio.sleep(2)
    assert catalog.answers == {5: None}
    assert [r.subscription.oid for r in FakeRunner.made] == [1, 1]
    launched.stop()
    await task


@virtual
async def test_a_failure_to_store_statistics_ends_no_worker() -> None:
    catalog = FakeCatalog(subscription(1))
    catalog.failures = [PubsubError("database is locked")] * 2
    launched, task = await started(catalog)
    await asyncio.sleep(5)
    assert not task.done()
    assert catalog.statistics
    launched.stop()
    await task


@virtual
async def test_an_unreachable_catalog_is_tried_again_and_ends_no_worker() -> None:
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog)
    catalog.unreachable = PubsubError("could not access the catalog")
    await asyncio.sleep(60)
    assert not task.done()
    assert not FakeRunner.made[0].ended.is_set()
    catalog.unreachable = None
    catalog.listed.append(subscription(2))
    catalog.counter += 1
    await asyncio.sleep(SETTINGS.wal_retrieve_retry_interval + 1)
    assert [r.subscription.oid for r in FakeRunner.made] == [1, 2]
    launched.stop()
    await task


@virtual
async def test_a_daemon_whose_catalog_was_taken_over_ends_its_workers_at_once() -> None:
    catalog = FakeCatalog(subscription(1))
    cancelled = asyncio.Event()

    async def until_cancelled(_: FakeRunner) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    FakeRunner.script = [until_cancelled]
    _, task = await started(catalog)
    catalog.taken = ObjectInUse("another daemon has taken over the catalog")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await task
    assert caught.value.subgroup(ObjectInUse) is not None
    assert cancelled.is_set()


async def told(catalog: FakeCatalog) -> tuple[dict[str, Any], PublisherStatus]:
    """The apply worker's row and the publisher's, as written next."""
    await asyncio.sleep(2)
    ((_, _, fields),) = catalog.statistics[-1]
    return fields, catalog.publishers[1]


@virtual
async def test_lag_is_unknown_while_the_publisher_is_away() -> None:
    """It said 0.0 s: the last worker's, which had caught up, or the next one's, which had begun with nothing."""
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog)
    (runner,) = FakeRunner.made
    figures: Figures = runner.apply.figures
    figures.caught_up, figures.publisher_lsn, figures.flush_lsn = True, Lsn(100), Lsn(100)
    figures.last_msg_receipt_time = datetime.now(UTC)
    FakeMonitors.found = PublisherStatus(current_lsn=Lsn(120))
    fields, publisher = await told(catalog)
    assert (fields["lag_seconds"], fields["publisher_lsn"], publisher.away_since) == (0.0, Lsn(120), None)

    # The stream stands, but not a word comes any more: neither from it nor from the publisher itself.
    silent = datetime.now(UTC) - timedelta(minutes=2)
    FakeMonitors.found, FakeMonitors.heard_at = None, silent - timedelta(minutes=1)
    figures.last_msg_receipt_time = silent
    fields, publisher = await told(catalog)
    assert (fields["lag_seconds"], fields["publisher_lsn"], publisher.away_since) == (None, None, silent)

    # The stream has ended, and the next worker has not got as far.
    heard = FakeMonitors.heard_at = datetime.now(UTC)
    runner.apply = SimpleNamespace(figures=Figures(), streaming=False)
    fields, publisher = await told(catalog)
    assert (fields["lag_seconds"], fields["publisher_lsn"], publisher.away_since) == (None, None, heard)
    runner.apply = None
    fields, publisher = await told(catalog)
    assert (fields["lag_seconds"], fields["publisher_lsn"], publisher.away_since) == (None, None, heard)

    # It answers, but apply fails: how much there is to do is known, how long it takes is not.
    FakeMonitors.found = PublisherStatus(current_lsn=Lsn(130))
    fields, publisher = await told(catalog)
    assert (fields["lag_seconds"], fields["publisher_lsn"], publisher.away_since) == (None, Lsn(130), None)
    launched.stop()
    await task


@virtual
async def test_lag_grows_while_nothing_becomes_durable() -> None:
    catalog = FakeCatalog(subscription(1))
    launched, task = await started(catalog)
    figures: Figures = FakeRunner.made[0].apply.figures
    figures.last_msg_receipt_time = datetime.now(UTC)
    figures.received(asyncio.get_running_loop().time(), caught_up=False, pending=True)
    fields, _ = await told(catalog)
    assert fields["lag_seconds"] is None, "nothing was applied yet: a backlog of hours may come"
    figures.lag.latest = 0.5
    await asyncio.sleep(600)
    fields, _ = await told(catalog)
    assert 600 <= fields["lag_seconds"] <= 610
    figures.received(asyncio.get_running_loop().time(), caught_up=False, pending=False)
    fields, _ = await told(catalog)
    assert fields["lag_seconds"] == 0.5, "a transaction in progress is not late"
    figures.received(asyncio.get_running_loop().time(), caught_up=True, pending=False)
    fields, _ = await told(catalog)
    assert fields["lag_seconds"] == 0.0
    launched.stop()
    await task


@virtual
async def test_a_wait_is_logged_when_it_begins_and_when_it_ends() -> None:
    catalog = FakeCatalog(subscription(1))
    FakeMonitors.found = None
    launched, task = await started(catalog)
    (runner,) = FakeRunner.made
    with captured_logs() as entries:
        for seconds in range(5):
            runner.waiting = {
                7: Warned("waits for a lock on table public.t", f"for {seconds} s", "End process 5."),
                8: Warned("waits for Spark to start"),
            }
            await told(catalog)
        runner.waiting = {7: Warned("waits for a lock on table public.t", "for 1 s", "End process 6.")}
        await told(catalog)
        runner.waiting = {}
        await told(catalog)
    assert [(e["log_level"], e["event"], e.get("hint")) for e in entries] == [
        ("warning", "worker waits", "End process 5."),
        ("warning", "worker waits", "End process 6."),
        ("info", "no worker waits any more", None),
        ("info", "no worker waits any more", None),
    ]
    assert {entry["reason"] for entry in entries} == {"waits for a lock on table public.t"}
    assert {entry["subscription"] for entry in entries} == {"s1"}
    launched.stop()
    await task
