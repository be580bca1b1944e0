"""Changes as rows of a table in mode history: which UPDATEs have a row of their own for the row before."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from apply.staging.history import _left
from pubsub.delta.table import TargetTable
from pubsub.protocol.rows import OLD_ROW, UPDATE, Changes


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_an_update_that_leaves_the_key_as_it_was(kind: pa.DataType) -> None:
    """Under REPLICA IDENTITY FULL every old row is sent.  NaN was once another key than NaN."""
    before, after = [math.nan, 0.0, 1.0, math.nan, 2.0], [math.nan, -0.0, 1.0, 3.0, math.nan]
    count = len(before)
    table = TargetTable("/w/t", pa.schema([pa.field("id", kind)]), (), "s.t", history=("id",))
    changes = Changes(
        np.arange(count),
        np.full(count, UPDATE, np.uint8),
        {"id": pa.array(after, kind)},
        {},
        np.full(count, OLD_ROW, np.uint8),
        {"id": pa.array(before, kind)},
    )
    assert _left(changes, table).tolist() == [3, 4]
