"""schema_changes = follow: alter Delta tables as the publisher's tables were altered, before the rows that need it.

    batch ─► Relation messages not looked at before
          ─► one look at the publisher's catalog for all of them         (definitions)
          ─► the attribute numbers of each message's columns             (attributes.identify)
          ─► the change that the last message requires                   (diff.wanted)
          ─► batches before are committed ─► one commit alters the table ─► the catalog's definition follows
          ─► the mapping from rows under each message to table rows      (destination.Reading)

Rows sent under an older definition are mapped to the table's while they are decoded, so a transaction may change rows,
alter the table and change rows again.  The table property pubsub.attributes records which of the publisher's columns
the table has, so after a crash an alteration is not repeated: the messages come again, are known, and require nothing.

Where stream and catalog do not determine a table's rows, CopyAgain is raised and the table is copied anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import structlog

from apply.batch import Batch
from apply.schema_changes import attributes as attrs
from apply.schema_changes.attributes import Attributes, Numbers
from apply.schema_changes.diff import Change, CopyAgain, Described, identity, wanted
from apply.schema_changes.table_definition import definition_json
from apply.staging.destination import Reading
from catalog.beside import oid_of
from catalog.records import Subscription
from catalog.store import Catalog
from pubsub import faults
from pubsub.concurrency import in_thread
from pubsub.delta import alter
from pubsub.delta import table as delta
from pubsub.delta.log.transactions import Transactions
from pubsub.delta.table import Commit, TargetTable
from pubsub.errors import NotInPrerequisiteState, PubsubError, UndefinedObject
from pubsub.protocol import rows
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation
from pubsub.protocol.text.columns import from_text
from pubsub.publisher import definitions, publication
from pubsub.publisher.connection import Connection
from pubsub.publisher.snapshots import begin_showing, end_of_wal
from pubsub.sql.typechoices import TypeChoices

if TYPE_CHECKING:
    import numpy.typing as npt

_CHUNK: Final = 16 << 20
_HIDDEN: Final = "a transaction that changed its rows may have altered it, and cannot be seen on the publisher"

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Effect:
    """A Relation message with rows that the table gets: the seq of the first row, and whether all rows are inserts."""

    message: Relation
    seq: int
    inserts_only: bool


UntilCommitted = Callable[[], Awaitable[None]]
Look = Callable[[Sequence[int], Sequence[int]], Awaitable["Looked"]]
Version = Callable[[int], Lsn]


@dataclass(frozen=True, slots=True)
class Looked:
    """Tables in the publisher's catalog at one moment, by oid, without missing ones.  WAL ended at `lsn` just after.

    `hidden`: tables that a transaction of the batch may have altered, while the catalog does not show it yet.
    """

    tables: Mapping[int, Described]
    lsn: Lsn
    hidden: frozenset[int] = frozenset()


@dataclass(slots=True)
class Columns:
    """What is known of one table: its Delta table, the publisher's columns in it, and the Relation messages looked at.

    `follows`: the message that the table's definition matches.  `announced`: whether a Relation message came that the publisher's
    catalog was not looked at for, whatever the message says.
    """

    relid: int
    app_id: str
    target: TargetTable
    attributes: Attributes | None
    looked_at: set[Relation] = field(default_factory=set)
    follows: Relation | None = None
    announced: bool = False
    readings: dict[Relation, Reading] = field(default_factory=dict)

    @property
    def oid(self) -> Oid:
        """The oid of the publisher's table."""
        return oid_of(self.relid)


async def load(relid: int, app_id: str, path: str, relation: str, definition: str | None) -> Columns:
    """Load the table's columns.  Its own property is used if it is newer than the catalog's definition.

    Raises UndefinedTable.
    """
    target = await asyncio.to_thread(delta.load, path, relation, definition)
    properties = await asyncio.to_thread(delta.properties, path)
    stored = attrs.stored(definition)
    said = attrs.newer(properties, app_id, stored)
    if said is not None:
        if target.source is None:  # else the properties have the first source's key, perhaps in another order
            target = delta.as_said(target, properties)
        return _columns(relid, app_id, target, said)
    if stored is None:
        return Columns(relid, app_id, target, None)
    return _columns(relid, app_id, target, replace(stored, app_id=app_id))


