"""Commit one table's batch without a Spark job: Arrow writes the data files, this process writes the log.

A Spark job's fixed cost is most of the time of a small commit, but a batch needs little of Delta.  New rows go into a
new data file.  Changed and deleted rows are found by reading only the key's columns, and marked in deletion vectors.  A
file that loses its last row is removed.  All of this is one commit, with the same (application id, end LSN) transaction
as Spark's commits.

    stage    images ─► data files in the table's directory that no log names yet
    commit   keys ─► matching rows of each file ─► vectors ─► masked rows completed from the rows they replace ─► log

`suits` tells which batches are committed here; spark_writer commits the others.  Everything here blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from pubsub.delta import data_files, deletion_vectors, key_set
from pubsub.delta.changeset import BASE_PREFIX, COUNT_COLUMN, MOVED_COLUMN, UNCHANGED_PREFIX, Folded
from pubsub.delta.commit_files import UnknownOutcome
from pubsub.delta.data_files import Action
from pubsub.delta.key_set import KeySet
from pubsub.delta.log import DataFile, OthersWereFirst, TableLog, is_local, local_path
from pubsub.delta.table import Commit, TargetTable, committed_lsn, is_of_later_copy, moved_on
from pubsub.errors import DataCorrupted, NotInPrerequisiteState, Overtaken
from pubsub.protocol.types import nulls

_BATCH_ROWS: Final = 1 << 18
_WIDE_BATCH_ROWS: Final = 1 << 11
# Rows of more compressed bytes than this are wide.
_WIDE_BYTES: Final = 256
_ATTEMPTS: Final = 10

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class DirectStaged:
    """One table's part of a batch, staged.  `added`: the `add` actions of its data files, which are durable."""

    table: TargetTable
    log: TableLog
    added: list[Action]
    deleted_keys: Any
    masked: Any
    replace_all: bool
    rows: int
    removed: Any = None
    still_holds: Callable[[], bool] | None = None
    """For a table that others write, too: tells whether the rows that were looked up are still the same."""


@dataclass(slots=True)
class _Found:
    """Rows of one file whose keys are in the batch: their positions, and the key's number for each."""

    file: DataFile
    positions: Indices
    key_rows: Indices
    vector: BitMap64 | None


@dataclass(slots=True)
class _Changes:
    """A commit's actions while they are collected, and the files to remove if it fails."""

    actions: list[Action] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)
    deleted_rows: int = 0


def suits(log: TableLog, table: TargetTable, folded: Folded) -> bool:
    """Tell whether the table's batch can be committed here.  `log` must be refreshed."""
    if folded.removed.num_rows and not folded.truncated:
        return log.unsupported() is None and log.vectors_enabled() and key_set.can_match_whole(table.schema)
    return accepts(log, table, rewrites=not (folded.insert_only or folded.truncated))


def accepts(log: TableLog, table: TargetTable, *, rewrites: bool) -> bool:
    """Tell whether rows can be added here, and with `rewrites` also changed and deleted.  `log` must be refreshed."""
    if log.unsupported() is not None:
        return False
    if not rewrites:
        return True
    if not table.key:
        return False
    return log.vectors_enabled() and key_set.can_match(pa.schema([table.schema.field(name) for name in table.key]))


def stage(log: TableLog, table: TargetTable, folded: Folded, *, replace_all: bool) -> DirectStaged:
    """Write the batch's complete images to data files.  A failure leaves nothing behind."""
    return DirectStaged(
        table=table,
        log=log,
        added=data_files.write_table(table, folded.images),
        deleted_keys=folded.deleted_keys if folded.deleted_keys.num_rows else None,
        masked=folded.masked if folded.masked.num_rows else None,
        replace_all=replace_all,
        rows=folded.inserts + folded.updates + folded.deletes,
        removed=folded.removed if folded.removed.num_rows else None,
    )


def discard(staged: DirectStaged) -> None:
    """Remove the data files of an abandoned batch, unless they were committed."""
    committed = staged.log.files
    for action in staged.added:
        if action["add"]["path"] not in committed:
            data_files.remove([staged.log.table / action["add"]["path"]])
    staged.added = []


