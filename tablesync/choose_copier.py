"""Choose who copies a table, and in how many chunks.

    a thread of the daemon    a table of less than LEAST_JOB_BYTES, in one chunk: a Spark job would take longer than
                              reading its rows
    a Spark job               any other table, with a task for each chunk; and a small one whose Delta table only Spark
                              can write (copyjob.copy_in_thread finds that)

A chunk is a range of the table's blocks.  After a crash the finished chunks stay (tablesync.may_resume).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

_BLOCK_SIZE: Final = 8192
# A chunk becomes a data file, and each batch of scattered changes touches all of these: the fewer the better.  The
# smallest is worth its own task, which costs a connection and some tens of milliseconds; the largest is copied again in
# seconds after a crash, and has about as many rows as the other writers put into a file.
_LEAST_CHUNK_BYTES: Final = 16 << 20
_MOST_CHUNK_BYTES: Final = 128 << 20
# A smaller table is divided into so many chunks for each core, so that the cores end at about the same time.
_CHUNKS_FOR_CORE: Final = 2
LEAST_JOB_BYTES: Final = 2 * 1024 * 1024
"""The least table worth a Spark job, including TOAST."""
_MOST_RANGES: Final = 4096

Range = tuple[int, int | None] | None
"""A chunk's first block, and the block after its last one; None: the whole relation."""


def takes_job(size: int, chunks: int = 1) -> bool:
    """Return whether a table of `size` bytes, planned in so many chunks, is copied by a Spark job."""
    return size >= LEAST_JOB_BYTES or chunks > 1


def edges(blocks: int | None, size: int, parallelism: int) -> tuple[int, ...]:
    """Return the first block of each chunk; () for a table whose ctids cannot be asked for (`blocks` None), as a partitioned one's.

    `size`: the table's bytes, including TOAST.  `parallelism`: how many tasks run at a time.
    """
    if blocks is None:
        return ()
    size = max(size, blocks * _BLOCK_SIZE)
    chunk = min(max(size // (_CHUNKS_FOR_CORE * parallelism), _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
    count = min(max(size // chunk, 1), _MOST_RANGES)
    if count > 1:
        # Whole rounds of tasks, so that no core idles while the last range is read.
        count = -(-count // parallelism) * parallelism
    elif size >= LEAST_JOB_BYTES:
        count = parallelism
    count = min(count, max(blocks, 1))
    return tuple(blocks * i // count for i in range(count))


def ranges(edges: Sequence[int]) -> list[Range]:
    """Return block ranges (first, end exclusive); the last is open-ended, as the table may grow until the snapshot.

    None stands for the whole relation if ctid cannot be used.
    """
    return [(first, end) for first, end in itertools.zip_longest(edges, edges[1:])] or [None]
