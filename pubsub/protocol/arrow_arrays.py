"""Read and build Arrow arrays by numpy arrays of their bytes and offsets, with no Python value per element."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.errors import ProgramLimitExceeded
from pubsub.protocol.type_contract import VARIANT

MAX_BYTES: Final = (1 << 31) - 1
"""The most bytes that one array's 32-bit offsets can address."""

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64] | npt.NDArray[np.int32]


def slices(
    data: Bytes,
    starts: Positions,
    ends: Positions,
    target: pa.DataType,
    *,
    valid: Mask | None = None,
) -> pa.Array:
    """Return the array of data[starts[i]:ends[i]], of type `target` (binary or string).

    The slices must be in order and not overlap; where `valid` is False the slice must be empty.  The offsets s0, e0,
    s1, e1, … make the gaps elements of their own, so that they describe one array over `data` as it is; taking every
    second element copies each value once.  Raises ProgramLimitExceeded for more than MAX_BYTES.
    """
    if data.size > MAX_BYTES:
        raise ProgramLimitExceeded(
            f"{data.size} bytes cannot be decoded at once", detail=f"The limit is {MAX_BYTES} bytes."
        )
    count = len(starts)
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    with_gaps = pa.Array.from_buffers(target, max(0, 2 * count - 1), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    array = with_gaps.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
    if valid is None:
        return array
    return pa.Array.from_buffers(target, count, [bitmap(valid), *array.buffers()[1:]], offset=array.offset)


def contents(values: pa.BinaryArray | pa.StringArray) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """Return a binary or string array's concatenated bytes and its offsets (one more than values, from 0)."""
    _, offset_buffer, data_buffer = values.buffers()
    if len(values) == 0 or offset_buffer is None:
        return np.empty(0, np.uint8), np.zeros(1, np.int32)
    offsets = np.frombuffer(offset_buffer, np.int32, len(values) + 1, values.offset * 4)
    if data_buffer is None:
        return np.empty(0, np.uint8), offsets
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0] if offsets[0] else offsets


def validity(values: pa.Array) -> Mask | None:
    """Return which values are not NULL; None if none is NULL."""
    if values.null_count == 0:
        return None
    mask: Mask = values.is_valid().to_numpy(zero_copy_only=False)
    return mask


def bitmap(mask: Mask | None) -> pa.Buffer | None:
    """Return a mask as Arrow's validity bitmap; None for None."""
    return None if mask is None else pa.py_buffer(np.packbits(mask, bitorder="little"))


def nulls(count: int, kind: pa.DataType) -> pa.Array:
    """Return `count` NULLs.  Arrow's own NULLs of a VARIANT have NULL parts too, which cannot be written to a file."""
    if kind != VARIANT:
        return pa.nulls(count, kind)
    empty = pa.repeat(pa.scalar(b"", pa.binary()), count)
    return pa.StructArray.from_arrays([empty, empty], fields=list(kind), mask=pa.repeat(True, count))


def repeated(value: pa.Scalar, count: int) -> pa.Array:
    """Return an array with `count` times the same value (a pyarrow Scalar)."""
    return pa.repeat(value, count) if value.is_valid else nulls(count, value.type)