def commit(staged: DirectStaged, record: Commit) -> None:
    """Commit a staged batch once; do nothing if the table holds `record.last` already.

    Raises NotInPrerequisiteState if the table can no longer be written here, or other writers were first ten times;
    Overtaken if it holds another version than `record.before`; OthersWereFirst if others have changed rows since
    it was last checked, unless `still_holds`; OSError.
    """
    log = staged.log
    with log.writing:
        for _ in range(_ATTEMPTS):
            log.refresh()
            if log.application_version(record.app_id) == int(record.last):
                discard(staged)
                return
            _require_unchanged(log, staged.table, record)
            others = log.written_by_others(record.app_id)
            if others and (staged.still_holds is None or not staged.still_holds()):
                raise OthersWereFirst(others)
            changes = _changes(staged)
            try:
                committed = _commit(log, changes, record, sum(row_count(action) for action in staged.added))
            except UnknownOutcome:
                staged.added = []  # the table may have them
                raise
            if committed:
                staged.added = []
                staged.deleted_keys = staged.masked = staged.removed = staged.still_holds = None
                return
    raise _no_room(staged.table)


def log_of(path: str) -> TableLog | None:
    """Return the log of a table that can be written here; None if Spark must write it.  Raises UndefinedTable."""
    if not is_local(path):
        return None
    log = TableLog(path)
    log.refresh()
    return log if log.unsupported() is None else None


def commit_copy(
    log: TableLog, table: TargetTable, added: Sequence[Action], record: Commit, definition: Sequence[Action] = ()
) -> None:
    """Commit an initial copy's files in place of all the table's files; `definition`: actions that set its columns.

    Raises NotInPrerequisiteState and OSError as `commit` does, and Overtaken if the table already holds a commit of
    this copy.
    """
    with log.writing:
        for _ in range(_ATTEMPTS):
            log.refresh()
            _require_unchanged(log, table, record)
            now = int(time.time() * 1000)
            changes = _Changes([*definition, *added, *(remove_action(file, now) for file in log.files.values())])
            if _commit(log, changes, record, sum(row_count(action) for action in added)):
                return
    raise _no_room(table)


def require_no_copy(table: TargetTable, record: Commit) -> None:
    """Raise Overtaken if the table already holds a commit of this copy: Delta would silently ignore Spark's."""
    held = committed_lsn(table.path, record.app_id)
    if held is not None:
        raise Overtaken(table.relation, moved_on(held, record))


def require_version(log: TableLog, relation: str, record: Commit) -> None:
    """Raise Overtaken unless the table holds the version `record.before`, and no later copy of it has begun."""
    held = log.application_version(record.app_id)
    if (held or 0) != (record.before or 0):
        raise Overtaken(relation, moved_on(held, record))
    if any(is_of_later_copy(other, record.app_id) for other in log.applications):
        raise Overtaken(relation, "It was copied anew, or is being copied.")


def _require_unchanged(log: TableLog, table: TargetTable, record: Commit) -> None:
    """As `require_version`; also raise NotInPrerequisiteState if the table can no longer be written here."""
    require_version(log, table.relation, record)
    reason = log.unsupported()
    if reason is not None:
        raise NotInPrerequisiteState(
            f'the Delta table of "{table.relation}" was altered while it was written to',
            detail=f"It can not be written as before: {reason}.",
        )


def _commit(log: TableLog, changes: _Changes, record: Commit, rows: int) -> bool:
    """Commit; return False if another writer committed this version first."""
    transaction = {"appId": record.app_id, "version": int(record.last), "lastUpdated": int(time.time() * 1000)}
    try:
        log.commit(
            [*changes.actions, {"txn": transaction}],
            operation="WRITE",
            metrics={
                "numFiles": sum("add" in action for action in changes.actions),
                "numOutputRows": rows,
                "numDeletedRows": changes.deleted_rows,
            },
            user_metadata=record.user_metadata,
            made=changes.made,
        )
    except FileExistsError:
        return False
    return True


def _no_room(table: TargetTable) -> NotInPrerequisiteState:
    return NotInPrerequisiteState(
        f'could not commit to the Delta table of "{table.relation}": other writers were first {_ATTEMPTS} times',
        sqlstate="40001",
    )


def row_count(action: Mapping[str, Any]) -> int:
    """Return the number of rows of the data file that an `add` action names."""
    return int(json.loads(action["add"]["stats"])["numRecords"])


def _changes(staged: DirectStaged) -> _Changes:
    """Work out the actions of the batch's commit for the table's present state."""
    log = staged.log
    changes = _Changes(actions=list(staged.added))
    now = int(time.time() * 1000)
    try:
        if staged.replace_all:
            changes.actions += [remove_action(file, now) for file in log.files.values()]
        elif staged.removed is not None:
            _mark(log, list(_find_copies(log, staged)), now, changes)
        elif staged.deleted_keys is not None:
            names = list(staged.table.key)
            wanted = KeySet(staged.deleted_keys.select(names))
            found = list(_find(log, wanted, staged.table))
            if staged.masked is not None:
                completed = data_files.write(staged.table, [_complete(log, staged, wanted, found)])
                changes.made += [log.table / action["add"]["path"] for action in completed]
                changes.actions += completed
            _mark(log, found, now, changes)
    except BaseException:
        data_files.remove(changes.made)
        raise
    return changes


