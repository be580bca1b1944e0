"""Number the rows of some columns so that equal rows have equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta.files.comparable_bytes import canonical
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.column_types import is_nested


def row_codes(columns: Sequence[pa.Array], limit: int, *, exact: bool = False) -> tuple[Indices, int]:
    """Return a number for each row, equal for equal rows, and an exclusive upper bound: at most `limit`, or the number of rows.

    Among floats, 0 equals -0 and all NaNs are equal, as in PostgreSQL and in Spark's joins; `exact` tells 0 from -0.
    """
    codes, bound = _column_codes(columns[0], exact)
    for column in columns[1:]:
        more, more_bound = _column_codes(column, exact)
        if bound * more_bound > 1 << 62:
            (codes, bound), (more, more_bound) = dense(codes), dense(more)
        codes, bound = codes * more_bound + more, bound * more_bound
    return (codes, bound) if bound <= limit else dense(codes)


def dense(codes: Indices) -> tuple[Indices, int]:
    """Renumber codes from 0 without gaps; return them and their count."""
    encoded = pa.array(codes).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _column_codes(column: pa.Array, exact: bool) -> tuple[Indices, int]:
    kinds = pa.types
    if not column.null_count and len(column):
        # Numbers are their own codes, less the smallest.
        if kinds.is_date32(column.type) or kinds.is_integer(column.type):
            numbers = column.view(pa.int32()) if kinds.is_date32(column.type) else column
            return _spread(numbers.to_numpy().astype(np.int64))
        if kinds.is_timestamp(column.type):
            return _spread(column.view(pa.int64()).to_numpy())
    if kinds.is_floating(column.type):
        column = comparable(column, exact)
    elif is_nested(column.type):
        column = canonical(column)
    encoded = column.dictionary_encode()
    indices = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    return indices + 1, len(encoded.dictionary) + 1


def _spread(numbers: Indices) -> tuple[Indices, int]:
    least, greatest = int(numbers.min()), int(numbers.max())
    if greatest - least >= 1 << 61:
        return dense(numbers)
    return numbers - least, greatest - least + 1


def comparable(column: pa.FloatingPointArray, exact: bool) -> pa.Int64Array:
    """Map floats to integers that are equal if and only if the floats are."""
    valid = column.is_valid()
    numbers = column.fill_null(0).to_numpy().astype(np.float64)
    numbers[np.isnan(numbers)] = np.nan
    if not exact:
        numbers += 0.0  # -0 becomes 0
    return pc.if_else(valid, pa.array(numbers.view(np.int64)), pa.scalar(None, pa.int64()))
