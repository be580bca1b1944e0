"""Work that blocks, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """`work()` in a thread.  Cancelled, this waits until it has ended: nothing goes on behind the caller's back."""
    running = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()  # nobody is left to be told
        raise
