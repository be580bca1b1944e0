"""Changes on disk: a file is an Arrow IPC stream, and each of its record batches is a segment with a checksum.

    schema | segment | segment | …            xid uint32, arrival int64, frame binary; metadata: header

Segments are written once, one after the other, and read back in that order.  Their offsets and CRC-32 checksums stay
with the writer, not in the file: a file that was changed, cut, exchanged or left by another process fails the check.
Any reader of Arrow streams can read the file; it must leave out aborted subtransactions itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from pubsub.errors import DataCorrupted
from pubsub.reorderbuffer import files
from pubsub.reorderbuffer.block import ChangeBlock, schema


@dataclass(frozen=True, slots=True)
class Segment:
    """A record batch of `count` changes: `length` bytes of the file from `offset`, with the CRC-32 `checksum`."""

    offset: int
    length: int
    checksum: int
    count: int


class SegmentFile:
    """The part of a log on disk.  `end` is the file's length, `nbytes` the length of the frames in it, in bytes."""

    __slots__ = ("_durable", "end", "header", "nbytes", "path", "segments")

    def __init__(
        self, path: Path, header: int, segments: Iterable[Segment] = (), end: int = 0, *, durable: bool = False
    ) -> None:
        """`segments` are those already in the file; `remove` keeps a `durable` file."""
        self._durable = durable
        self.path = path
        self.header = header
        self.segments = list(segments)
        self.end = end
        self.nbytes = 0

    def append(self, block: ChangeBlock) -> None:
        """Append `block` to the file.  After an error (FileFailure, DiskFull) the file is as it was before."""
        pieces = [memoryview(block.to_arrow().serialize()).cast("B")]
        if not self.segments:
            # The schema is written with the first segment: no file exists without a segment.
            pieces.insert(0, memoryview(schema(self.header).serialize()).cast("B"))
        files.write_at(self.path, self.end, pieces, create=not self.segments)
        self.end += sum(map(len, pieces))
        length = len(pieces[-1])
        self.segments.append(Segment(self.end - length, length, zlib.crc32(pieces[-1]), block.count))
        self.nbytes += block.nbytes

    def read(self) -> Iterator[ChangeBlock]:
        """Yield a block for each segment, in order; none that was yielded is kept.

        Raises FileFailure, and DataCorrupted if the bytes are not those that were written.
        """
        if not self.segments:
            return
        expected = schema(self.header)
        with files.opened(self.path) as file:
            for number in range(len(self.segments)):
                yield self._block(file, number, expected)

    def _block(self, file: int, number: int, expected: pa.Schema) -> ChangeBlock:
        segment = self.segments[number]
        data = files.read_at(file, self.path, segment.offset, segment.length)
        where = f'segment {number + 1} of {len(self.segments)} in file "{self.path}"'
        if zlib.crc32(data) != segment.checksum:
            raise DataCorrupted(f"checksum mismatch in {where}", hint="The transaction must be fetched again.")
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), expected)
            batch.validate(full=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataCorrupted(f"{where} is not a record batch", detail=str(error)) from error
        if batch.num_rows != segment.count:
            raise DataCorrupted(f"{where} has {batch.num_rows} changes in place of {segment.count}")
        return ChangeBlock.from_arrow(batch, self.header)

    def remove(self) -> None:
        """Remove the file, if it was ever written and is not `durable`."""
        if self.segments and not self._durable:
            files.remove(self.path)
            self.segments.clear()
            self.end = self.nbytes = 0
