"""The publisher's table, as the connections of its sync worker see it.

A failure that is the table's own, and not one that other tables would have too, is attributed to it here (`blaming`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from apply.schema_changes.attributes import Attributes, stored
from apply.schema_changes.column_choice import Choice, choose
from apply.schema_changes.kept_rows import published_filter
from apply.schema_changes.table_definition import planned_table
from apply.worker_statistics import Figures
from catalog.records import Subscription, SubscriptionRel
from pubsub.delta.table import TargetTable
from pubsub.errors import UndefinedTable
from pubsub.masks import fingerprint_of, require_key
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, publication, snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import TableDefinition
from pubsub.publisher.publication import PublishedTable
from pubsub.publisher.read_table import ReadTable
from pubsub.sql.source import Source
from pubsub.sql.typechoices import TypeChoices
from tablesync import chunk_reader
from tablesync.may_resume import Conditions, conditions


@dataclass(frozen=True, slots=True)
class Seen:
    """The publisher's table as one transaction sees it, and what its Delta table gets of it."""

    published: PublishedTable
    """As it is published; `row_filter`: what leaves rows out at the publisher, or here."""
    definition: TableDefinition
    target: TargetTable
    choice: Choice


@dataclass(frozen=True, slots=True)
class Described:
    """The publisher's table as one transaction sees it, and how its rows are copied."""

    definition: TableDefinition
    target: TargetTable
    choice: Choice
    source: chunk_reader.CopySource
    conditions: Conditions


def with_mask_key(target: TargetTable, before: Attributes | None) -> TargetTable:
    """Return the table with the key by which a copy masks it: that of before, unless RESYNC TABLE was given since.

    `before`: the table's attributes, if it has some.  Raises NotInPrerequisiteState without a key, or with another one.
    """
    if not target.masks.are_keyed:
        return target
    key = require_key(target.relation, None)
    fingerprint, held = fingerprint_of(key), before.fingerprint if before is not None else ""
    if held and before is not None and not before.asked:
        require_key(target.relation, held)
    return replace(target, masks=replace(target.masks, fingerprint=fingerprint))


class PublisherTable:
    """One table of a subscription on its publisher."""

    def __init__(
        self,
        subscription: Subscription,
        relation: SubscriptionRel,
        slot: str,
        figures: Figures,
        longest: int | None = None,
        max_rate: float = 0,
    ) -> None:
        """`slot` names the sync slot, and is the application_name of all connections.  `longest`, `max_rate`: see CopySource."""
        self.relation = relation
        """The table as of the worker's last read of the catalog."""
        self.slot = slot
        self.to_blame = False
        """Whether the failure is the table's own, and not one that other tables would have, too."""
        self._subscription = subscription
        self._figures = figures
        self._longest = longest
        self._max_rate = max_rate

    async def connect(self, *, replication: bool) -> Connection:
        """Connect to the publisher as the sync worker.  Raises ConnectionFailure."""
        with self._figures.waits_for("a connection to the publisher"):
            return await Connection.connect(
                self._subscription.conninfo, replication=replication, application_name=self.slot
            )

    async def describe(self, connection: Connection, snapshot: str, lsn: Lsn) -> Described:
        """Return the table as the connection's transaction sees it, and what to copy under its `snapshot`.

        Takes no lasting lock. With one, an ALTER TABLE would queue behind it, and the copy's tasks behind the ALTER TABLE.
        """
        subscription, relation = self._subscription, self.relation
        seen = await self.published(connection)
        definition, target = seen.definition, seen.target
        file = await snapshots.file_seen(connection, relation.oid)
        publishing = await snapshots.publishing(connection, subscription.publications, relation.oid)
        source = chunk_reader.CopySource(
            conninfo=subscription.conninfo,
            application_name=self.slot,
            table=ReadTable.of(definition, seen.choice.read, seen.choice.read.values()),
            snapshot=snapshot,
            row_filter=seen.published.row_filter,
            lsn=str(lsn),
            bytes=definition.bytes,
            longest=self._longest,
            max_rate=self._max_rate,
            masks=target.masks,
            mask_key=target.masks.key(target.relation),
        )
        found = conditions(subscription, seen.published, definition, target, publishing, file)
        return Described(definition, target, seen.choice, source, found)

    async def published(self, connection: Connection) -> Seen:
        """Return the table as the connection's transaction sees it."""
        relation = self.relation
        published = await publication.published_tables(connection, self._subscription.publications, relation.oid)
        found = published[0] if published else None
        with self.blaming():
            if found is None:
                raise UndefinedTable(
                    f'table "{relation.qualified_name}" not found on publisher',
                    hint="ALTER SUBSCRIPTION … REFRESH PUBLICATION takes it out of the subscription.",
                )
            definition = await definitions.table_definition(connection, relation.oid)
            choices = TypeChoices.parse(self._subscription.options.types)
            layouts = self._subscription.options.layouts
            whose = relation.whose
            source = None if whose is None else Source(layouts.sharing.column, whose)
            choice = choose(layouts, definition, found.attnames, relation.definition)
            target = planned_table(
                definition, found.attnames, relation.path, choices, choice, layouts, source, relation.beside
            )
            target = with_mask_key(target, stored(relation.definition))
            found = replace(found, row_filter=published_filter(found.row_filter, choice.where, definition))
            return Seen(found, definition, target, choice)

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Attribute a failure inside to this table."""
        self.to_blame = True
        yield
        self.to_blame = False
