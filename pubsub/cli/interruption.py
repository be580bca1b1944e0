"""Ctrl-C and SIGTERM cancel a command, wherever it is, and in a shell's background job, too, which has SIGINT ignored.

asyncio's own handler is not installed where SIGINT is ignored: the signal was lost.  psql and the server's other programs
handle it in any case.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Final, TypeVar

T = TypeVar("T")

_LAST: Final = 3
"""The signal that ends the process at once: the first one cancels the command, the second one what it then removes."""


async def cancelled_by(numbers: tuple[signal.Signals, ...], work: Coroutine[object, object, T]) -> T:
    """Return or raise the result of `work`, which each of these signals cancels: at the first it removes what it has made.

    The handlers are those of before afterwards.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    received = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == _LAST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        loop.call_soon_threadsafe(task.cancel)

    # Not with the event loop's handlers: the last signal counts also where the loop is held up.
    before = [(number, signal.signal(number, handle)) for number in numbers]
    try:
        return await work
    finally:
        for number, handler in before:
            signal.signal(number, handler)
