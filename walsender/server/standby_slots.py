"""Failover slots wait for the standbys that would be promoted: synchronized_standby_slots of the upstream server, 17 and later.

A subscriber that is ahead of the new primary could not go on there.  So a slot with `failover` is sent, and moves over, only
WAL that the standbys have which own the named physical slots.

    upstream server ── restart_lsn of the named slots ──► StandbySlots ──► decoding processes, functions over slots

Follows slot.c (StandbySlotsHaveCaughtup, WaitForStandbyConfirmation).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection

if TYPE_CHECKING:
    from walsender.feed.feed import Feed

_LOOK: Final = 1.0
"""Seconds between two looks at the setting, while failover slots are in use."""
_SOON: Final = 0.1
"""The same, while they wait for a standby."""
_VERSION_17: Final = 170000
_NAME: Final = "synchronized_standby_slots"
_STATE: Final = (
    f"SELECT pg_catalog.current_setting('{_NAME}'), (SELECT pg_catalog.json_object_agg(slot_name,"
    " pg_catalog.json_build_array(slot_type, invalidation_reason IS NOT NULL, active, restart_lsn))"
    " FROM pg_catalog.pg_replication_slots)"
)

logger = structlog.get_logger()


class StandbySlots:
    """What the standbys of one upstream server have.  `streams` returns whether streams of failover slots run.

    `told` is called with `reached` whenever that has changed.
    """

    def __init__(self, conninfo: str, feed: Feed, streams: Callable[[], bool], told: Callable[[], None]) -> None:
        self._conninfo = conninfo
        self._feed = feed
        self._streams = streams
        self._told = told
        self._waiting = 0
        self._soon = asyncio.Event()
        self._changed = asyncio.Event()
        self._names: tuple[str, ...] | None = None
        self._problems: set[str] = set()
        self.reached: int | None = 0
        """The LSN up to which all the standbys have the WAL; 0: that is not known; None: no slot waits for them."""

    def look_soon(self) -> None:
        """Streams have begun or ended."""
        self._soon.set()

    async def wait_for(self, lsn: int) -> None:
        """Wait until failover slots may be at `lsn`."""
        self._waiting += 1
        try:
            while self.reached is not None and self.reached < lsn:
                self._soon.set()
                await self._changed.wait()
        finally:
            self._waiting -= 1

    async def looked(self) -> None:
        """Wait until `reached` says what holds now; call it where a stream is among those that run."""
        while self._names is None and self.reached is not None:
            self._soon.set()
            await self._changed.wait()

    async def run(self) -> None:
        """Look, while anybody has to know, until cancelled."""
        if self._feed.server.version < _VERSION_17:
            self._set(None)
            await asyncio.Event().wait()
        while True:
            while not self._is_needed():
                # What is known now says nothing about later.
                self._names = None
                self._set(0)
                await self._soon.wait()
                self._soon.clear()
            try:
                async with await self._feed.connect(self._conninfo) as connection:
                    await self._watch(connection)
            except ConnectionFailure:
                await asyncio.sleep(_LOOK)  # the feed says that the server cannot be reached
            except PublisherError as error:
                logger.warning("synchronized_standby_slots cannot be read", reason=error.message)
                await asyncio.sleep(_LOOK)

    def _is_needed(self) -> bool:
        return self._waiting > 0 or self._streams()

    async def _watch(self, connection: Connection) -> None:
        while self._is_needed():
            self._soon.clear()
            ((setting, slots),) = await connection.query(_STATE)
            self._look(setting or "", json.loads(slots or "{}"))
            behind = self.reached is not None and (self._waiting or self.reached < self._feed.received)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    if behind:
                        await asyncio.sleep(_SOON)
                    elif self.reached is None:
                        await self._soon.wait()
                    else:
                        await self._feed.wait_for_more()

    def _look(self, setting: str, slots: dict[str, list[Any]]) -> None:
        names = _names_of(setting)
        if names != self._names:
            logger.info("synchronized_standby_slots was read", value=setting)
            self._names = names
            self._set(0 if names else None)
        if not names:
            return
        judged = [_judged(name, slots.get(name), self._feed.received) for name in names]
        problems = {problem for problem, _ in judged if problem}
        for problem in sorted(problems - self._problems):
            logger.warning("failover slots wait for a standby", reason=problem)
        self._problems = problems
        found = [lsn for _, lsn in judged if lsn is not None]
        if len(found) == len(judged):
            # Otherwise they still have what they had before.
            self._set(max(min(found), self.reached or 0))

    def _set(self, reached: int | None) -> None:
        before, self.reached = self.reached, reached
        self._changed.set()
        self._changed.clear()
        if reached != before:
            self._told()


def _names_of(setting: str) -> tuple[str, ...]:
    """Split the setting, whose names are those that slots can have (varlena.c: SplitIdentifierString)."""
    names = (one.strip() for one in setting.split(","))
    return tuple(one.strip('"') if one[:1] == '"' else one.lower() for one in names if one)


def _judged(name: str, slot: list[Any] | None, wanted: int) -> tuple[str, int | None]:
    """Return what is wrong with a slot, if anything, and up to where its standby has the WAL; None: that says nothing."""
    if slot is None:
        return f'replication slot "{name}" specified in parameter "{_NAME}" does not exist', None
    kind, is_invalid, is_active, restart = slot
    if kind != "physical":
        return f'cannot specify logical replication slot "{name}" in parameter "{_NAME}"', None
    if is_invalid:
        return f'physical replication slot "{name}" specified in parameter "{_NAME}" has been invalidated', None
    lsn = None if restart is None else int(Lsn.parse(restart))
    if (lsn is None or lsn < wanted) and not is_active:
        return f'replication slot "{name}" specified in parameter "{_NAME}" does not have active_pid', lsn
    return "", lsn
