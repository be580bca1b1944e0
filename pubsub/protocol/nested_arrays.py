"""Build arrays and composites as Arrow's lists and structs from their parts, split from text or from binary transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.protocol.arrow_arrays import Mask, bitmap
from pubsub.protocol.refused_values import InvalidText


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The elements of all rows as one binary array, and the offset of each row's first element (one more than rows)."""

    texts: Any
    offsets: npt.NDArray[np.int32]


def list_array(
    offsets: npt.NDArray[np.int32], elements: Callable[[], pa.Array], target: pa.ListType, valid: Mask | None
) -> pa.ListArray:
    """Build arrays of type `target` from what `elements` returns; row i has the elements offsets[i] to offsets[i + 1].

    Raises InvalidText with the row's index instead of the element's.
    """
    try:
        children = elements()
    except InvalidText as error:
        error.index = int(np.searchsorted(offsets, error.index, side="right")) - 1
        raise
    return pa.Array.from_buffers(
        target,
        len(offsets) - 1,
        [bitmap(valid), pa.py_buffer(np.ascontiguousarray(offsets, np.int32))],
        children=[children],
    )


def struct_array(children: list[pa.Array], target: pa.StructType, valid: Mask | None, count: int) -> pa.StructArray:
    """Build `count` composites of type `target` from their attributes `children`."""
    return pa.Array.from_buffers(target, count, [bitmap(valid)], children=children)
