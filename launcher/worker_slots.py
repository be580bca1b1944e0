"""The slots of logical replication workers, over all subscriptions (launcher.c: logicalrep_worker_launch).

There are max_logical_replication_workers slots.  An apply worker keeps its slot as long as its subscription runs; a
sync worker holds one during the copy of its table.  In PostgreSQL no table is ever copied while apply workers, which do
not end, hold all slots.  Here an apply worker shares its slot with one sync worker of its subscription, so that copies
always go on:

    limit 3   apply a [+ sync a.t]   apply b [+ sync b.u]   sync a.v   c: apply waits; b: its second sync worker waits

A slot that becomes free goes to a waiting apply worker, since a subscription without one stands still; otherwise to a
sync worker of the subscription that has the fewest.  Among equals, the first to ask goes first.  A sync worker that an apply
worker waits for does not wait itself: it takes a slot beyond the limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from catalog.figures import Warned

#: launcher.c's words.
MESSAGE: Final = "out of logical replication worker slots"
_HINT: Final = 'You might need to increase "max_logical_replication_workers".'
#: How many holders a message names at most.
_NAMED: Final = 10

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerName:
    """Names a worker: its subscription, and the table that it synchronizes (None: the apply worker)."""

    subid: int
    subscription: str
    relation: str | None = None

    def __str__(self) -> str:
        if self.relation is None:
            return f'apply worker of "{self.subscription}"'
        return f'sync worker of "{self.subscription}" for {self.relation}'


class WorkerSlots:
    """The workers that hold a slot and those that wait for one.  For use from one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holding: dict[WorkerName, None] = {}
        self._waiting: dict[WorkerName, asyncio.Future[None]] = {}
        # Whether workers wait; logged when it begins and when it is over.
        self._out = False

    @asynccontextmanager
    async def held(self, worker: WorkerName, *, at_once: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and hold it while the body runs; `at_once`: hold one even if none is free.

        A subscription's apply worker must hold one before its sync workers ask.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if at_once:
            self._holding[worker] = None
            turn.set_result(None)
        else:
            self._waiting[worker] = turn
            self._grant()
        try:
            if not turn.done():
                self._tell(worker)
                await turn
            yield
        finally:
            self._waiting.pop(worker, None)
            self._holding.pop(worker, None)
            self._grant()

    def wait(self, worker: WorkerName) -> Warned | None:
        """Return why the worker has no slot yet; None if it has one or did not ask."""
        return self.shortage() if worker in self._waiting else None

    def shortage(self) -> Warned:
        """Return the warning that all slots are held: PostgreSQL's message, and who holds them."""
        if self._limit == 0:
            return Warned(MESSAGE, '"max_logical_replication_workers" is 0: no worker starts.', _HINT)
        return Warned(MESSAGE, f"{self._limit} of {self._limit} are held: {_listed(self._slots())}.", _HINT)

    def _slots(self) -> Iterator[str]:
        """Yield a description of each held slot's holders."""
        sharing: dict[int, WorkerName] = {}
        applying = {worker.subid for worker in self._holding if worker.relation is None}
        for worker in self._holding:
            if worker.relation is not None and worker.subid in applying:
                sharing.setdefault(worker.subid, worker)
        for worker in self._holding:
            if worker.relation is None and worker.subid in sharing:
                yield f"{worker} (and its sync worker for {sharing[worker.subid].relation})"
            elif sharing.get(worker.subid) != worker:
                yield str(worker)

    def _used(self) -> int:
        """Count the held slots: the first sync worker beside an apply worker needs none of its own."""
        applying = {worker.subid for worker in self._holding if worker.relation is None}
        syncing = Counter(worker.subid for worker in self._holding if worker.relation is not None)
        return len(applying) + sum(count - (subid in applying) for subid, count in syncing.items())

    def _grant(self) -> None:
        while True:
            syncing = Counter(worker.subid for worker in self._holding if worker.relation is not None)
            applying = {worker.subid for worker in self._holding if worker.relation is None}
            free = self._limit - self._used()
            # Among equals min() takes the first, which asked first.
            able = [w for w in self._waiting if free > 0 or _shares(w, applying, syncing)]
            if not able:
                break
            worker = min(able, key=lambda w: (w.relation is not None, syncing[w.subid]))
            turn = self._waiting.pop(worker)
            if not turn.done():
                self._holding[worker] = None
                turn.set_result(None)
        if self._out and not self._waiting:
            self._out = False
            logger.info("no worker waits any more", reason=MESSAGE)

    def _tell(self, worker: WorkerName) -> None:
        """Log the shortage once while workers wait, and for each apply worker, whose subscription cannot begin."""
        if not self._out or worker.relation is None:
            said = self.shortage()
            logger.warning(
                "worker waits",
                reason=said.message,
                subscription=worker.subscription,
                relation=worker.relation,
                detail=said.detail,
                hint=said.hint,
            )
        self._out = True


def _shares(worker: WorkerName, applying: set[int], syncing: Counter[int]) -> bool:
    return worker.relation is not None and worker.subid in applying and not syncing[worker.subid]


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - _NAMED
    return ", ".join(known[:_NAMED]) + (f" and {more} more" if more > 0 else "")
