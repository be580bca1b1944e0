"""Looks at the publishers beside the streams: what `status` shows and warns of, and nothing that is decided by.

Each subscription that has a slot is looked at, a disabled one too: its slot holds WAL back all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from catalog.records import PublisherStatus, Subscription, Warned
from launcher.slotwarnings import about_slot, about_wait
from pubsub.errors import PubsubError
from pubsub.publisher import publication, slots
from pubsub.publisher.connection import Connection

_INTERVAL: Final = 2.0
#: A disabled subscription's publisher, whose connection is not kept.
_SELDOM: Final = 30.0
#: A publisher that does not answer for so long is asked again later.
_PATIENCE: Final = 30.0

log = structlog.get_logger()


@dataclass(slots=True)
class _Watch:
    subscription: Subscription
    task: asyncio.Task[None]
    last: PublisherStatus | None = None


class Monitors:
    """A task and a connection for each subscription that is watched.  They never fail: they are for people."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}

    def watch(self, subscriptions: Iterable[Subscription]) -> None:
        """Watch these and no others, as they are now."""
        wanted = {s.oid: s for s in subscriptions if s.slot_name is not None and not s.dropping}
        for oid in [oid for oid, watch in self._watches.items() if wanted.get(oid) != watch.subscription]:
            self._watches.pop(oid).task.cancel()
        for oid, subscription in wanted.items():
            if oid not in self._watches:
                task = asyncio.create_task(self._look_regularly(subscription), name=f"monitor {subscription.name}")
                self._watches[oid] = _Watch(subscription, task)

    def looks(self) -> dict[int, PublisherStatus | None]:
        """The latest looks; None where the publisher could not be asked."""
        return {oid: watch.last for oid, watch in self._watches.items()}

    async def close(self) -> None:
        """End them all."""
        tasks = [watch.task for watch in self._watches.values()]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_regularly(self, subscription: Subscription) -> None:
        connection: Connection | None = None
        try:
            while True:
                found: PublisherStatus | None = None
                try:
                    async with asyncio.timeout(_PATIENCE):
                        if connection is None or connection.closed:
                            connection = await Connection.connect(
                                subscription.conninfo, application_name="pubsub monitor"
                            )
                        found = await look(connection, subscription)
                except (PubsubError, TimeoutError) as error:
                    log.debug("publisher could not be asked", subscription=subscription.name, reason=str(error))
                    if connection is not None:
                        await connection.close()
                if (watch := self._watches.get(subscription.oid)) is not None and watch.subscription is subscription:
                    watch.last = found
                if not subscription.enabled and connection is not None:
                    await connection.close()
                await asyncio.sleep(_INTERVAL if subscription.enabled else _SELDOM)
        finally:
            if connection is not None:
                await connection.close()


async def look(connection: Connection, subscription: Subscription) -> PublisherStatus:
    """One look at the publisher.  Raises what queries raise."""
    current = await slots.current_wal_lsn(connection)
    slot = None
    warnings = []
    if subscription.slot_name is not None:
        slot = await slots.slot_info(connection, subscription.slot_name)
        if (warned := about_slot(subscription.slot_name, slot)) is not None:
            warnings.append(warned)
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
    waits = await slots.slot_waits(connection, f"pg\\_{subscription.oid}\\_sync\\_%")
    return PublisherStatus(
        current_lsn=current,
        retained_wal_bytes=slot.retained_bytes if slot is not None else None,
        safe_wal_bytes=slot.safe_wal_size if slot is not None else None,
        wal_status=slot.wal_status if slot is not None else None,
        warnings=tuple(warnings),
        waits={wait.slot: about_wait(wait) for wait in waits},
    )


def combined(look: PublisherStatus | None, more: Sequence[Warned]) -> PublisherStatus:
    """A look with what the stream itself was warned of."""
    found = look or PublisherStatus()
    return PublisherStatus(
        found.current_lsn, found.retained_wal_bytes, found.safe_wal_bytes, found.wal_status,
        (*found.warnings, *more), found.waits,
    )  # fmt: skip
