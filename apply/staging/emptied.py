"""What a TRUNCATE is to a table whose truncated rows stay: a DELETE of each row.  They are marked as deleted (the option truncate =
soft), or as ended (mode = scd2).

Of rows that the batch itself leaves in the table until then, the DELETEs are added to the batch's changes, in the place of the
TRUNCATE, so that the fold has nothing else to know: such a row has the values that it had last, and its key may come again.

    I 1    U 2    TRUNCATE    I 1 ...       becomes   I 1    U 2    D 1    D 2    I 1 ...

All other rows of the table are marked by whoever commits the batch, with the `marks` of its first TRUNCATE (Folded.marks).  Rows that
were marked before stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from apply.batch import Batch, Truncation
from apply.staging.own_columns import Leaving, own_of_deletions
from apply.staging.touches import EventKeys, event_keys, take, touches_of
from pubsub.delta.table import TargetTable
from pubsub.protocol.arrow_arrays import Indices, Mask, nulls
from pubsub.protocol.rows import DELETE, OLD_KEY, Changes


@dataclass(frozen=True, slots=True, eq=False)
class Emptied:
    """The TRUNCATEs among a batch's changes.

    `first`: how many changes there are before the first one; none that comes later finds a row of the table.  `made`: the changes
    that are DELETEs added here.  `marks`: what rows that the batch does not name get in the table's own columns.
    """

    first: int
    made: Mask
    marks: Mapping[str, pa.Scalar]


def with_deletions(
    changes: Changes, leaving: Leaving, table: TargetTable, batch: Batch, emptied: Sequence[Truncation]
) -> tuple[Changes, Leaving, Emptied]:
    """Return the changes, and what leaves a key, with the DELETEs of the rows that the TRUNCATEs `emptied` found.

    `changes` and `leaving` are from own_columns.with_own.  Raises IdentityMissing.
    """
    transactions = np.array([one.transaction for one in emptied], np.int64)
    marks = {name: column[0] for name, column in own_of_deletions(table, batch, transactions[:1]).items()}
    places = np.searchsorted(changes.seq, [one.seq for one in emptied])
    if not places[-1]:
        return changes, leaving, Emptied(0, np.zeros(changes.count, np.bool_), marks)
    keys = event_keys(changes, table.key)
    events, which = _left(changes, keys, places)
    first = int(places[0] + (places[which] == places[0]).sum())
    if not len(events):
        return changes, leaving, Emptied(first, np.zeros(changes.count, np.bool_), marks)
    own = own_of_deletions(table, batch, transactions[which])
    seqs = np.array([one.seq for one in emptied], np.int64)[which]
    # Each DELETE comes just before the change that its TRUNCATE came before.
    order = np.argsort(np.concatenate([2 * np.arange(changes.count) + 1, 2 * places[which]]), kind="stable")
    made = np.concatenate([np.zeros(changes.count, np.bool_), np.ones(len(events), np.bool_)])[order]
    joined = _joined(changes, take(keys.columns, events), own, seqs, order)
    at = pa.array(order)
    left = {name: pa.concat_arrays([column, own[name]]).take(at) for name, column in leaving.items()}
    return joined, left, Emptied(first, made, marks)


def _left(changes: Changes, keys: EventKeys, places: Indices) -> tuple[Indices, Indices]:
    """Return the changes whose row a TRUNCATE finds, and the number of that TRUNCATE; `places`: how many changes came before each."""
    touches = touches_of(changes, keys, None)
    which = np.searchsorted(places, touches.event, side="right")
    last = (np.diff(touches.code, append=-1) != 0) | (np.diff(which, append=-1) != 0)
    found = np.flatnonzero(last & touches.arrives & (which < len(places)))
    found = found[np.lexsort((touches.event[found], which[found]))]
    return touches.event[found], which[found]


def _joined(
    changes: Changes, keys: Mapping[str, pa.Array], own: Mapping[str, pa.Array], seqs: Indices, order: Indices
) -> Changes:
    """Return the changes and the deletions of these keys, in this order."""
    count, at = len(seqs), pa.array(order)

    def with_more(name: str, column: pa.Array, more: Mapping[str, pa.Array]) -> pa.Array:
        added = more[name] if name in more else nulls(count, column.type)
        return pa.concat_arrays([column, added]).take(at)

    sent = {**keys, **own}
    old = {name: changes.old.get(name, nulls(changes.count, column.type)) for name, column in keys.items()}
    unchanged = {}
    for name in changes.new:
        if name in changes.unchanged or name not in sent:
            before = changes.unchanged.get(name, np.zeros(changes.count, np.bool_))
            unchanged[name] = np.concatenate([before, np.full(count, name not in sent)])[order]
    return Changes(
        np.concatenate([changes.seq, seqs])[order],
        np.concatenate([changes.op, np.full(count, DELETE, np.uint8)])[order],
        {name: with_more(name, column, sent) for name, column in changes.new.items()},
        unchanged,
        np.concatenate([changes.old_kind, np.full(count, OLD_KEY, np.uint8)])[order],
        {name: with_more(name, column, keys) for name, column in {**changes.old, **old}.items()},
    )
