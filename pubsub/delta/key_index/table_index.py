"""The runs of one table's data files: what is sought in them, and how they follow the table.

    small files           a run of each in memory, made by the batch that first needs it (memory_runs.py)
    from 2**18 rows on    runs on disk, made in the background; each is of several data files
    four of a size        are put together, so that their number grows with the logarithm of the table
    half of it is dead    a run is written anew, without the files that the table has no longer

A data file never changes, so neither does what a run says of it; deletion vectors are applied to what is found.  A file
that is another than the run's, though it has its name, is in no run.  A file without a run is read, and so are all files
for a batch of many keys, which is faster then.  A damaged run is removed, and made anew.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import structlog

from pubsub.delta.key_index import layout
from pubsub.delta.key_index.hashing import Hashes, Secret, can_hash, hash_keys
from pubsub.delta.key_index.layout import Damaged
from pubsub.delta.key_index.memory_runs import MemoryRuns
from pubsub.delta.key_index.run_file import (
    SUFFIX,
    Header,
    IndexedFile,
    Run,
    Source,
    Stop,
    in_memory,
    open_run,
    write_run,
)
from pubsub.protocol.arrow_arrays import Indices

#: Yields the columns of a data file's key, in the order of its rows.
Read: TypeAlias = Callable[[str], Iterator[pa.RecordBatch]]

# Reading a file takes as long as seeking so many keys, and one more for each so many rows.
_KEYS: Final = 5_000
_ROWS_FOR_KEY: Final = 10
# Files of fewer rows stay in memory, and others until together they have so many.
_SMALL: Final = 1 << 15
_DISK_ROWS: Final = 1 << 18
# A batch does not wait until a run of more rows has been made.
_MADE_AT_ONCE: Final = 1 << 18
# So many rows are hashed and sorted at a time, and so many become one run at a time.
_PIECE_ROWS: Final = 1 << 20
_MOST_ROWS: Final = 1 << 26
_MERGE: Final = 4
# After a failure, as of a full disk, nothing is made for so many seconds.
_AFTER_FAILURE: Final = 60.0

_NONE: Final = np.empty(0, np.int64)

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Key:
    """A table's key: the names of its columns in the data files, and their types."""

    columns: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, names: Sequence[str], types: Sequence[pa.DataType]) -> Key | None:
        """Return the key of these columns; None if it cannot be hashed."""
        if not names or not all(map(can_hash, types)):
            return None
        return cls(tuple((name, str(kind)) for name, kind in zip(names, types, strict=True)))


