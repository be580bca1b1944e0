"""A batch's changes of one table folded to what the table must become: at most one image for each key.

With a key, an event touches the key its row stands under afterwards (I, U) or stood under before (D), and an UPDATE of the key
also the one that the row leaves.  Sorted by key and then by arrival, the touches of a key tell its story:

    first touch not an INSERT   the key may be in the table: deleted_keys
    last touch an arrival       its event's new row is the key's final image
    the touch before a U or D   its predecessor: the event that made the row which it changes; none: the row in the table

so that   1 I k=7   2 U k=7→8   3 U k=8   4 D k=9   gives   image of 3 under 8; deleted_keys 8 and 9 (7 began with an INSERT).

A value that an UPDATE left unchanged is its predecessor's, and so on back along the chain: pointers are doubled until all rest.
A chain that ends at a row of the table leaves the value to the writer, with the key under which the row stood (masked).  A U or
D whose key was deleted earlier in the batch is skipped, as a subscriber skips it (worker.c: update_missing, delete_missing).

Without a key, under REPLICA IDENTITY FULL, the table is a multiset of rows: each change adds its new row and takes one copy of
its old one, and the sums are what remains (worker.c: FindReplTupleInLocalRel takes one of the equal rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.arrays import Mask
from pubsub.protocol.rows import DELETE, INSERT, OLD_ROW, UPDATE, Changes

UNCHANGED_PREFIX: Final = "__unchanged_"
BASE_PREFIX: Final = "__base_"
COUNT_COLUMN: Final = "__count"

_CODE_BITS: Final = 63  # of a sort key: a key's code and an event's number

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """What becomes of the table.  All tables are pyarrow's; columns are named and ordered as in the changes.

    `images`: complete rows to insert.  `masked`: rows to insert of which some values must come from the table as it was before
    the batch: bool `__unchanged_<i>` says where column i (its place among the columns) is meant, only for columns where that
    happens; `__base_<j>` is the j-th key column of the row in the table.  `deleted_keys`: distinct keys whose rows leave the
    table before anything is inserted, those of images among them unless the batch began with their INSERT.  `removed`, without
    a key: distinct rows, and in `__count` how many copies of each leave.

    `insert_only`: nothing leaves the table, an append does.  `truncated`: the table is emptied first; nothing else leaves it.
    `inserts`, `updates`, `deletes` count the changes as they came, those before a TRUNCATE too.
    """

    images: Any
    masked: Any
    deleted_keys: Any
    removed: Any
    insert_only: bool
    truncated: bool
    inserts: int
    updates: int
    deletes: int


def fold(changes: Changes, key: Sequence[str] | None, *, full: bool, truncate_before: int | None = None) -> Folded:
    """Fold `changes`, which are in order of arrival.

    `key`: names of the columns that identify a row, or None; `full`: without a key, the old rows are whole (REPLICA IDENTITY
    FULL).  `truncate_before`: the number in the batch of the table's last TRUNCATE; changes before it are void.
    Raises NotInPrerequisiteState (55000) for an UPDATE or DELETE that says not which row it changes.
    """
    counts = np.bincount(changes.op, minlength=DELETE + UPDATE)
    truncated = truncate_before is not None
    if truncate_before is not None:
        changes = _since(changes, truncate_before)
    if key:
        images, masked, deleted, removed = *_fold_keyed(changes, key, truncated), _no_rows(changes)
    else:
        images, removed = _fold_multiset(changes, full, truncated)
        masked, deleted = pa.table(changes.new).slice(0, 0), pa.table({})
    return Folded(
        images=images,
        masked=masked,
        deleted_keys=deleted,
        removed=removed,
        insert_only=not (masked.num_rows or deleted.num_rows or removed.num_rows),
        truncated=truncated,
        inserts=int(counts[INSERT]),
        updates=int(counts[UPDATE]),
        deletes=int(counts[DELETE]),
    )


def _since(changes: Changes, seq: int) -> Changes:
    """The changes numbered `seq` and later."""
    first = int(np.searchsorted(changes.seq, seq))
    return Changes(
        changes.seq[first:],
        changes.op[first:],
        {name: column.slice(first) for name, column in changes.new.items()},
        {name: mask[first:] for name, mask in changes.unchanged.items()},
        changes.old_kind[first:],
        {name: column.slice(first) for name, column in changes.old.items()},
    )


def _no_rows(changes: Changes) -> Any:
    """An empty table of removed rows."""
    counts = pa.array([], pa.int64())
    return pa.table({name: column.slice(0, 0) for name, column in changes.new.items()} | {COUNT_COLUMN: counts})


def _take(columns: Mapping[str, Any], rows: Indices) -> dict[str, Any]:
    """The rows of each column, in that order; `rows` are distinct and ascending, or few."""
    if rows.size and any(len(column) != rows.size for column in columns.values()) or not rows.size:
        indices = pa.array(rows)
        return {name: column.take(indices) for name, column in columns.items()}
    return dict(columns)


# With a key
