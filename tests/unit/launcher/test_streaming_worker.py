"""What asks a subscription's apply worker for something waits for one that starts again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.streaming_worker import streaming
from pubsub.errors import NotInPrerequisiteState
from tests.support.virtual_time import run


def runner(worker: Any) -> Any:
    return SimpleNamespace(apply=worker)


def worker(*, streams: bool) -> Any:
    return SimpleNamespace(streaming=streams)


def test_a_worker_that_starts_again_is_waited_for() -> None:
    ended, begun = worker(streams=True), worker(streams=False)
    ours = runner(ended)

    async def start_again() -> None:
        await asyncio.sleep(5)
        ours.apply = None
        await asyncio.sleep(5)
        ours.apply = begun
        await asyncio.sleep(5)
        begun.streaming = True

    async def ask() -> None:
        starting = asyncio.create_task(start_again())
        assert await streaming({1: ours}, 1) == (ours, ended)
        assert await streaming({1: ours}, 1, other_than=ended) == (ours, begun)
        await starting

    run(ask())


def test_a_worker_that_never_streams_is_given_up() -> None:
    with pytest.raises(NotInPrerequisiteState, match="no apply worker that runs") as failure:
        run(streaming({1: runner(worker(streams=False))}, 1))
    assert failure.value.detail == "None has begun to stream within 60 s."


def test_a_subscription_that_is_disabled_is_refused_at_once() -> None:
    runners: dict[int, Any] = {1: runner(None)}

    async def disable() -> None:
        await asyncio.sleep(1)
        runners.clear()

    async def ask() -> None:
        disabling = asyncio.create_task(disable())
        with pytest.raises(NotInPrerequisiteState) as failure:
            await streaming(runners, 1)
        assert failure.value.detail == "It is disabled, or a command has paused it."
        await disabling

    run(ask())
