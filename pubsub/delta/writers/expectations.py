"""Look whether a table has the rows that a batch takes for granted, before anything of the batch is committed.

A publisher's changes say what was there before them: an INSERT that no row had the key, an UPDATE or DELETE that one had it.  A
table that lacks the one or has the other would end with two rows of one key, or with a row that was never sent.  Such a batch is
not committed: it is staged again, with a look at the table for each key, and conflicts are judged as PostgreSQL judges them.

    standing    their rows leave the table, so they are sought in any case
    either      likewise, where a row may have stayed that the publisher does not have; that there is none is as well
    free        mostly new keys: files whose statistics exclude them are not opened, and the others are asked as for standing ones

The keys of inserted rows are kept by the batch's data files, which are read again if statistics do not decide.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta.files import file_rows, marked_rows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.files.sought_rows import Found, find
from pubsub.delta.key_index.hashing import Secret, can_hash, hash_keys
from pubsub.delta.log.add_file import file_of_action
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action
from pubsub.delta.sources import own_files
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import NotAsExpected

Range = tuple[int, int]

# So many keys are read from data files and sought at a time.
_AT_ONCE: Final = 1 << 22
_SECRET: Final = Secret.of(b"")


@dataclass(slots=True)
class Inserted:
    """Data files of a batch, in no log yet, whose rows are all inserted: the table has none of their keys, nor has another row.

    `gives_way`: the table may have rows with their keys, which leave it.  `ranges`: the least and greatest first key column of
    each part that was staged; None if they are not integers.
    """

    files: Sequence[Action] = ()
    gives_way: bool = False
    ranges: list[Range] | None = field(default_factory=list)

    def add(self, keys: pa.Table) -> None:
        """Note the keys of another part, which are distinct."""
        span = _range(keys)
        if span is None:
            self.ranges = None
        elif self.ranges is not None:
            self.ranges.append(span)


def require_standing(keys: KeySet, found: Sequence[Found]) -> None:
    """Raise NotAsExpected unless each of the keys is among the rows found for them."""
    there = np.zeros(len(keys), np.bool_)
    for one in found:
        there[one.key_rows] = True
    if not there.all():
        raise NotAsExpected("a row to be changed is missing")


def require_free(log: TableLog, table: TargetTable, keys: pa.Table) -> list[Found]:
    """Raise NotAsExpected if a live row of the table has one of these keys, or if two of them are equal.

    Return the rows with these keys that are marked as deleted: they make room.  Earlier versions of a row stay.  `log` must be
    refreshed.
    """
    marked = []
    for live, deleted in marked_rows.divided(log, table, rows_under(log, table, keys)):
        if len(live.positions):
            raise NotAsExpected("a row is in the way")
        if not table.versions:
            marked.append(deleted)
    return marked


def rows_under(log: TableLog, table: TargetTable, keys: pa.Table) -> Iterator[Found]:
    """Yield the rows of the table that have one of these keys.  Raises NotAsExpected if two of the keys are equal.

    `log` must be refreshed.
    """
    span = _range(keys) if keys.num_rows else None
    if not keys.num_rows or (span is not None and not _may_have(log, table, span)):
        return
    wanted = KeySet(keys)
    if not wanted.distinct:
        raise NotAsExpected("two rows have one key")
    yield from find(log, wanted, table)


def require_inserted_free(log: TableLog, table: TargetTable, inserted: Inserted) -> list[Found]:
    """As `require_free`, for the keys in data files that are in no log yet; with `gives_way` return all rows with these keys."""
    ranges = inserted.ranges
    if ranges is not None and _apart(ranges) and not any(_may_have(log, table, one) for one in ranges):
        return []
    marked: list[Found] = []
    count = sum(file_of_action(action["add"]).rows or 0 for action in inserted.files)
    times = -(-count // _AT_ONCE) if all(can_hash(table.schema.field(name).type) for name in table.key) else 1
    for number in range(times):
        keys = list(_keys_in(log, table, inserted.files, number, times))
        if keys:
            look = rows_under if inserted.gives_way else require_free
            marked += look(log, table, pa.Table.from_batches(keys).combine_chunks())
    return marked


def _keys_in(
    log: TableLog, table: TargetTable, files: Sequence[Action], number: int, times: int
) -> Iterator[pa.RecordBatch]:
    """Yield the keys of the files' rows: of `times` parts of equal size the one of this number, the same for equal keys."""
    for action in files:
        file = file_of_action(action["add"])
        for _, batch in file_rows.read_columns(log, file, table, table.key):
            if times > 1:
                batch = batch.filter(pa.array(hash_keys(batch.columns, _SECRET).low % np.uint64(times) == number))
            yield batch


def _range(keys: pa.Table) -> Range | None:
    """Return the least and greatest first key column, None if it is no integer."""
    first = keys.column(0)
    if not pa.types.is_integer(first.type):
        return None
    bounds = pc.min_max(first).as_py()
    return bounds["min"], bounds["max"]


def _may_have(log: TableLog, table: TargetTable, span: Range) -> bool:
    """Return whether the statistics of some data file allow a first key column within the range."""
    low, high = span
    name = table.stored_name(table.key[0])
    for file in own_files(log, table):
        least, greatest = file.bounds.get(name, (None, None))
        if not (isinstance(least, int) and isinstance(greatest, int)) or (least <= high and greatest >= low):
            return True
    return False


def _apart(ranges: Sequence[Range]) -> bool:
    """Return whether no two of the ranges have a number in common."""
    ordered = sorted(ranges)
    return all(before[1] < after[0] for before, after in pairwise(ordered))
