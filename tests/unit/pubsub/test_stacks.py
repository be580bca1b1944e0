"""SIGUSR1 tells where a process stands."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal

import pytest

from pubsub.stacks import tell_when_asked
from tests.support.captured_logs import captured_logs


async def _waits(event: asyncio.Event) -> None:
    await _waits_further(event)


async def _waits_further(event: asyncio.Event) -> None:
    await event.wait()


async def test_threads_and_tasks_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    # As in a process that had another loop before.
    faulthandler.register(signal.SIGUSR1)
    waiting = asyncio.create_task(_waits(event), name="one that waits")
    tell_when_asked(loop)
    try:
        with captured_logs() as logs:
            async with asyncio.timeout(60):
                while not logs:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    await asyncio.sleep(0)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR1)
    event.set()
    await waiting
    (tasks,) = {tuple(one["tasks"]) for one in logs if one["event"] == "where this process stands"}
    (found,) = (one for one in tasks if one.startswith("one that waits: "))
    places = found.removeprefix("one that waits: ").split(" > ")
    assert [place.split(":")[0] for place in places] == [*["tests/unit/pubsub/test_stacks.py"] * 2, "locks.py"]
    assert [place.split()[1] for place in places] == ["_waits", "_waits_further", "Event.wait"]
    assert "test_threads_and_tasks_are_told" in capfd.readouterr().err
