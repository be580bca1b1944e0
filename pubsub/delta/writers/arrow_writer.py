"""Commit one table's batch without a Spark job: Arrow writes the data files, Delta's own transaction commits them.

A Spark job's fixed cost is most of the time of a small commit, but a batch needs little of Delta.  New rows go into a
new data file.  Changed and deleted rows are found by reading only the key's columns, and marked in deletion vectors.  A
file that loses its last row is removed.  All of this is one commit, with the same (application id, end LSN) transaction
as Spark's commits.

    stage    images ─► data files in the table's directory that no log names yet
    look     keys ─► matching rows of each file: are they as the batch expects?  (expectations)
    commit   the same ─► vectors ─► masked rows completed from the rows they replace ─► log

`suits` tells which batches are committed here; spark_writer commits the others.  Everything here blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import versions
from pubsub.delta.files import data_files, file_rows, key_set, marked_rows
from pubsub.delta.files.bounded_rows import ScatteredRows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.files.sought_rows import Found, find
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile, loosened
from pubsub.delta.log.other_commits import ConcurrentCommit
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Operation, Transactions, UnknownOutcome, commit_retrying, transaction
from pubsub.delta.past import goes_on_keeping
from pubsub.delta.places import Place, is_reached
from pubsub.delta.soft_deletes import DELETED_AT
from pubsub.delta.sources import has_files, own_files, part_of, pass_others
from pubsub.delta.table import Commit, TargetTable, committed_lsn, is_of_later_copy, moved_on
from pubsub.delta.writers import expectations
from pubsub.delta.writers.changeset import (
    BASE_PREFIX,
    COUNT_COLUMN,
    MOVED_COLUMN,
    UNCHANGED_PREFIX,
    Folded,
    NotAsExpected,
)
from pubsub.delta.writers.expectations import Inserted
from pubsub.delta.writers.leaving_rows import Gone, by_file, ended, marked
from pubsub.errors import NotInPrerequisiteState, Overtaken
from pubsub.processor_time import spent_on
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.lsn import Lsn

# So many bytes of whole rows are sought at a time.
_SOUGHT_BYTES: Final = 256 << 20


@dataclass(slots=True)
class _Leaving:
    """The rows that leave the table at one version of its log, and the keys for which they were found (None: there are none).

    `files`: those of the table then.  `others`: rows that make room for the keys that arrive: they are marked as deleted, or may
    stand (Expected.either).
    """

    version: int
    files: Sequence[AddFile]
    keys: KeySet | None
    rows: Sequence[Found]
    others: Sequence[Found] = ()


@dataclass(slots=True)
class DirectStaged:
    """One table's part of a batch, staged.  `added`: the `add` actions of its data files, which are durable.

    `deleted_keys`: those whose rows leave, or end (Folded); with `all_stand` the table must have a row under each.  `removed`: rows
    that leave a table without a key, all of which it must have.  `free_keys` and `inserted`: keys under which it must have none.
    `either_keys`: those under which it may have one, which leaves it then.  `marks`: see Folded.
    """

    table: TargetTable
    log: TableLog
    added: list[Action]
    deleted_keys: pa.Table | None
    masked: pa.Table | None
    replace_all: bool
    rows: int
    removed: pa.Table | None = None
    all_stand: bool = False
    free_keys: pa.Table | None = None
    either_keys: pa.Table | None = None
    inserted: Inserted | None = None
    marks: Mapping[str, pa.Scalar] | None = None
    leaving: _Leaving | None = None
    still_holds: Callable[[], bool] | None = None
    """For a table that others write, too: returns whether the rows that were looked up are still the same."""


@dataclass(slots=True)
class _Changes:
    """A commit's actions while they are collected, and the files to remove if it fails."""

    actions: list[Action] = field(default_factory=list)
    made: list[Place] = field(default_factory=list)