def _columns(relid: int, app_id: str, target: TargetTable, known: Attributes) -> Columns:
    # A copy that had to add a column, or the table's owner, may have dropped those that were kept.
    known = replace(known, kept=tuple(one for one in known.kept if one[1] in target.schema.names))
    return Columns(relid, app_id, _as_chosen(target, known), known)


def _as_chosen(target: TargetTable, attributes: Attributes) -> TargetTable:
    masks = attributes.masked
    sent = frozenset(column.name for column in attributes.columns) - masks.absent
    others: frozenset[str] = frozenset()
    if target.source is not None:
        others = frozenset(target.replicated) - frozenset(attributes.names.values())
    return replace(
        target, closed=attributes.goes_by_numbers, masks=masks, where=attributes.row_filter, sent=sent, others=others
    )


class Publisher:
    """Looks at the publisher's catalog over a separate connection."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def __call__(self, oids: Sequence[int], xids: Sequence[int]) -> Looked:
        """Return the existing tables as one transaction sees them that sees what the received transactions `xids` did.

        Takes no locks, so an ALTER TABLE that is uncommitted or prepared does not block it.
        """
        subscription = self._subscription
        async with await Connection.connect(
            subscription.conninfo, replication=False, application_name=subscription.name
        ) as connection:
            hidden = await begin_showing(connection, oids, xids)
            found = await definitions.table_definitions(connection, oids, sizes=False)
            listed = await publication.published_columns(connection, subscription.publications, oids)
            await connection.execute("COMMIT")
            lsn = await end_of_wal(connection)
        return Looked({int(oid): Described(one, listed.get(oid)) for oid, one in found.items()}, lsn, hidden)


class Follower:
    """Follows the schema changes of a subscription's tables.  `look` asks the publisher."""

    def __init__(self, catalog: Catalog, subscription: Subscription, look: Look, transactions: Transactions) -> None:
        self._transactions = transactions
        self._catalog = catalog
        self._subid = subscription.oid
        self._keep = subscription.options.dropped_columns == "keep"
        self._choices = TypeChoices.parse(subscription.options.types)
        self._layouts = subscription.options.layouts
        self._look = look

    async def follow(
        self,
        batch: Batch,
        tables: Sequence[tuple[Columns, Lsn]],
        until_committed: UntilCommitted | None,
        version: Version,
    ) -> list[CopyAgain]:
        """Alter the tables as the batch's rows require; return those that must be copied again.

        `tables`: each with the LSN up to which it holds everything.  `until_committed` returns once everything before the batch
        is committed.  With `until_committed` None the batch may still be rolled back, so nothing is altered and the publisher is
        not asked.  `version` returns a table's version by relid, as this worker committed or read it.  Raises
        NotInPrerequisiteState, Overtaken, and the errors of asking the publisher.
        """
        if until_committed is None:
            for table, _ in tables:
                _refuse_unknown(batch, table)
            return []
        for table, _ in tables:
            # Of a transaction that was skipped, the message counts for the next rows.
            table.announced |= table.oid in batch.announced
        fresh = [
            (table, after)
            for table, after in tables
            if table.announced or _is_news(table, [m for _, m in batch.relations.get(table.oid, ())])
        ]
        if not fresh:
            return []
        in_effect = await in_thread(partial(_in_effect, batch, fresh))
        fresh = [(table, after) for table, after in fresh if in_effect[table.relid]]
        if not fresh:
            return []
        looked = await self.look([table for table, _ in fresh], _xids(batch))
        again: list[CopyAgain] = []
        for table, _ in fresh:
            effect = in_effect[table.relid]
            try:
                if table.oid in looked.hidden:
                    raise CopyAgain(table.relid, table.target.relation, _HIDDEN)
                await self._follow(batch, table, effect, looked.tables.get(table.oid), until_committed, version)
            except PubsubError as error:
                error.relid = table.relid
                if error.finish_lsn is None:
                    error.finish_lsn = batch.transaction_of(effect[-1].seq).final_lsn
                if not isinstance(error, CopyAgain):
                    raise
                again.append(error)
                continue  # it stays announced: another table's error may come first
            table.announced = False
        return again

    async def unchanged(self, batch: Batch, tables: Sequence[Columns], announced: Mapping[int, Relation]) -> bool:
        """Return whether these last messages of the batch require no alteration, and the publisher has rewritten none of the tables.

        Raises the errors of asking the publisher.
        """
        looked = await self.look(tables, _xids(batch))
        if looked.hidden:
            return False
        for table in tables:
            known, message = table.attributes, announced[table.oid]
            if known is None:
                continue
            numbers = known.known(attrs.shape_of(message))
            if numbers is None:
                return False
            try:
                change = self._wanted(table, known, message, numbers, looked.tables.get(table.oid))
            except CopyAgain:
                return False
            if change is not None and change.alteration is not None:
                return False
        return True

    def _wanted(
        self, table: Columns, known: Attributes, message: Relation, numbers: Numbers, described: Described | None
    ) -> Change | None:
        return wanted(
            table.target,
            known,
            message,
            numbers,
            described,
            keep=self._keep,
            choices=self._choices,
            layout=self._layouts.choice_of(message.namespace, message.name),
        )

    async def renamed(self, batch: Batch, oids: Sequence[int]) -> tuple[Mapping[int, tuple[str, str]], frozenset[int]]:
        """Return the tables' schemas and names in the publisher's catalog, by oid, and for which that is not final: as
        Looked.hidden.  Dropped tables are missing.
        """
        looked = await self._look(oids, _xids(batch))
        names = {oid: (one.definition.schema, one.definition.name) for oid, one in looked.tables.items()}
        return names, looked.hidden

    async def rename(self, relid: int, table: Columns | None, schema: str, name: str) -> None:
        """Rename the table, unless it has left the subscription; everything before must be committed."""
        try:
            await self._catalog.rename_relation(self._subid, relid, schema, name)
        except UndefinedObject:
            return
        if table is not None:
            table.target = await in_thread(partial(alter.rename, self._transactions, table.target, f"{schema}.{name}"))

    async def _follow(
        self,
        batch: Batch,
        table: Columns,
        effect: Sequence[Effect],
        described: Described | None,
        until_committed: UntilCommitted,
        version: Version,
    ) -> None:
        if table.attributes is None:
            message = effect[-1].message
            said = self._layouts.choice_of(message.namespace, message.name)
            if said.mask or said.rename or said.where:
                what = "masked" if said.mask else "renamed" if said.rename else "those of its condition"
                raise CopyAgain(table.relid, table.target.relation, f"which columns are {what} is not known")
            table.attributes = _adopted(table, effect, described)
            if table.attributes is None:
                return  # decoding refuses what does not fit
        known = table.attributes
        live = described.published if described is not None else ()
        count = described.definition.attributes if described is not None else known.count
        found: list[tuple[Relation, Numbers]] = []
        for one in effect:
            message = one.message
            shape = attrs.shape_of(message)
            transaction = batch.transaction_of(one.seq)
            older = transaction.end_lsn < known.since
            numbers = attrs.identify(shape, known, live, count, transaction.xid, older=older)
            held = known.known(shape)
            if numbers is None and (held is None or known.left_out is not None):
                raise CopyAgain(table.relid, table.target.relation, "which column is which cannot be told")
            if held is not None and numbers is not None and not _agree(held, numbers):
                raise CopyAgain(
                    table.relid, table.target.relation, "a column was dropped, and another added under its name"
                )
            found.append((message, held if held is not None else numbers))  # type: ignore[arg-type]
        last = effect[-1].message
        since = batch.transaction_of(effect[-1].seq).end_lsn
        if since >= known.since:
            change = self._wanted(table, known, last, found[-1][1], described)
            if not _same_key(table, effect, found, change):
                raise CopyAgain(
                    table.relid, table.target.relation, "its key was changed in a transaction that changed its rows"
                )
            if change is not None:
                changed = [(attrs.shape_of(message), numbers) for message, numbers in found]
                after = replace(change.attributes, since=since).with_shapes(changed)
                if change.alteration is not None:
                    await until_committed()
                    await self._alter(table, change.alteration, after, version(table.relid))
                else:
                    _know(table, after)
                    if _facts(after) != _facts(known):
                        await self._store(table)
                _tell_left_out(table.target.relation, known, after)
        self._read(table, found)

    async def look(self, tables: Sequence[Columns], xids: Sequence[int] = ()) -> Looked:
        """Return the tables in the publisher's catalog.  Raises the errors of asking the publisher."""
        return await self._look([*dict.fromkeys(table.oid for table in tables)], xids)

    async def take_over(self, table: Columns, now: Described, since: Lsn, version: Lsn) -> None:
        """Alter the table to match `now`, the publisher's table since `since`.

        All earlier rows are committed, up to `version`.  Raises CopyAgain, and as `follow` does.
        """
        known = table.attributes
        if known is None:
            return  # it joined without a copy, and its columns' numbers are unknown
        message = now.as_message(table.oid)
        numbers = tuple(column.attnum for column in now.published)
        change = self._wanted(table, known, message, numbers, now)
        if change is None:
            return
        after = replace(change.attributes, since=max(since, known.since))
        after = after.with_shapes([(attrs.shape_of(message), numbers)])
        if change.alteration is not None:
            await self._alter(table, change.alteration, after, version)
        else:
            _know(table, after)
            await self._store(table)
        _tell_left_out(table.target.relation, known, after)
        self._read(table, [])

    async def _alter(self, table: Columns, change: alter.Alteration, after: Attributes, version: Lsn) -> None:
        before = table.target
        record = Commit(table.app_id, after.since, after.since, previous=version or None, source=before.whose)
        await faults.reached(f"alter {before.relation}")
        table.target = await in_thread(
            partial(
                alter.alter, self._transactions, before, change, {attrs.property_of(before): after.as_json()}, record
            )
        )
        _know(table, after)
        await faults.reached(f"altered {before.relation}")
        await self._store(table)
        logger.info(
            "table was altered as the publisher's was",
            relation=before.relation,
            lsn=str(after.since),
            columns=table.target.schema.names,
        )

    async def _store(self, table: Columns) -> None:
        assert table.attributes is not None
        definition = definition_json(table.target, table.attributes.as_json())
        with suppress(UndefinedObject):  # it has left meanwhile
            await self._catalog.set_relation_definition(self._subid, table.relid, definition)

    def _read(self, table: Columns, found: Sequence[tuple[Relation, Numbers]]) -> None:
        """Update how rows under these messages, and those read before, map to the table."""
        known = table.attributes
        assert known is not None
        for message, _ in found:
            table.looked_at.add(message)
        table.follows = found[-1][0] if found else None
        numbers_of = dict(found)
        for message in [*table.readings, *(message for message, _ in found)]:
            numbers = numbers_of.get(message) or known.known(attrs.shape_of(message))
            if numbers is not None:
                table.readings[message] = reading(table.target, known, numbers)


