"""Who copies a table, a thread or a Spark job, and the chunks that it is divided into."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tablesync.choose_copier import LEAST_JOB_BYTES, edges, ranges, takes_job


def test_a_small_table_in_one_chunk_needs_no_spark_job() -> None:
    assert not takes_job(0)
    assert not takes_job(LEAST_JOB_BYTES - 1)
    assert takes_job(LEAST_JOB_BYTES)
    assert takes_job(0, 2), "an earlier attempt has planned more chunks, when the table was larger"


@given(st.integers(0, 2**32), st.integers(0, 2**46), st.integers(1, 64))
def test_every_block_is_read_once(blocks: int, toast: int, parallelism: int) -> None:
    parts = ranges(edges(blocks, 8192 * blocks + toast, parallelism))
    bounds = [part for part in parts if part is not None]
    assert len(bounds) == len(parts)
    assert bounds[0][0] == 0
    assert bounds[-1][1] is None, "the table may grow until the snapshot is taken"
    for (first, end), (following, _) in itertools.pairwise(bounds):
        assert end == following
        assert first < following
    assert len(parts) <= 4096 + parallelism
    assert len(parts) % parallelism == 0 or len(parts) in {1, blocks}


def test_small_tables_are_one_task_and_large_ones_many() -> None:
    megabyte = 128
    assert ranges(edges(0, 0, 4)) == [(0, None)]
    assert ranges(edges(10, 81920, 4)) == [(0, None)]
    assert ranges(edges(None, 0, 4)) == [None]
    assert len(edges(3 * megabyte, 0, 4)) == 4
    assert len(edges(85 * megabyte, 0, 2)) == 4
    assert len(edges(1024 * megabyte, 0, 2)) == 8
    assert len(edges(megabyte, 1 << 30, 2)) == 8, "most of its bytes are TOAST"
    assert len(edges(2**31, 0, 2)) == 4096
