"""Returns memory that the allocators keep after a large batch to the system, so that a daemon holds only what it needs.

glibc makes up to eight arenas for each core, for the threads, and every arena keeps what its largest batch took.
Without glibc, `limit_arenas` does nothing and `give_back` only releases Arrow's unused memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import pyarrow as pa

_ARENA_MAX: Final = -8  # mallopt(3): M_ARENA_MAX
_ARENAS: Final = 2


def limit_arenas() -> None:
    """Limit glibc's arenas and put Arrow's buffers into them, at the start of a process that stages in threads."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, _ARENAS)
        pa.set_memory_pool(pa.system_memory_pool())


def give_back() -> None:
    """Return unused memory to the system, after a large batch.  Takes some milliseconds."""
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
