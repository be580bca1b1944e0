"""A run on disk: which data files it is of, and its arrays (layout.py), mapped into memory.

    magic, length and CRC-32 of the header ─ header (JSON) ─ each array, at a multiple of 4096

A run is written under another name and renamed; it is not fsynced, since it is a cache, and each part of it is checked when
it is used.  A run of several data files numbers their rows one file after the other.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pubsub.delta.key_index import layout
from pubsub.delta.key_index.hashing import HIGH_BITS, Hashes
from pubsub.delta.key_index.layout import Arrays, Damaged, Rows
from pubsub.protocol.arrow_arrays import Indices

SUFFIX: Final = ".run"
_MAGIC: Final = b"pubsubK1"
_START: Final = struct.Struct("<8sII")
_PAGE: Final = 4096
# Of so many entries a run is put together at once.
_AT_ONCE: Final = 1 << 19
# In memory there may be many small runs, so seeking in each must be quick; on disk the bytes count.
_FEWEST_IN_MEMORY: Final = 4

#: Returns whether to stop.
Stopped: TypeAlias = Callable[[], bool]


class Stop(Exception):
    """The work is not wanted any more."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A data file: its path in the log, what distinguishes it from another of that name, and its number of rows."""

    path: str
    identity: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a run is of: `table` and `key` (names and types), the secret's fingerprint, and its files in their order."""

    table: str
    key: tuple[tuple[str, str], ...]
    secret: str
    files: tuple[IndexedFile, ...]

    @property
    def begins(self) -> Indices:
        """The run's number of each file's first row, and behind the last one the number of all rows."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum([file.rows for file in self.files], dtype=np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run, on disk (`path`, mapped as `pages`) or in memory.  `begins`: as of its header."""

    header: Header
    arrays: Arrays
    begins: Indices
    path: Path | None = None
    pages: mmap.mmap | None = None

    def release(self) -> None:
        """Give back the memory of pages that were read; the system may still have them when they are read again."""
        if self.pages is not None:
            self.pages.madvise(mmap.MADV_DONTNEED)

    def find(self, wanted: Hashes) -> dict[str, tuple[Indices, Indices]]:
        """Return for each file with such a key the positions, ascending, and the number of the key of each.

        Raises Damaged.
        """
        rows, keys = layout.seek(self.arrays, wanted)
        order = np.argsort(rows)
        rows, keys = rows[order], keys[order]
        bounds = np.searchsorted(rows, self.begins)
        if len(rows) and bounds[-1] != len(rows):
            raise Damaged
        found = {}
        for number in np.flatnonzero(np.diff(bounds)):
            part = slice(bounds[number], bounds[number + 1])
            found[self.header.files[number].path] = (rows[part] - self.begins[number], keys[part])
        return found


def in_memory(header: Header, hashes: Hashes, rows: Rows) -> Run:
    """Return a run that is not on disk."""
    _, arrays = layout.arrange(hashes, rows, layout.bits_for(len(hashes), fewest=_FEWEST_IN_MEMORY))
    return Run(header, arrays, header.begins)


def open_run(path: Path) -> Run:
    """Map the run at `path`.  Raises Damaged, OSError."""
    with open(path, "rb") as file:
        start = file.read(_START.size)
        if len(start) < _START.size:
            raise Damaged
        magic, length, crc = _START.unpack(start)
        text = file.read(length)
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != crc:
            raise Damaged
        size = os.fstat(file.fileno()).st_size
        found = json.loads(text)
        bits, entries, room = found.pop("bits"), found.pop("entries"), found.pop("room")
        files = tuple(IndexedFile(one["path"], tuple(one["identity"]), one["rows"]) for one in found.pop("files"))
        header = Header(found["table"], tuple((name, kind) for name, kind in found["key"]), found["secret"], files)
        places = _places(_START.size + length, bits, room)
        if size < places[-1]:
            raise Damaged
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    # What is sought lies anywhere, so reading ahead would be in vain.
    pages.madvise(mmap.MADV_RANDOM)
    whole = np.frombuffer(pages, np.uint8)

    def part(at: int, kind: type[np.generic], count: int) -> npt.NDArray[Any]:
        return whole[at : at + count * np.dtype(kind).itemsize].view(kind)

    arrays = Arrays(
        bits,
        part(places[0], np.uint32, (1 << bits) + 1),
        part(places[1], np.uint32, 1 << bits),
        part(places[2], np.uint64, entries),
        part(places[3], np.uint32, entries),
    )
    return Run(header, arrays, header.begins, path, pages)


