"""The rows that leave a table's data files with a commit: those that were found, and those that a TRUNCATE, or a copy, marks.

A marked row is written again, with the time of its deletion, or of its end (mode = scd2; there so is each row that was found).
Rows that were marked before stay where they are, so a file that has no others is not read.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from pubsub.delta.files import file_rows
from pubsub.delta.files.sought_rows import Found
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.sources import own_files
from pubsub.delta.table import TargetTable
from pubsub.delta.versions import ENDS, VALID_FROM_LSN, VALID_TO_LSN
from pubsub.protocol.arrow_arrays import repeated


@dataclass(frozen=True, slots=True)
class Gone:
    """The rows of one file that leave it; `vector`: those that had left it before.

    `without_nulls`: columns, by their physical names, that are NULL in no row that stays in it.
    """

    file: AddFile
    positions: BitMap64
    vector: BitMap64 | None
    without_nulls: tuple[str, ...] = ()

    @property
    def all(self) -> BitMap64:
        """Those that the file does not have afterwards."""
        return self.positions if self.vector is None else self.positions | self.vector


def by_file(found: Sequence[Found]) -> dict[str, Gone]:
    """Return the rows found, by the paths of their files."""
    gone: dict[str, Gone] = {}
    for one in found:
        positions = BitMap64(one.positions.astype(np.uint64))
        before = gone.get(one.file.path)
        gone[one.file.path] = Gone(one.file, positions if before is None else positions | before.positions, one.vector)
    return gone


def ended(log: TableLog, table: TargetTable, found: Sequence[Found], keys: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows found for `keys`, a piece at a time, with the values of the columns ENDS that are beside their keys."""
    ends = {name: keys.column(name).combine_chunks() for name in ENDS}
    for one in found:
        order = np.argsort(one.positions)
        at, numbers = one.positions[order], one.key_rows[order]
        for start, batch in file_rows.read_columns(log, one.file, table, table.schema.names, at=at):
            first, last = np.searchsorted(at, (start, start + batch.num_rows))
            rows = pa.Table.from_batches([batch.take(pa.array(at[first:last] - start))])
            of_keys = pa.array(numbers[first:last])
            for name, values in ends.items():
                rows = rows.set_column(rows.schema.get_field_index(name), name, values.take(of_keys))
            yield rows


def marked(
    log: TableLog, table: TargetTable, marks: Mapping[str, pa.Scalar], gone: dict[str, Gone]
) -> Iterator[pa.Table]:
    """Yield the table's live rows that are not among those `gone`, a piece at a time, with these values; add them to `gone`.

    `log` must be refreshed, and the iterator be read to its end.
    """
    assert table.mark is not None
    # So that the next TRUNCATE leaves alone what stays of a file.
    stored = () if table.mark in table.partitioned_by else (table.stored_name(table.mark),)
    for file in own_files(log, table):
        if file_rows.known_live(log, table, file) is False:
            continue
        before = gone.get(file.path)
        if before is None:
            vector = None if file.vector is None else deletion_vectors.read(log.table, file.vector)
            before = Gone(file, BitMap64(), vector)
        left, live = deletion_vectors.positions(before.all), BitMap64()
        for start, batch in file_rows.read_columns(log, file, table, table.schema.names):
            chosen = batch.column(table.mark).is_null().to_numpy(zero_copy_only=False)
            first, last = np.searchsorted(left, (start, start + batch.num_rows))
            chosen[left[first:last] - start] = False
            places = np.flatnonzero(chosen)
            if len(places):
                live |= BitMap64((places + start).astype(np.uint64))
                rows = pa.Table.from_batches([batch]).filter(pa.array(chosen))
                if table.versions:
                    # What a copy begins with may have been there just then.
                    rows = rows.filter(pc.less(rows.column(VALID_FROM_LSN), marks[VALID_TO_LSN]))
                yield _with(rows, marks)
        if live:
            gone[file.path] = Gone(file, before.positions | live, before.vector, stored)


def _with(rows: pa.Table, marks: Mapping[str, pa.Scalar]) -> pa.Table:
    for name, value in marks.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, repeated(value, rows.num_rows))
    return rows
