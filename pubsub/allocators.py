"""What the allocators keep of a large batch goes back to the system: a daemon's memory is what it needs now.

glibc gives each thread an arena of its own, eight for each core, and every one keeps what its largest batch has taken.
Elsewhere than on glibc there is nothing to do.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import pyarrow as pa

_ARENA_MAX: Final = -8  # mallopt(3): M_ARENA_MAX
_ARENAS: Final = 2


def limit_arenas() -> None:
    """At the start of a process that stages batches in threads: few arenas, and Arrow's buffers in them."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, _ARENAS)
        pa.set_memory_pool(pa.system_memory_pool())


def give_back() -> None:
    """After a large batch.  Takes some milliseconds."""
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
