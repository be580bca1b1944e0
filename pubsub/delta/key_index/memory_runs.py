"""The runs of small data files, kept in memory within bounds.

Runs are bounded in bytes, and in number, since those of small files are mostly overhead.  One that was used within the last
minute is not given up for another: a table whose runs do not all fit would otherwise sort its files anew for each batch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from pubsub.delta.key_index.run_file import IndexedFile, Run

_MOST_BYTES: Final = 48 << 20
_MOST_RUNS: Final = 4096
# The most bytes of an entry in memory, with its part of a bucket.
_ENTRY: Final = 17
# A run that was used within so many seconds stays.
_IN_USE: Final = 60.0


@dataclass(slots=True)
class _Held:
    """`used`: when it was used last, in monotonic seconds."""

    run: Run
    used: float


class MemoryRuns:
    """The runs of one node's tables, by table and data file, for any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], _Held] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory that the runs' arrays take."""
        return self._nbytes

    def get(self, table: str, file: IndexedFile, key: tuple[tuple[str, str], ...]) -> Run | None:
        """Return the run of the data file by that key, if there is one."""
        with self._lock:
            held = self._held.get((table, file.path))
            if held is None or held.run.header.files != (file,) or held.run.header.key != key:
                return None
            held.used = time.monotonic()
            return held.run

    def put(self, table: str, file: IndexedFile, run: Run) -> None:
        """Keep the data file's run, for which there must be room."""
        with self._lock:
            before = self._held.pop((table, file.path), None)
            self._nbytes += run.arrays.nbytes - (before.run.arrays.nbytes if before is not None else 0)
            self._held[table, file.path] = _Held(run, time.monotonic())

    def make_room(self, rows: int) -> bool:
        """Give up runs that are not in use, as far as needed; return whether there is room now for so many rows."""

        def fits() -> bool:
            return self._nbytes + rows * _ENTRY <= self._most_bytes and len(self._held) < _MOST_RUNS

        with self._lock:
            before = time.monotonic() - _IN_USE
            for name in [] if fits() else [name for name, held in self._held.items() if held.used < before]:
                if fits():
                    break
                self._nbytes -= self._held.pop(name).run.arrays.nbytes
            return fits()
