"""Runner: what a worker that must decide again is, and is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import launcher.runner
from apply.handover import Handover
from apply.worker_statistics import Figures
from launcher.runner import Runner
from launcher.worker_slots import WorkerSlots
from pubsub.errors import (
    ConnectionFailure,
    NotInPrerequisiteState,
    Overtaken,
    PublisherError,
    PubsubError,
    SerializationFailure,
    StartAgain,
    UndefinedTable,
)
from pubsub.publisher.replication import StreamEnded
from pubsub.setting_tables import CopiesSettings
from tests.support.virtual_time import run

PAUSE = 5.0


class Catalog:
    """As much of it as a runner without tables uses; `disabled`: the subscription was."""

    async def relations(self, _: int) -> list[Any]:
        return []

    async def sequences(self, _: int) -> list[Any]:
        return []

    async def clear_worker_stats(self, _: int) -> None:
        return

    async def put_statistics(self, **_: Any) -> None:
        return

    async def set_subscription_error(self, *_: Any, **__: Any) -> None:
        return

    async def set_relation_error(self, *_: Any) -> None:
        return

    async def set_enabled(self, _: int, enabled: bool) -> None:
        assert not enabled
        self.disabled = True

    disabled = False


def runner_of(*, disable_on_error: bool) -> Runner:
    options = SimpleNamespace(disable_on_error=disable_on_error, on_table_error="isolate", copy_first="")
    subscription: Any = SimpleNamespace(oid=1, name="s", options=options)
    settings = SimpleNamespace(
        wal_retrieve_retry_interval=PAUSE,
        catalog_poll_interval=1.0,
        max_sync_workers_per_subscription=1,
        copies=CopiesSettings(),
    )
    node: Any = SimpleNamespace(
        node_id="n", catalog=Catalog(), engine=None, writers=None, settings=settings, workers=WorkerSlots(1)
    )
    return Runner(subscription, node, Handover())


def test_a_worker_that_is_overtaken_again_and_again_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times another process may be at work; then status must show it.  A batch in between begins the count anew."""
    reported: list[tuple[int, str]] = []
    begun = 0

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.figures = Figures()
            self.streaming = True

        async def run(self) -> None:
            nonlocal begun
            begun += 1
            self.figures.batches = int(begun == 4)
            if begun < 10:
                raise Overtaken("public.t", "It holds more.")
            runner.drain()

        def drain(self) -> None:
            return

    async def report(_: Runner, error: BaseException, relation: object, *, count: bool) -> None:
        reported.append((begun, str(error)))

    runner: Any = None

    async def go() -> None:
        nonlocal runner
        runner = runner_of(disable_on_error=False)
        await runner.run()

    monkeypatch.setattr(launcher.runner, "ApplyWorker", Worker)
    monkeypatch.setattr(Runner, "_report", report)
    run(go(), launcher.runner)
    assert [at for at, _ in reported] == [7, 8, 9]
    assert "was changed by another process" in reported[0][1]


@pytest.mark.parametrize(
    ("error", "pause"), [(StartAgain("again"), 0.0), (Overtaken("public.t", "It holds more."), PAUSE)]
)
def test_a_worker_that_starts_again(error: Exception, pause: float) -> None:
    """At once, or after a pause where another process is at work on the table; either is no failure of the subscription."""
    begun: list[float] = []

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.figures = Figures()
            self.streaming = True

        async def run(self) -> None:
            begun.append(asyncio.get_running_loop().time())
            if len(begun) < 3:
                raise ExceptionGroup("tasks", [error])
            runner.drain()

        def drain(self) -> None:
            return

    async def go() -> None:
        nonlocal runner
        runner = runner_of(disable_on_error=True)
        await runner.run()

    runner: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.runner, "ApplyWorker", Worker)
        run(go(), launcher.runner)
    assert [round(at - begun[0], 3) for at in begun] == [0.0, pause, 2 * pause]


def of_table(error: PubsubError) -> PubsubError:
    error.relid = 1
    return error


@pytest.mark.parametrize(
    ("error", "streaming", "ending", "disables"),
    [
        (NotInPrerequisiteState("no"), True, False, True),
        (NotInPrerequisiteState("no slot name"), False, False, False),
        # Of a table that cannot be taken over when a worker begins.
        (of_table(UndefinedTable("the Delta table is gone")), False, False, True),
        (StreamEnded("data stream from publisher has ended"), True, False, False),
        # PostgreSQL's worker, too, is disabled by a connection that breaks in its stream.
        (ConnectionFailure("server closed the connection unexpectedly"), True, False, True),
        (ConnectionFailure("connection refused"), False, False, False),
        (PublisherError("terminating connection due to administrator command", sqlstate="57P01"), True, False, True),
        # Ours, as of a Delta table that others write all the time.
        (of_table(SerializationFailure("other writers were first")), True, False, False),
        (PublisherError("canceling statement due to conflict with recovery", sqlstate="40001"), True, False, True),
        # As of a batch that waits for a sync worker when the daemon ends.
        (NotInPrerequisiteState("told to end before the sync worker was done"), True, True, False),
    ],
)
def test_which_errors_disable_a_subscription(
    monkeypatch: pytest.MonkeyPatch, error: PubsubError, streaming: bool, ending: bool, disables: bool
) -> None:
    """The daemon's restart disables none."""
    begun = 0

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.figures = Figures()
            self.streaming = streaming

        async def run(self) -> None:
            nonlocal begun
            begun += 1
            if ending or begun > 2:
                runner.drain()
            if begun < 3:
                raise error

        def drain(self) -> None:
            return

    async def go() -> None:
        nonlocal runner
        runner = runner_of(disable_on_error=True)
        await runner.run()

    async def explained(*_: Any) -> None:
        return

    runner: Any = None
    monkeypatch.setattr(launcher.runner, "ApplyWorker", Worker)
    monkeypatch.setattr(launcher.runner, "explain", explained)
    monkeypatch.setattr(launcher.runner, "count_conflict_of", explained)
    run(go(), launcher.runner)
    assert (runner._node.catalog.disabled, begun) == (disables, 1 if disables or ending else 3)
