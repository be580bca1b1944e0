"""Give a batch's changes the columns that a Delta table has for itself: of the change that made a row, when it was deleted, since
when a version of it holds (mode = scd2), and whose it is.

Where deleted rows stay (pubsub.delta.soft_deletes) a deletion leaves the row as it is and says when it was made, so it is like an
UPDATE that leaves everything unchanged: what the publisher does not send of a deleted row, the fold takes from the changes before
it, or from the table's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from apply.batch import Batch, Transaction
from pubsub.delta import soft_deletes
from pubsub.delta.metadata_columns import KINDS
from pubsub.delta.soft_deletes import DELETED_AT
from pubsub.delta.table import TargetTable
from pubsub.delta.versions import ENDS, VALID_FROM, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN
from pubsub.protocol.arrow_arrays import Indices, Mask, nulls, repeated
from pubsub.protocol.rows import DELETE, INSERT, OLD_ROW, UPDATE, Changes
from pubsub.sql.source import Source

#: What a row that leaves its key, and stays there as a deleted one, has in the table's own columns, for each change; with mode = scd2
#: what a version gets that the change ends.
Leaving = Mapping[str, pa.Array]

_OF_TRANSACTION: Final[Mapping[str, Callable[[Transaction], int]]] = {
    "lsn": lambda transaction: int(transaction.end_lsn),
    "commit_time": lambda transaction: transaction.committed_at,
    "xid": lambda transaction: transaction.xid,
}


def with_own(changes: Changes, table: TargetTable, batch: Batch) -> tuple[Changes, Leaving | None]:
    """Return the changes with all of the table's columns, and, if its deleted or ended rows stay, what they have in its own ones."""
    changes = with_source(changes, table)
    if not table.metadata and table.mark is None:
        return changes, None
    transactions = batch.transactions_of(changes.seq)
    own = {name: _ops(changes) if kind == "op" else _of(kind, batch, transactions) for kind, name in table.metadata}
    leaving = None
    if table.versions:
        leaving = own_of_deletions(table, batch, transactions)
        own |= {VALID_FROM: leaving[VALID_TO], VALID_FROM_LSN: leaving[VALID_TO_LSN]}
        own |= {name: nulls(changes.count, leaving[name].type) for name in ENDS}
    elif table.soft_deletes:
        leaving = own_of_deletions(table, batch, transactions)
        deleted = pa.array(changes.op == DELETE)
        own[DELETED_AT] = pc.if_else(deleted, leaving[DELETED_AT], pa.scalar(None, soft_deletes.FIELD.type))
    return with_columns(changes, table, own), leaving


def with_source(changes: Changes, table: TargetTable) -> Changes:
    """Return the changes with the column that says whose rows they are, if the table has several sources."""
    if table.source is None:
        return changes
    whose = {table.source.column: _source(table.source, changes.count)}
    names = [field.name for field in table.schema if field.name in changes.new or field.name in whose]
    new = {name: whose.get(name, changes.new.get(name)) for name in names}
    # Without a key, rows are found by all their values.
    old = changes.old | whose if changes.old and not table.key else changes.old
    return dataclasses.replace(changes, new=new, old=old)


def _source(source: Source, count: int) -> pa.Array:
    return repeated(pa.scalar(source.value, pa.string()), count)


def own_of_deletions(table: TargetTable, batch: Batch, transactions: Indices) -> Leaving:
    """Return what a table whose deleted, or ended, rows stay has in its own columns of those that these transactions deleted.

    `transactions`: for each row the place in the batch.  Of metadata an ended version keeps what it has.
    """
    if table.versions:
        return {VALID_TO: _of("commit_time", batch, transactions), VALID_TO_LSN: _of("lsn", batch, transactions)}
    of_change = {
        name: pa.repeat(pa.scalar("D"), len(transactions)) if kind == "op" else _of(kind, batch, transactions)
        for kind, name in table.metadata
    }
    whose = {} if table.source is None else {table.source.column: _source(table.source, len(transactions))}
    return {**of_change, **whose, DELETED_AT: _of("commit_time", batch, transactions)}


def with_columns(changes: Changes, table: TargetTable, own: Mapping[str, pa.Array]) -> Changes:
    """Return the changes with the columns `own`, too; where deleted rows stay, deleted ones with what was sent of them."""
    new = {field.name: own.get(field.name, changes.new.get(field.name)) for field in table.schema}
    deleted: Mask = changes.op == DELETE
    if not table.soft_deletes or not deleted.any():
        return dataclasses.replace(changes, new=new)
    unchanged = dict(changes.unchanged)
    whole = changes.old_kind == OLD_ROW
    for name in table.replicated:
        if name in changes.old:
            new[name] = _chosen(deleted, changes.old[name], changes.new[name])
        if name not in table.key:
            unsent = deleted & ~whole if name in changes.old else deleted
            unchanged[name] = unchanged[name] | unsent if name in unchanged else unsent
    return dataclasses.replace(changes, new=new, unchanged=unchanged)


def _ops(changes: Changes) -> pa.Array:
    """Return what a metadata column of the kind op has for each change."""
    places = np.searchsorted(_OPS, changes.op).astype(np.int8)
    return pa.DictionaryArray.from_arrays(pa.array(places), pa.array([chr(op) for op in _OPS])).cast(pa.string())


def _of(kind: str, batch: Batch, transactions: Indices) -> pa.Array:
    """Return what a metadata column of another kind has for changes of these transactions."""
    if not len(transactions):
        return nulls(0, KINDS[kind])
    values = np.array([_OF_TRANSACTION[kind](one) for one in batch.transactions], np.int64)
    return pa.array(values[transactions]).cast(KINDS[kind])


_OPS: Final = np.sort(np.array([INSERT, UPDATE, DELETE], np.uint8))


def _chosen(mask: Mask, one: pa.Array, other: pa.Array) -> pa.Array:
    """Return `one` where the mask is set, else `other`.  By index, so for nested types, too."""
    own = np.arange(len(mask))
    return pa.concat_arrays([one, other]).take(pa.array(np.where(mask, own, own + len(mask))))
