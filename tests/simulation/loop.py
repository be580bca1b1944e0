"""An event loop for a whole process: virtual time, work in threads as tasks, and the same order in every run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

from tests.simulation.life import Life

#: Rounds without any time passing, after which none ever will.
_MANY: Final = 100_000
#: No history takes as long, in virtual seconds: a few steps, and all that `settle` waits for.
_LONGEST: Final = 20_000.0


class Stuck(Exception):
    """No time will pass any more; the message says why."""


class _Selector(selectors.SelectSelector):
    """Selects nothing: no file is ever watched, but for the loop's own pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits, and no timer is set")
        if self.now > _LONGEST:
            raise Stuck(f"the history does not end: something waits in vain, for more than {_LONGEST:.0f} s by now")
        self._rounds += 1
        if timeout > 0:
            self.now += timeout
            self._rounds = 0
        elif self._rounds > _MANY:
            raise Stuck("something is done again and again, and no time passes")
        return []


class _Task(asyncio.Task[Any]):
    """A task that hashes to its number: sets of tasks are walked in the same order in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(**options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time` is virtual: seconds from 0.  `steps` counts the rounds; a life that is to die by one does so between two."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._numbers = 0
        self.steps = 0
        self.between: Callable[[], None] | None = None
        super().__init__(self._virtual)
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _loop, _context: None)

    def time(self) -> float:
        return self._virtual.now

    def create_future(self) -> asyncio.Future[Any]:
        self._numbers += 1
        return _Future(self._numbers, loop=self)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._numbers += 1
        task = _Task(self._numbers, coroutine, loop=loop, context=context)
        life = Life.current() if context is None else context.run(Life.current)
        if life is not None:
            life.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` in the loop's own thread, some time later; it goes on even if nobody waits any more."""
        future = self.create_future()
        life = Life.current()
        if life is None:
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)
            return future
        self.create_task(life.in_thread(future, lambda: func(*args)))
        return future

    def _run_once(self) -> None:
        self.steps += 1
        if self.between is not None:
            self.between()
        super()._run_once()  # type: ignore[misc]
