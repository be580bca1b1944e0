"""This daemon's tenure of what it has leased, where several share the catalog: it takes, leaves, and gives up.

    taken ──► runs ──► to be left ──► its workers drain ──► given up ──► another one takes it

Process 0 decides for its worker processes, too (launcher.division).  The process that runs a unit gives it up, once nothing of
it runs there any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

import structlog

from catalog.leases import Fleet
from catalog.records import OF_NODE
from catalog.store import Catalog
from launcher.division import part_of, tied
from launcher.share import Share

_LOST: Final = 8.0
"""Seconds that the lock of another daemon is free before it is taken for dead: one that lost its session takes it again sooner."""

logger = structlog.get_logger()


class Tenure:
    """What this process has of the node, which `share` tells others.  `busy`: returns the oids of which something runs here."""

    def __init__(self, catalog: Catalog, share: Share, busy: Callable[[], Collection[int]]) -> None:
        self._catalog = catalog
        self._share = share
        self._busy = busy
        # Since when, in monotonic seconds, the locks of daemons have been free.
        self._missing: dict[int, float] = {}
        # What the last division was made of, and the change counter then.
        self._known: Fleet | None = None
        self._counter = -1

    async def see_to(self, counter: int) -> bool:
        """Do what is to be done now; return whether the catalog was changed.  `counter`: its change counter.

        Raises ObjectInUse if this daemon has been expelled, and other PubsubErrors.
        """
        fleet, is_new = await self._read(counter)
        changed = False
        if self._share.number == 0:
            changed = await self._expel(fleet)
            if is_new:
                changed |= await self._divide(fleet)
            if changed:
                fleet = await self._catalog.fleet()
        # What was changed has moved the counter, so the next call reads it again.
        self._known, self._counter = fleet, counter
        ours = {one.unit: one for one in fleet.leases if one.daemon == fleet.me}
        leased = frozenset(oid for oid, unit in fleet.units.items() if unit in ours)
        gained = leased - (self._share.leased or frozenset())
        if gained:
            await self._forget_workers(fleet, gained)
        self._share.leased = leased | ({OF_NODE} & ours.keys())
        self._share.leaving = frozenset(oid for oid in leased if ours[fleet.units[oid]].leaving)
        leaving = {one.unit for one in ours.values() if one.leaving and self._share.has_unit(one.unit)}
        return (bool(leaving) and await self._give_up(fleet, leaving)) or changed

    async def _read(self, counter: int) -> tuple[Fleet, bool]:
        """Return the fleet, and whether it may have to be divided anew.

        Most calls find nothing moved, and many daemons ask: then only their locks and memory are read, which move no counter.
        """
        if self._known is not None and counter == self._counter:
            daemons, alive = await self._catalog.members()
            fleet = replace(self._known, daemons=daemons, alive=alive)
            if fleet.ready == self._known.ready:
                return fleet, False
        return await self._catalog.fleet(), True

    async def _expel(self, fleet: Fleet) -> bool:
        now = time.monotonic()
        dead = {one.id: one for one in fleet.daemons if one.id not in fleet.alive}
        self._missing = {daemon: self._missing.get(daemon, now) for daemon in dead}
        changed = False
        for daemon, since in self._missing.items():
            if now - since >= _LOST and await self._catalog.expel(daemon):
                logger.warning("another daemon is gone", pid=dead[daemon].pid, host=dead[daemon].host)
                changed = True
        return changed

    async def _divide(self, fleet: Fleet) -> bool:
        part = part_of(fleet)
        if not part.takes and not part.leaves:
            return False
        await self._catalog.lease(part.takes, part.leaves)
        logger.info("subscriptions are divided", takes=len(part.takes), leaves=len(part.leaves))
        return True

    async def _forget_workers(self, fleet: Fleet, oids: Collection[int]) -> None:
        """Remove what another daemon, or this process at an earlier time, has stored of the workers of what it has now."""
        await self._catalog.clear_worker_stats_of({oid for oid in oids if self._share.has_unit(fleet.units[oid])})

    async def _give_up(self, fleet: Fleet, leaving: Collection[int]) -> bool:
        """Give up what is to be left, once nothing runs of it here."""
        # From here on nothing of it begins.
        done = set(leaving) - {fleet.units.get(oid, oid) for oid in self._busy()}
        if not done:
            return False
        # Of these, transactions may have been prepared since, whose files are in this home.
        kept = {unit for unit, daemon in tied(await self._catalog.fleet()).items() if daemon == fleet.me} & done
        if kept:
            await self._catalog.release(kept, left=False)
        if done - kept:
            await self._catalog.release(done - kept, left=True)
        gone = {oid for oid, unit in fleet.units.items() if unit in done - kept}
        self._share.leased = (self._share.leased or frozenset()) - gone
        return True
