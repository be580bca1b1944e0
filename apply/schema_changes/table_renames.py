"""Follow the publisher's renames of tables.

A table is known by its oid; its name in the subscription is the catalog's until the publisher is seen to use another one.  A
name is seen in the relation's last Relation message of a batch, but a table that sends nothing announces nothing:

    the batch announces             what happened                                         what is done
    16384 as b, ours is a           16384 was renamed                                     it is renamed
    16400 as a, not one of ours,    our a was dropped and created again, or renamed       the publisher is asked for
      while our a is 16384            and another table took its name                       the name of 16384
    16384 as b, while our b         both were renamed, as when two tables exchange        the publisher is asked for
      is 16385                        names                                                 the name of 16385

The publisher's catalog is ahead of the stream.  A name that another of our tables still has is not taken: that table's own rename
comes later in the stream.

Under schema_changes = refuse a renamed table is an error, because its changes would go to no table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import structlog

from apply.batch import Batch
from apply.schema_changes.follow import Columns, Follower, UntilCommitted
from catalog.records import SubscriptionRel
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.sql.layout_rules import name_beside

logger = structlog.get_logger()

Name = tuple[str, str]
"""Schema and name of a table."""


class Table(Protocol):
    """A table of the subscription, as far as its name is concerned."""

    relation: SubscriptionRel
    after: Lsn | None
    """None: no changes are applied to the table, so its name is not followed."""
    columns: Columns | None
    announced_name: Name | None
    """In the last Relation message that was looked at."""

    @property
    def name(self) -> Name:
        """Of the published table, in the catalog."""


class Tables(Protocol):
    """The tables of the subscription."""

    @property
    def by_oid(self) -> Mapping[int, Table]:
        """By oid, those by which names are followed; it may lose some at any wait."""

    @property
    def by_name(self) -> Mapping[Name, Table]:
        """The same by their names."""

    @property
    def named(self) -> Mapping[Name, Sequence[Table]]:
        """By name, all that the subscription has of a published table: these, and what stands beside them."""


def announced_names(batch: Batch) -> dict[int, Name]:
    """Return each relation's name in its last Relation message of the batch, by oid, unless that may still be undone."""
    return {
        oid: (messages[-1][1].namespace, messages[-1][1].name)
        for oid, messages in batch.relations.items()
        if oid not in batch.unnamed
    }


def refuse_renamed(batch: Batch, tables: Mapping[int, Table], names: Collection[Name]) -> None:
    """Raise NotInPrerequisiteState for a renamed table, whose changes would find no destination and be lost.

    `names`: the names of `tables` in the catalog.
    """
    for oid, (schema, name) in announced_names(batch).items():
        table = tables.get(oid)
        if table is not None and table.after is not None and (schema, name) not in names:
            raise renamed_otherwise(table.relation, schema, name)


def renamed_otherwise(relation: SubscriptionRel, schema: str, name: str) -> NotInPrerequisiteState:
    """Return the error of a table that has another name at the publisher, which is not followed."""
    error = NotInPrerequisiteState(
        f'logical replication target relation "{schema}.{name}" does not exist',
        detail=f'The publisher has renamed "{relation.qualified_name}".',
        hint="Rename it back; a rename is not followed.",
    )
    error.relid = relation.relid
    return error


def newly_announced(announced: Mapping[int, Name], tables: Mapping[int, Table]) -> dict[int, Name]:
    """Return the tables that are announced under a name which is neither ours nor the one last announced."""
    return {
        oid: name
        for oid, name in announced.items()
        if (table := tables.get(oid)) is not None
        and table.after is not None
        and name not in (table.announced_name, table.name)
    }


def displaced(
    announced: Mapping[int, Name],
    renamed: Mapping[int, Name],
    tables: Mapping[int, Table],
    by_name: Mapping[Name, Table],
) -> set[int]:
    """Return the tables whose names are announced for another relation: they were renamed, too, or dropped."""
    found: set[int] = {other.relation.oid for name in renamed.values() if (other := by_name.get(name)) is not None}
    for oid, name in announced.items():
        other = by_name.get(name)
        if oid not in tables and other is not None and other.after is not None:
            found.add(other.relation.oid)
    return found - renamed.keys()


def without_taken(renamed: Mapping[int, Name], tables: Mapping[int, Table]) -> dict[int, Name]:
    """Leave out the renames to a name that another table has, and keeps for now."""
    taken = {table.name for oid, table in tables.items() if oid not in renamed}
    return {oid: name for oid, name in renamed.items() if name not in taken}


def use_our_names(batch: Batch, tables: Mapping[int, Table]) -> None:
    """Rename the batch's relations to the names of their tables, and remember the announced names."""
    announced = announced_names(batch)
    for oid in batch.relations:
        table = tables.get(oid)
        if table is not None:
            table.announced_name = announced.get(oid, table.announced_name)
            batch.rename(oid, *table.name)


def use_our_names_of_unnamed(batch: Batch, tables: Mapping[int, Table]) -> None:
    """Rename the relations whose names may still be undone: others' rows of them are of our tables, and are not lost."""
    for oid in batch.unnamed:
        table = tables.get(oid)
        if table is not None:
            batch.rename(oid, *table.name)


class Renames:
    """Renames a subscription's tables as the publisher's were renamed."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        # Tables that the publisher has not renamed although another table uses their name: they were dropped.
        self._not_renamed: set[int] = set()

    async def follow(self, batch: Batch, tables: Tables, until_committed: UntilCommitted | None) -> bool:
        """Rename tables, and return whether any was renamed; the catalog must then be read again.

        Everything before the batch is committed first (`until_committed`); if that is None, the batch may still be rolled back, and
        NotInPrerequisiteState is raised for a rename, or what may be one: the publisher's catalog does not show it yet.  Raises the
        errors of asking the publisher, too.
        """
        announced = announced_names(batch)
        if until_committed is None:
            new = newly_announced(announced, tables.by_oid)
            if doubtful := [*new, *(displaced(announced, new, tables.by_oid, tables.by_name) - self._not_renamed)]:
                error = NotInPrerequisiteState("a table is renamed in a transaction in progress")
                error.relid = doubtful[0]
                raise error
            return False
        renamed = await self._renamed(batch, announced, tables)
        if not renamed:
            return False
        await until_committed()
        for oid, (schema, name) in renamed.items():
            known = tables.by_oid.get(oid)
            if known is None:
                continue  # removed meanwhile
            for table in tables.named.get(known.name, ()):
                relation, here = table.relation, name_beside(name, table.relation.beside)
                if relation.oid != oid:
                    continue  # it has been given this name a moment ago, and this one is still to lose it
                logger.info("table was renamed as the publisher's was", relation=relation.qualified_name, name=here)
                await self._follower.rename(relation.relid, table.columns, schema, here)
        return True

    async def _renamed(self, batch: Batch, announced: Mapping[int, Name], tables: Tables) -> dict[int, Name]:
        """Return the tables to rename, with their new names; ask the publisher about those that others displace."""
        renamed = newly_announced(announced, tables.by_oid)
        doubtful = displaced(announced, renamed, tables.by_oid, tables.by_name) - self._not_renamed
        if doubtful:
            now, hidden = await self._follower.renamed(batch, [*doubtful])
            here = tables.by_oid
            renamed |= {oid: name for oid, name in now.items() if oid in here and name != here[oid].name}
            self._not_renamed |= doubtful - renamed.keys() - hidden
        return without_taken(renamed, tables.by_oid)