def suits(log: TableLog, table: TargetTable, folded: Folded) -> bool:
    """Return whether the table's batch can be committed here.  `log` must be refreshed."""
    if folded.removed.num_rows and not folded.truncated:
        return log.unsupported() is None and log.vectors_enabled() and key_set.can_match_whole(table.schema)
    return accepts(log, table, rewrites=not (folded.insert_only or folded.truncated))


def accepts(log: TableLog, table: TargetTable, *, rewrites: bool) -> bool:
    """Return whether rows can be added here, and with `rewrites` also changed and deleted.  `log` must be refreshed."""
    if log.unsupported() is not None:
        return False
    # A row that arrives may take the place of one that is marked as deleted, or has stayed.
    if not rewrites and table.mark is None and not table.gives_way:
        return True
    if not table.key:
        return False
    return log.vectors_enabled() and key_set.can_match(pa.schema([table.schema.field(name) for name in table.key]))


def stage(log: TableLog, table: TargetTable, folded: Folded, *, replace_all: bool) -> DirectStaged:
    """Write the batch's complete images to data files of the table as it is laid out.  A failure leaves nothing behind."""
    return staged_of(log, table, folded, data_files.write_table(table, folded.images), replace_all=replace_all)


def staged_of(
    log: TableLog, table: TargetTable, folded: Folded, added: list[Action], *, replace_all: bool
) -> DirectStaged:
    """Return a staged batch whose complete images are in the data files that `added` names."""
    expected = folded.expected
    leaving = folded.deleted_keys if expected is None else expected.standing
    return DirectStaged(
        table=table,
        log=log,
        added=added,
        deleted_keys=leaving if leaving.num_rows else None,
        masked=folded.masked if folded.masked.num_rows else None,
        replace_all=replace_all,
        rows=folded.inserts + folded.updates + folded.deletes,
        removed=folded.removed if folded.removed.num_rows else None,
        all_stand=expected is not None,
        free_keys=expected.free if expected is not None and expected.free.num_rows else None,
        either_keys=expected.either if expected is not None and expected.either.num_rows else None,
        marks=folded.marks,
    )


def look(staged: DirectStaged, record: Commit) -> None:
    """Raise NotAsExpected or ConcurrentCommit if `commit` would; what is found is kept for it.

    Does nothing if the table holds another version than `record.previous`, of which `commit` will tell.
    """
    log = staged.log
    with log.writing:
        log.refresh()
        if (log.application_version(record.app_id) or 0) != (record.previous or 0):
            return
        _require_no_others(staged, record)
        if not staged.replace_all:
            _leaving(staged)


def discard(staged: DirectStaged) -> None:
    """Remove the data files of an abandoned batch, unless they were committed."""
    committed = staged.log.files
    added = [action for action in staged.added if action["add"]["path"] not in committed]
    data_files.remove(data_files.paths(staged.log.table, added))
    staged.added = []


def commit(staged: DirectStaged, record: Commit) -> None:
    """Commit a staged batch once; do nothing if the table holds `record.last` already.

    Raises NotInPrerequisiteState if the table can no longer be written here; SerializationFailure if other writers were
    first each time; Overtaken if it holds another version than `record.previous`; ConcurrentCommit if others have changed rows since
    it was last checked, unless `still_holds`; NotAsExpected if its rows are not those that the batch expects; OSError.
    """
    log = staged.log

    def attempt() -> None:
        log.refresh()
        if log.application_version(record.app_id) == int(record.last):
            discard(staged)
            return
        _require_unchanged(log, staged.table, record)
        _require_no_others(staged, record)
        changes = _changes(staged, record)
        try:
            _commit(log, staged.table, changes, record)
        except UnknownOutcome:
            staged.added = []  # the table may have them
            raise
        staged.added = []
        staged.deleted_keys = staged.masked = staged.removed = staged.still_holds = None
        staged.free_keys = staged.either_keys = staged.inserted = staged.leaving = None

    with log.writing:
        commit_retrying(_what(staged.table), attempt)


def _require_no_others(staged: DirectStaged, record: Commit) -> None:
    others = staged.log.written_by_others(record.app_id, part_of(staged.table))
    if others and (staged.still_holds is None or not staged.still_holds()):
        raise ConcurrentCommit(others)


