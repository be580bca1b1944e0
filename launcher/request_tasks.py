"""Requests of commands that take long: each has a task of its own, beside the launcher's work."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Set

from catalog.records import Request


class RequestTasks(ABC):
    """The tasks of the requests of some `kinds`."""

    def __init__(self, kinds: Set[str]) -> None:
        self._kinds = kinds
        # By request's id, with its subscription's oid.
        self._tasks: dict[int, tuple[int | None, asyncio.Task[None]]] = {}

    def takes(self, request: Request) -> bool:
        """Return whether the request is one of these; begin to carry it out, unless that has begun."""
        if request.kind not in self._kinds:
            return False
        if request.id not in self._tasks:
            task = asyncio.create_task(self._carry_out(request), name=request.kind)
            self._tasks[request.id] = request.subid, task
            task.add_done_callback(lambda _: self._tasks.pop(request.id))
        return True

    @property
    def busy(self) -> set[int]:
        """The oids of the subscriptions for which there are tasks."""
        return {subid for subid, _ in self._tasks.values() if subid is not None}

    async def close(self) -> None:
        """End what has begun."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def _carry_out(self, request: Request) -> None:
        """Carry a request out, and answer it; one that is left unanswered is begun again at the next look at the catalog."""
