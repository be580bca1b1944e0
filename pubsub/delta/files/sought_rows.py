"""Find the live rows of a table that have one of some keys: in an index of the keys, or by reading the key's columns.  Blocks.

Files and row groups whose partition or statistics exclude all of the keys are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from pubsub.delta.files import file_rows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.key_index.run_file import IndexedFile
from pubsub.delta.key_index.table_index import Key
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile, path_of
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import StorePath
from pubsub.delta.table import TargetTable
from pubsub.protocol.arrow_arrays import Indices


@dataclass(slots=True)
class Found:
    """Rows of one file whose keys are among those sought: their positions, and the key's number for each."""

    file: AddFile
    positions: Indices
    key_rows: Indices
    vector: BitMap64 | None


def find(log: TableLog, wanted: KeySet, table: TargetTable) -> Iterator[Found]:
    """Find the table's live rows that have one of the keys, file by file; of earlier versions of rows (mode = scd2) perhaps some."""
    files = list(file_rows.files_with(log, table, table.key, wanted)) if len(wanted) else []
    ended: frozenset[str] = frozenset()
    if table.versions:
        # Most files hold rows that have ended; of these each key may have many.
        ended = frozenset(
            path for path, file in dict(log.files).items() if file_rows.known_live(log, table, file) is False
        )
        files = [file for file in files if file.path not in ended]
    indexed = _in_index(log, files, table, wanted, ended)
    for file in files:
        at, which = indexed[file.path] if file.path in indexed else _in_file(log, file, table, wanted)
        if not len(at):
            continue
        vector = None
        if file.vector is not None:
            vector = deletion_vectors.read(log.table, file.vector)
            gone = deletion_vectors.positions(BitMap64(at.astype(np.uint64)) & vector)
            live = ~deletion_vectors.among(gone, at)
            at, which = at[live], which[live]
        if len(at):
            yield Found(file, at, which, vector)


def _in_index(
    log: TableLog, files: Sequence[AddFile], table: TargetTable, wanted: KeySet, unsought: Collection[str]
) -> dict[str, tuple[Indices, Indices]]:
    """Find the rows of the files that the index has, as `_in_file` does; of those `unsought`, by path, it needs none."""
    # The sources of a table may name its key's columns in different orders, and have the same runs.
    names = table.key if table.source is None else tuple(sorted(table.key))
    types = [table.schema.field(name).type for name in names]
    key = Key.of([table.stored_name(name) for name in names], types)
    if log.index is None or key is None or not files:
        return {}
    of_table = {path: file for path, file in dict(log.files).items() if path not in unsought}
    known = {path: one for path, file in of_table.items() if (one := _indexed(log, file)) is not None}

    def read(path: str) -> Iterator[pa.RecordBatch]:
        for _, batch in file_rows.read_columns(log, of_table[path], table, names):
            yield batch

    columns = [wanted.keys.column(name).combine_chunks().cast(kind) for name, kind in zip(names, types, strict=True)]
    sought = [known[file.path] for file in files if file.path in known]
    return log.index.find(key, columns, sought, list(known.values()), read)


def _indexed(log: TableLog, file: AddFile) -> IndexedFile | None:
    """Return what the index knows a data file by; None if it is not there, as reading it will say.

    An object store is not asked: nobody puts another file in the place of one whose name has a UUID.
    """
    path = path_of(file, log.table)
    if isinstance(path, StorePath):
        return IndexedFile(file.path, (0, file.modification_time, file.size), file_rows.rows_in(log, file))
    try:
        stat = path.stat()
        return IndexedFile(file.path, (stat.st_ino, stat.st_mtime_ns, stat.st_size), file_rows.rows_in(log, file))
    except FileNotFoundError:
        return None


def _in_file(log: TableLog, file: AddFile, table: TargetTable, wanted: KeySet) -> tuple[Indices, Indices]:
    """Return the positions of the rows, deleted ones included, that have one of the keys, and the key's number for each."""
    positions: list[Indices] = []
    key_rows: list[Indices] = []
    for start, batch in file_rows.read_columns(log, file, table, table.key, wanted):
        rows = wanted.rows(batch)
        hits = np.flatnonzero(rows >= 0)
        if len(hits):
            positions.append(hits + start)
            key_rows.append(rows[hits])
    if not positions:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(positions), np.concatenate(key_rows)
