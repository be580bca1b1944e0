"""One process of the simulation: a daemon, or a client that carries out a command.

A life ends in order or by `kill`.  It dies between two rounds of the loop, or in a durable write: before it, or when it is
done.  From then on nothing that it does has an effect: each call of a model raises Killed, and its tasks end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.simulation.chance import Chance

T = TypeVar("T")

_CURRENT: ContextVar[Life | None] = ContextVar("life", default=None)


class Killed(BaseException):
    """The process has died: what is running in it does not go on."""


class Life:
    """A process named `name`.  `dies_in`: how many more durable writes it makes; None: as many as it likes."""

    def __init__(self, name: str, chance: Chance) -> None:
        self.name = name
        self.chance = chance
        self.alive = True
        self.frozen: asyncio.Event | None = None
        self.dies_in: int | None = None
        self.died_at = ""
        self.tasks: list[asyncio.Task[Any]] = []
        self.ends: list[Callable[[], None]] = []
        self._context = contextvars.copy_context()
        self._context.run(_CURRENT.set, self)

    @staticmethod
    def current() -> Life | None:
        """Return the process that runs now; None for what is outside of all."""
        return _CURRENT.get()

    def begin(self, main: Coroutine[Any, Any, T], name: str = "main") -> asyncio.Task[T]:
        """Start a task in this process."""
        return asyncio.get_running_loop().create_task(main, name=name, context=self._context)

    # What the models ask

    def check(self) -> None:
        """Raise Killed unless the process lives."""
        if not self.alive:
            raise Killed

    async def step(self, what: str) -> None:
        """Wait as long as a call to the outside may take; it may fail (ConnectionFailure)."""
        self.check()
        await self.chance.wait()
        await self._thawed()
        self.check()
        self.chance.fail(what)

    async def wait(self) -> None:
        """Wait as `step` does, for a call that does not fail."""
        self.check()
        await self.chance.wait()
        await self._thawed()
        self.check()

    def writes(self, what: str) -> None:
        """Note that the process makes a durable write now, or has made one: it may die here."""
        self.check()
        if self.dies_in is None:
            return
        self.dies_in -= 1
        if self.dies_in <= 0:
            self.die(what)
            raise Killed

    async def in_thread(self, future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        """Do `work` for `future` in what stands for a thread."""
        try:
            await self.wait()
            result = work()
            await self.wait()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                error = Killed()
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def thaw(self) -> None:
        """Let a process that is held go on."""
        frozen, self.frozen = self.frozen, None
        if frozen is not None:
            frozen.set()

    def die(self, where: str) -> None:
        """Let it have no effect any more; `kill` then ends its tasks."""
        if self.alive:
            self.alive = False
            self.died_at = where
            self.chance.tell(f"{self.name} is killed ({where})")

    async def kill(self, where: str = "by kill -9") -> None:
        """Let it die, if it has not, and wait until its tasks have ended."""
        self.die(where)
        self.thaw()
        await self.end()

    async def end(self) -> None:
        """Wait until its tasks have ended, cancelled where they go on."""
        for _ in range(50):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
        else:
            raise AssertionError(f"tasks of {self.name} do not end: {left}")
        for task in self.tasks:
            if not task.cancelled():
                task.exception()
        for end in self.ends:
            end()
        self.ends.clear()

    async def _thawed(self) -> None:
        while self.frozen is not None:
            await self.frozen.wait()