def writable_log(path: str, transactions: Transactions | None = None) -> TableLog | None:
    """Return the log of a table that takes our files, None if a statement of Spark's must write it.

    Without `transactions` it is only read.  Raises UndefinedTable.
    """
    if not is_reached(path):
        return None
    log = TableLog(path, transactions)
    log.refresh()
    return log if log.unsupported() is None else None


def commit_copy(
    log: TableLog, table: TargetTable, added: Sequence[Action], record: Commit, definition: Sequence[Action] = ()
) -> None:
    """Commit an initial copy's files in place of all the table's files; `definition`: actions that set its columns.

    A history keeps its files: what a copy reads is added to them.  So does a table that keeps every version of its rows, whose
    current ones end with the copy.

    Raises what `commit` raises for these reasons, and Overtaken if the table already holds a commit of
    this copy.
    """

    def attempt() -> None:
        log.refresh()
        _require_unchanged(log, table, record, redefined=bool(definition))
        now = int(time.time() * 1000)
        changes = _Changes([*definition, *added])
        if not goes_on_keeping(table, log.properties):
            changes.actions += [remove_action(file, now) for file in own_files(log, table)]
        elif table.versions:
            _end_all(log, table, record.last, now, changes)
        _commit(log, table, changes, record)

    with log.writing:
        commit_retrying(_what(table), attempt)


def _end_all(log: TableLog, table: TargetTable, lsn: Lsn, now: int, changes: _Changes) -> None:
    """End all current rows of the table at a copy's LSN."""
    gone: dict[str, Gone] = {}
    try:
        _write(log, table, changes, marked(log, table, versions.ended(lsn), gone))
        _mark(log, gone.values(), now, changes)
    except BaseException:
        data_files.remove(changes.made)
        raise


def require_no_copy(table: TargetTable, record: Commit) -> None:
    """Raise Overtaken if the table already holds a commit of this copy: Delta would silently ignore Spark's."""
    held = committed_lsn(table.path, record.app_id)
    if held is not None:
        raise Overtaken(table.relation, moved_on(held, record))


def require_version(log: TableLog, relation: str, record: Commit) -> None:
    """Raise Overtaken unless the table holds the version `record.previous`, and no later copy of it has begun."""
    held = log.application_version(record.app_id)
    if (held or 0) != (record.previous or 0):
        raise Overtaken(relation, moved_on(held, record))
    if any(is_of_later_copy(other, record.app_id) for other in log.applications):
        raise Overtaken(relation, "It was copied anew, or is being copied.")


def _require_unchanged(log: TableLog, table: TargetTable, record: Commit, *, redefined: bool = False) -> None:
    """As `require_version`; also raise NotInPrerequisiteState if the table can no longer be written here.

    `redefined`: the commit itself sets the table's columns and partitions.
    """
    require_version(log, table.relation, record)
    reason = log.unsupported()
    if reason is None and not redefined and file_rows.laid_out(log, table) != table:
        reason = "its partition or cluster columns are others"
    if reason is not None:
        raise NotInPrerequisiteState(
            f'the Delta table of "{table.relation}" was altered while it was written to',
            detail=f"It cannot be written as before: {reason}.",
        )


def _commit(log: TableLog, table: TargetTable, changes: _Changes, record: Commit) -> None:
    log.commit(
        [*changes.actions, transaction(record.app_id, int(record.last))],
        Operation.WRITE,
        user_metadata=record.user_metadata,
        made=changes.made,
        part=part_of(table),
    )


def _what(table: TargetTable) -> str:
    return f'commit to the Delta table of "{table.relation}"'


def row_count(action: Action) -> int:
    """Return the number of rows of the data file that an `add` action names."""
    return int(json.loads(action["add"]["stats"])["numRecords"])


