"""One table's part of a batch, folded: which rows leave the table, and which come.

`apply.staging.fold` makes a change set, the writers (`arrow_writer`, `spark_writer`) carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

# Longer than a column's name in PostgreSQL can be: no table has them.
UNCHANGED_PREFIX: Final = "__unchanged_".ljust(64, "_")
BASE_PREFIX: Final = "__base_".ljust(64, "_")
COUNT_COLUMN: Final = "__count".ljust(64, "_")
MOVED_COLUMN: Final = "__moved".ljust(64, "_")

# Rows of this subscription, and rows that others are known to have written last.
OURS: Final = 1
THEIRS: Final = 2

Indices = npt.NDArray[np.int64]


class Present(Protocol):
    """Which rows a table holds."""

    def keys(self, keys: Any) -> Indices:
        """For each of these distinct keys (a table of the key's columns) whose row stands under it: 0 for none, OURS or THEIRS."""

    def copies(self, rows: Any) -> Indices:
        """For each of these distinct rows (a table of all columns) how many are equal to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Unmet:
    """Changes that did not find the table as they expected it, in order of arrival.

    `seq` and `op` are as in Changes.  Of the first SHOWN, `keys` are the keys (without a key: the rows) that they looked for, and
    `rows` the new rows, both as tables.
    """

    seq: Indices
    op: npt.NDArray[np.uint8]
    keys: Any
    rows: Any


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """What becomes of the table.  All tables are pyarrow's; columns are named and ordered as in the changes.

    `images`: complete rows to insert.  `masked`: rows to insert of which some values must come from the table as it was before
    the batch: bool UNCHANGED_PREFIX<i> says where column i (its place among the columns) is meant, only for columns where that
    happens; BASE_PREFIX<j> is the j-th key column of the row in the table.  `deleted_keys`: distinct keys whose rows leave the
    table before anything is inserted, those of images among them unless the batch began with their INSERT.  `removed`, without
    a key: distinct rows, and in COUNT_COLUMN how many copies of each leave.

    Folded as upserts, every touched key is among `deleted_keys`, and bool MOVED_COLUMN of `masked` says of a row that it left the
    key under which it stood before the batch.

    `insert_only`: nothing leaves the table, an append does.  `truncated`: the table is emptied first; nothing else leaves it.
    `inserts`, `updates`, `deletes` count the changes as they came, those before a TRUNCATE too.

    `missing`: updates and deletes that were left out, since there is no row for them; `collisions`: inserts and updates of keys
    that came where a row stands; `differing`: updates and deletes of rows that others wrote, which are done.  None where there are
    none, or nobody looked.
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
    missing: Unmet | None = None
    collisions: Unmet | None = None
    differing: Unmet | None = None