def _find(log: TableLog, wanted: KeySet, table: TargetTable) -> Iterator[_Found]:
    """Find the table's living rows that have one of the keys, file by file."""
    first = table.key[0]
    for file in log.files.values():
        if wanted.outside(file.bounds.get(table.stored_name(first))):
            continue
        positions: list[Indices] = []
        key_rows: list[Indices] = []
        for start, batch in _read_columns(log, file, table, table.key, _BATCH_ROWS, wanted):
            rows = wanted.rows(batch)
            hits = np.flatnonzero(rows >= 0)
            if len(hits):
                positions.append(hits + start)
                key_rows.append(rows[hits])
        if not positions:
            continue
        at, which = np.concatenate(positions), np.concatenate(key_rows)
        vector = None
        if file.vector is not None:
            vector = deletion_vectors.read(log.table, file.vector)
            living = np.isin(at, deletion_vectors.positions(vector), assume_unique=True, invert=True)
            at, which = at[living], which[living]
        if len(at):
            yield _Found(file, at, which, vector)


def living(
    log: TableLog, table: TargetTable, names: Sequence[str], wanted: KeySet | None
) -> Iterator[tuple[Any, DataFile]]:
    """Yield the named columns of the table's living rows, with their file.

    With `wanted`, files and row groups whose bounds exclude all of its keys are left out.
    """
    for file in log.files.values():
        if wanted is not None and wanted.outside(file.bounds.get(table.stored_name(names[0]))):
            continue
        gone = (
            deletion_vectors.positions(deletion_vectors.read(log.table, file.vector))
            if file.vector is not None
            else None
        )
        size = _WIDE_BATCH_ROWS if wanted is None and _is_wide(log, file) else _BATCH_ROWS
        for start, batch in _read_columns(log, file, table, names, size, wanted):
            yield (batch if gone is None else _without(batch, start, gone)), file


def _without(batch: Any, start: int, gone: Indices) -> Any:
    """Drop the rows at the file positions `gone` from a piece of the file that begins at position `start`."""
    there = np.ones(batch.num_rows, np.bool_)
    first, last = np.searchsorted(gone, (start, start + batch.num_rows))
    there[gone[first:last] - start] = False
    return batch.filter(pa.array(there))


def _find_copies(log: TableLog, staged: DirectStaged) -> Iterator[_Found]:
    """Find, for each removed row, as many equal rows as were removed, in any files."""
    names = staged.table.schema.names
    wanted = KeySet(staged.removed.select(names), whole=True)
    left = np.asarray(staged.removed.column(COUNT_COLUMN)).astype(np.int64)
    for file in list(log.files.values()):
        gone = deletion_vectors.read(log.table, file.vector) if file.vector is not None else None
        dead = deletion_vectors.positions(gone) if gone is not None else np.empty(0, np.int64)
        positions: list[Indices] = []
        size = _WIDE_BATCH_ROWS if _is_wide(log, file) else _BATCH_ROWS
        for start, batch in _read_columns(log, file, staged.table, names, size):
            rows = wanted.rows(batch)
            hits = np.flatnonzero(rows >= 0)
            hits = hits[np.isin(hits + start, dead, assume_unique=True, invert=True)]
            taken = hits[_first_of_each(rows[hits], left)]
            if len(taken):
                left -= np.bincount(rows[taken], minlength=len(left))
                positions.append(taken + start)
        if positions:
            at = np.concatenate(positions)
            yield _Found(file, at, np.full(len(at), -1), gone)


def _first_of_each(rows: Indices, left: Indices) -> npt.NDArray[np.bool_]:
    """Mark the entries of `rows` that are among the first left[row] equal ones."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    chosen = np.empty(len(rows), np.bool_)
    chosen[order] = np.arange(len(rows)) - starts < left[ordered]
    return chosen


def _is_wide(log: TableLog, file: DataFile) -> bool:
    return file.size > _WIDE_BYTES * rows_in(log, file)


def _read_columns(
    log: TableLog, file: DataFile, table: TargetTable, names: Sequence[str], size: int, wanted: KeySet | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield the named columns of a file, a piece at a time in file order, each with its first row's position.

    A column that the file lacks, because it was added later, is NULL.  With `wanted`, row groups whose statistics
    exclude all of its keys are left out.
    """
    stored = [table.stored_name(name) for name in names]
    with _opened(log, file) as parquet:
        there = set(parquet.schema_arrow.names)
        start = 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            if wanted is None or not wanted.outside(_group_bounds(parquet, group, stored[0])):
                at = start
                columns = [name for name in stored if name in there]
                for batch in parquet.iter_batches(size, row_groups=[group], columns=columns):
                    yield at, _named(batch, table, names, stored)
                    at += batch.num_rows
            start += count


