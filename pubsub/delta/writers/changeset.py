"""One table's part of a batch, folded: which rows leave the table, and which come.

`apply.staging.fold` makes a change set, the writers (`arrow_writer`, `spark_writer`) carry it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from pubsub.protocol.arrow_arrays import Indices

if TYPE_CHECKING:
    import pyarrow as pa

# Longer than any column name in PostgreSQL (63 bytes), so no table has a column of these names.
UNCHANGED_PREFIX: Final = "__unchanged_".ljust(64, "_")
BASE_PREFIX: Final = "__base_".ljust(64, "_")
COUNT_COLUMN: Final = "__count".ljust(64, "_")
MOVED_COLUMN: Final = "__moved".ljust(64, "_")

# Who wrote a row last: this subscription, or, as far as known, another writer.
OURS: Final = 1
THEIRS: Final = 2


class Present(Protocol):
    """Looks up which rows a table holds."""

    def keys(self, keys: pa.Table) -> Indices:
        """Return, for each of these distinct keys (a table of the key's columns), OURS or THEIRS, or 0 if no row has the key."""

    def copies(self, rows: pa.Table) -> Indices:
        """Return, for each of these distinct rows (a table of all columns), how many rows of the table equal it."""


@dataclass(frozen=True, slots=True, eq=False)
class Conflicting:
    """Changes that did not find the table as they expected it, in order of arrival.

    `seq` and `op` are as in Changes.  `keys` and `rows` cover the first fold.SHOWN of them, as tables: the keys that they looked
    for (the whole rows, in a table without a key), and their new rows.
    """

    seq: Indices
    op: npt.NDArray[np.uint8]
    keys: pa.Table
    rows: pa.Table


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What a batch that was folded without a look at the table takes for granted, as tables of the key's columns.

    `standing`: distinct keys under which the table has a row, which leaves it.  `free`: distinct keys under which it has none.
    `either`: distinct keys under which it may have one, which leaves it then.
    """

    standing: pa.Table
    free: pa.Table
    either: pa.Table


class NotAsExpected(Exception):
    """The table does not have the rows that a batch takes for granted (Expected); nothing of the batch is in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The change set of one table.  Columns have the names and order of the changes.

    `images`: complete rows to insert.
    `masked`: rows to insert that take some values from the table as it was before the batch.  The bool column
    UNCHANGED_PREFIX<i> marks the rows whose column i (by position) is such a value; it exists only where some row has one.
    BASE_PREFIX<j> holds the j-th key column of the row to take them from.
    `deleted_keys`: distinct keys whose rows leave the table before anything is inserted.  Keys of images are among them, unless
    the batch began with their INSERT.
    `removed`, for a table without a key: distinct rows, with the number of copies that leave in COUNT_COLUMN.

    Folded as upserts, every touched key is in `deleted_keys`, and the bool column MOVED_COLUMN of `masked` marks rows that left
    the key that they had before the batch.

    `insert_only`: nothing leaves the table, so an append is enough.  `truncated`: the table is emptied first; nothing else
    leaves it.  `inserts`, `updates`, `deletes` count the changes as received, including those before a TRUNCATE.

    `missing`: updates and deletes left out because their row does not exist.  `collisions`: inserts and key changes that arrive
    where a row exists.  `differing`: updates and deletes, carried out, of rows that others wrote.  None if there are none.

    `expected`: what all of this takes for granted about the table.  None if the table was looked up, or if nothing is.

    In a table with mode = scd2 the rows under `deleted_keys`, and `standing` ones, come again as they are, with the values of the
    columns versions.ENDS, which are beside their keys.

    `marks`: what live rows of the table that do not leave it get in columns of its own, by name: they are marked as deleted.
    """

    images: pa.Table
    masked: pa.Table
    deleted_keys: pa.Table
    removed: pa.Table
    insert_only: bool
    truncated: bool
    inserts: int
    updates: int
    deletes: int
    missing: Conflicting | None = None
    collisions: Conflicting | None = None
    differing: Conflicting | None = None
    expected: Expected | None = None
    marks: Mapping[str, pa.Scalar] | None = None