def write_run(directory: Path, header: Header, sources: Sequence[Source], stopped: Stopped) -> Run:
    """Write the entries of all sources as one run in `directory`, and return it.

    Takes memory for about _AT_ONCE entries.  Raises Damaged (of a source), OSError, Stop; a failure leaves nothing behind.
    """
    room = sum(source.most for source in sources)
    bits = layout.bits_for(room, least=HIGH_BITS)
    path = directory / f"{uuid.uuid4().hex}{SUFFIX}"
    aside = path.with_suffix(".tmp")
    try:
        with open(aside, "xb") as file:
            entries = _write(file.fileno(), header, sources, bits, room, stopped)
            _write_header(file.fileno(), header, bits, entries, room)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return open_run(path)


@dataclass(frozen=True, slots=True)
class Source:
    """A run whose entries go into another: `begins` has the new number of each of its files' first rows, -1 for a file to leave out.

    `most`: at least the number of its entries that go there.
    """

    run: Run
    begins: Indices

    @property
    def most(self) -> int:
        rows = [file.rows for file, begin in zip(self.run.header.files, self.begins, strict=True) if begin >= 0]
        return min(sum(rows), len(self.run.arrays))

    def read(self, first: int, count: int) -> tuple[Hashes, Rows]:
        """Return the entries whose hashes begin with `count` numbers of HIGH_BITS from `first` on.  Raises Damaged."""
        more = self.run.arrays.bits - HIGH_BITS
        if more >= 0:
            hashes, rows = layout.entries(self.run.arrays, first << more, count << more)
        else:
            hashes, rows = layout.entries(self.run.arrays, 0, 1 << self.run.arrays.bits)
            here = (hashes.high >= first) & (hashes.high < first + count)
            hashes, rows = Hashes(hashes.high[here], hashes.low[here], hashes.which[here]), rows[here]
        if len(rows) and int(rows.max()) >= self.run.begins[-1]:
            raise Damaged
        of = np.searchsorted(self.run.begins, rows, side="right") - 1
        there = self.begins[of] >= 0
        moved = (rows - self.run.begins[of] + self.begins[of])[there].astype(np.uint32)
        return Hashes(hashes.high[there], hashes.low[there], hashes.which[there]), moved


def _write(file: int, header: Header, sources: Sequence[Source], bits: int, room: int, stopped: Stopped) -> int:
    places = _places(_START.size + len(_text(header, bits, room, room)), bits, room)
    os.ftruncate(file, places[-1])
    step = max(min((_AT_ONCE << HIGH_BITS) // max(room, 1), 1 << HIGH_BITS), 1)
    done = 0
    for first in range(0, 1 << HIGH_BITS, step):
        if stopped():
            raise Stop
        count = min(step, (1 << HIGH_BITS) - first)
        read = [source.read(first, count) for source in sources]
        for source in sources:
            source.run.release()  # it is read in order, and would lie in memory whole at the end
        hashes = Hashes(*(np.concatenate([getattr(one, name) for one, _ in read]) for name in ("high", "low", "which")))
        more = bits - HIGH_BITS
        _, part = layout.arrange(hashes, np.concatenate([rows for _, rows in read]), bits, first << more, count << more)
        _put(file, part.starts + np.uint32(done), places[0], first << more)
        _put(file, part.sums, places[1], first << more)
        _put(file, part.lows, places[2], done)
        _put(file, part.rows, places[3], done)
        done += len(part)
    return done


def _write_header(file: int, header: Header, bits: int, entries: int, room: int) -> None:
    text = _text(header, bits, entries, room)
    os.pwrite(file, _START.pack(_MAGIC, len(text), zlib.crc32(text)) + text, 0)


def _text(header: Header, bits: int, entries: int, room: int) -> bytes:
    """Return the header as JSON, of a length that does not depend on `entries`."""
    found = asdict(header) | {"bits": bits, "room": room}
    text = json.dumps(found | {"entries": room}, ensure_ascii=True)
    return json.dumps(found | {"entries": entries}, ensure_ascii=True).ljust(len(text)).encode("ascii")


def _places(header: int, bits: int, room: int) -> list[int]:
    """Return where each array begins in the file, and its end."""
    places = [-(-header // _PAGE) * _PAGE]
    for size in (4 * ((1 << bits) + 1), 4 << bits, 8 * room, 4 * room):
        places.append(-(-(places[-1] + size) // _PAGE) * _PAGE)
    return places


def _put(file: int, values: npt.NDArray[Any], place: int, index: int) -> None:
    data = np.ascontiguousarray(values).data.cast("B")
    at = place + index * values.itemsize
    while len(data):
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
