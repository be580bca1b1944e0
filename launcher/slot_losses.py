"""Copy every table of a subscription anew when its slot is lost, if the subscription says so (on_slot_loss = resync).

That is ALTER SUBSCRIPTION ... RESYNC TABLE with every table, given by the daemon: a new slot, and copies as many at a time as
max_sync_workers_per_subscription says; readers see the old rows until a table's copy is whole.  A subscription is copied anew at
most max_resyncs_per_day times within a day: a slot that is lost again and again wants another remedy.  An attempt that does not
reach its new slot is not counted, and made again; if the tables are to be copied anew by then, the slot alone is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from apply.publisher_identity import SlotLost
from catalog.records import Subscription
from catalog.store import Catalog
from launcher.altersubscription import begin_stream_anew, resync
from launcher.client_session import Session
from launcher.failures import typed
from launcher.notices import Notice
from pubsub.settings import Settings
from pubsub.sql.identifiers import QualifiedName

_DAY: Final = 86400.0

logger = structlog.get_logger()


class SlotLosses:
    """What is done about the lost slots of one node's subscriptions."""

    def __init__(self, settings: Settings, catalog: Catalog, wake: Callable[[], None]) -> None:
        self._settings = settings
        self._catalog = catalog
        self._wake = wake
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Subscriptions whose slot was lost too often, by oid: said once.  Of failed attempts, the last reason.
        self._given_up: set[int] = set()
        self._failed: dict[int, str] = {}

    def lost(self, subscription: Subscription, error: SlotLost) -> None:
        """Begin to copy the subscription's tables anew, if it says so and that is not under way."""
        if subscription.options.on_slot_loss == "resync" and subscription.oid not in self._tasks:
            task = asyncio.create_task(self._resync(subscription, error), name=f"lost slot of {subscription.name}")
            self._tasks[subscription.oid] = task
            task.add_done_callback(lambda _: self._tasks.pop(subscription.oid, None))

    @property
    def busy(self) -> set[int]:
        """The oids of the subscriptions of which something is under way."""
        return set(self._tasks)

    async def close(self) -> None:
        """Cancel what is under way: the slot is still lost when the daemon starts again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _resync(self, subscription: Subscription, error: SlotLost) -> None:
        try:
            if error.copies:
                await self._copy_anew(subscription, error)
            else:
                await self._make_slot(subscription)
            self._failed.pop(subscription.oid, None)
        except Exception as failure:
            known = typed(failure)
            if self._failed.get(subscription.oid) == known.message:
                return  # said before; the apply worker tries again, and says that the slot is lost
            self._failed[subscription.oid] = known.message
            logger.error(
                "tables could not be copied anew after the loss of a slot",
                subscription=subscription.name,
                reason=known.message,
                detail=known.detail,
                hint=known.hint,
            )

    async def _copy_anew(self, subscription: Subscription, error: SlotLost) -> None:
        oid, now = subscription.oid, time.time()
        stored = await self._catalog.subscription(oid)
        times = tuple(at for at in stored.options.resynced_at if now - _DAY < at <= now)
        limit = self._settings.max_resyncs_per_day
        if len(times) >= limit:
            if oid not in self._given_up:
                self._given_up.add(oid)
                logger.error(
                    "replication slot was lost, and tables are not copied anew again today",
                    subscription=subscription.name,
                    reason=error.message,
                    max_resyncs_per_day=limit,
                )
            return
        self._given_up.discard(oid)
        relations = await self._catalog.relations(oid)
        logger.warning(
            "replication slot was lost: every table is copied anew",
            subscription=subscription.name,
            reason=error.message,
            detail=error.detail,
            tables=len(relations),
            rows=sum(relation.estimated_rows or 0 for relation in relations),
        )
        session = Session(self._settings, self._catalog, self._notice, self._wake)
        names = tuple(QualifiedName(one.schema, one.name) for one in relations)
        await resync(session, stored, names, resynced_at=(*times, now))

    async def _make_slot(self, subscription: Subscription) -> None:
        """Make the slot, of which no table needs anything: an attempt ended before, or the first copies are under way."""
        stored = await self._catalog.subscription(subscription.oid)
        assert stored.slot_name is not None
        logger.warning(
            "replication slot was lost before any table was copied: it is made anew", subscription=stored.name
        )
        session = Session(self._settings, self._catalog, self._notice, self._wake)
        async with await session.connect(stored.name, stored.conninfo) as connection:
            await begin_stream_anew(session, stored, connection, stored.slot_name)

    def _notice(self, notice: Notice) -> None:
        logger.info("notice of a copy anew", message=notice.message, detail=notice.detail, hint=notice.hint)
