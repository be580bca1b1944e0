"""A relation's frames as changes of the table that they go to: what each table gets, under which Relation message.

Blocks; numpy and Arrow let the interpreter go while they work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from apply.batch import Batch
from pubsub.delta.choose_writer import Stage
from pubsub.delta.log import OtherCommit
from pubsub.delta.table import Commit, TargetTable
from pubsub.errors import InvalidValue, NotInPrerequisiteState, PubsubError
from pubsub.protocol import pgoutput, rows
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.types import nulls, repeated

if TYPE_CHECKING:
    from apply.staging.staged_table import PreparedTable

_NO_END: Final = np.iinfo(np.int64).max

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Frames = Mapping[int, Sequence[rows.RowFrames]]


class Window(Protocol):
    """What a table needs that was copied under several snapshots, until the stream has passed the newest (tablesync.window)."""

    async def complete(self, prepared: PreparedTable) -> PreparedTable:
        """Just before the commit: the batch with the values that neither it nor the table has."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows that were sent under one Relation message become rows of the table as it is now.

    `fields`: for each column of the message the table's (None: one that the table never gets).  `missing`: by name, what rows
    of that time have in columns that were added later (pyarrow Scalars).
    """

    fields: tuple[pa.Field | None, ...]
    missing: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a relation's rows go: `after` is the LSN up to which the table holds everything already.

    `before`: the table stops, and gets only transactions that end before this LSN.  `contested`: its rows are not all this
    subscription's, so that changes may meet what they do not expect (conflicts).
    `readings`: for Relation messages whose columns are not simply the table's of the same names.

    With a `window` changes are upserts, and deletes of rows that may not be there.
    """

    relid: int
    table: TargetTable
    app_id: str
    after: Lsn
    types: BinaryTypes = field(default_factory=BinaryTypes)
    """How values of binary transfer are read."""
    before: Lsn | None = None
    contested: bool = False
    readings: Mapping[pgoutput.Relation, Reading] = field(default_factory=dict)
    window: Window | None = None

    def reading(self, relation: pgoutput.Relation) -> Reading:
        """How rows under this message are read.  Raises NotInPrerequisiteState."""
        known = self.readings.get(relation)
        return known if known is not None else Reading(tuple(targets(relation, self.table)), {})

    @property
    def may_conflict(self) -> bool:
        """Whether what the table holds is looked up.  In a window it holds later rows, too: no conflicts are those."""
        return self.contested and self.window is None

    def commit(self, batch: Batch) -> Commit:
        """What the table's part of the batch is recorded under."""
        last = batch.last_lsn
        if self.before is not None:
            last = max(t.end_lsn for t in batch.transactions if t.end_lsn < self.before)
        return Commit(self.app_id, batch.first_lsn, last)


