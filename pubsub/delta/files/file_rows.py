"""Read the rows of data files without a JVM: by their keys, or whole, without those that deletion vectors remove.  Blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pubsub.delta import schema_json as schema
from pubsub.delta.files import partitions
from pubsub.delta.files.bounded_rows import rows_at_once
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile, path_of
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import open_parquet, parquet_rows
from pubsub.delta.sources import own_files
from pubsub.delta.table import TargetTable
from pubsub.errors import DataCorrupted
from pubsub.protocol.arrow_arrays import Indices, nulls
from pubsub.protocol.column_types import is_nested

# The most rows that are read at once.
_MOST_ROWS: Final = 1 << 18
# Where a piece has fewer, values are large.
_FEW_ROWS: Final = 64


class Wanted(Protocol):
    """Which rows are sought, as far as the bounds of a column tell: those of keys (KeySet), or of a span of a history."""

    def outside(self, bounds: tuple[Any, Any] | None) -> bool:
        """Return whether no sought row can be among rows with these least and greatest values (None: unknown)."""


def laid_out(log: TableLog, table: TargetTable) -> TargetTable:
    """Return the table with what the log says of its data files: its partition and cluster columns, and how columns are found."""
    names = {table.stored_name(name): name for name in table.schema.names}
    return replace(
        table,
        partitioned_by=log.partition_columns,
        clustered_by=tuple(names[name] for name in log.cluster_columns if name in names),
        by_id=log.properties.get(schema.MODE) == "id",
    )


def files_with(log: TableLog, table: TargetTable, names: Sequence[str], wanted: KeySet) -> Iterator[AddFile]:
    """Yield the files that can have one of the keys, whose columns are `names`, by their partitions and statistics."""
    possible = partitions.Partitions(table, wanted.keys)
    for file in own_files(log, table):
        if not possible.exclude(file.partition) and not wanted.outside(file.bounds.get(table.stored_name(names[0]))):
            yield file


def live_columns(log: TableLog, table: TargetTable, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the named columns of the table's live rows."""
    table = laid_out(log, table)
    for file in own_files(log, table):
        gone = deleted_positions(log, file)
        for start, batch in read_columns(log, file, table, names):
            yield without(batch, start, gone)


