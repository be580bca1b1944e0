"""An event loop whose clock jumps to the next timer as soon as nothing else can run, so that hours of waiting take no
time.

Nothing in the loop may wait for another thread: `run` makes asyncio.to_thread call its function in the loop's own
thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits, and no timer is set: a deadlock")
        if timeout > 0:
            self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual: seconds from 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class Clock:
    """Replaces the module `time` in the code under test."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


async def to_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    await asyncio.sleep(0)
    return function(*args, **kwargs)


def run(main: Coroutine[Any, Any, T], *modules: Any) -> T:
    """Run `main` in virtual time; `modules` see the virtual clock where they use `time`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", to_thread)
        for module in modules:
            patch.setattr(module, "time", Clock)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)


async def until(condition: Callable[[], object], seconds: float = 1000.0) -> None:
    """Wait in virtual time until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
