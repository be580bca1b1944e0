"""Take the comments of the publisher's tables and columns over into the Delta tables (the option comments): a task of the daemon.

COMMENT ON is not part of a stream of changes.  So a publisher is asked once its subscription's tables have changed, and every
_INTERVAL seconds; a table whose comments are others by then gets them in a commit that changes nothing else.  The option holds at
once; when it is switched off, what is there stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from apply.schema_changes import attributes
from catalog.records import Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher.failures import foreseen, traced
from launcher.share import ALL, Share
from pubsub.delta.comments import Comments, follow
from pubsub.delta.places import is_reached
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import application_id
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import ConnectionFailure
from pubsub.publisher.connection import Connection
from pubsub.publisher.descriptions import Description, descriptions
from pubsub.texts import first_line

NAP: Final = 2.0
#: How often a publisher is asked whose subscription has not changed, in seconds.
_INTERVAL: Final = 60.0
#: How long an answer is waited for, in seconds.
_PATIENCE: Final = 120.0

logger = structlog.get_logger()


class TableComments:
    """One node's; `run` lasts until it is cancelled, and then until the commit under way has ended.

    `share`: the subscriptions whose tables it sees to.
    """

    def __init__(
        self, node_id: str, catalog: Catalog, engine: Engine, writers: TableWriters, share: Share = ALL
    ) -> None:
        self._node_id = node_id
        self._share = share
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._seen = -1
        self._wanted: dict[int, tuple[Subscription, tuple[SubscriptionRel, ...]]] = {}
        # When each subscription's publisher is asked again.
        self._due: dict[int, float] = {}
        self._at_work: set[int] = set()
        self.nap = NAP

    async def run(self) -> None:
        """Work until cancelled.  Nothing is done while the catalog is another daemon's."""
        while True:
            await asyncio.sleep(self.nap)
            try:
                await self._look()
            except Exception as error:
                logger.warning("comments of tables could not be looked at", reason=first_line(error))

    @property
    def busy(self) -> set[int]:
        """The oids of the subscriptions whose tables are being looked at."""
        return set(self._at_work)

    async def _look(self) -> None:
        counter = await self._catalog.change_counter()
        if counter != self._seen:
            wanted = await self._read_wanted()
            for oid in self._wanted.keys() | wanted.keys():
                if self._wanted.get(oid) != wanted.get(oid):
                    self._due.pop(oid, None)
            self._wanted, self._seen = wanted, counter
        now = time.monotonic()
        due = [oid for oid in self._wanted if self._due.get(oid, now) <= now]
        if due:
            await self._engine.fence()
            await self._catalog.prove()
            await asyncio.gather(*map(self._see_to, due))

    async def _read_wanted(self) -> dict[int, tuple[Subscription, tuple[SubscriptionRel, ...]]]:
        """Return the subscriptions that want comments, with their tables that have a Delta table which is reached without Spark."""
        found = {}
        for subscription in self._share.of(await self._catalog.subscriptions()):
            if not subscription.options.comments or not subscription.enabled or subscription.paused is not None:
                continue
            relations = tuple(
                one
                for one in await self._catalog.relations(subscription.oid)
                if one.state is RelState.READY and one.definition is not None and is_reached(one.path)
            )
            if relations:
                found[subscription.oid] = subscription, relations
        return found

    async def _see_to(self, oid: int) -> None:
        """See to a subscription's tables.  Raises nothing: the others have theirs, and it is tried again."""
        subscription, relations = self._wanted[oid]
        self._due[oid] = time.monotonic() + _INTERVAL
        if not self._share.may_begin(oid):
            return
        self._at_work.add(oid)
        try:
            await self._compare(subscription, relations)
        finally:
            self._at_work.discard(oid)

    async def _compare(self, subscription: Subscription, relations: tuple[SubscriptionRel, ...]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                async with await Connection.connect(
                    subscription.conninfo, application_name=f"{subscription.name} comments"
                ) as connection:
                    found = await descriptions(connection, [*{relation.oid for relation in relations}])
        except (ConnectionFailure, TimeoutError):
            return  # the apply worker and the monitor tell of it
        except Exception as error:
            self._failed(subscription.name, None, error)
            return
        for relation in relations:
            described = found.get(relation.oid)
            if described is None:
                continue
            try:
                if await self._engine.run_without_spark(self._follow, relation, described):
                    logger.info(
                        "comments were taken over", subscription=subscription.name, relation=relation.qualified_name
                    )
            except Exception as error:
                self._failed(subscription.name, relation.qualified_name, error)

    def _follow(self, relation: SubscriptionRel, described: Sequence[Description]) -> bool:
        app_id = application_id(self._node_id, relation.subid, relation.relid, relation.copy_generation)

        def wanted(properties: Mapping[str, str]) -> Comments:
            return comments_of(described, attributes.current(relation.definition, properties, app_id))

        return follow(self._writers.log_of(relation.path), wanted, shared=relation.whose is not None)

    def _failed(self, subscription: str, relation: str | None, error: Exception) -> None:
        logger.warning(
            "comments could not be taken over",
            subscription=subscription,
            relation=relation,
            reason=first_line(error),
            exception=None if foreseen(error) else traced(error),
        )


def comments_of(described: Sequence[Description], known: attributes.Attributes | None) -> Comments:
    """Return what a Delta table's comments are to be.  `known`: its columns' numbers at the publisher; None: names tell."""
    here: Mapping[int, str] = {one.number: one.name for one in described if one.number}
    if known is not None:
        here = {column.number: column.name for column in known.columns}
    comments = {one.number: one.comment for one in described}
    return Comments(comments.get(0), {name: comments[number] for number, name in here.items() if number in comments})