def live_rows(
    log: TableLog, files: Sequence[AddFile], table: TargetTable, names: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of these files that are not deleted, a piece at a time: the named columns, or all."""
    table = laid_out(log, table)
    names = table.schema.names if names is None else names
    for file in files:
        gone = deleted_positions(log, file)
        for start, batch in read_columns(log, file, table, names):
            yield pa.Table.from_batches([without(batch, start, gone)])


def deleted_positions(log: TableLog, file: AddFile) -> Indices:
    """Return the positions, ascending, of the rows that the file's deletion vector removes."""
    if file.vector is None:
        return np.empty(0, np.int64)
    return deletion_vectors.positions(deletion_vectors.read(log.table, file.vector))


def without(batch: pa.RecordBatch, start: int, gone: Indices) -> pa.RecordBatch:
    """Drop the rows at the file positions `gone` from a piece of the file that begins at position `start`."""
    if not len(gone):
        return batch
    there = np.ones(batch.num_rows, np.bool_)
    first, last = np.searchsorted(gone, (start, start + batch.num_rows))
    there[gone[first:last] - start] = False
    return batch.filter(pa.array(there))


def rows_in(log: TableLog, file: AddFile) -> int:
    """Return the number of rows in a data file, including deleted ones."""
    if file.rows is None:
        file.rows = parquet_rows(path_of(file, log.table))
    return file.rows


def known_live(log: TableLog, table: TargetTable, file: AddFile) -> bool | None:
    """Return what a file's statistics say: all of its rows are live, or none is; None: either may be.

    The table has a `mark`.
    """
    assert table.mark is not None
    name = table.stored_name(table.mark)
    if table.mark in table.partitioned_by:
        return file.partition.get(name) is None
    nulls = file.null_count(name)
    if nulls == 0:
        return False
    return True if nulls is not None and nulls == rows_in(log, file) else None


def read_columns(
    log: TableLog,
    file: AddFile,
    table: TargetTable,
    names: Sequence[str],
    wanted: Wanted | None = None,
    at: Indices | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the named columns of a file, a piece (bounded_rows) at a time in file order, each with its first row's position.

    A column that the file lacks, because it was added later, is NULL.  Partition columns come from the log.  With
    `wanted`, row groups are left out whose statistics of the first column exclude all that it seeks; with `at`, which
    is ascending, those without a row at one of these positions.
    """
    with _opened(log, file) as parquet:
        inside = _columns_inside(parquet.schema_arrow, table, names)
        start = 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            begin, start = start, start + count
            if at is not None and np.searchsorted(at, begin) == np.searchsorted(at, start):
                continue
            if wanted is not None and wanted.outside(_group_bounds(parquet, group, inside.get(names[0]))):
                continue
            # Without a column Arrow would not count the rows of each piece.
            columns = list(inside.values()) or parquet.schema_arrow.names[:1]
            size = rows_at_once(parquet, group, columns, _MOST_ROWS)
            for batch in _pieces(parquet, group, columns, size):
                yield begin, _named(batch, file, table, names, inside)
                begin += batch.num_rows


def _pieces(parquet: pq.ParquetFile, group: int, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
    """Yield the columns of a row group, `size` rows at a time.

    Arrow keeps what it reads a large value with: its threads after their work, a reader of batches until its end.
    """
    threads = size >= _FEW_ROWS
    if parquet.metadata.row_group(group).num_rows <= size:
        yield from parquet.read_row_group(group, columns, use_threads=threads).to_batches()
    else:
        yield from parquet.iter_batches(size, row_groups=[group], columns=columns, use_threads=threads)


def _columns_inside(found: pa.Schema, table: TargetTable, names: Sequence[str]) -> dict[str, str]:
    """Return the name in a data file of each of the columns that it holds."""
    if table.by_id:
        by_id = {int((one.metadata or {}).get(b"PARQUET:field_id", -1)): one.name for one in found}
        places = {name: by_id.get(table.mapped[name][1]) for name in names}
    else:
        there = set(found.names)
        places = {name: stored for name in names if (stored := table.stored_name(name)) in there}
    return {name: place for name, place in places.items() if place is not None and name not in table.partitioned_by}


def _named(
    batch: pa.RecordBatch, file: AddFile, table: TargetTable, names: Sequence[str], inside: Mapping[str, str]
) -> pa.RecordBatch:
    columns = []
    for name in names:
        kind = table.schema.field(name).type
        if name in table.partitioned_by:
            columns.append(partitions.column(table, name, file.partition, batch.num_rows))
        elif name in inside:
            column = batch.column(inside[name])
            # Files from before a column was widened have the narrower type, and INT96 has no time zone.
            kind = _inside(column.type, kind)
            columns.append(column if column.type == kind else column.cast(kind))
        else:
            columns.append(nulls(batch.num_rows, kind))
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def _inside(found: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """Return the table's type of a column with the names that a file has inside arrays and composites.

    Where a file has other fields than the table, and where VARIANT has them in another order, it is the file's type.
    """
    if pa.types.is_list(found) and pa.types.is_list(kind):
        return pa.list_(found.value_field.with_type(_inside(found.value_type, kind.value_type)))
    if pa.types.is_struct(found) and pa.types.is_struct(kind):
        if [field.name for field in found] != [field.name for field in kind]:
            return found
        return pa.struct([one.with_type(_inside(one.type, field.type)) for one, field in zip(found, kind, strict=True)])
    return found if is_nested(kind) else kind


def _opened(log: TableLog, file: AddFile) -> pq.ParquetFile:
    path = path_of(file, log.table)
    try:
        return open_parquet(path)
    except FileNotFoundError as error:
        raise DataCorrupted(
            f'data file "{path}" of a Delta table does not exist',
            detail="Its log names it: VACUUM with a short retention, or a deletion by hand, has removed it.",
            hint="ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew.",
        ) from error


def _group_bounds(parquet: pq.ParquetFile, group: int, name: str | None) -> tuple[Any, Any] | None:
    if name is None:
        return None
    leaves = map(parquet.schema.column, range(parquet.metadata.num_columns))
    # A field of a struct has a path that another column's name may be, but not the column's name.
    index = next((place for place, leaf in enumerate(leaves) if leaf.path == leaf.name == name), None)
    if index is None:
        return None
    statistics = parquet.metadata.row_group(group).column(index).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return statistics.min, statistics.max
