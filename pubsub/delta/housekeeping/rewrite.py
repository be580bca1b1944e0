"""Rewrite data files of a partition into one, while batches go on being committed to it.

    under the lock     the log is replayed; files are chosen (choose_files.py)
    without it         their live rows ─► one new file, sorted (row_order.py)
    under the lock     the log is replayed again; rows that were deleted meanwhile ─► a deletion vector of the new file
                       ─► one commit (dataChange false)

Under load each commit gives a large file another deletion vector, so a rewriting that failed on every such conflict
would never end.  A deletion vector only grows: a row at position p of an old file comes behind the rows of the files
before it and the live rows before p; and if the new file is sorted, that place has a rank.

    old file: 10 rows, 2 and 5 deleted at the choice; since then 7, too
    new file: begins at 100; row 7 was the sixth live one (0 1 3 4 6 7), so position 105, or ranks[105], is deleted

A file that is gone by then, whoever removed it, has no live rows any more: all of its rows are deleted from the new one.
If the columns have changed, or rows have come back (RESTORE), the new file is dropped.  Everything here blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from pubsub import faults
from pubsub.delta.files import data_files
from pubsub.delta.files.file_rows import deleted_positions, known_live, laid_out, live_rows, rows_in
from pubsub.delta.housekeeping.row_order import RowOrder, order_of
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.deletion_vectors import Positions
from pubsub.delta.log.other_commits import Partition
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Conflict, Operation
from pubsub.delta.places import Place
from pubsub.delta.table import SOURCE, TargetTable, mark_of
from pubsub.delta.versions import VALID_TO_LSN
from pubsub.delta.writers.arrow_writer import remove_action, row_count
from pubsub.processor_time import spent_on

_NONE: Positions = np.empty(0, np.int64)


class _Dropped(Exception):
    """The new file cannot take the place of the old ones any more."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file as it was chosen: `rows` with deleted ones, `gone`: their positions, `begin`: the live rows of those before."""

    file: AddFile
    rows: int
    gone: Positions
    begin: int


@spent_on("housekeeping", whole=True)
def rewrite(
    log: TableLog, load: Callable[[], TargetTable], choose: Callable[[Sequence[AddFile]], Sequence[AddFile]]
) -> bool:
    """Rewrite the files that `choose` returns, and commit that; return whether it was committed.

    `choose` gets the files of one partition at a time, until it returns some; of a table with mode = scd2, those of ended rows and
    the others by themselves.  `load` returns the table as its log
    describes it.  The rows stay the same.  Raises what TableLog's methods and data_files.write raise; a failure leaves
    nothing behind.
    """
    with log.writing:
        log.refresh()
        if not can_be_rewritten(log):
            return False
        metadata = log.metadata
        versions = load() if mark_of(log.properties) == VALID_TO_LSN else None
        chosen = next(filter(None, map(choose, _together(log, versions))), ())
    if not chosen:
        return False
    sources = _sources(log, chosen)
    table = laid_out(log, load())
    order = order_of(log, chosen, table)
    rows = live_rows(log, chosen, table) if order is None else order.rows(log, chosen, table)
    added = data_files.write(table, rows, merging=True)
    made = data_files.paths(log.table, added)
    try:
        faults.point("files rewritten")
        with log.writing:
            log.refresh()
            if not can_be_rewritten(log) or log.metadata != metadata:
                return False
            actions = _actions(log, sources, order, added, made)
            owned, made = made, []  # the log removes them if it does not commit, unless the outcome is unknown
            log.commit(actions, Operation.MERGE_FILES, made=owned, part=_part_of(log, chosen))
            return True
    except (Conflict, _Dropped):
        return False
    finally:
        data_files.remove(made)


def can_be_rewritten(log: TableLog) -> bool:
    """Return whether our files serve the table, by its log as it was last read.

    Where rows are tracked they keep their files: moved, they would look new.
    """
    return log.unsupported() is None and not log.tracks_rows


def _together(log: TableLog, versions: TargetTable | None) -> list[list[AddFile]]:
    """Return the table's files, those of each partition together; `versions`: the table, if its rows have ended or not."""
    table = None if versions is None else laid_out(log, versions)
    found: dict[Hashable, list[AddFile]] = {}
    for file in log.files.values():
        ended = table is not None and known_live(log, table, file) is False
        found.setdefault((file.partition_key, ended), []).append(file)
    return list(found.values())


def _part_of(log: TableLog, chosen: Sequence[AddFile]) -> Partition | None:
    """Return the source whose files these are: other nodes' commits to others do not concern them.  None: any commit may."""
    values = [(name, value) for name, value in chosen[0].partition.items() if value is not None]
    return values[0] if SOURCE in log.properties and len(values) == 1 else None


def _sources(log: TableLog, chosen: Sequence[AddFile]) -> list[_Source]:
    sources: list[_Source] = []
    begin = 0
    for file in chosen:
        rows, gone = rows_in(log, file), deleted_positions(log, file)
        sources.append(_Source(file, rows, gone, begin))
        begin += rows - len(gone)
    return sources


def _actions(
    log: TableLog, sources: Sequence[_Source], order: RowOrder | None, added: Sequence[Action], made: list[Place]
) -> list[Action]:
    """Return the commit's actions for the log's present state; add a vector's file to `made`.  Raises _Dropped."""
    now = int(time.time() * 1000)
    actions: list[Action] = []
    dead = [_NONE]
    for source in sources:
        held = log.files.get(source.file.path)
        if held is None:
            dead.append(np.arange(source.rows - len(source.gone)) + source.begin)
        else:
            dead.append(_deleted_since(source, held, log) + source.begin)
            actions.append(remove_action(held, now, data_change=False))
    if not actions:
        raise _Dropped
    positions = np.concatenate(dead)
    if order is not None:
        positions = order.ranks[positions]
    for action in added:
        add = action["add"] | {"dataChange": False}
        if len(positions) == row_count(action):
            data_files.remove(made)  # every row was deleted meanwhile
            made.clear()
            continue
        if len(positions):
            path, (descriptor,) = deletion_vectors.write(log.table, [BitMap64(positions.astype(np.uint64))])
            made.append(path)
            add |= {
                "deletionVector": descriptor,
                "stats": add["stats"].replace('"tightBounds":true', '"tightBounds":false'),
            }
        actions.append({"add": add})
    return actions


def _deleted_since(source: _Source, held: AddFile, log: TableLog) -> Positions:
    """Return which of the source's rows in the new file were deleted since it was chosen, as numbers of live rows.

    Raises _Dropped if the file is another, or rows have come back.
    """
    if held.size != source.file.size:
        raise _Dropped
    before, after = deletion_vectors.unique_id(source.file.vector), deletion_vectors.unique_id(held.vector)
    if before == after:
        return _NONE
    deleted = deleted_positions(log, held)
    if not deletion_vectors.among(deleted, source.gone).all():
        raise _Dropped
    new = np.setdiff1d(deleted, source.gone, assume_unique=True)
    return new - np.searchsorted(source.gone, new)
