"""A batch's changes as those of a table whose deleted rows stay (pubsub.delta.soft_deletes).

A deletion leaves the row as it is and says when it was made, so it is like an UPDATE that leaves everything unchanged: what the
publisher does not send of a deleted row, the fold takes from the changes before it, or from the table's row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from apply.batch import Batch
from pubsub.delta import soft_deletes
from pubsub.delta.soft_deletes import DELETED_AT
from pubsub.delta.table import TargetTable
from pubsub.protocol.arrow_arrays import Mask
from pubsub.protocol.rows import DELETE, OLD_ROW, Changes


def commit_times(batch: Batch, changes: Changes) -> pa.Array:
    """Return when the transaction of each change was committed, as the type of the column for it."""
    times = np.array([t.committed_at for t in batch.transactions], np.int64)
    return pa.array(times[batch.transactions_of(changes.seq)]).cast(soft_deletes.FIELD.type)


def with_deleted(changes: Changes, table: TargetTable, ended: pa.Array) -> Changes:
    """Return the changes with all of the table's columns; deleted rows with what was sent of them, and the time, of `ended`."""
    deleted = changes.op == DELETE
    chosen = pa.array(deleted)
    whole = changes.old_kind == OLD_ROW
    new: dict[str, pa.Array] = {}
    unchanged = dict(changes.unchanged)
    for field in table.schema:
        name = field.name
        if name == DELETED_AT:
            new[name] = pc.if_else(chosen, ended, pa.scalar(None, field.type))
            continue
        new[name] = changes.new[name]
        if not deleted.any():
            continue
        if name in changes.old:
            new[name] = _chosen(deleted, changes.old[name], new[name])
        if name not in table.key:
            unsent = deleted & ~whole if name in changes.old else deleted
            unchanged[name] = unchanged[name] | unsent if name in unchanged else unsent
    return dataclasses.replace(changes, new=new, unchanged=unchanged)


def _chosen(mask: Mask, one: pa.Array, other: pa.Array) -> pa.Array:
    """Return `one` where the mask is set, else `other`.  By index, so for nested types, too."""
    own = np.arange(len(mask))
    return pa.concat_arrays([one, other]).take(pa.array(np.where(mask, own, own + len(mask))))
