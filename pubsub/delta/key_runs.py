"""Keeps the keys of data files sorted in memory, so that a small batch finds its rows without reading the files again.

    a file's integer keys ─► sorted, each with its position in the file: its run
    a batch's keys        ─► sought in the run, by binary search

A data file never changes, so neither does its run; deletion vectors are applied to what is found.  A file that is another
than the run's, though it has its name, has none.  Runs are bounded in bytes, and in number, since those of small files are
mostly overhead.  One that was used within the last minute is not given up for another: a table whose runs do not all fit
would otherwise sort its files anew for each batch.  A file without a run is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Indices = npt.NDArray[np.int64]
_File = tuple[int, int]

_MOST_BYTES: Final = 48 << 20
_MOST_RUNS: Final = 4096
# Reading a file takes as long as seeking so many keys, and one more for each so many rows.
_KEYS: Final = 5_000
_ROWS_FOR_KEY: Final = 10
# A run that was used within so many seconds stays.
_IN_USE: Final = 60.0


@dataclass(slots=True)
class Run:
    """The keys of a data file, ascending, and their positions; not `usable`, and empty, if one occurs twice or is NULL.

    `used`: when it was used last, in monotonic seconds.  `of`: the file.
    """

    keys: npt.NDArray[Any]
    positions: npt.NDArray[np.uint32]
    usable: bool
    used: float
    of: _File

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.positions.nbytes

    def find(self, ordered: npt.NDArray[Any], order: Indices) -> tuple[Indices, Indices]:
        """Return the positions, ascending, of the rows that have one of the keys `ordered`, and the key's number for each.

        `order`: the number of each key in `ordered`.
        """
        if not len(self.keys):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.minimum(np.searchsorted(self.keys, ordered), len(self.keys) - 1)
        there = self.keys[places] == ordered
        positions = self.positions[places[there]].astype(np.int64)
        by_position = np.argsort(positions)
        return positions[by_position], order[there][by_position]


class KeyRuns:
    """The runs of one node's tables, for any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory that the runs' keys and positions take."""
        return self._nbytes

    def pay(self, keys: int, rows: int) -> bool:
        """Return whether so many keys are better sought in a run than by reading a file of so many rows."""
        return keys <= _KEYS + rows // _ROWS_FOR_KEY

    def get(self, path: Path) -> Run | None:
        """Return the run of the data file at `path`, if there is one.  Raises FileNotFoundError."""
        file = _file(path)
        with self._lock:
            run = self._runs.get(str(path))
            if run is None or run.of != file:
                return None
            run.used = time.monotonic()
            return run

    def make(self, path: Path, rows: int, columns: Iterator[pa.RecordBatch]) -> Run | None:
        """Make the run of a data file of `rows` rows from its key; None, and nothing is read, if there is no room."""
        if not self._make_room(rows * 12):
            return None
        file = _file(path)
        run = _sorted(file, [batch.column(0) for batch in columns])
        with self._lock:
            held = self._runs.pop(str(path), None)
            self._nbytes += run.nbytes - (held.nbytes if held is not None else 0)
            self._runs[str(path)] = run
        return run

    def _make_room(self, nbytes: int) -> bool:
        """Give up runs that are not in use, as far as needed; return whether there is room now."""

        def fits() -> bool:
            return self._nbytes + nbytes <= self._most_bytes and len(self._runs) < _MOST_RUNS

        with self._lock:
            before = time.monotonic() - _IN_USE
            for path in [] if fits() else [path for path, run in self._runs.items() if run.used < before]:
                if fits():
                    break
                self._nbytes -= self._runs.pop(path).nbytes
            return fits()


def _file(path: Path) -> _File:
    """Return what distinguishes a file from another of its name."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _sorted(file: _File, columns: list[pa.Array]) -> Run:
    now = time.monotonic()
    nothing = np.empty(0, np.int64), np.empty(0, np.uint32)
    if any(column.null_count for column in columns):
        return Run(*nothing, usable=False, used=now, of=file)
    keys = pa.chunked_array(columns).to_numpy() if columns else nothing[0]
    ascending = np.argsort(keys, kind="stable").astype(np.uint32)
    keys = keys[ascending]
    if bool(np.any(keys[1:] == keys[:-1])):
        return Run(*nothing, usable=False, used=now, of=file)
    return Run(keys, ascending, usable=True, used=now, of=file)
