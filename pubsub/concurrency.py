"""Run work to its end whatever is cancelled.

A thread, a database transaction or a job of Spark's goes on when the task that waits for it is cancelled: a commit could land
after its table's version was read, or a lock stay held.  So the caller waits for the end first, and is cancelled then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish(work: asyncio.Future[T], *, cancelled: Callable[[], None] | None = None) -> T:
    """Return what `work` returns, or raise what it raises; if the caller is cancelled, wait for its end and raise CancelledError.

    `cancelled()` is called at once on the caller's cancellation: it may make the work end sooner.  What the work raises after
    that is dropped, since the caller is gone.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled()
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work()` in a thread, to its end."""
    return await finish(asyncio.create_task(asyncio.to_thread(work)))


def uncancelled(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Run the coroutine method in a task of its own, to its end."""

    @functools.wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await finish(asyncio.ensure_future(method(*args, **kwargs)))

    return run
