"""Hand a table over from its sync worker to apply: states w and c, which live in memory alone.

    sync worker                         apply worker
    copy done, at LSN X ── w ─────────►  answers with C = max(X, the origin, end of the last transaction it
                         ◄──────── c ──  has decided not to apply to the table); applies what commits after C
    applies up to C exactly
    stores s at C ───────── s ─────────► writes its own batches of the table from now on

In PostgreSQL these states are in shared memory (worker_internal.h: relstate, relstate_lsn), and apply waits while the sync
worker catches up (tablesync.c: wait_for_relation_state_change).  Here apply goes on receiving; only its first commit to the
table waits for `s`.  A promised C outlives both workers as long as the process lives: their successors keep it.  Only a new copy
breaks the promise, and then apply starts again from its origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from pubsub import faults
from pubsub.protocol.lsn import Lsn


class Applying(Protocol):
    """The apply worker, as the hand-over sees it."""

    def answer(self, relid: int, at: Lsn) -> Lsn:
        """Return C for a table whose sync worker is at `at`; this worker applies what commits after C."""

    def start_again(self) -> None:
        """Decide again from the origin: a new copy has broken a promise."""

    def tables_changed(self) -> None:
        """Read the catalog again: a table has reached s."""


class Handover:
    """One subscription's tables between copy and ready.  Use it from one event loop; nothing here is stored."""

    def __init__(self) -> None:
        self._waiting: dict[int, Lsn] = {}
        self._promised: dict[int, Lsn] = {}
        self._synced: dict[int, asyncio.Event] = {}
        self._applying: Applying | None = None
        self._attached = asyncio.Event()
        self._looked_up: set[str] = set()

    @property
    def promised(self) -> Mapping[int, Lsn]:
        """C by relation oid, for each table that has been promised one and is not ready."""
        return self._promised

    def attach(self, applying: Applying) -> None:
        """Register the apply worker, which has taken over the promises."""
        self._applying = applying
        self._attached.set()

    def detach(self) -> None:
        """Forget the apply worker, which ends; promises stand."""
        self._applying = None
        self._attached.clear()

    def look_up(self, app_id: str) -> None:
        """Have the rows of this copy of a table looked up from now on, by each worker of this process (Destination.contested)."""
        self._looked_up.add(app_id)

    def looks_up(self, app_id: str) -> bool:
        """Return whether the rows of this copy of a table are looked up."""
        return app_id in self._looked_up

    def state(self, relid: int) -> tuple[str, Lsn] | None:
        """Return ('w', X) or ('c', C) while the table is in that state, else None."""
        if relid not in self._waiting or self._event(relid).is_set():
            return None
        promised = self._promised.get(relid)
        return ("w", self._waiting[relid]) if promised is None else ("c", promised)

    async def catchup_lsn(self, relid: int, at: Lsn) -> Lsn:
        """Enter state w with the sync worker at `at`; wait for state c and return its C >= `at`."""
        self._waiting[relid] = at
        await faults.reached(f"sync wait {relid}")
        while relid not in self._promised:
            await self._attached.wait()
            if self._applying is not None:
                self._promised[relid] = self._applying.answer(relid, at)
        return self._promised[relid]

    def new_copy(self, relid: int) -> None:
        """Drop the promise for a table that is copied from a new snapshot."""
        self._waiting.pop(relid, None)
        self._event(relid).clear()
        if self._promised.pop(relid, None) is not None and self._applying is not None:
            self._applying.start_again()

    def synced(self, relid: int) -> None:
        """Note that state s is stored: apply may write the table."""
        self._event(relid).set()
        if self._applying is not None:
            self._applying.tables_changed()

    async def wait_synced(self, relid: int) -> None:
        """Wait until the table's sync worker has stored s, or the table is forgotten."""
        await self._event(relid).wait()

    def forget(self, relid: int) -> None:
        """Forget a table that is ready or no longer in the subscription."""
        self._waiting.pop(relid, None)
        self._promised.pop(relid, None)
        self._event(relid).set()
        del self._synced[relid]

    def _event(self, relid: int) -> asyncio.Event:
        return self._synced.setdefault(relid, asyncio.Event())
