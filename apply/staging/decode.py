"""Decode a relation's frames, each by the Relation message that it was sent under, into changes of the destination table.

Blocks; numpy and Arrow release the interpreter lock while they work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from apply.batch import Batch, Truncation
from apply.identity_missing import IdentityMissing
from apply.staging.destination import Destination, Reading
from apply.staging.matching_rows import NotTold, matching, needed
from pubsub import masking
from pubsub.delta.table import TargetTable
from pubsub.errors import InvalidValue, NotInPrerequisiteState
from pubsub.masks import Masks
from pubsub.processor_time import spent_on
from pubsub.protocol import pgoutput, rows
from pubsub.protocol.arrow_arrays import nulls, repeated
from pubsub.protocol.lsn import Lsn

_NO_END: Final = np.iinfo(np.int64).max

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Frames = Mapping[int, Sequence[rows.RowFrames]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The changes of a batch that a table gets: those marked in `kept`, by seq (None: all), from seq `truncate_before` on.

    `oids` are the publisher's relations that go to the table: several if a table was dropped and created again.  A table that a
    TRUNCATE does not empty, one in mode history among them, gets all changes, and `emptied`: the TRUNCATEs among them.
    """

    destination: Destination
    oids: tuple[int, ...]
    kept: Mask | None
    truncate_before: int | None
    emptied: Sequence[Truncation] = ()

    @property
    def empties(self) -> bool:
        """Whether a TRUNCATE leaves something in the table, or takes something away, even if no row comes."""
        return self.truncate_before is not None or bool(self.emptied and self.destination.table.truncate != "ignore")

    def select(self, frames: Sequence[rows.RowFrames]) -> list[rows.RowFrames]:
        """Leave out frames that the table holds already, and those that a later TRUNCATE removes."""
        return _select(frames, self.kept, self.truncate_before)


def wanted_by(batch: Batch, oids: Sequence[int], destinations: Mapping[tuple[str, str], Destination]) -> list[Wanted]:
    """Return the changes that each destination gets from these relations.

    Raises NotInPrerequisiteState for a relation without a Relation message.
    """
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
        bounds = destination.after, destination.stops_before
        emptied = batch.kept_truncations(of_name, *bounds)
        if bounds not in kept:
            kept[bounds] = batch.kept_rows(*bounds)
        truncate_before = None
        if not destination.table.keeps_past and destination.table.truncate == "follow":
            truncate_before = max((one.seq for one in emptied), default=None)
            emptied = ()
        found.append(Wanted(destination, tuple(of_name), kept[bounds], truncate_before, emptied))
    return found


def under_messages(
    batch: Batch, wanted: Wanted, frames: Frames
) -> list[tuple[pgoutput.Relation, list[rows.RowFrames]]]:
    """Group the frames that the table gets by the Relation message that each was sent under."""
    found = []
    for oid in wanted.oids:
        if oid not in frames:
            continue
        for relation, some in _by_relation_message(batch.relations[oid], frames[oid]):
            chosen = wanted.select(some)
            if chosen:
                found.append((relation, chosen))
    return found


@spent_on("decoding")
def decode(batch: Batch, wanted: Wanted, frames: Frames, origin: str) -> tuple[list[rows.Changes], bool]:
    """Decode the frames that the table gets, in order; also return whether old rows are whole (FULL, in a table without a key).

    Rows that the table does not have are left out (the option where), and masked columns have what stands for their values.  Raises
    InvalidValue and NotInPrerequisiteState with the transaction's finish LSN in the context.
    """
    table = wanted.destination.table
    parts: list[rows.Changes] = []
    full = False
    for relation, chosen in under_messages(batch, wanted, frames):
        full = full or (not table.key and relation.replica_identity == "f")
        with locating(batch, relation, chosen, origin):
            reading = wanted.destination.reading(relation)
            mask_key = table.masks.key(table.relation)
            changes = rows.decode_changes(
                chosen,
                relation,
                _read(reading, table.masks),
                key=needed(table),
                types=wanted.destination.types,
                hidden=table.masks.rules.keys(),
            )
            _check_identity(relation, reading, table, changes)
            changes = matching(changes, relation, reading, table)
        if changes.count:
            parts.append(_as_in_target(_masked(changes, table, mask_key), reading, table))
    # The parts are ordered by oid so far; an older table of the same name may have the greater oid.
    parts.sort(key=lambda part: int(part.seq[0]))
    return parts, full


@contextmanager
def locating(
    batch: Batch, relation: pgoutput.Relation, frames: Sequence[rows.RowFrames], origin: str
) -> Iterator[None]:
    """Add to an error the transaction that it comes from: of a value its own, else the first of these frames'."""
    try:
        yield
    except InvalidValue as error:
        raise _located(error, batch, relation, origin) from error
    except NotInPrerequisiteState as error:
        seq = error.seq if isinstance(error, NotTold) else min(int(some.seq[0]) for some in frames)
        error.finish_lsn = batch.transaction_of(seq).final_lsn
        raise


