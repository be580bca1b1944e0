"""Transactions that nobody's cancellation tears apart."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def whole(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Runs to its end in a task of its own, also when the caller is cancelled, who is told afterwards.

    A driver that is cancelled in the middle of a transaction may leave it open in its thread: SQLite's write lock was once held
    so for minutes.  A catalog's transaction takes milliseconds, and its wait for another process has a bound.
    """

    @functools.wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.ensure_future(method(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError:
                    continue
            if not task.cancelled():
                task.exception()  # the caller is gone: it will find the state as it is
            raise

    return run