def _xids(batch: Batch) -> list[int]:
    return [transaction.xid for transaction in batch.transactions]


def _is_news(table: Columns, messages: Sequence[Relation]) -> bool:
    """Return whether to look at the messages: one is new, or the table no longer matches the last one."""
    return bool(messages) and (messages[-1] != table.follows or any(one not in table.looked_at for one in messages))


def _refuse_unknown(batch: Batch, table: Columns) -> None:
    """Raise NotInPrerequisiteState for messages whose columns differ from the table's."""
    for _, message in batch.relations.get(table.oid, ()):
        if message in table.looked_at or table.attributes is None:
            continue
        numbers = table.attributes.known(attrs.shape_of(message))
        if numbers is None or set(numbers) != table.attributes.by_number.keys():
            raise NotInPrerequisiteState(f'table "{table.target.relation}" is altered in a transaction in progress')
        table.readings[message] = reading(table.target, table.attributes, numbers)


def reading(target: TargetTable, known: Attributes, numbers: Numbers) -> Reading:
    """Return how rows whose columns have these numbers map to rows of the table."""
    left_out = {one.number for one in known.left_out or ()}
    names = {number: name for number, name in known.names.items() if number not in left_out}
    fields = tuple(
        target.schema.field(names[number]) if number is not None and number in names else None for number in numbers
    )
    missing = {
        column.name: value(column.missing, target.schema.field(column.name).type)
        for column in known.columns
        if column.number not in numbers and column.number not in known.masks
    }
    return Reading(fields, missing)


