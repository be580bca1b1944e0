"""Leave out of a relation's changes what concerns rows that a table does not have (the option where), as a publisher does whose
publication has that row filter (pgoutput.c: pgoutput_row_filter):

    before     after                 the change becomes
    –          meets it              INSERT
    –          does not              nothing
    meets it   meets it              UPDATE
    does not   meets it              INSERT: the row comes
    meets it   does not              DELETE: the row goes
    does not   does not              nothing
    meets it   –                     DELETE
    does not   –                     nothing

What the row was before is in the change itself if the publisher's old row has the condition's columns: under REPLICA IDENTITY FULL,
or if they are part of the key, which an UPDATE without an old key has left as it was.  Then it does not matter what the table holds,
and conflicts are those that they are without the option (`matching`).

A publication may not have another row filter.  A table may: then the table itself tells, since it has the rows that met the
condition, and those alone.  UPDATEs and DELETEs are taken as if all rows had met it, and once a batch's changes are together the
first of each key is looked up (`settled`).  A row that is not there comes by such an UPDATE, and a DELETE of it is nothing: neither
is a conflict.  What a row that comes lacks, because an UPDATE has left it as it was, out of line (TOAST), nobody has: an error.

The condition has the publisher's values: rows are looked at before columns are masked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from apply.staging.touches import event_keys, places_of, take, touches_of
from pubsub.delta.files.key_set import can_match
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import Present
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.arrow_arrays import Indices, Mask, nulls, repeated
from pubsub.protocol.pgoutput import Relation
from pubsub.protocol.rows import DELETE, INSERT, OLD_KEY, UPDATE, Changes
from pubsub.row_filters import RowFilter

if TYPE_CHECKING:
    from apply.staging.destination import Reading


class NotTold(NotInPrerequisiteState):
    """A change lacks what the condition needs, or what a row that comes needs; `seq`: its number in the batch.

    Its hint (`hint_for`) names the published table.
    """

    def __init__(self, message: str, detail: str, seq: int) -> None:
        # What stops alone gets a hint of its own about RESYNC TABLE.
        super().__init__(message, detail=f"{detail} Afterwards RESYNC TABLE copies the table anew.")
        self.seq = seq

    @staticmethod
    def hint_for(published: str) -> str:
        return f"On the publisher: ALTER TABLE {published} REPLICA IDENTITY FULL;"


def needed(table: TargetTable) -> frozenset[str] | None:
    """Return the columns of old rows that are read; None: all of them."""
    if not table.key:
        return None
    return frozenset(table.key) | (frozenset() if table.where is None else table.where.names)


def untold(where: RowFilter, relation: Relation, reading: Reading, table: TargetTable) -> str | None:
    """Return a column of the condition that old rows under this message lack; None if they have all (RelationBuildPublicationDesc)."""
    known = {
        of_table.name
        for column, of_table in zip(relation.columns, reading.fields, strict=True)
        if of_table is not None and column.in_replica_identity
    }
    if relation.replica_identity == "f" and where.partitioned:
        # The message is the root's: a partition may send its own key alone.
        known &= set(table.identity)
    return min(where.names - known, default=None)


def matching(changes: Changes, relation: Relation, reading: Reading, table: TargetTable) -> Changes:
    """Return the changes of the rows that the table has; without `where`, all of them.  Old rows have the columns of `needed`.

    Raises NotTold if a change lacks a value that the condition needs, or values of a row that comes, or if nothing tells what a row
    was before; NotInPrerequisiteState if a column of the condition is not sent.
    """
    where = table.where
    if where is None or not changes.count:
        return changes
    _require_columns(where, reading, table)
    updates, deletes = changes.op == UPDATE, changes.op == DELETE
    for name in where.names & changes.unchanged.keys():
        unsent = changes.unchanged[name] & updates
        if unsent.any():
            raise _not_sent(table, name, changes, unsent)
    after = where.matches(_whole(changes.new, where, reading, changes.count)) & ~deletes
    lacking = untold(where, relation, reading, table)
    if lacking is None:
        before = np.where(updates, after, False)
        with_old = changes.old_kind != 0
        if with_old.any():
            before = np.where(with_old, where.matches(_whole(changes.old, where, reading, changes.count)), before)
    else:
        if (updates | deletes).any():
            _require_lookup(table, lacking, changes, updates | deletes)
        # As if all rows had met it: `settled` corrects that.
        before = updates | deletes
    comes, goes = updates & after & ~before, updates & before & ~after
    _require_whole(table, changes, comes)
    if comes.any() or goes.any():
        changes = _turned(changes, comes, goes, table)
    kept = before | after
    if not kept.all():
        changes = _chosen(changes, kept)
    if not table.key:
        return changes
    return dataclasses.replace(changes, old={name: one for name, one in changes.old.items() if name in table.key})


def settled(changes: Changes, table: TargetTable, present: Present | None) -> Changes:
    """Return the changes of some keys, all of a batch and in order, as what they are to the rows that the table has.

    `present`: what the table holds; None: it may have any rows, as in the window of a copy, in which changes are upserts.  Raises
    NotTold if values of a row that comes were not sent.
    """
    if not table.key or not (changes.op != INSERT).any():
        return changes
    keys = event_keys(changes, table.key)
    touches = touches_of(changes, keys, None)
    first = touches.first()
    there = np.ones(len(first), np.bool_)
    asked = np.flatnonzero(first & touches.from_here)
    if present is not None and asked.size:
        at = places_of(keys, touches)[asked]
        there[asked] = present.keys(pa.table(take(keys.columns, at))) > 0
    absent = touches.from_here & ~(touches.after_arrival() | (first & there))
    events = touches.event[absent]
    missing = np.zeros(changes.count, np.bool_)
    missing[events] = True
    comes = missing & (changes.op == UPDATE)
    _require_whole(table, changes, comes)
    if comes.any():
        changes = _turned(changes, comes, np.zeros(changes.count, np.bool_), table)
    gone = missing & (changes.op == DELETE)
    return _chosen(changes, ~gone) if gone.any() else changes


def _require_columns(where: RowFilter, reading: Reading, table: TargetTable) -> None:
    sent = {one.name for one in reading.fields if one is not None}
    for name, here, _ in where.columns:
        if here not in sent and here not in reading.missing:
            raise NotInPrerequisiteState(
                f'column "{name}" of table "{table.relation}", which the condition of the option where names, is not sent',
                hint=f"ALTER SUBSCRIPTION … SET (where = …) without it, and RESYNC TABLE {table.relation}.",
            )


def _require_lookup(table: TargetTable, lacking: str, changes: Changes, concerned: Mask) -> None:
    """Raise NotTold for a table that does not tell which rows of the publisher met the condition before."""
    reason = unfit_to_tell(table)
    if reason is not None:
        raise NotTold(
            f'a change of table "{table.relation}" does not tell whether its row met the condition of the option where before',
            f'Column "{lacking}" of the condition is not part of the replica identity, and {reason}.',
            _first(changes, concerned),
        )


def _require_whole(table: TargetTable, changes: Changes, comes: Mask) -> None:
    for name, mask in changes.unchanged.items():
        if (mask & comes).any():
            raise NotTold(
                f'a row of table "{table.relation}" meets the condition of the option where by now, and the publisher did not send '
                "all of it",
                f'The value of column "{name}" is stored out of line (TOAST), and an UPDATE has left it as it was.',
                _first(changes, mask & comes),
            )


def _first(changes: Changes, mask: Mask) -> int:
    return int(changes.seq[np.flatnonzero(mask)[0]])


def unfit_to_tell(table: TargetTable) -> str | None:
    """Return why a table does not tell which rows of the publisher met its condition before; None if it does."""
    if table.keeps_past:
        return "the Delta table keeps what rows were before"
    if table.truncate != "follow":
        return "rows stay in the Delta table after a TRUNCATE"
    if not table.key:
        return "the Delta table has no key"
    if not can_match(pa.schema([table.schema.field(name) for name in table.key])):
        return "the Delta table's key has floating-point numbers, which are not looked up"
    return None


def _whole(columns: dict[str, pa.Array], where: RowFilter, reading: Reading, count: int) -> dict[str, pa.Array]:
    """Return the condition's columns; those that rows of this time did not have yet have what they have in older rows."""
    return {name: columns[name] if name in columns else repeated(reading.missing[name], count) for name in where.names}


