"""Add the tables that a publication has got since, if a subscription says so (new_tables = follow).

That is ALTER SUBSCRIPTION ... REFRESH PUBLICATION, given by the daemon, without what it takes away: tables that are no longer
published stay until somebody gives the command.  A publisher is looked at every _INTERVAL seconds, and at once when its stream
names a table that the subscription does not have.  A table that cannot be replicated holds back no other: status says why, and
every look tries it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from catalog.figures import Warned
from catalog.records import NewRelation, Subscription, SubscriptionChanges
from catalog.store import Catalog
from launcher import published_tables
from launcher.altersubscription import first_connection, follow_names
from launcher.client_session import Session
from launcher.failures import foreseen, traced, typed
from launcher.notices import Notice
from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.protocol.ids import Oid
from pubsub.publisher.connection import Connection
from pubsub.publisher.publication import PublishedTable
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_qualified
from pubsub.sql.typechoices import TypeChoices

#: How often a publisher is asked for its tables, in seconds.
_INTERVAL: Final = 20.0
#: How long a look may take before it is given up until the next one, in seconds.
_PATIENCE: Final = 120.0
#: How many refused tables status names one by one.
_NAMED: Final = 10

logger = structlog.get_logger()


@dataclass(slots=True)
class _Watch:
    subscription: Subscription
    unknown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream has named a table that the subscription does not have."""
    named: set[tuple[str, str]] = field(default_factory=set)
    """Tables that the stream has named since the last look."""
    refused: dict[str, PubsubError] = field(default_factory=dict)
    """Why tables could not be added, by name; by "" why none could be looked for."""
    told: set[str] = field(default_factory=set)
    """What the log has of it."""
    notices: set[str] = field(default_factory=set)
    """Those that the log has."""


