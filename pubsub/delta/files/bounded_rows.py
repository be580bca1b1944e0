"""Divide rows into pieces of bounded bytes, so that memory does not grow with the values that a batch or a table holds.

A piece has about PIECE_BYTES; a row that is larger is a piece of its own.  Arrow's arrays of text and binary values end at
2 GB, which no piece reaches: a value of PostgreSQL's has at most 1 GB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.protocol.arrow_arrays import Indices

PIECE_BYTES: Final = 2 << 20
_LARGE_BYTES: Final = 24 << 20
_LARGE_ROW: Final = 4 << 20
# The size at which writers give a dictionary up, and the fewest values that are expected in one.
_DICTIONARY_BYTES: Final = 1 << 20
_DICTIONARY_VALUES: Final = 8


def are_large(rows: pa.Table) -> bool:
    """Return whether the values are so large that a writer's memory is several times that of one of them."""
    return bool(rows.nbytes >= max(_LARGE_BYTES, rows.num_rows * _LARGE_ROW))


class ScatteredRows:
    """Rows of a table by their numbers, in any order.

    Table.take would join the table's chunks first, which copies all of them and fails past 2 GB.
    """

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._schema = table.schema
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._bytes: Indices = np.concatenate([np.empty(0, np.int64), *map(_row_bytes, self._batches)])

    def take(self, numbers: Indices) -> pa.Table:
        """Return the rows with these numbers, in this order."""
        chunks = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(chunks, kind="stable")
        taken = []
        for chunk in np.unique(chunks):
            batch = self._batches[chunk]
            inside = numbers[chunks == chunk] - (self._ends[chunk] - batch.num_rows)
            taken.append(batch.take(pa.array(inside)))
        found = pa.Table.from_batches(taken, self._schema).combine_chunks()
        if len(taken) < 2:
            return found
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return found.take(pa.array(places))

    def pieces(self, numbers: Indices) -> Iterator[slice]:
        """Yield slices of `numbers`, in order, whose rows make pieces."""
        ends = np.cumsum(self._bytes[numbers])
        begin = 0
        while begin < len(numbers):
            before = ends[begin - 1] if begin else 0
            end = max(int(np.searchsorted(ends, before + PIECE_BYTES, side="right")), begin + 1)
            yield slice(begin, end)
            begin = end


def pieces(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows in pieces, without copying them."""
    if rows.nbytes <= PIECE_BYTES or rows.num_rows < 2:
        yield rows
        return
    half = rows.num_rows // 2
    yield from pieces(rows.slice(0, half))
    yield from pieces(rows.slice(half))


def rows_at_once(parquet: pq.ParquetFile, group: int, columns: Collection[str], most: int) -> int:
    """Return how many rows of a row group make a piece of these columns, by the file's footer; at least 1, at most `most`."""
    found = parquet.metadata.row_group(group)
    width = 0.0
    varying = set()
    for name in columns:
        try:
            width += parquet.schema_arrow.field(name).type.bit_width / 8
        except ValueError:
            varying.add(name)
    for index in range(found.num_columns) if varying else ():
        chunk = found.column(index)
        path = chunk.path_in_schema
        # A name may have dots, as the path to a field of a struct has.
        if path in varying or any(path.startswith(f"{name}.") for name in varying):
            size = chunk.total_uncompressed_size
            width += size / max(found.num_rows, 1)
            if chunk.has_dictionary_page:
                # A value is there once, however often it occurs.
                width += min(size, _DICTIONARY_BYTES) / _DICTIONARY_VALUES
    return max(1, min(most, int(PIECE_BYTES / max(width, 1))))


def _row_bytes(batch: pa.RecordBatch) -> Indices:
    """Return the bytes of each row."""
    return _sum(map(_value_bytes, batch.columns), batch.num_rows)


def _sum(columns: Iterable[Indices], rows: int) -> Indices:
    total = np.zeros(rows, np.int64)
    for column in columns:
        total += column
    return total


def _value_bytes(values: pa.Array) -> Indices:
    kinds, kind = pa.types, values.type
    if kinds.is_string(kind) or kinds.is_binary(kind):
        lengths: Indices = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return lengths
    if kinds.is_struct(kind):
        return _sum(map(_value_bytes, values.flatten()), len(values))
    if kinds.is_list(kind) or kinds.is_map(kind):
        ends = np.append(0, np.cumsum(_value_bytes(values.values)))
        offsets = values.offsets.to_numpy()
        inside: Indices = ends[offsets[1:]] - ends[offsets[:-1]]
        return inside
    return np.full(len(values), -(-kind.bit_width // 8))
