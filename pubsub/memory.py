"""What this process and Spark's JVM take of the machine's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Heap:
    """The JVM's heap in bytes: in use, garbage included; taken from the system; as large as it may get."""

    used: int
    committed: int
    max: int


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes.  None: not known, or there is no JVM.

    `python`, `jvm`: the resident memory of the daemon and of its JVM, without the processes that Spark starts for copies.
    """

    python: int | None = None
    jvm: int | None = None
    heap_used: int | None = None
    heap_committed: int | None = None
    heap_max: int | None = None


def resident(pid: int | None) -> int | None:
    """Return a process's resident memory in bytes; None if it has ended, or there is no /proc."""
    if pid is None:
        return None
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None
