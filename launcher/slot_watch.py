"""Watch what a subscription's slots have left before they are lost: its own one, and those with which tables are copied.

A warning is in `status` as long as it holds, with figures that change; the log has it once, when it begins, and its end.
"""

from __future__ import annotations

import time
from typing import Final

import structlog

from catalog.figures import Warned
from catalog.records import Subscription
from launcher.slot_warnings import Room, about_slot, about_slot_of_a_copy
from pubsub.publisher import slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.slots import SlotInfo

logger = structlog.get_logger()

_TABLE: Final = """
SELECT format('%s.%s', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = $1::oid
"""


class SlotWatch:
    """The slots of `subscription`, as each look finds them."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._rooms: dict[str, Room] = {}
        # The last look's warnings, by slot, and those that the log has.
        self._last: dict[str, Warned] = {}
        self._told: set[str] = set()

    async def look(self, connection: Connection, of_copies: str) -> tuple[SlotInfo | None, list[Warned]]:
        """Return the subscription's own slot, and warnings about all; `of_copies`: a LIKE pattern of the others' names.

        Raises what queries raise.
        """
        now = time.monotonic()
        name = self._subscription.slot_name
        own = await slots.slot_info(connection, name) if name is not None else None
        copies = await slots.slot_infos(connection, of_copies)
        names = {one.name for one in copies} | ({name} if name is not None else set())
        self._rooms = {one: self._rooms.get(one) or Room() for one in names}
        found: dict[str, Warned] = {}
        if name is not None:
            archive = self._subscription.options.wal_archive
            warned = about_slot(name, own, archive, self._seconds_left(name, own, now))
            found |= {name: warned} if warned is not None else {}
        for slot in copies:
            left = self._seconds_left(slot.name, slot, now)
            if about_slot_of_a_copy(slot, slot.name, left) is not None:
                warned = about_slot_of_a_copy(slot, await _table_of(connection, slot.name), left)
                found |= {slot.name: warned} if warned is not None else {}
        self._tell(found)
        return own, list(found.values())

    def _seconds_left(self, name: str, slot: SlotInfo | None, now: float) -> float | None:
        self._rooms[name].see(slot, now)
        return self._rooms[name].seconds_left()

    def _tell(self, warned: dict[str, Warned]) -> None:
        """Log what two looks have found: a slot that is just being dropped or made anew is seen once at most."""
        for name in (warned.keys() & self._last.keys()) - self._told:
            warning = warned[name]
            logger.warning(
                "replication slot is lost, or soon will be",
                subscription=self._subscription.name,
                slot=name,
                reason=warning.message,
                detail=warning.detail,
                hint=warning.hint,
            )
            self._told.add(name)
        for name in self._told - warned.keys():
            logger.info("replication slot is in no danger any more", subscription=self._subscription.name, slot=name)
        self._told &= warned.keys()
        self._last = warned


async def _table_of(connection: Connection, slot: str) -> str:
    """Return the table that a sync worker's slot is for (tablesync.worker.sync_slot_name)."""
    oid = slot.split("_")[3]
    rows = await connection.query(_TABLE, [oid])
    return rows[0][0] or oid if rows else oid
