"""Run work to completion despite cancellation.

A thread, a database transaction or a Spark job goes on when the task that waits for it is cancelled: a commit could
land after its table's version was read, or a lock stay held.  So the caller first waits for the end, and is cancelled
then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish(work: asyncio.Future[T], *, cancelled: Callable[[], None] | None = None) -> T:
    """Return or raise the result of `work`; if the caller is cancelled, wait for the end and raise CancelledError.

    `cancelled()` is called at once when the caller is cancelled, and may make the work end sooner.  An error that the
    work raises after that is dropped.
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
    """Run `work()` in a thread, to completion, and return or raise its result."""
    return await finish(asyncio.create_task(asyncio.to_thread(work)))


def uncancelled(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine method to run to completion, in a task of its own."""

    @functools.wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await finish(asyncio.ensure_future(method(*args, **kwargs)))

    return run