def _named(batch: Any, table: TargetTable, names: Sequence[str], stored: Sequence[str]) -> Any:
    there = {name: place for place, name in enumerate(batch.schema.names)}
    return pa.RecordBatch.from_arrays(
        [
            batch.column(there[inner]) if inner in there else nulls(batch.num_rows, table.schema.field(name).type)
            for name, inner in zip(names, stored, strict=True)
        ],
        names=list(names),
    )


def _opened(log: TableLog, file: DataFile) -> pq.ParquetFile:
    path = local_path(file, log.table)
    try:
        return pq.ParquetFile(path, memory_map=False)
    except FileNotFoundError as error:
        raise DataCorrupted(
            f'data file "{path}" of a Delta table does not exist',
            detail="Its log names it: VACUUM with a short retention, or a deletion by hand, has removed it.",
            hint="ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew.",
        ) from error


def _group_bounds(parquet: pq.ParquetFile, group: int, name: str) -> tuple[Any, Any] | None:
    index = parquet.schema_arrow.get_field_index(name)
    if index < 0:
        return None
    statistics = parquet.metadata.row_group(group).column(index).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return statistics.min, statistics.max


def _mark(log: TableLog, found: Sequence[_Found], now: int, changes: _Changes) -> None:
    """Remove the found rows: remove files that lose their last row, and give the others a new deletion vector."""
    marked: list[tuple[DataFile, BitMap64]] = []
    for one in found:
        changes.deleted_rows += len(one.positions)
        changes.actions.append(remove_action(one.file, now))
        if one.file.deleted + len(one.positions) == rows_in(log, one.file):
            continue
        bitmap = BitMap64(one.positions.astype(np.uint64))
        marked.append((one.file, bitmap if one.vector is None else bitmap | one.vector))
    if not marked:
        return
    path, descriptors = deletion_vectors.write(log.table, [bitmap for _, bitmap in marked])
    changes.made.append(path)
    for (file, _), descriptor in zip(marked, descriptors, strict=True):
        changes.actions.append(
            {
                "add": {
                    "path": file.path,
                    "partitionValues": {},
                    "size": file.size,
                    "modificationTime": file.modification_time,
                    "dataChange": True,
                    "stats": _loose(log, file),
                    "deletionVector": descriptor,
                    **_tags(file),
                }
            }
        )


def rows_in(log: TableLog, file: DataFile) -> int:
    """Return the number of rows in a data file, including deleted ones."""
    if file.rows is None:
        file.rows = pq.read_metadata(local_path(file, log.table)).num_rows
    return file.rows


def _loose(log: TableLog, file: DataFile) -> str:
    """Return the file's statistics with numRecords, marked as not tight, since a row at a bound may be deleted."""
    known = json.loads(file.stats) if file.stats else {}
    known["numRecords"] = rows_in(log, file)
    known["tightBounds"] = False
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"))


def remove_action(file: DataFile, now: int, *, data_change: bool = True) -> Action:
    """Return the `remove` action of a file."""
    remove: Action = {
        "path": file.path,
        "deletionTimestamp": now,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": file.size,
        **_tags(file),
    }
    if file.stats is not None:
        remove["stats"] = file.stats
    if file.vector is not None:
        remove["deletionVector"] = dict(file.vector)
    return {"remove": remove}


def _tags(file: DataFile) -> dict[str, Any]:
    return {"tags": dict(file.tags)} if file.tags else {}