def _turned(changes: Changes, comes: Mask, goes: Mask, table: TargetTable) -> Changes:
    """Make INSERTs and DELETEs of those UPDATEs by which a row comes, or goes."""
    op, old_kind = changes.op.copy(), changes.old_kind.copy()
    op[comes], old_kind[comes] = INSERT, 0
    op[goes] = DELETE
    new, old, unchanged = changes.new, changes.old, changes.unchanged
    if goes.any():
        new = {name: _choose(goes, None, column) for name, column in new.items()}
        unchanged = {name: mask & ~goes for name, mask in unchanged.items()}
    unsent = goes & (changes.old_kind == 0)
    if unsent.any():
        # The key is that of the new row.
        old_kind[unsent] = OLD_KEY
        keys = {name: _choose(~unsent, old.get(name), changes.new[name]) for name in table.identity}
        old = {**old, **keys}
    return dataclasses.replace(changes, op=op, old_kind=old_kind, new=new, old=old, unchanged=_some(unchanged))


def _choose(chosen: Mask, one: pa.Array | None, other: pa.Array) -> pa.Array:
    """Return `one` (None: NULLs) where the mask is set, else `other`.  By index, so for nested types, too."""
    own: Indices = np.arange(len(chosen))
    first = nulls(len(chosen), other.type) if one is None else one
    return pa.concat_arrays([first, other]).take(pa.array(np.where(chosen, own, own + len(chosen))))


def _chosen(changes: Changes, kept: Mask) -> Changes:
    mask = pa.array(kept)
    return Changes(
        changes.seq[kept],
        changes.op[kept],
        {name: column.filter(mask) for name, column in changes.new.items()},
        _some({name: one[kept] for name, one in changes.unchanged.items()}),
        changes.old_kind[kept],
        {name: column.filter(mask) for name, column in changes.old.items()},
    )


def _some(unchanged: dict[str, Mask]) -> dict[str, Mask]:
    return {name: mask for name, mask in unchanged.items() if mask.any()}


def _not_sent(table: TargetTable, name: str, changes: Changes, unsent: Mask) -> NotTold:
    return NotTold(
        f'an UPDATE of table "{table.relation}" has left the value of column "{name}" as it was, and the publisher did not send it',
        "The condition of the option where needs it.",
        _first(changes, unsent),
    )
