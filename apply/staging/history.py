"""A batch's changes as rows of a table in mode history (pubsub.delta.change_rows): nothing is folded, rows are only added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from apply.batch import Batch, Truncation
from apply.staging.row_codes import comparable
from pubsub.delta import change_rows
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import Folded
from pubsub.processor_time import spent_on
from pubsub.protocol.arrow_arrays import Indices, Mask, nulls
from pubsub.protocol.rows import DELETE, INSERT, UPDATE, Changes


@spent_on("folding")
def history(changes: Changes | None, batch: Batch, table: TargetTable, emptied: Sequence[Truncation] = ()) -> Folded:
    """Return the rows that these changes, and these TRUNCATEs, are in the table's history."""
    pieces = []
    counts = np.zeros(UPDATE + 1, np.int64)
    if emptied:
        pieces.append(_emptied(batch, table, emptied))
    if changes is not None and changes.count:
        counts = np.bincount(changes.op, minlength=UPDATE + 1)
        left = _left(changes, table)
        if len(left):
            pieces.append(_table(table, _taken(changes.old, left), _of(batch, "O", changes.seq[left], before=True)))
        described = _of(batch, _letters(changes), changes.seq) | {change_rows.UNCHANGED: _unchanged(changes)}
        pieces.append(_table(table, _values(changes), described))
    none = table.schema.empty_table()
    return Folded(
        images=pa.concat_tables(pieces) if pieces else none,
        masked=none,
        deleted_keys=none.select([]),
        removed=none,
        insert_only=True,
        truncated=False,
        inserts=int(counts[INSERT]),
        updates=int(counts[UPDATE]),
        deletes=int(counts[DELETE]),
    )


def _left(changes: Changes, table: TargetTable) -> Indices:
    """Return the UPDATEs whose old row is a row of its own: those of the key, and all that sent it in a table without a key."""
    with_old = (changes.op == UPDATE) & (changes.old_kind != 0)
    key = [name for name in table.identity if name in changes.old]
    if key and with_old.any():
        differs = np.zeros(changes.count, np.bool_)
        for name in key:
            # NaN, which equals itself in PostgreSQL, has no equal in Arrow.
            other = pc.fill_null(pc.not_equal(*(_of_one_nan(one[name]) for one in (changes.old, changes.new))), False)
            differs |= other.to_numpy(zero_copy_only=False)
        with_old &= differs
    return np.flatnonzero(with_old)


def _of_one_nan(column: pa.Array) -> pa.Array:
    """Return floats as integers that are equal where PostgreSQL's values are; other columns as they are."""
    return comparable(column, exact=False) if pa.types.is_floating(column.type) else column


def _values(changes: Changes) -> Mapping[str, pa.Array]:
    """Return the columns as the changes made them; of deleted rows, what was sent of them."""
    deleted: Mask = changes.op == DELETE
    if not deleted.any():
        return changes.new
    chosen = pa.array(deleted)
    nothing = {name: pa.scalar(None, column.type) for name, column in changes.new.items()}
    return {
        name: pc.if_else(chosen, changes.old.get(name, nothing[name]), column) for name, column in changes.new.items()
    }


def _taken(columns: Mapping[str, pa.Array], rows: Indices) -> Mapping[str, pa.Array]:
    indices = pa.array(rows)
    return {name: column.take(indices) for name, column in columns.items()}


def _letters(changes: Changes) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array(np.searchsorted(_OPS, changes.op).astype(np.int8)), pa.array([chr(op) for op in _OPS])
    ).cast(pa.string())


_OPS: Final = np.sort(np.array([INSERT, UPDATE, DELETE], np.uint8))


def _of(batch: Batch, op: str | pa.Array, seq: Indices, *, before: bool = False) -> dict[str, pa.Array]:
    """Return the columns that describe the changes numbered `seq`, or rows that come just `before` them."""
    return _described(batch, op, batch.transactions_of(seq), seq, before=before)


def _described(
    batch: Batch, op: str | pa.Array, transactions: Indices, seq: Indices, *, before: bool
) -> dict[str, pa.Array]:
    facts = np.array([(t.end_lsn, t.first_seq, t.committed_at, t.xid) for t in batch.transactions], np.int64).reshape(
        -1, 4
    )[transactions]
    return {
        change_rows.OP: pa.repeat(op, len(seq)) if isinstance(op, str) else op,
        change_rows.LSN: pa.array(facts[:, 0]),
        change_rows.SEQ: pa.array(2 * (seq - facts[:, 1]) + (0 if before else 1)),
        change_rows.COMMIT_TIME: pa.array(facts[:, 2]).cast(pa.timestamp("us", tz="UTC")),
        change_rows.XID: pa.array(facts[:, 3]),
    }


def _unchanged(changes: Changes) -> pa.Array:
    """Return for each change the names of the columns whose values were not sent; NULL if there are none."""
    kind = pa.list_(pa.string())
    names = [name for name, mask in changes.unchanged.items() if mask.any()]
    if not names:
        return nulls(changes.count, kind)
    marked = np.stack([changes.unchanged[name] for name in names], axis=1)
    counts = marked.sum(axis=1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    listed = pa.array(names).take(pa.array(np.nonzero(marked)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), listed, mask=pa.array(counts == 0)).cast(kind)


def _emptied(batch: Batch, table: TargetTable, emptied: Sequence[Truncation]) -> pa.Table:
    # Two with no row in between are one.
    places = np.array(sorted({(one.seq, one.transaction) for one in emptied}), np.int64)
    seq, transactions = places[:, 0], places[:, 1]
    return _table(table, {}, _described(batch, "T", transactions, seq, before=True))


def _table(table: TargetTable, values: Mapping[str, pa.Array], described: Mapping[str, pa.Array]) -> pa.Table:
    """Return rows of the table; a column that is in neither is NULL."""
    columns = {**values, **described}
    count = len(described[change_rows.LSN])
    return pa.table(
        [columns[field.name] if field.name in columns else nulls(count, field.type) for field in table.schema],
        schema=table.schema,
    )
