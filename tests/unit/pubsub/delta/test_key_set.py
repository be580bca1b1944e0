"""Which rows are found by their keys: floats are equal as in PostgreSQL."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pubsub.delta.files.key_set import KeySet


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bits", ["f8", "f4"])
def test_every_nan_is_equal(bits: str, whole: bool) -> None:
    """Infinity - Infinity has the sign bit that 'NaN' lacks, and other bits can come from a driver."""
    first = 0xFFF8 << 48 if bits == "f8" else 0xFFC0 << 16
    made = np.array([first, first | 1, 0], bits.replace("f", "u")).view(bits)
    plain = np.array([np.nan, 1, 0], bits)
    others = pa.array([1, 1, 2])
    keys = KeySet(pa.table({"f": pa.array(made[[0, 2]]), "n": others.take(pa.array([0, 2]))}), whole=whole)
    assert keys.rows(pa.table({"f": pa.array(plain), "n": others})).tolist() == [0, -1, 1]
    assert keys.rows(pa.table({"f": pa.array(made), "n": others})).tolist() == [0, 0, 1]
    nothing = pa.table({"f": pa.array([None], pa.array(plain).type), "n": others.slice(0, 1)})
    assert keys.rows(nothing).tolist() == [-1]