def no_changes(table: TargetTable) -> rows.Changes:
    """Return an empty set of changes with the table's columns, for a TRUNCATE after which no row comes.

    Nothing is asked of the Relation message that announced it: a table is altered only for rows.
    """
    nothing = np.empty(0, np.uint8)
    columns = {field.name: pa.array([], field.type) for field in table.schema}
    return rows.Changes(np.empty(0, np.int64), nothing, columns, {}, nothing, {})


def no_relation(oid: int) -> NotInPrerequisiteState:
    """Return the error for a relation without a Relation message (relation.c: logicalrep_rel_open)."""
    return NotInPrerequisiteState(f"no relation map entry for remote relation ID {oid}", sqlstate="08P01")


def _by_relation_message(
    messages: Sequence[tuple[int, pgoutput.Relation]], frames: Sequence[rows.RowFrames]
) -> list[tuple[pgoutput.Relation, list[rows.RowFrames]]]:
    """Group frames by the Relation message that each was sent under."""
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
    """Leave out frames that the table holds already, and those that a later TRUNCATE removes."""
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


def _check_identity(relation: pgoutput.Relation, reading: Reading, table: TargetTable, changes: rows.Changes) -> None:
    """Check that updates and deletes identify their row by the target's key.

    Follows relation.c: logicalrep_rel_mark_updatable; the texts are those of worker.c: check_relation_updatable.
    """
    if not np.any(changes.op != ord("I")) or (table.history is not None and not table.identity):
        return
    if relation.replica_identity == "f":
        return
    sent = {
        column.name if of_table is None else of_table.name
        for column, of_table in zip(relation.columns, reading.fields, strict=True)
        if column.in_replica_identity
    }
    if not table.identity or not sent.issuperset(table.identity):
        raise IdentityMissing(
            "publisher did not send replica identity column expected by the logical replication target relation "
            f'"{table.relation}"'
            if table.identity
            else f'logical replication target relation "{table.relation}" has neither REPLICA IDENTITY index nor PRIMARY KEY '
            "column and published relation does not have REPLICA IDENTITY FULL",
            detail=f"The publisher identifies rows by ({', '.join(sorted(sent))}), "
            f"the Delta table by ({', '.join(table.identity)}).",
            hint="Drop the table from the publication, refresh, add it again and refresh: it is then copied anew.",
        )


def _read(reading: Reading, masks: Masks) -> list[pa.Field | None]:
    """Return the fields whose values are read: not those that are NULL anyway, whatever is sent."""
    return [None if field is not None and field.name in masks.absent else field for field in reading.fields]


def _masked(changes: rows.Changes, table: TargetTable, key: bytes) -> rows.Changes:
    """Mask new and old rows.  The NULL that stands for an unchanged value stays one."""
    masks = table.masks
    if not masks:
        return changes
    absent = {name: nulls(changes.count, table.schema.field(name).type) for name in masks.absent}
    old = masking.apply(masks, changes.old, key)
    if old and not table.key:
        old |= absent
    return dataclasses.replace(changes, new=masking.apply(masks, changes.new, key) | absent, old=old)


def _as_in_target(changes: rows.Changes, reading: Reading, table: TargetTable) -> rows.Changes:
    """Bring the changes to the target's columns and order.

    A column that only the target has is NULL, or `reading.missing`, in new rows; updates leave it as it is.  The columns of
    change_rows, which history adds, are left out.
    """
    sent = {of_table.name for of_table in reading.fields if of_table is not None} | table.masks.absent
    names = table.replicated
    extra = [table.schema.field(name) for name in names if name not in sent]
    values = {one.name: _filled(reading, one, changes.count) for one in extra}
    stay = () if table.keeps_past else extra
    untouched = {one.name: changes.op == ord("U") for one in stay if one.name not in table.others}
    new = changes.new | values
    old = changes.old
    if not table.key and table.history is None and old:
        # Without a key, rows are found by all their values.
        old = old | values
    return dataclasses.replace(
        changes,
        new={name: new[name] for name in names},
        unchanged=changes.unchanged | untouched,
        old=old,
    )


def _filled(reading: Reading, column: pa.Field, count: int) -> pa.Array:
    value = reading.missing.get(column.name)
    return nulls(count, column.type) if value is None else repeated(value, count)


def _located(error: InvalidValue, batch: Batch, relation: pgoutput.Relation, origin: str) -> InvalidValue:
    """Add table, column and transaction to the error; the context is PostgreSQL's (worker.c: apply_error_callback)."""
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
