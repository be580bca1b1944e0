"""WAL from a directory: an archive, or a server's own pg_wal.

A segment's file has the segment's name, or an ending: compressed (.zst, .lz4, .gz), incomplete (.partial), or both, in
either order.  If several timelines have the position, the newest one of the followed history is read: its file begins
with a copy of the older one's WAL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from pubsub.errors import PubsubError
from pubsub.protocol.timeline import TimelineHistory, parse_history
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import FORMATS, LONG_HEADER, LONG_HEADER_REST, PAGE_HEADER, SHORT_HEADER, XLP_LONG_HEADER
from walsender.xlog.geometry import Geometry

CHUNK_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 64 << 10
"""Bytes read at a time from a compressed file: if it is cut short, the last piece is lost."""
_CODECS: Final = {".zst": "zstd", ".lz4": "lz4", ".gz": "gzip"}
# pg_receivewal puts .partial last.
_ENDINGS: Final = (
    *("", *_CODECS),
    *(".partial", *(f".partial{codec}" for codec in _CODECS), *(f"{codec}.partial" for codec in _CODECS)),
)
_STATES: Final = {errno.ENOENT: "58P01", errno.ENOTDIR: "58P01", errno.EACCES: "42501", errno.EPERM: "42501"}
_SEGMENT: Final = re.compile(f"[0-9A-F]{{24}}(?:{'|'.join(map(re.escape, _ENDINGS))})")


class SegmentDirectory:
    """Segments of the cluster `system_identifier`.

    Raises PubsubError (58P01, 42501) if `path` is no readable directory.
    """

    def __init__(self, path: Path, geometry: Geometry, system_identifier: int) -> None:
        try:
            os.scandir(path / ".").close()
        except OSError as error:
            raise _failure(f'could not open directory "{path}"', error) from error
        self._path = path
        self._geometry = geometry
        self._system_identifier = system_identifier

    async def provide(self, lsn: int, history: TimelineHistory) -> AsyncGenerator[None]:
        """Have the segment that holds `lsn` be there, if it can be; yield now and then meanwhile.  Here it is, or is not."""
        for _ in range(0):
            yield

    async def provide_history(self, timeline: int) -> AsyncGenerator[None]:
        """As `provide`, of the timeline's history file."""
        for _ in range(0):
            yield

    def find(self, lsn: int, history: TimelineHistory) -> tuple[Path, int] | None:
        """Return the file that has the WAL at `lsn`, and its timeline; None if there is none."""
        for timeline in history.timelines_of_segment(lsn, self._geometry.segment_size):
            name = self._geometry.segment_name(timeline, lsn)
            for ending in _ENDINGS:
                path = self._path / (name + ending)
                if _is_file(path):
                    return path, timeline
        return None

    def read(self, lsn: int, history: TimelineHistory) -> Iterator[tuple[int, bytes]]:
        """Yield (LSN, bytes) from `lsn` on, segment after segment, as far as they are there.

        A file of a timeline that the history left is read up to that point.  Raises PubsubError (58030), and
        WalCorrupted for another cluster's file.
        """
        size = self._geometry.segment_size
        while (found := self.find(lsn, history)) is not None:
            path, timeline = found
            start = lsn - lsn % size
            got = lsn
            length = min(size, (history.end_of(timeline) or start + size) - start)
            for position, data in _contents(path, length):
                if position == 0:
                    check_header(data, start, self._system_identifier, str(path))
                if position + len(data) <= lsn - start:
                    continue
                cut = max(lsn - start - position, 0)
                yield start + position + cut, data[cut:]
                got = start + position + len(data)
            if got < start + size:
                return
            lsn = start + size

    def has_written(self, lsn: int, history: TimelineHistory) -> bool:
        """Return whether the segment that begins at `lsn` is there and has been written to.

        A server keeps files for later use, empty or with their old contents.
        """
        found = self.find(lsn, history)
        if found is None:
            return False
        path, _ = found
        for _, data in _contents(path, LONG_HEADER):
            return check_header(data, lsn, self._system_identifier, str(path))
        return False

    def whole(self, name: str) -> Iterator[tuple[int, bytes]] | None:
        """Return (offset, bytes) of a segment's file that is not marked as incomplete; None if there is none."""
        for ending in ("", *_CODECS):
            path = self._path / (name + ending)
            if _is_file(path):
                return _contents(path, self._geometry.segment_size + 1)
        return None

    def has_after(self, lsn: int) -> bool:
        """Return whether there is any segment after the one that holds `lsn`."""
        return any(start > lsn for start in self._starts())

    def history(self, timeline: int) -> TimelineHistory:
        """Return the timeline's history from its file; the timeline alone if there is no file."""
        for ending in ("", *_CODECS):
            path = self._path / f"{timeline:08X}.history{ending}"
            if _is_file(path):
                text = b"".join(data for _, data in _contents(path, 1 << 20))
                return parse_history(timeline, text.decode("utf-8", "replace"))
        return TimelineHistory.only(timeline)

    def _starts(self) -> Iterator[int]:
        for entry in self._path.iterdir():
            if _SEGMENT.fullmatch(entry.name):
                with contextlib.suppress(ValueError):
                    yield self._geometry.segment_start(entry.name[:24])[1]


def check_header(data: bytes, start: int, system_identifier: int, name: str) -> bool:
    """Return whether a segment's file, which begins with `data`, begins with the header of the page at `start`.

    Raises WalCorrupted if another cluster wrote it.
    """
    if len(data) < LONG_HEADER:
        return False
    magic, info, _, address, _ = PAGE_HEADER.unpack_from(data)
    if magic not in FORMATS or not info & XLP_LONG_HEADER or address != start:
        return False
    identifier = LONG_HEADER_REST.unpack_from(data, SHORT_HEADER)[0]
    if identifier != system_identifier:
        raise WalCorrupted(
            "WAL file is from different database system: WAL file database system identifier is "
            f"{identifier}, pg_control database system identifier is {system_identifier}",
            start,
            detail=f'The file is "{name}".',
        )
    return True


def _contents(path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes), at most `limit` bytes in all.  A compressed file that is cut short gives what it has."""
    codec = next((_CODECS[suffix] for suffix in path.suffixes if suffix in _CODECS), None)
    position = 0
    try:
        with path.open("rb") as file:
            stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) if codec else file
            while position < limit:
                data: bytes = stream.read(min(_PIECE_BYTES if codec else CHUNK_BYTES, limit - position))
                if not data:
                    return
                yield position, data
                position += len(data)
    except (OSError, pa.ArrowException) as error:
        if codec is not None and "Truncated compressed stream" in str(error):
            return
        raise _failure(f'could not read file "{path}"', error) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise _failure(f'could not stat file "{path}"', error) from error


def _failure(what: str, error: Exception) -> PubsubError:
    """Make the error of a failed file access (elog.c: errcode_for_file_access)."""
    number = error.errno if isinstance(error, OSError) else None
    sqlstate = _STATES.get(number or 0, "58030")
    return PubsubError(f"{what}: {os.strerror(number) if number else error}", sqlstate=sqlstate)