class WrittenByOthers(Exception):
    """A table was found to have commits by others; nothing of the batch has been committed to it."""

    def __init__(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        super().__init__(destination.table.relation)
        self.destination = destination
        self.commits = commits


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a batch's changes a table gets: those that `kept` says, by seq (None: all), from `truncate_before` on.

    `oids` are the publisher's relations that go to it: several when a table was dropped and made again.
    """

    destination: Destination
    oids: tuple[int, ...]
    kept: Mask | None
    truncate_before: int | None

    def select(self, frames: Sequence[rows.RowFrames]) -> list[rows.RowFrames]:
        """Not those that the table has, nor those that a later TRUNCATE removes anyway."""
        return _select(frames, self.kept, self.truncate_before)


def wanted_by(batch: Batch, oids: Sequence[int], destinations: Mapping[tuple[str, str], Destination]) -> list[Wanted]:
    """What each destination gets of these relations.  Raises NotInPrerequisiteState for one that was never described."""
    by_name: dict[tuple[str, str], list[int]] = {}
    for oid in sorted(oids):
        if oid not in batch.relations:
            raise no_relation(oid)
        relation = batch.relations[oid][-1][1]
        by_name.setdefault((relation.namespace, relation.name), []).append(oid)
    found = []
    kept: dict[tuple[Lsn, Lsn | None], Mask | None] = {}
    for name, of_name in by_name.items():
        destination = destinations.get(name)
        if destination is None:
            continue
        bounds = destination.after, destination.before
        truncations = [batch.kept_truncation(oid, *bounds) for oid in of_name]
        truncate_before = max((seq for seq in truncations if seq is not None), default=None)
        if bounds not in kept:
            kept[bounds] = batch.kept_rows(*bounds)
        found.append(Wanted(destination, tuple(of_name), kept[bounds], truncate_before))
    return found


def under_messages(
    batch: Batch, wanted: Wanted, frames: Frames
) -> list[tuple[pgoutput.Relation, list[rows.RowFrames]]]:
    """The changes that the table gets, of `frames`, each with the Relation message that it was sent under."""
    found = []
    for oid in wanted.oids:
        if oid not in frames:
            continue
        for relation, some in _by_relation_message(batch.relations[oid], frames[oid]):
            chosen = wanted.select(some)
            if chosen:
                found.append((relation, chosen))
    return found


def decode(batch: Batch, wanted: Wanted, frames: Frames, origin: str) -> tuple[list[rows.Changes], bool]:
    """The changes that the table gets, of `frames`, in order; and whether rows without a key come whole.

    Raises InvalidValue and NotInPrerequisiteState with the transaction's finish LSN in the context.
    """
    table = wanted.destination.table
    parts: list[rows.Changes] = []
    full = False
    for relation, chosen in under_messages(batch, wanted, frames):
        full = full or (not table.key and relation.replica_identity == "f")
        reading = wanted.destination.reading(relation)
        try:
            changes = rows.decode_changes(
                chosen,
                relation,
                reading.fields,
                key=table.key or None,
                types=wanted.destination.types,
            )
            _check_identity(relation, reading, table, changes)
        except InvalidValue as error:
            raise _located(error, batch, relation, origin) from error
        except NotInPrerequisiteState as error:
            first = min(int(some.seq[0]) for some in chosen)
            error.finish_lsn = batch.transaction_of(first).final_lsn
            raise
        parts.append(_as_in_target(changes, reading, table))
    # By oid so far: an older table of the name may have the greater one.
    parts.sort(key=lambda part: int(part.seq[0]))
    return parts, full


def no_changes(batch: Batch, wanted: Wanted) -> rows.Changes:
    """None of the table's changes, with its columns."""
    table, relation = wanted.destination.table, batch.relations[wanted.oids[0]][-1][1]
    reading = wanted.destination.reading(relation)
    return _as_in_target(rows.decode_changes([], relation, reading.fields), reading, table)


def look_for_others(stage: Stage, destination: Destination) -> None:
    """Raises WrittenByOthers when they have written the table since it was looked at, and what TableLog raises."""
    others = stage.written_by_others(destination.table, destination.app_id)
    if others:
        raise WrittenByOthers(destination, others)


@contextmanager
def blaming(destination: Destination) -> Iterator[None]:
    """What fails inside fails because of this table alone."""
    try:
        yield
    except PubsubError as error:
        error.relid = destination.relid
        raise


def no_relation(oid: int) -> NotInPrerequisiteState:
    """relation.c: logicalrep_rel_open."""
    return NotInPrerequisiteState(f"no relation map entry for remote relation ID {oid}", sqlstate="08P01")


def _by_relation_message(
    messages: Sequence[tuple[int, pgoutput.Relation]], frames: Sequence[rows.RowFrames]
) -> list[tuple[pgoutput.Relation, list[rows.RowFrames]]]:
    """The frames under the Relation message that each was sent under."""
    if any(len(some.seq) and some.seq[0] < messages[0][0] for some in frames):
        raise no_relation(messages[0][1].oid)
    if len(messages) == 1:
        return [(messages[0][1], list(frames))]
    parts = []
    for index, (first, relation) in enumerate(messages):
        end = messages[index + 1][0] if index + 1 < len(messages) else None
        some = [_where(f, (f.seq >= first) & (f.seq < (end if end is not None else _NO_END))) for f in frames]
        parts.append((relation, [f for f in some if len(f.seq)]))
    return parts


def _select(
    frames: Sequence[rows.RowFrames],
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
    truncate_before: int | None,
) -> list[rows.RowFrames]:
    """The frames that the table gets: not those it has, nor those that a later TRUNCATE removes anyway."""
    result = []
    for some in frames:
        if kept is not None:
            some = _where(some, kept[some.seq])
        if truncate_before is not None:
            some = _where(some, some.seq >= truncate_before)
        if len(some.seq):
            result.append(some)
    return result


def _where(frames: rows.RowFrames, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> rows.RowFrames:
    if wanted.all():
        return frames
    return rows.RowFrames(frames.data, frames.starts[wanted], frames.ends[wanted], frames.seq[wanted])


def targets(relation: pgoutput.Relation, table: TargetTable) -> list[pa.Field | None]:
    """The target's field for each of the relation's columns (relation.c: logicalrep_report_missing_attrs)."""
    indexes = {name: table.schema.get_field_index(name) for name in (column.name for column in relation.columns)}
    missing = [name for name, index in indexes.items() if index < 0]
    if missing:
        listed = ", ".join(f'"{name}"' for name in missing)
        raise NotInPrerequisiteState(
            f'logical replication target relation "{table.relation}" is missing replicated '
            f"column{'s' if len(missing) > 1 else ''}: {listed}",
            detail="The publisher's table has changed since it was copied.",
            hint=f'Add the column to the Delta table at "{table.path}", or drop and create the subscription.',
        )
    return [table.schema.field(indexes[column.name]) for column in relation.columns]


def _check_identity(relation: pgoutput.Relation, reading: Reading, table: TargetTable, changes: rows.Changes) -> None:
    """Updates and deletes name their row by the key that the target has (relation.c: logicalrep_rel_mark_updatable; the texts are
    worker.c's, check_relation_updatable)."""
    if not np.any(changes.op != ord("I")):
        return
    if relation.replica_identity == "f":
        return
    sent = {
        column.name if of_table is None else of_table.name
        for column, of_table in zip(relation.columns, reading.fields, strict=True)
        if column.in_replica_identity
    }
    if not table.key or not sent.issuperset(table.key):
        raise NotInPrerequisiteState(
            "publisher did not send replica identity column expected by the logical replication target relation "
            f'"{table.relation}"'
            if table.key
            else f'logical replication target relation "{table.relation}" has neither REPLICA IDENTITY index nor PRIMARY KEY '
            "column and published relation does not have REPLICA IDENTITY FULL",
            detail=f"The publisher identifies rows by ({', '.join(sorted(sent))}), "
            f"the Delta table by ({', '.join(table.key)}).",
            hint="Drop the table from the publication, refresh, add it again and refresh: it is then copied anew.",
        )


def _as_in_target(changes: rows.Changes, reading: Reading, table: TargetTable) -> rows.Changes:
    """The target's columns in its order.  Those that only the target has: NULL, or what is missing, in new rows, kept as they are
    by updates."""
    sent = {of_table.name for of_table in reading.fields if of_table is not None}
    extra = [of_table for of_table in table.schema if of_table.name not in sent]
    values = {one.name: _filled(reading, one, changes.count) for one in extra}
    untouched = {one.name: changes.op == ord("U") for one in extra}
    new = changes.new | values
    old = changes.old
    if not table.key and old:
        # Rows are found by all their values.
        old = old | values
    return dataclasses.replace(
        changes,
        new={name: new[name] for name in table.schema.names},
        unchanged=changes.unchanged | untouched,
        old=old,
    )


def _filled(reading: Reading, column: pa.Field, count: int) -> Any:
    value = reading.missing.get(column.name)
    return nulls(count, column.type) if value is None else repeated(value, count)


def _located(error: InvalidValue, batch: Batch, relation: pgoutput.Relation, origin: str) -> InvalidValue:
    """The error with table, column and transaction; the context is PostgreSQL's (worker.c: apply_error_callback)."""
    qualified = f"{relation.namespace}.{relation.name}"
    where = f'processing remote data for replication origin "{origin}" for replication target relation "{qualified}"'
    if not isinstance(error, rows.InvalidField):
        return InvalidValue(error.message, sqlstate=error.sqlstate, hint=error.hint, context=where)
    transaction = batch.transaction_of(error.seq)
    where += f' column "{error.column}" in transaction {transaction.xid}, finished at {transaction.final_lsn}'
    located = InvalidValue(
        f'column "{error.column}" of table "{qualified}": {error.message}',
        sqlstate=error.sqlstate,
        detail=f"Key {error.key}. The transaction finished at {transaction.final_lsn}; nothing of its batch has been applied.",
        hint=f"Copy the table anew with (types = '{relation.namespace}.{relation.name}.{error.column} text'), or leave the "
        "column out by a column list.",
        context=where,
    )
    located.finish_lsn = transaction.final_lsn
    return located
