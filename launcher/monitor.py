"""Poll the publishers, on connections of their own, for the figures and warnings of `status`.  No decision depends on them.

Every subscription with a slot is polled, including disabled ones, whose slots retain WAL all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import structlog

from catalog.figures import PublisherStatus, Warned
from catalog.records import Subscription
from catalog.store import Catalog
from launcher.leftover_slots import leftover_slots
from launcher.partition_files import PartitionFiles
from launcher.slot_warnings import about_lock, about_wait
from launcher.slot_watch import SlotWatch
from pubsub.errors import PubsubError
from pubsub.publisher import locks, publication, slots
from pubsub.publisher.connection import Connection

_INTERVAL: Final = 2.0
#: The interval for a disabled subscription's publisher, whose connection is not kept.  All three are in seconds.
_SELDOM: Final = 30.0
#: At how many looks partitions are looked at once.
_PARTITIONS: Final = 5
#: An attempt that takes longer is given up and repeated after the interval.
_PATIENCE: Final = 30.0

logger = structlog.get_logger()


@dataclass(slots=True)
class _Watch:
    subscription: Subscription
    task: asyncio.Task[None]
    last: PublisherStatus | None = None
    heard: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When the publisher last answered; until its first answer, when the watch began."""


class Monitors:
    """A task and a connection for each watched subscription.  They never fail, since they serve only to inform."""

    def __init__(self, node_id: str, catalog: Catalog) -> None:
        self._node_id = node_id
        self._catalog = catalog
        self._watches: dict[int, _Watch] = {}
        self._partitions: dict[int, PartitionFiles] = {}

    def watch(self, subscriptions: Iterable[Subscription]) -> None:
        """Watch exactly these subscriptions, as they are now."""
        wanted = {s.oid: s for s in subscriptions if s.slot_name is not None}
        self._partitions = {oid: one for oid, one in self._partitions.items() if oid in wanted}
        before: dict[int, _Watch] = {}
        for oid in [oid for oid, watch in self._watches.items() if wanted.get(oid) != watch.subscription]:
            before[oid] = self._watches.pop(oid)
            before[oid].task.cancel()
        for oid, subscription in wanted.items():
            if oid not in self._watches:
                task = asyncio.create_task(self._look_regularly(subscription), name=f"monitor {subscription.name}")
                watch = self._watches[oid] = _Watch(subscription, task)
                if oid in before and before[oid].subscription.conninfo == subscription.conninfo:
                    watch.heard = before[oid].heard

    def looks(self) -> dict[int, PublisherStatus | None]:
        """Return each subscription's latest status; None where the last attempt failed."""
        return {oid: watch.last for oid, watch in self._watches.items()}

    def heard(self, oid: int) -> datetime | None:
        """Return when a publisher last answered, or else when its watch began; None if it is not watched."""
        return self._watches[oid].heard if oid in self._watches else None

    async def close(self) -> None:
        """End every watch."""
        tasks = [watch.task for watch in self._watches.values()]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_regularly(self, subscription: Subscription) -> None:
        connection: Connection | None = None
        suspects: Mapping[str, Warned] = {}
        watched = SlotWatch(subscription)
        # What was found stays when the subscription is altered.
        partitions = self._partitions.setdefault(subscription.oid, PartitionFiles())
        emptied: Sequence[Warned] = ()
        looks = 0
        try:
            while True:
                found: PublisherStatus | None = None
                try:
                    async with asyncio.timeout(_PATIENCE):
                        if connection is None or connection.closed:
                            connection = await Connection.connect(
                                subscription.conninfo, application_name="pubsub monitor"
                            )
                        found = await look(connection, subscription, self._node_id, watched)
                        before = suspects
                        suspects = await leftover_slots(connection, self._catalog, self._node_id, subscription.oid)
                        left = [warning for name, warning in suspects.items() if name in before]
                        if looks % _PARTITIONS == 0:
                            relations = await self._catalog.relations(subscription.oid)
                            emptied = await partitions.look(connection, subscription.name, relations)
                        looks += 1
                        found = replace(found, warnings=(*found.warnings, *left, *emptied))
                except (PubsubError, TimeoutError) as error:
                    logger.debug("publisher could not be asked", subscription=subscription.name, reason=str(error))
                    if connection is not None:
                        await connection.close()
                if (watch := self._watches.get(subscription.oid)) is not None and watch.subscription is subscription:
                    watch.last = found
                    if found is not None:
                        watch.heard = datetime.now(UTC)
                if not subscription.enabled and connection is not None:
                    await connection.close()
                await asyncio.sleep(_INTERVAL if subscription.enabled else _SELDOM)
        finally:
            if connection is not None:
                await connection.close()


async def look(connection: Connection, subscription: Subscription, node_id: str, watched: SlotWatch) -> PublisherStatus:
    """Query the publisher's status once; `watched` learns what the slots have left.  Raises what queries raise."""
    current = await slots.current_wal_lsn(connection)
    # A sync worker's slot and its sessions have one name (tablesync.worker.sync_slot_name).
    of_ours = f"pg\\_{subscription.oid}\\_sync\\_%\\_{node_id}"
    slot, warnings = await watched.look(connection, of_ours)
    if subscription.slot_name is not None and slot is not None and slot.confirmed_flush_lsn is None:
        # The apply worker is making it, to follow it once a gap is filled.
        named = subscription.slot_name.replace("_", "\\_")
        warnings += [about_wait(one) for one in await slots.slot_waits(connection, named)]
    if missing := await publication.missing_publications(connection, subscription.publications):
        names = ", ".join(f'"{name}"' for name in missing)
        warnings.append(
            Warned(
                f"publication {names} does not exist on the publisher"
                if len(missing) == 1
                else f"publications {names} do not exist on the publisher",
                hint="Create it again, or take it out with ALTER SUBSCRIPTION ... DROP PUBLICATION.",
            )
        )
    waits = {_table(one.application): about_lock(one) for one in reversed(await locks.lock_waits(connection, of_ours))}
    waits |= {_table(one.slot): about_wait(one) for one in await slots.slot_waits(connection, of_ours)}
    return PublisherStatus(
        current_lsn=current,
        retained_wal_bytes=slot.retained_bytes if slot is not None else None,
        safe_wal_bytes=slot.safe_wal_size if slot is not None else None,
        wal_status=slot.wal_status if slot is not None else None,
        warnings=tuple(warnings),
        waits=waits,
    )


def _table(name: str) -> int:
    """Return the oid of the table that a sync worker's slot is named after."""
    return int(name.split("_")[3])


def combined(
    look: PublisherStatus | None,
    more: Sequence[Warned],
    waits: Mapping[int, Warned],
    away_since: datetime | None,
) -> PublisherStatus:
    """Join the monitor's `look` with the stream's own warnings (`more`) and the workers' `waits`.

    Where both name a wait for the same table, the publisher's stands, since it says more.
    """
    found = look or PublisherStatus()
    known = {relid: found.waits.get(relid, wait) for relid, wait in waits.items()}
    return replace(found, warnings=(*found.warnings, *more), waits={**found.waits, **known}, away_since=away_since)