def _changes(staged: DirectStaged, record: Commit) -> _Changes:
    """Work out the actions of the batch's commit for the table's present state, and what other sources commit meanwhile."""
    log = staged.log
    files, metadata = own_files(log, staged.table), log.metadata
    changes = _Changes(actions=list(staged.added))
    now = int(time.time() * 1000)
    try:
        if staged.replace_all:
            changes.actions += [remove_action(file, now) for file in own_files(log, staged.table)]
        else:
            leaving = _leaving(staged)
            if staged.masked is not None and leaving.keys is not None:
                _write(log, staged.table, changes, _completed(log, staged, leaving.keys, leaving.rows))
            if staged.table.versions and staged.deleted_keys is not None:
                _write(log, staged.table, changes, ended(log, staged.table, leaving.rows, staged.deleted_keys))
            gone = by_file([*leaving.rows, *leaving.others])
            if staged.marks is not None:
                _write(log, staged.table, changes, marked(log, staged.table, staged.marks, gone))
            _mark(log, gone.values(), now, changes)
        if staged.table.source is not None:
            pass_others(log, staged.table, files, metadata)
            _require_unchanged(log, staged.table, record)
    except BaseException:
        data_files.remove(changes.made)
        raise
    return changes


def _write(log: TableLog, table: TargetTable, changes: _Changes, rows: Iterable[pa.Table]) -> None:
    """Write rows to data files of the commit."""
    added = data_files.write(table, rows, several=True)
    changes.made += data_files.paths(log.table, added)
    changes.actions += added


@spent_on("finding")
def _leaving(staged: DirectStaged) -> _Leaving:
    """Find the rows that leave, unless that was done for this version, or these files.  Raises NotAsExpected."""
    log, table, known = staged.log, staged.table, staged.leaving
    if known is not None and table.source is not None and has_files(log, table, known.files):
        known.version = log.version  # others' commits since have left the source's files alone
    if known is None or known.version != log.version:
        wanted: KeySet | None = None
        found: Sequence[Found] = ()
        others: list[Found] = []
        if staged.removed is not None:
            found = _find_copies(log, staged)
        if staged.deleted_keys is not None:
            wanted = KeySet(staged.deleted_keys.select(list(table.key)))
            found = list(find(log, wanted, table))
            if staged.all_stand or table.versions:
                found = list(marked_rows.only_live(log, table, found))
            if staged.all_stand:
                expectations.require_standing(wanted, found)
        if staged.free_keys is not None:
            others += expectations.require_free(log, table, staged.free_keys)
        if staged.either_keys is not None:
            others += expectations.rows_under(log, table, staged.either_keys)
        if staged.inserted is not None:
            others += expectations.require_inserted_free(log, table, staged.inserted)
        known = staged.leaving = _Leaving(log.version, own_files(log, table), wanted, found, others)
    return known


@spent_on("finding")
def _find_copies(log: TableLog, staged: DirectStaged) -> Sequence[Found]:
    """Find, for each removed row, as many equal rows as were removed, in any files.  Raises NotAsExpected if there are fewer."""
    assert staged.removed is not None
    found: dict[str, Found] = {}
    names = staged.table.schema.names
    for removed in _bounded(staged.removed):
        wanted = KeySet(removed.select(names), whole=True)
        left = np.asarray(removed.column(COUNT_COLUMN)).astype(np.int64)
        for file in file_rows.files_with(log, staged.table, names, wanted):
            gone = deletion_vectors.read(log.table, file.vector) if file.vector is not None else None
            dead = deletion_vectors.positions(gone) if gone is not None else np.empty(0, np.int64)
            positions: list[Indices] = [found[file.path].positions] if file.path in found else []
            for start, batch in file_rows.read_columns(log, file, staged.table, names):
                rows = wanted.rows(batch)
                hits = np.flatnonzero(rows >= 0)
                hits = hits[~deletion_vectors.among(dead, hits + start)]
                taken = hits[_first_of_each(rows[hits], left)]
                if len(taken):
                    left -= np.bincount(rows[taken], minlength=len(left))
                    positions.append(taken + start)
            if positions:
                at = np.concatenate(positions)
                found[file.path] = Found(file, at, np.full(len(at), -1), gone)
        if left.any():
            raise NotAsExpected("a row is missing")
    return list(found.values())


