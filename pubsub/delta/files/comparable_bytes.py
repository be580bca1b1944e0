"""Encode arrays and composites as bytes that are equal if and only if the values are: Arrow compares bytes, not nested values.

Each inner value is its length and its bytes, NULL a length of -1; an array is its elements in order, a composite its attributes.
Floats are their bits, with a single NaN.  Works on whole columns; the encoding is the same in every batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.protocol.arrow_arrays import bitmap, contents, validity

_NULL: Final = np.frombuffer(np.array(-1, "<i4").tobytes(), np.uint8)


def canonical(column: pa.Array) -> pa.BinaryArray:
    """Encode the nested `column` as a binary array, NULL where the column is."""
    valid = validity(column)
    inside = _inside(column)
    if valid is None:
        return inside
    return pa.Array.from_buffers(pa.binary(), len(column), [bitmap(valid), *inside.buffers()[1:]], offset=inside.offset)


def _inside(column: pa.Array) -> pa.BinaryArray:
    """Return the bytes of each value; those of a NULL are arbitrary."""
    kind = column.type
    if pa.types.is_list(kind):
        elements, offsets = column.flatten(), _offsets(column)
        _, data_offsets, data = _written(elements).buffers()
        starts = np.frombuffer(data_offsets, np.int32, len(elements) + 1)[offsets] if data_offsets else offsets
        return pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(np.ascontiguousarray(starts)), data])
    if pa.types.is_struct(kind):
        return pc.binary_join_element_wise(*(_written(column.field(place)) for place in range(kind.num_fields)), b"")
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.cast(pa.binary()).fill_null(b"")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_floating(kind):
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False).copy()
        numbers[np.isnan(numbers)] = np.nan
        column = pa.array(numbers)
    return (
        column.view(pa.binary(column.type.bit_width // 8))
        .fill_null(bytes(column.type.bit_width // 8))
        .cast(pa.binary())
    )


def _offsets(column: pa.ListArray) -> npt.NDArray[np.int32]:
    """Return where each array's elements begin among all elements: one offset more than arrays; a NULL has no elements."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int32)
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])


def _written(column: pa.Array) -> pa.BinaryArray:
    """Prefix each value with its length: a binary array without NULLs."""
    inside, valid = _inside(column), validity(column)
    if valid is not None:
        inside = pc.if_else(pa.array(valid), inside, b"")
    _, offsets = contents(inside)
    lengths = np.diff(offsets).astype("<i4")
    heads = np.ascontiguousarray(lengths).view(np.uint8).reshape(-1, 4).copy()
    if valid is not None:
        heads[~valid] = _NULL
    places = np.arange(0, 4 * len(lengths) + 1, 4, dtype=np.int32)
    prefix = pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(places), pa.py_buffer(heads)])
    return pc.binary_join_element_wise(prefix, inside, b"")