def _complete(log: TableLog, staged: DirectStaged, wanted: KeySet, found: Sequence[_Found]) -> Any:
    """Complete the masked images with unchanged values from the rows that they replace.

    An image whose row the table lacks is left out, as PostgreSQL skips an update of a missing row (update_missing).
    """
    table, masked = staged.table, staged.masked
    names = table.schema.names
    of_key = wanted.rows(_bases(staged))
    needed = np.zeros(len(wanted), np.bool_)
    needed[of_key] = True
    flagged = [name for index, name in enumerate(names) if f"{UNCHANGED_PREFIX}{index}" in masked.column_names]
    place_of_key = np.full(len(wanted), -1, np.int64)
    pieces: list[Any] = []
    gathered = 0
    for one in found:
        chosen = needed[one.key_rows]
        positions, key_rows = one.positions[chosen], one.key_rows[chosen]
        for start, batch in _read_columns(log, one.file, table, flagged, _WIDE_BATCH_ROWS) if len(positions) else ():
            first, last = np.searchsorted(positions, (start, start + batch.num_rows))
            if first == last:
                continue
            pieces.append(batch.take(pa.array(positions[first:last] - start)))
            place_of_key[key_rows[first:last]] = np.arange(gathered, gathered + last - first)
            gathered += int(last - first)
    places = place_of_key[of_key]
    there = pa.array(places >= 0)
    masked, at = masked.filter(there), pa.array(places[places >= 0])
    if masked.num_rows == 0:
        return table.schema.empty_table()
    return _unmasked(table, masked, pa.Table.from_batches(pieces).combine_chunks().take(at))


def _bases(staged: DirectStaged) -> Any:
    """Return the keys under which the table has the rows that the masked images replace."""
    bases = staged.masked.select([f"{BASE_PREFIX}{index}" for index in range(len(staged.table.key))])
    return bases.rename_columns(list(staged.table.key)).combine_chunks()


def _unmasked(table: TargetTable, masked: Any, old: Any) -> Any:
    """Complete the masked images with unchanged values from `old`, which has one row for each."""
    columns = []
    for index, name in enumerate(table.schema.names):
        column = masked.column(name)
        if f"{UNCHANGED_PREFIX}{index}" in masked.column_names:
            kept = old.column(name).cast(column.type)
            column = _choose(masked.column(f"{UNCHANGED_PREFIX}{index}"), kept, column)
        columns.append(column)
    return pa.table(columns, names=table.schema.names)


def without_base(staged: DirectStaged, doubtful: Sequence[KeySet] | None) -> npt.NDArray[np.bool_]:
    """Mark the masked images of a batch folded as upserts that cannot be completed from the table.

    Either the table has no row under the image's base key, or its row may be a different one: the image's row has left
    that key, and the key is in doubt, being in one of `doubtful` (None: all keys are in doubt).
    """
    bases = _bases(staged)
    wanted = KeySet(staged.deleted_keys.select(list(staged.table.key)))
    of_key = wanted.rows(bases)
    there = np.zeros(len(wanted), np.bool_)
    with staged.log.writing:
        staged.log.refresh()
        for one in _find(staged.log, wanted, staged.table):
            there[one.key_rows] = True
    moved: npt.NDArray[np.bool_] = np.asarray(staged.masked.column(MOVED_COLUMN))
    if doubtful is not None:
        suspect = np.zeros(len(moved), np.bool_)
        for keys_ in doubtful:
            suspect |= keys_.rows(bases) >= 0
        moved = moved & suspect
    without: npt.NDArray[np.bool_] = np.logical_or(~there[of_key], moved)
    return without


def complete_from(staged: DirectStaged, chosen: npt.NDArray[np.bool_], rows: Any) -> None:
    """Complete the `chosen` masked images from `rows`, matched by the images' own keys; drop those without a row."""
    table = staged.table
    masked = staged.masked.filter(pa.array(chosen))
    rest = staged.masked.filter(pa.array(~chosen))
    staged.masked = rest if rest.num_rows else None
    key = list(table.key)
    at = KeySet(rows.select(key)).rows(masked.select(key).combine_chunks())
    masked = masked.filter(pa.array(at >= 0))
    if masked.num_rows:
        old = rows.take(pa.array(at[at >= 0]))
        staged.added += data_files.write(table, [_unmasked(table, masked, old)])


def _choose(flags: Any, kept: Any, new: Any) -> Any:
    """Return `kept` where the flag is set, else `new`.  Works by index, so for nested types, too."""
    count = len(flags)
    both = pa.chunked_array([*kept.chunks, *new.chunks], kept.type).combine_chunks()
    own = np.arange(count)
    return both.take(pa.array(np.where(np.asarray(flags), own, own + count)))


def living_rows(log: TableLog, files: Sequence[DataFile], table: TargetTable) -> Iterator[Any]:
    """Yield the rows of these files that are not deleted, with the table's column names, a piece at a time."""
    for file in files:
        gone = (
            deletion_vectors.positions(deletion_vectors.read(log.table, file.vector))
            if file.vector is not None
            else None
        )
        size = _WIDE_BATCH_ROWS if _is_wide(log, file) else _BATCH_ROWS
        for start, batch in _read_columns(log, file, table, table.schema.names, size):
            yield pa.Table.from_batches([batch if gone is None else _without(batch, start, gone)])