def _bounded(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of a large batch's parts, a few parts at a time: one array would not hold them all."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in rows.to_batches():
        if pending and size + batch.nbytes > _SOUGHT_BYTES:
            yield pa.Table.from_batches(pending)
            pending, size = [], 0
        pending.append(batch)
        size += batch.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


def _first_of_each(rows: Indices, left: Indices) -> npt.NDArray[np.bool_]:
    """Mark the entries of `rows` that are among the first left[row] equal ones."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    chosen = np.empty(len(rows), np.bool_)
    chosen[order] = np.arange(len(rows)) - starts < left[ordered]
    return chosen


def _mark(log: TableLog, gone: Iterable[Gone], now: int, changes: _Changes) -> None:
    """Remove rows: remove files that lose their last row, and give the others a new deletion vector."""
    left: list[Gone] = []
    for one in gone:
        changes.actions.append(remove_action(one.file, now))
        if one.file.deleted + len(one.positions) < file_rows.rows_in(log, one.file):
            left.append(one)
    if not left:
        return
    path, descriptors = deletion_vectors.write(log.table, [one.all for one in left])
    changes.made.append(path)
    for one, descriptor in zip(left, descriptors, strict=True):
        file = one.file
        changes.actions.append(
            {
                "add": {
                    "path": file.path,
                    "partitionValues": dict(file.partition),
                    "size": file.size,
                    "modificationTime": file.modification_time,
                    "dataChange": True,
                    "stats": loosened(file.stats, file_rows.rows_in(log, file), one.without_nulls),
                    "deletionVector": descriptor,
                    **_tags(file),
                    **file.kept,
                }
            }
        )


def remove_action(file: AddFile, now: int, *, data_change: bool = True) -> Action:
    """Return the `remove` action of a file."""
    remove: Action = {
        "path": file.path,
        "deletionTimestamp": now,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": dict(file.partition),
        "size": file.size,
        **_tags(file),
        **{name: value for name, value in file.kept.items() if name != "clusteringProvider"},
    }
    if file.stats is not None:
        remove["stats"] = file.stats
    if file.vector is not None:
        remove["deletionVector"] = dict(file.vector)
    return {"remove": remove}


def _tags(file: AddFile) -> dict[str, Any]:
    return {"tags": dict(file.tags)} if file.tags else {}


def _completed(log: TableLog, staged: DirectStaged, wanted: KeySet, found: Sequence[Found]) -> Iterator[pa.Table]:
    """Yield the masked images, completed with unchanged values from the rows that they replace, a piece at a time.

    The values pass through memory in the order in which the table's files have them.  An image whose row the table lacks
    is left out, as PostgreSQL skips an update of a missing row (update_missing).
    """
    table, masked = staged.table, staged.masked
    assert masked is not None
    flagged = [name for index, name in enumerate(table.schema.names) if _flag(index) in masked.column_names]
    file_of_key = np.full(len(wanted), -1, np.int64)
    position_of_key = np.zeros(len(wanted), np.int64)
    for number, one in enumerate(found):
        file_of_key[one.key_rows] = number
        position_of_key[one.key_rows] = one.positions
    of_key = wanted.rows(_bases(staged))
    files, positions = file_of_key[of_key], position_of_key[of_key]
    order = np.lexsort((positions, files))
    bounds = np.searchsorted(files[order], np.arange(len(found) + 1))
    images = ScatteredRows(masked)
    for number, one in enumerate(found):
        chosen = order[bounds[number] : bounds[number + 1]]
        at = positions[chosen]
        for start, batch in file_rows.read_columns(log, one.file, table, flagged, at=at):
            first, last = np.searchsorted(at, (start, start + batch.num_rows))
            for part in images.pieces(chosen[first:last]):
                old = pa.Table.from_batches([_rows(batch, at[first:last][part] - start)])
                yield _unmasked(table, images.take(chosen[first:last][part]), old)


def _rows(batch: pa.RecordBatch, numbers: Indices) -> pa.RecordBatch:
    """Return the rows with these numbers; consecutive ones are not copied."""
    if (np.diff(numbers) == 1).all():
        return batch.slice(numbers[0], len(numbers))
    return batch.take(pa.array(numbers))


def _flag(index: int) -> str:
    """Return the name of the column that marks the unchanged values of a table's column."""
    return f"{UNCHANGED_PREFIX}{index}"


def _bases(staged: DirectStaged) -> pa.Table:
    """Return the keys under which the table has the rows that the masked images replace."""
    assert staged.masked is not None
    bases = staged.masked.select([f"{BASE_PREFIX}{index}" for index in range(len(staged.table.key))])
    return bases.rename_columns(list(staged.table.key)).combine_chunks()


def _unmasked(table: TargetTable, masked: pa.Table, old: pa.Table) -> pa.Table:
    """Complete the masked images with unchanged values from `old`, which has one row for each."""
    columns = []
    for index, name in enumerate(table.schema.names):
        column = masked.column(name)
        if _flag(index) in masked.column_names:
            kept = old.column(name).cast(column.type)
            column = _choose(masked.column(_flag(index)), kept, column)
        columns.append(column)
    return pa.table(columns, names=table.schema.names)


@spent_on("finding")
def without_base(staged: DirectStaged, doubtful: Sequence[KeySet] | None) -> npt.NDArray[np.bool_]:
    """Mark the masked images of a batch folded as upserts that cannot be completed from the table.

    Either the table has no row under the image's base key, or its row may be a different one: the image's row has left
    that key, and the key is in doubt, being in one of `doubtful` (None: all keys are in doubt).
    """
    assert staged.deleted_keys is not None
    assert staged.masked is not None
    bases = _bases(staged)
    wanted = KeySet(staged.deleted_keys.select(list(staged.table.key)))
    of_key = wanted.rows(bases)
    there = np.zeros(len(wanted), np.bool_)
    with staged.log.writing:
        staged.log.refresh()
        for one in find(staged.log, wanted, staged.table):
            there[one.key_rows] = True
    moved: npt.NDArray[np.bool_] = np.asarray(staged.masked.column(MOVED_COLUMN))
    if doubtful is not None:
        suspect = np.zeros(len(moved), np.bool_)
        for keys_ in doubtful:
            suspect |= keys_.rows(bases) >= 0
        moved = moved & suspect
    without: npt.NDArray[np.bool_] = np.logical_or(~there[of_key], moved)
    if staged.table.soft_deletes:
        # A deleted row has left the publisher, too: it stays if the table has it.
        without &= staged.masked.column(DELETED_AT).is_null().to_numpy()
    return without


def complete_from(staged: DirectStaged, chosen: npt.NDArray[np.bool_], rows: pa.Table) -> None:
    """Complete the `chosen` masked images from `rows`, matched by the images' own keys; drop those without a row."""
    assert staged.masked is not None
    table = staged.table
    masked = staged.masked.filter(pa.array(chosen))
    rest = staged.masked.filter(pa.array(~chosen))
    staged.masked = rest if rest.num_rows else None
    key = list(table.key)
    at = KeySet(rows.select(key)).rows(masked.select(key).combine_chunks())
    there = np.flatnonzero(at >= 0)
    images, old = ScatteredRows(masked), ScatteredRows(rows)

    def completed() -> Iterator[pa.Table]:
        for part in old.pieces(at[there]):
            of_part = there[part]
            for some in images.pieces(of_part):
                yield _unmasked(table, images.take(of_part[some]), old.take(at[of_part[some]]))

    staged.added += data_files.write(table, completed(), several=True)


def _choose(flags: pa.ChunkedArray, kept: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return `kept` where the flag is set, else `new`.  Works by index, so for nested types, too."""
    if pc.all(flags).as_py():
        return kept
    count = len(flags)
    both = pa.chunked_array([*kept.chunks, *new.chunks], kept.type).combine_chunks()
    own = np.arange(count)
    return both.take(pa.array(np.where(np.asarray(flags), own, own + count)))