def value(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """Parse PostgreSQL's text of a value (None: NULL) as one of type `kind`.  Raises InvalidText."""
    if text is None:
        return pa.scalar(None, kind)
    return from_text(pa.array([text.encode()], pa.binary()), kind)[0]


def _know(table: Columns, attributes: Attributes) -> None:
    table.attributes = attributes
    table.target = _as_chosen(table.target, attributes)


def _facts(known: Attributes) -> tuple[object, ...]:
    """Return what is stored of a table that is not altered, if it has changed."""
    named = [(column.number, column.sent_as) for column in known.columns]
    return known.storage, known.count, known.left_out, known.masks, known.renames, known.where, named


def _tell_left_out(relation: str, before: Attributes, after: Attributes) -> None:
    """Tell of columns that the publisher has added to a table some of whose columns are left out."""
    added = [one.name for one in after.left_out or () if one.number not in before.numbers]
    if added:
        logger.warning("new columns are left out", relation=relation, columns=added)


def _agree(held: Numbers, numbers: Numbers) -> bool:
    """Return whether two lists of numbers differ only where one does not know a dropped column's."""
    return all(one == other or one is None or other is None for one, other in zip(held, numbers, strict=True))


def _adopted(table: Columns, effect: Sequence[Effect], described: Described | None) -> Attributes | None:
    """Return the attributes of a table that was copied before they were recorded, if it has not changed since."""
    if described is None or len(effect) != 1:
        return None
    message = effect[0].message
    names = {column.name for column in message.columns}
    live = {(c.name, c.type_oid, c.type_modifier) for c in described.published}
    if live != set(attrs.shape_of(message)) or not names <= set(table.target.schema.names):
        return None
    return attrs.of_definition(described.definition, list(names), table.app_id, Lsn(0))


def _same_key(
    table: Columns, effect: Sequence[Effect], found: Sequence[tuple[Relation, Numbers]], change: Change | None
) -> bool:
    """Return whether the table's key after the change identifies the rows of all these messages.

    It identifies rows that were only inserted, since a key created after them is unique among them.
    """
    assert table.attributes is not None
    alteration = None if change is None else change.alteration
    key = table.target.identity if alteration is None else alteration.key
    names = change.attributes.names if change is not None else table.attributes.names
    numbers = {number for number, name in names.items() if name in key}
    moves = change is not None and change.moves_key
    whole = identity(*found[-1]) is None
    for one, (message, of_columns) in zip(effect, found, strict=True):
        named_by = identity(message, of_columns)
        fits = named_by == numbers if named_by is not None else whole or not moves
        if not (one.inserts_only or fits):
            return False
    return True


def _in_effect(batch: Batch, tables: Sequence[tuple[Columns, Lsn]]) -> dict[int, list[Effect]]:
    """Return, by relid, the messages in effect for rows that each table gets, in order.  Reads the batch."""
    oids = [table.oid for table, _ in tables]
    seqs: dict[int, list[npt.NDArray[np.int64]]] = {oid: [np.empty(0, np.int64)] for oid in oids}
    inserts: dict[int, list[npt.NDArray[np.bool_]]] = {oid: [np.empty(0, np.bool_)] for oid in oids}
    for first, blocks in batch.chunks(_CHUNK):
        for oid, pieces in rows.split_by_relation(blocks, first).items():
            if oid in seqs:
                seqs[oid] += [piece.seq for piece in pieces]
                inserts[oid] += [piece.data[piece.starts] == rows.INSERT for piece in pieces]
    found: dict[int, list[Effect]] = {}
    for table, after in tables:
        of_table, is_insert = np.concatenate(seqs[table.oid]), np.concatenate(inserts[table.oid])
        kept = batch.kept_rows(after)
        if kept is not None:
            of_table, is_insert = of_table[kept[of_table]], is_insert[kept[of_table]]
        messages = batch.relations.get(table.oid, [])
        starts = np.array([seq for seq, _ in messages] or [0], np.int64)
        at = np.searchsorted(starts, of_table, side="right") - 1
        effective, first_at = np.unique(at, return_index=True)
        found[table.relid] = [
            Effect(messages[place][1], int(of_table[index]), bool(is_insert[at == place].all()))
            for place, index in zip(effective.tolist(), first_at.tolist(), strict=True)
            if place >= 0
        ]
    return found
