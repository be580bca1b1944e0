"""WAL that is kept: files of a segment each, named after the LSN at which they begin (`0000000001400000`).

The receiver writes at any place of the last segments (`SpoolWriter`); other processes read what it has told them is there
(`Spool`).  A segment that is whole, on disk and behind the last one is compressed.  Timelines are not told apart: where
the server changes to a new one, its bytes follow, or replace, those of the old one.

What a crash leaves: bytes that were not yet on disk may be anything, and segments after them as well.  Every record has
its checksum, so the receiver finds where that begins, and asks for the WAL from there on again.  A compressed segment and
the plain one it was made of can both be there; the plain one counts, since it may have been written to again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from pubsub import faults
from pubsub.errors import DataCorrupted, PubsubError
from pubsub.reorderbuffer import files
from pubsub.reorderbuffer.files import FileFailure
from walsender.feed.archive import Archive
from walsender.xlog.errors import WalMissing

_COMPRESSED: Final = ".zst"
_ASIDE: Final = ".tmp"
_CHUNK: Final = 1 << 20
_NAME: Final = 16
_UNSYNCED: Final = 8
"""Segments that may be whole and not yet on disk."""


class SyncFailure(PubsubError):
    """What was written may not be on disk.  No later fsync would tell: a system may report a failed write once only.

    It ends the process (fd.c: data_sync_elevel).
    """

    default_sqlstate = "58030"


class Spool:
    """The segments in `directory`, to be read.  Methods block, and raise FileFailure."""

    def __init__(self, directory: Path, segment_size: int) -> None:
        self.directory = directory
        self._size = segment_size
        self._reading: tuple[int, int] = (-1, -1)
        """The segment that is open for reading, plain or from the archive, and its descriptor."""
        self._unpacking: tuple[int, int, Any] = (-1, 0, None)
        """The compressed segment that is being read, how far, and its stream."""
        self.stop = threading.Event()
        """Set it to end a restore_command that a read waits for."""

    def starts(self) -> list[int]:
        """Return the LSNs of the segments that are there, in order."""
        with files.doing("read", self.directory):
            return sorted({int(path.name[:_NAME], 16) for path in self.directory.iterdir() if _is_segment(path.name)})

    def read(self, lsn: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (LSN, bytes) from `lsn` up to `end`; what is not here comes from the archive.

        Raises WalMissing if that does not have it either, PubsubError if it cannot be asked.
        """
        while True:
            for position, data in self.read_kept(lsn, end):
                yield position, data
                lsn = position + len(data)
            if lsn >= end:
                return
            self.adopt(lsn, self.fetch(lsn, self.stop))

    def read_kept(self, lsn: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (LSN, bytes) from `lsn` up to `end`, or up to the first byte that is not there."""
        while lsn < end:
            start = lsn - lsn % self._size
            data = self._read(start, lsn - start, min(end - lsn, start + self._size - lsn, _CHUNK))
            if not data:
                return
            yield lsn, data
            lsn += len(data)

    def fetch(self, lsn: int, stop: threading.Event) -> int:
        """Return a descriptor of the segment that holds `lsn`, from the archive; may run beside `read_kept`, in a thread.

        `stop` ends a restore_command.  Raises as `read` does.
        """
        archive = Archive.of(self.directory)
        if archive is None:
            raise WalMissing("WAL that was kept here has been removed", lsn)
        number = archive.fetch(lsn, stop)
        if number is None:
            raise WalMissing(
                f"requested WAL segment {archive.name(lsn)} has already been removed",
                lsn,
                detail="Neither the spool nor the archive has it.",
            )
        return number

    def adopt(self, lsn: int, number: int) -> None:
        """Read the segment that holds `lsn` from a descriptor of `fetch`, which is closed here in the end."""
        self.close()
        self._reading = (lsn - lsn % self._size, number)

    def size(self) -> int:
        """Return the bytes on disk."""
        with files.doing("read", self.directory):
            return sum(entry.stat().st_blocks * 512 for entry in os.scandir(self.directory))

    def close(self) -> None:
        """Close what is open; it can be read again."""
        if self._reading[1] >= 0:
            os.close(self._reading[1])
        self._reading = (-1, -1)
        self._unpacking = (-1, 0, None)

    def _path(self, start: int) -> Path:
        return self.directory / f"{start:0{_NAME}X}"

    def _compressed(self, start: int) -> Path:
        return self.directory / f"{start:0{_NAME}X}{_COMPRESSED}"

    def _read(self, start: int, offset: int, count: int) -> bytes:
        for _ in range(3):
            if self._reading[0] == start or self._open_plain(start):
                with files.doing("read", self._path(start)):
                    return os.pread(self._reading[1], count, offset)
            data = self._unpack(start, offset, count)
            if data is not None:
                return data
            # It has just been compressed, or removed.
        return b""

    def _open_plain(self, start: int) -> bool:
        path = self._path(start)
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError:
            with files.doing("open", path):
                raise
        self.close()
        self._reading = (start, number)
        return True

    def _unpack(self, start: int, offset: int, count: int) -> bytes | None:
        path = self._compressed(start)
        try:
            at, position, stream = self._unpacking
            if at != start or position > offset:
                stream = pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd")
                position = 0
            while position < offset:
                position += len(stream.read(min(offset - position, _CHUNK))) or _end(path)
            data: bytes = stream.read(count) or _end(path)
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            self._unpacking = (-1, 0, None)
            raise DataCorrupted(
                f'WAL segment "{path}" cannot be read: {error}',
                hint="Remove the file: its WAL is taken from the archive or the upstream server, if they have it.",
            ) from error
        self._unpacking = (start, offset + len(data), stream)
        return data


class SpoolWriter(Spool):
    """The segments in `directory`, which this process alone writes.

    Everything below `synced` is on disk.
    """

    def __init__(self, directory: Path, segment_size: int) -> None:
        super().__init__(directory, segment_size)
        self.synced = 0
        self._number = -1
        self._start = -1
        self._unsynced: list[int] = []
        """Descriptors of whole segments that are not on disk yet."""
        self._names_synced = True
        self._failure: SyncFailure | None = None
        files.remove_all(directory, _ASIDE)
        self._sync_what_is_there()

    def run_start(self, lsn: int) -> int:
        """Return where the segments begin that go on without a gap up to the one that holds `lsn`; past `lsn` if that is missing."""
        there = set(self.starts())
        start = lsn - lsn % self._size + self._size
        while start - self._size in there:
            start -= self._size
        return start

    def write(self, lsn: int, data: bytes) -> None:
        """Keep bytes that lie at `lsn`.  Raises DiskFull, FileFailure: part of them may be there then."""
        view = memoryview(data)
        while view:
            start = lsn - lsn % self._size
            self._open(start)
            part = view[: start + self._size - lsn]
            with files.doing("write", self._path(start)):
                faults.point("spool write")
                written = os.pwrite(self._number, part, lsn - start)
            lsn += written
            view = view[written:]

    def sync(self, lsn: int) -> None:
        """Make durable what was written up to `lsn`; may run beside `write`, in a thread.

        Raises SyncFailure, and then again whenever it is called.
        """
        if self._failure is not None:
            raise self._failure
        # The last segment first: `write` may go on to the next one at any moment, and the last is whole then.
        number = self._number
        last = os.dup(number) if number >= 0 else -1
        whole, self._unsynced = self._unsynced, []
        names, self._names_synced = self._names_synced, True
        try:
            with files.doing("fsync", self.directory):
                for one in (*whole, last):
                    if one >= 0:
                        os.fsync(one)
            if not names:
                files.sync_directory(self.directory)
        except FileFailure as error:
            self._unsynced = [*whole, *self._unsynced]
            self._failure = SyncFailure(
                error.message,
                detail="WAL that was received may not be on disk.",
                hint="Look at the disk. The upstream server keeps what was not reported as flushed.",
            )
            raise self._failure from error
        finally:
            if last >= 0:
                os.close(last)
        for one in whole:
            os.close(one)
        self.synced = max(self.synced, lsn)

    def put(self, start: int, pieces: Iterable[bytes]) -> None:
        """Add a whole segment, durably; the receiver has never written to it."""
        aside = self._path(start).with_suffix(_ASIDE)
        with files.doing("write", aside), aside.open("wb") as file:
            aside.chmod(files.FILE_MODE)
            for one in pieces:
                file.write(one)
        files.make_durable(aside, self._path(start))

    def compress_before(self, lsn: int) -> None:
        """Compress the whole segments that end up to `lsn`, which is on disk."""
        with files.doing("read", self.directory):
            plain = sorted(int(name, 16) for name in os.listdir(self.directory) if len(name) == _NAME)
        for start in plain:
            path = self._path(start)
            if start + self._size > min(lsn, self.synced) or path.stat().st_size < self._size:
                continue
            compressed = self._compressed(start)
            aside = compressed.with_name(compressed.name + _ASIDE)
            with files.doing("write", aside):
                with path.open("rb") as segment, pa.CompressedOutputStream(str(aside), "zstd") as packed:
                    aside.chmod(files.FILE_MODE)
                    while data := segment.read(_CHUNK):
                        packed.write(data)
            faults.point("spool compressed aside")
            files.make_durable(aside, compressed)
            faults.point("spool compressed")
            files.remove(path)

    def remove_before(self, lsn: int) -> None:
        """Remove the segments that end up to `lsn`, the oldest first."""
        for start in self.starts():
            if start + self._size <= lsn:
                self._remove(start)
                faults.point("spool removed")

    def close(self) -> None:
        super().close()
        for number in (*self._unsynced, self._number):
            if number >= 0:
                os.close(number)
        self._unsynced = []
        self._number = self._start = -1

    def _sync_what_is_there(self) -> None:
        """Make durable what a process that was killed has written: it is read as received, and never written again."""
        with files.doing("fsync", self.directory):
            for start in self.starts():
                if self._open_plain(start):
                    os.fsync(self._reading[1])
        super().close()
        files.sync_directory(self.directory)

    def _remove(self, start: int) -> None:
        files.remove(self._compressed(start))
        files.remove(self._path(start))

    def _open(self, start: int) -> None:
        if start == self._start:
            return
        if self._number >= 0:
            self._unsynced.append(self._number)
            self._number = self._start = -1
            if len(self._unsynced) > _UNSYNCED:
                self.sync(self.synced)
        self._complete(start - self._size)
        path = self._path(start)
        if not path.exists() and self._compressed(start).exists():
            # Bytes that come again, as after a restart at the last segment's end.
            self._decompress(start)
        with files.doing("open", path):
            self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, files.FILE_MODE)
        self._start = start
        self._names_synced = False

    def _complete(self, start: int) -> None:
        """Have a segment that ended early (XLOG_SWITCH) end with zeros: the next one is begun before they have come."""
        path = self._path(start)
        with files.doing("write", path):
            try:
                number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return
            if os.fstat(number).st_size >= self._size:
                os.close(number)
                return
            self._unsynced.append(number)
            os.ftruncate(number, self._size)

    def _decompress(self, start: int) -> None:
        aside = self._path(start).with_suffix(_ASIDE)
        data = self._read(start, 0, self._size)
        with files.doing("write", aside):
            aside.write_bytes(data)
        files.make_durable(aside, self._path(start))


def _is_segment(name: str) -> bool:
    name = name.removesuffix(_COMPRESSED)
    return len(name) == _NAME and all(digit in "0123456789ABCDEF" for digit in name)


def _end(path: Path) -> Any:
    raise pa.ArrowInvalid(f"{path.name} ends before its time")
