"""Arrays and composites as bytes that are equal exactly where they are: what Arrow has no equality for, it has for bytes.

Each value within is its bytes behind their length, NULL a length of -1; an array is its elements one after the other, a composite its
attributes.  Floats go by their bits, with one NaN.  By columns, and the same in every batch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.protocol.arrays import bitmap, contents, validity

_NULL: Final = np.frombuffer(np.array(-1, "<i4").tobytes(), np.uint8)


def canonical(column: Any) -> Any:
    """A binary array, NULL where the nested `column` (a pyarrow Array) is."""
    valid = validity(column)
    inside = _inside(column)
    if valid is None:
        return inside
    return pa.Array.from_buffers(pa.binary(), len(column), [bitmap(valid), *inside.buffers()[1:]], offset=inside.offset)


def _inside(column: Any) -> Any:
    """The bytes of each value; of a NULL whatever they are."""
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


def _offsets(column: Any) -> npt.NDArray[np.int32]:
    """Where each array's elements begin among those of all (one more than arrays); a NULL has none."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int32)
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])


def _written(column: Any) -> Any:
    """Each value behind its length: a binary array without NULLs."""
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