class TableIndex:
    """The runs of the table at `table`; those on disk are in `directory` (None: there are none).  One batch seeks at a time."""

    def __init__(
        self, table: str, directory: Path | None, secret: Secret, memory: MemoryRuns, background: Executor
    ) -> None:
        self._table = table
        self._directory = directory
        self._secret = secret
        self._memory = memory
        self._background = background
        self._lock = threading.Lock()
        self._runs: tuple[Run, ...] | None = None
        self._working = False
        self._stopped = False
        self._retry_at = -math.inf

    def find(
        self, key: Key, keys: Sequence[pa.Array], files: Sequence[IndexedFile], live: Sequence[IndexedFile], read: Read
    ) -> dict[str, tuple[Indices, Indices]]:
        """Seek the keys with the columns `keys` in `files`.

        Return for each file that has a run the positions, ascending, of the rows with one of them, and the key's number for
        each.  The others must be read.  `live`: all files of the table.  `read` may be called later, in another thread.
        """
        count = len(keys[0])
        found: dict[str, tuple[Indices, Indices]] = {}
        wanted: Hashes | None = None
        covering = self._covering(key)
        of_run: dict[int, tuple[Run, list[IndexedFile]]] = {}
        for file in files:
            run = covering.get(file)
            if run is None:
                run = self._made_at_once(key, file, count, read) if _pays(count, file.rows) else None
            if run is not None:
                of_run.setdefault(id(run), (run, []))[1].append(file)
        for run, there in of_run.values():
            if not _pays(count, int(run.begins[-1])):
                continue
            wanted = wanted if wanted is not None else hash_keys(keys, self._secret)
            try:
                places = run.find(wanted)
            except Damaged:
                self._drop(run)
                continue
            # The system has mapped sixteen pages around each that was read, and counts them as this process's memory.
            run.release()
            for file in there:
                found[file.path] = places.get(file.path, (_NONE, _NONE))
        self._follow(key, live, read)
        return found

    def stop(self) -> None:
        """End work in the background soon."""
        self._stopped = True

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs on disk."""
        with self._lock:
            if self._runs is None:
                self._runs = tuple(self._open())
            return self._runs

    def _open(self) -> Iterator[Run]:
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            try:
                if path.suffix != SUFFIX:
                    raise Damaged  # not finished
                run = open_run(path)
                if run.header.table != self._table or run.header.secret != self._secret.fingerprint:
                    raise Damaged
                yield run
            except (Damaged, OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)

    def _covering(self, key: Key) -> dict[IndexedFile, Run]:
        """Return the run on disk of each file that has one by this key."""
        covering: dict[IndexedFile, Run] = {}
        for run in self.runs:
            if run.header.key == key.columns:
                for file in run.header.files:
                    covering.setdefault(file, run)
        return covering

    def _made_at_once(self, key: Key, file: IndexedFile, count: int, read: Read) -> Run | None:
        """Return the file's run in memory, made now if need be; None if it is too large, or there is no room."""
        run = self._memory.get(self._table, file, key.columns)
        if run is None and file.rows <= _MADE_AT_ONCE and self._memory.make_room(file.rows):
            header = Header(self._table, key.columns, self._secret.fingerprint, (file,))
            run = in_memory(header, *self._hashed(read(file.path), 0))
            self._memory.put(self._table, file, run)
        return run

    def _hashed(self, batches: Iterator[pa.RecordBatch], begin: int) -> tuple[Hashes, layout.Rows]:
        """Return the hashes of the keys, and their rows, which are numbered from `begin` on."""
        made: list[Hashes] = []
        rows: list[Indices] = []
        for batch in batches:
            made.append(hash_keys(batch.columns, self._secret))
            rows.append(made[-1].which + begin)
            begin += batch.num_rows
        if not made:
            return Hashes(np.empty(0, np.uint64), np.empty(0, np.uint64), _NONE), np.empty(0, np.uint32)
        hashes = Hashes(*(np.concatenate([getattr(one, name) for one in made]) for name in ("high", "low", "which")))
        return hashes, np.concatenate(rows).astype(np.uint32)

    def _drop(self, run: Run) -> None:
        logger.warning(
            "a run of the key index is damaged, and will be made anew", table=self._table, path=str(run.path)
        )
        with self._lock:
            self._runs = tuple(one for one in self._runs or () if one is not run)
        if run.path is not None:
            run.path.unlink(missing_ok=True)

    # in the background

    def _follow(self, key: Key, live: Sequence[IndexedFile], read: Read) -> None:
        """Have runs made, put together or removed, if that is due."""
        if self._directory is None or self._stopped or self._working or time.monotonic() < self._retry_at:
            return
        if self._work(key, live) is None:
            return
        self._working = True
        self._background.submit(self._keep_up, key, tuple(live), read)

    def _keep_up(self, key: Key, live: Sequence[IndexedFile], read: Read) -> None:
        try:
            while not self._stopped and (work := self._work(key, live)):
                work(read)
        except Stop:
            pass
        except Exception as error:
            self._retry_at = time.monotonic() + _AFTER_FAILURE
            logger.warning("the key index could not follow its table", table=self._table, reason=str(error))
        finally:
            self._working = False

    def _work(self, key: Key, live: Sequence[IndexedFile]) -> Callable[[Read], None] | None:
        """Return what is to be done next."""
        covering = self._covering(key)
        alive: dict[int, int] = {}
        missing: list[IndexedFile] = []
        for file in live:
            run = covering.get(file)
            if run is not None:
                alive[id(run)] = alive.get(id(run), 0) + file.rows
            elif file.rows >= _SMALL:
                missing.append(file)
        runs = self.runs
        if unused := [run for run in runs if id(run) not in alive]:
            return lambda read: self._replace(unused, None)
        if sum(file.rows for file in missing) >= _DISK_ROWS:
            return lambda read: self._make(key, missing, read)
        classes: dict[int, list[Run]] = {}
        for run in runs:
            if 2 * alive[id(run)] < int(run.begins[-1]):
                worn = [run]
                return lambda read: self._merge(key, worn, covering, live)
            classes.setdefault(alive[id(run)].bit_length() // 2, []).append(run)
        for _, of_class in sorted(classes.items()):
            if len(of_class) >= _MERGE and sum(alive[id(run)] for run in of_class) <= 1 << 31:
                return lambda read: self._merge(key, of_class, covering, live)
        return None

    def _make(self, key: Key, missing: Sequence[IndexedFile], read: Read) -> None:
        """Make a run of files that have none."""
        assert self._directory is not None
        chosen: list[IndexedFile] = []
        for file in missing:
            if chosen and sum(one.rows for one in chosen) + file.rows > _MOST_ROWS:
                break
            chosen.append(file)
        header = Header(self._table, key.columns, self._secret.fingerprint, tuple(chosen))
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        parts: list[Run] = []
        pieces: list[Run] = []
        try:
            for piece in self._pieces(header, read):
                pieces.append(piece)
                if sum(len(one.arrays) for one in pieces) >= _PIECE_ROWS:
                    parts.append(self._written(header, pieces))
                    pieces = []
            if pieces or not parts:
                parts.append(self._written(header, pieces))
            made = self._written(header, parts) if len(parts) > 1 else parts.pop()
        finally:
            for part in parts:
                if part.path is not None:
                    part.path.unlink(missing_ok=True)
        self._replace((), made)

    def _pieces(self, header: Header, read: Read) -> Iterator[Run]:
        for number, file in enumerate(header.files):
            at = int(header.begins[number])
            for batch in read(file.path):
                if self._stopped:
                    raise Stop
                hashes, rows = self._hashed(iter([batch]), at)
                at += batch.num_rows
                yield in_memory(header, hashes, rows)

    def _written(self, header: Header, runs: Sequence[Run]) -> Run:
        """Write one run of several whose rows have the same numbers."""
        assert self._directory is not None
        sources = [Source(run, header.begins[:-1]) for run in runs]
        return write_run(self._directory, header, sources, lambda: self._stopped)

    def _merge(
        self, key: Key, runs: Sequence[Run], covering: Mapping[IndexedFile, Run], live: Sequence[IndexedFile]
    ) -> None:
        """Put runs together, without the files that the table has no longer, or that another run has, too."""
        assert self._directory is not None
        alive = set(live)
        kept = [file for run in runs for file in run.header.files if file in alive and covering[file] is run]
        header = Header(self._table, key.columns, self._secret.fingerprint, tuple(kept))
        begins = dict(zip(kept, header.begins[:-1].tolist(), strict=True))
        sources = [
            Source(
                run,
                np.array(
                    [begins[file] if covering.get(file) is run and file in begins else -1 for file in run.header.files]
                ),
            )
            for run in runs
        ]
        try:
            made = write_run(self._directory, header, sources, lambda: self._stopped)
        except Damaged:
            for run in runs:
                self._drop(run)
            return
        self._replace(runs, made)

    def _replace(self, runs: Sequence[Run], made: Run | None) -> None:
        with self._lock:
            left = [one for one in self._runs or () if all(one is not run for run in runs)]
            self._runs = (*left, made) if made is not None else tuple(left)
        if made is not None:
            made.release()
        for run in runs:
            if run.path is not None:
                run.path.unlink(missing_ok=True)


def _pays(keys: int, rows: int) -> bool:
    """Return whether so many keys are better sought in a run than by reading files of so many rows."""
    return keys <= _KEYS + rows // _ROWS_FOR_KEY