class NewTables:
    """A task for each subscription that follows its publications.  The tasks never fail."""

    def __init__(self, settings: Settings, catalog: Catalog, wake: Callable[[], None]) -> None:
        self._settings = settings
        self._catalog = catalog
        self._wake = wake
        self._watches: dict[int, tuple[_Watch, asyncio.Task[None]]] = {}

    def watch(self, subscriptions: Iterable[Subscription]) -> None:
        """Follow the publications of exactly those of the enabled subscriptions that say so, as they are now."""
        wanted = {one.oid: one for one in subscriptions if one.options.new_tables == "follow"}
        for oid, (watch, task) in list(self._watches.items()):
            if wanted.get(oid) != watch.subscription:
                task.cancel()
                del self._watches[oid]
        for oid, subscription in wanted.items():
            if oid not in self._watches:
                watch = _Watch(subscription)
                task = asyncio.create_task(self._look_regularly(watch), name=f"new tables of {subscription.name}")
                self._watches[oid] = watch, task

    def seen(self, oid: int, names: Collection[tuple[str, str]]) -> None:
        """Look at once for the tables of these schemas and names, which the subscription's stream has and the catalog has not."""
        if oid in self._watches:
            watch, _ = self._watches[oid]
            if not watch.named.issuperset(names):
                watch.named.update(names)
                watch.unknown.set()

    def warnings(self, oid: int) -> list[Warned]:
        """Return which published tables are not replicated, and why."""
        if oid not in self._watches:
            return []
        refused = self._watches[oid][0].refused
        found = [Warned(_warning(name, error), hint=error.hint) for name, error in refused.items()]
        if len(found) > _NAMED:
            found[_NAMED:] = [
                Warned(f"{len(found) - _NAMED} more published tables are not replicated; the log names them")
            ]
        return found

    async def close(self) -> None:
        """End every watch."""
        tasks = [task for _, task in self._watches.values()]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_regularly(self, watch: _Watch) -> None:
        while True:
            watch.unknown.clear()
            refused: dict[str, PubsubError] = {}
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._look(watch, refused)
            except TimeoutError:
                refused = watch.refused
                logger.warning("publisher's tables could not be read in time", subscription=watch.subscription.name)
            except ConnectionFailure:
                # The apply worker and the monitor tell of it.
                refused = watch.refused
            except Exception as error:
                refused = {**watch.refused, "": typed(error)}
                if not foreseen(error):
                    logger.error(
                        "new tables could not be looked for",
                        subscription=watch.subscription.name,
                        reason=str(error),
                        exception=traced(error),
                    )
            self._tell(watch, refused)
            # A table that is refused, or is not published, is not looked for whenever the stream names it.
            try:
                async with asyncio.timeout(_INTERVAL):
                    await watch.unknown.wait()
            except TimeoutError:
                watch.named.clear()

    def _tell(self, watch: _Watch, refused: dict[str, PubsubError]) -> None:
        watch.refused = refused
        told = {_warning(name, error): error for name, error in refused.items()}
        for warning, error in told.items():
            if warning not in watch.told:
                logger.warning(
                    "published table is not replicated",
                    subscription=watch.subscription.name,
                    reason=warning,
                    detail=error.detail,
                    hint=error.hint,
                )
        # What is over may be told again.
        watch.told = set(told)

    async def _look(self, watch: _Watch, refused: dict[str, PubsubError]) -> None:
        """Add the tables that are published and that the subscription lacks; `refused` gets those that cannot be."""
        oid = watch.subscription.oid
        subscription = next((one for one in await self._catalog.subscriptions() if one.oid == oid), None)
        if subscription is None or not subscription.enabled or subscription.paused is not None:
            return
        # A session of a walsender's is asked for only where there is something to add: they are few.
        async with await Connection.connect(
            subscription.conninfo, application_name=f"{subscription.name} new tables"
        ) as connection:
            published = await published_tables.published_tables(connection, subscription.publications)
            if not await self._new(subscription, published):
                return
        async with await Connection.connect(
            subscription.conninfo, replication=True, application_name=f"{subscription.name} new tables"
        ) as connection:
            changes = await first_connection(subscription, connection)
            published = await published_tables.published_tables(connection, subscription.publications)
            if new := await self._new(subscription, published):
                if subscription.options.schema_changes == "follow":
                    await follow_names(self._catalog, oid, await self._catalog.relations(oid), published)
                joining = await self._joining(watch, connection, subscription, changes, new, refused)
                await self._add(subscription, changes, joining)

    async def _new(self, subscription: Subscription, published: dict[Oid, PublishedTable]) -> dict[Oid, PublishedTable]:
        """Return those of the `published` tables that the subscription lacks.

        One of a known name was dropped and created again: as in PostgreSQL it is the same table.  A table that was renamed has
        left its old name, if names are followed.
        """
        follows = subscription.options.schema_changes == "follow"
        known, names = set(), set()
        for relation in await self._catalog.relations(subscription.oid):
            known.add(relation.oid)
            now = published.get(relation.oid) if follows else None
            names.add((relation.schema, relation.published_name) if now is None else (now.schema, now.name))
        return {
            relid: table
            for relid, table in published.items()
            if relid not in known and (table.schema, table.name) not in names
        }

    async def _joining(
        self,
        watch: _Watch,
        connection: Connection,
        subscription: Subscription,
        changes: SubscriptionChanges,
        new: dict[Oid, PublishedTable],
        refused: dict[str, PubsubError],
    ) -> list[NewRelation]:
        """Return the rows of the tables that can be added: of all together, or else of each alone."""
        options = subscription.options
        target = changes.get("target", subscription.target)
        session = Session(self._settings, self._catalog, lambda notice: self._notice(watch, notice))

        async def planned(tables: dict[Oid, PublishedTable]) -> list[NewRelation]:
            if options.binary:
                await published_tables.refuse_binary(connection, tables)
            plans = await published_tables.plan(
                session,
                connection,
                tables,
                target,
                copy_data=True,
                create_tables=options.create_tables,
                choices=TypeChoices.parse(options.types),
                layouts=options.layouts,
                subid=subscription.oid,
            )
            return [one.relation(copy_data=True, lsn=None) for one in plans]

        if options.origin == "none":
            have = [
                quote_qualified(r.schema, r.published_name) for r in await self._catalog.relations(subscription.oid)
            ]
            await published_tables.warn_of_foreign_rows(
                session, connection, subscription.name, subscription.publications, besides=have
            )
        try:
            return await planned(new)
        except ConnectionFailure:
            raise
        except PubsubError:
            joining: list[NewRelation] = []
            for relid, table in new.items():
                try:
                    joining += await planned({relid: table})
                except ConnectionFailure:
                    raise
                except PubsubError as error:
                    refused[f"{table.schema}.{table.name}"] = error
            for relation in await self._catalog.relations(subscription.oid):
                # A command has added it meanwhile.
                refused.pop(relation.qualified_name, None)
            return joining

    async def _add(self, subscription: Subscription, changes: SubscriptionChanges, joining: list[NewRelation]) -> None:
        if not joining:
            return
        known = subscription.publications
        await self._catalog.refresh_subscription(subscription.oid, changes, (), joining, publications=known)
        for one in joining:
            logger.info(
                "published table is added to the subscription",
                subscription=subscription.name,
                relation=f"{one.schema}.{one.name}",
                rows=one.estimated_rows,
            )
        self._wake()

    @staticmethod
    def _notice(watch: _Watch, notice: Notice) -> None:
        if notice.message not in watch.notices:
            watch.notices.add(notice.message)
            logger.info("notice of new tables", message=notice.message, detail=notice.detail, hint=notice.hint)


def _warning(name: str, error: PubsubError) -> str:
    what = f'published table "{name}" is not replicated' if name else "new tables could not be looked for"
    return f"{what}: {error.message}"
