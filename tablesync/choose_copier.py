"""Choose who copies a table, and in how many chunks.

    a thread of the daemon    a table of less than LEAST_JOB_BYTES, in one chunk: a Spark job would take longer than
                              reading its rows
    a Spark job               any other table, with a task for each chunk; and a small one whose Delta table only Spark
                              can write (copyjob.copy_here finds that)

A chunk is a range of the table's blocks.  After a crash the finished chunks stay (tablesync.resume).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

_BLOCK_SIZE: Final = 8192
# The least range worth its own task; a task costs a connection and some tens of milliseconds.
_LEAST_RANGE_BLOCKS: Final = 16 * 1024 * 1024 // _BLOCK_SIZE
LEAST_JOB_BYTES: Final = 2 * 1024 * 1024
"""The least table worth a Spark job, including TOAST."""
_MOST_RANGES: Final = 4096

Range = tuple[int, int | None] | None
"""A chunk's first block, and the block after its last one; None: the whole relation."""


def takes_job(size: int, chunks: int = 1) -> bool:
    """Return whether a table of `size` bytes, planned in so many chunks, is copied by a Spark job."""
    return size >= LEAST_JOB_BYTES or chunks > 1


def edges(blocks: int | None, parallelism: int) -> tuple[int, ...]:
    """Return the first block of each chunk; () for a partitioned table (`blocks` None), which has no ctids."""
    if blocks is None:
        return ()
    count = min(max(blocks // _LEAST_RANGE_BLOCKS, 1), _MOST_RANGES)
    if count > 1:
        # Whole rounds of tasks, so that no core idles while the last range is read.
        count = -(-count // parallelism) * parallelism
    elif blocks >= LEAST_JOB_BYTES // _BLOCK_SIZE:
        count = parallelism
    return tuple(blocks * i // count for i in range(count))


def ranges(edges: Sequence[int]) -> list[Range]:
    """Return block ranges (first, end exclusive); the last is open-ended, as the table may grow until the snapshot.

    None stands for the whole relation if ctid cannot be used.
    """
    return [(first, end) for first, end in itertools.zip_longest(edges, edges[1:])] or [None]
