"""Return memory that the allocators keep to the system, so that a daemon holds only what it needs.

What a large batch took goes back at once.  What small batches free lies between what stays, and would add up to hundreds of
megabytes in minutes; it goes back from time to time.

glibc makes up to eight arenas for each core, for the threads, and every arena keeps what its largest batch took.
Without glibc, `limit_arenas` does nothing and `give_back` only releases Arrow's unused memory.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

_ARENA_MAX: Final = -8  # mallopt(3): M_ARENA_MAX
_ARENAS: Final = 2
# Memory goes back at least as often, in seconds, while there is work.
_EVERY: Final = 30.0


@dataclass(slots=True)
class _GivenBack:
    """When memory was returned last, in monotonic seconds: one process has many pipelines."""

    at: float


_given_back: Final = _GivenBack(time.monotonic())


def limit_arenas() -> None:
    """Limit glibc's arenas and put Arrow's buffers into them, at the start of a process that stages in threads.

    What Arrow allocates inside, in Parquet's writer and reader, is where ARROW_DEFAULT_MEMORY_POOL said when it was imported.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, _ARENAS)
        pa.set_memory_pool(pa.system_memory_pool())


def is_due() -> bool:
    """Return whether this process has returned nothing for half a minute."""
    return time.monotonic() - _given_back.at > _EVERY


def give_back() -> None:
    """Return unused memory to the system.  Takes some milliseconds."""
    _given_back.at = time.monotonic()
    pa.default_memory_pool().release_unused()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
    except OSError:
        return None
