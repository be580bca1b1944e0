"""Blocks of changes in byte buffers: an OpenBlock grows, a ChangeBlock is immutable.

A change is a frame of arbitrary bytes.  A block holds the concatenated frames, the length of each, and their
(sub)transactions as runs: a run is consecutive frames of one (sub)transaction, with none of another log received
between them.  There is no Python object per change.

The frames of a streamed transaction carry the id of their (sub)transaction after the type byte (proto.c).  Sealing a
block reads all its ids at once and moves each type byte to the last byte of the id.  A streamed message then looks as
it would outside a stream, with a header four bytes longer.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.errors import ProgramLimitExceeded, ProtocolViolation
from pubsub.protocol.arrow_arrays import MAX_BYTES, Bytes, bitmap, contents
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.reorderbuffer.log import BLOCK_BYTES

STREAM_HEADER: Final = XLOG_HEADER + 4
"""Bytes before the message in a sealed frame of a streamed transaction."""

_XLOG_DATA: Final = ord("w")

Lengths = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]
Xids = npt.NDArray[np.uint32]
Arrivals = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChangeBlock:
    """Frames in order of arrival: `data` holds them concatenated, `lengths` the bytes of each.

    Run i begins with frame `run_starts[i]` (the first run with 0) and belongs to (sub)transaction `run_xids[i]`.
    `run_arrivals` never decreases and orders runs among those of other logs.  `header` is the number of bytes before
    the message in each frame.  `memory` is the bytes that the block's buffers take, unused capacity included; 0 if it
    is a view of another block's.
    """

    data: Bytes
    lengths: Lengths
    run_starts: Positions
    run_xids: Xids
    run_arrivals: Arrivals
    header: int
    memory: int = 0

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames."""
        return self.data.size

    def run_lengths(self) -> Positions:
        """Return the number of frames in each run."""
        return np.diff(self.run_starts, append=self.count)

    def xids(self) -> Xids:
        """Return the (sub)transaction of each frame."""
        return np.repeat(self.run_xids, self.run_lengths())

    def arrivals(self) -> Arrivals:
        return np.repeat(self.run_arrivals, self.run_lengths())

    def message_types(self) -> npt.NDArray[np.uint8]:
        """Return the type byte of each frame's message; 0 if the frame ends before it."""
        if not self.data.size:
            return np.zeros(self.count, np.uint8)
        lengths = self.lengths.astype(np.int64)
        types = self.data.take(np.cumsum(lengths) - lengths + self.header, mode="clip")
        types[lengths <= self.header] = 0
        return types

    def frames(self) -> Iterator[bytes]:
        """Yield each frame as a `bytes` object: for rare messages and for tests."""
        start = 0
        for length in self.lengths.tolist():
            yield self.data[start : start + length].tobytes()
            start += length

    def others(self, types: bytes = b"IUD") -> Iterator[tuple[int, bytes]]:
        """Yield the messages of types not in `types` (Relation, Type, Truncate, …), each with its frame's number."""
        wanted = ~np.isin(self.message_types(), np.frombuffer(types, np.uint8))
        ends = np.cumsum(self.lengths.astype(np.int64))
        for number in np.flatnonzero(wanted).tolist():
            end = int(ends[number])
            yield number, self.data[end - int(self.lengths[number]) : end].tobytes()[self.header :]

    def by_xid(self) -> Iterator[tuple[int, int, int]]:
        """Yield each (sub)transaction with the number and the bytes of its frames."""
        if not self.count:
            return
        if len(self.run_xids) == 1:
            yield int(self.run_xids[0]), self.count, self.nbytes
            return
        sizes = np.add.reduceat(self.lengths.astype(np.int64), self.run_starts)
        xids, place = np.unique(self.run_xids, return_inverse=True)
        counts = np.bincount(place, self.run_lengths()).astype(np.int64)
        nbytes = np.bincount(place, sizes).astype(np.int64)
        yield from zip(xids.tolist(), counts.tolist(), nbytes.tolist(), strict=True)

    def without(self, xids: Xids) -> ChangeBlock:
        """Return a block without the frames of `xids`; the block itself if it has none."""
        unwanted = np.isin(self.run_xids, xids)
        if not unwanted.any():
            return self
        kept = ~unwanted
        run_lengths = self.run_lengths()
        wanted = pa.Array.from_buffers(pa.bool_(), self.count, [None, bitmap(np.repeat(kept, run_lengths))])
        data, offsets = contents(self._frames().filter(wanted))
        kept_lengths = run_lengths[kept]
        return ChangeBlock(
            data,
            np.diff(offsets).astype(np.uint32),
            np.cumsum(kept_lengths) - kept_lengths,
            self.run_xids[kept],
            self.run_arrivals[kept],
            self.header,
        )

    def cut(self, bounds: Sequence[int]) -> Iterator[ChangeBlock]:
        """Yield views of the frames between consecutive `bounds`, which rise from 0 to `count`."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths.astype(np.int64))])
        for first, end in itertools.pairwise(bounds):
            start_run = int(np.searchsorted(self.run_starts, first, side="right")) - 1
            runs = slice(start_run, int(np.searchsorted(self.run_starts, end)))
            yield ChangeBlock(
                self.data[offsets[first] : offsets[end]],
                self.lengths[first:end],
                np.maximum(self.run_starts[runs] - first, 0),
                self.run_xids[runs],
                self.run_arrivals[runs],
                self.header,
            )

    def runs(self) -> Iterator[tuple[int, ChangeBlock]]:
        """Yield a view of each run, with its arrival number."""
        bounds = [*self.run_starts.tolist(), self.count]
        yield from zip(self.run_arrivals.tolist(), self.cut(bounds), strict=True)

    def to_arrow(self) -> pa.RecordBatch:
        """Return a batch with the columns of `schema`, without copying the frames.

        Raises ProgramLimitExceeded for more than MAX_BYTES of frames.
        """
        if self.nbytes > MAX_BYTES:
            raise ProgramLimitExceeded(f"a block of {self.nbytes} bytes", detail=f"The limit is {MAX_BYTES} bytes.")
        # Not pa.array or to_numpy: they import pandas.
        xids = pa.Array.from_buffers(pa.uint32(), self.count, [None, pa.py_buffer(self.xids())])
        arrivals = pa.Array.from_buffers(pa.int64(), self.count, [None, pa.py_buffer(self.arrivals())])
        return pa.record_batch([xids, arrivals, self._frames()], schema=schema(self.header))

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch, header: int) -> Self:
        """Return the block that `to_arrow` turned into `batch`, as a view of `batch`."""
        xids = np.frombuffer(batch.column(0).buffers()[1], np.uint32, batch.num_rows)
        arrivals = np.frombuffer(batch.column(1).buffers()[1], np.int64, batch.num_rows)
        data, offsets = contents(batch.column(2))
        changes = (xids[1:] != xids[:-1]) | (arrivals[1:] != arrivals[:-1])
        starts = np.concatenate([np.zeros(min(1, len(xids)), np.int64), np.flatnonzero(changes) + 1])
        return cls(data, np.diff(offsets).astype(np.uint32), starts, xids[starts], arrivals[starts], header)

    def _frames(self) -> pa.BinaryArray:
        """Return the frames as an array over `data`."""
        offsets = np.zeros(self.count + 1, np.int32)
        np.cumsum(self.lengths, out=offsets[1:])
        return pa.Array.from_buffers(pa.binary(), self.count, [None, pa.py_buffer(offsets), pa.py_buffer(self.data)])


def schema(header: int) -> pa.Schema:
    """Return the schema of changes on disk; its metadata holds the header's length."""
    return pa.schema(
        [
            pa.field("xid", pa.uint32(), nullable=False),
            pa.field("arrival", pa.int64(), nullable=False),
            pa.field("frame", pa.binary(), nullable=False),
        ],
        metadata={"header": str(header)},
    )


class OpenBlock:
    """A block that grows.  `tagged` frames name their own (sub)transaction; for others the argument of `add` does.

    `memory` is the bytes allocated, the buffers' spare capacity included.
    """

    __slots__ = (
        "_arrival",
        "_arrivals",
        "_data",
        "_lengths",
        "_run_memory",
        "_starts",
        "_xid",
        "_xids",
        "memory",
        "tagged",
    )

    def __init__(self, *, tagged: bool) -> None:
        self.tagged = tagged
        self.memory = self._run_memory = 0
        self._xid = self._arrival = -1
        self._data = bytearray()
        self._lengths = array("I")
        self._starts = array("q")
        self._xids = array("I")
        self._arrivals = array("q")

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def add(self, data: bytes, frames: Sequence[bytes], xid: int, arrival: int) -> None:
        """Append `frames` (at least one); `data` is the same frames joined."""
        if self._xid != xid or self._arrival != arrival:
            self._xid, self._arrival = xid, arrival
            self._starts.append(len(self._lengths))
            self._xids.append(xid)
            self._arrivals.append(arrival)
            self._run_memory = getsizeof(self._starts) + getsizeof(self._xids) + getsizeof(self._arrivals)
        self._data += data
        if len(frames) == 1:
            self._lengths.append(len(data))
        else:
            self._lengths.extend(map(len, frames))
        self.memory = getsizeof(self._data) + getsizeof(self._lengths) + self._run_memory

    def seal(self, header: int) -> ChangeBlock:
        """Return the finished block; nothing may be added afterwards.

        Raises ProtocolViolation for a tagged frame that is not an XLogData with a transaction id.
        """
        data, lengths = np.frombuffer(self._data, np.uint8), np.frombuffer(self._lengths, np.uint32)
        starts, xids = np.frombuffer(self._starts, np.int64), np.frombuffer(self._xids, np.uint32)
        arrivals = np.frombuffer(self._arrivals, np.int64)
        if not self.tagged:
            return ChangeBlock(data, lengths, starts, xids, arrivals, header, self.memory)
        return _take_xids(data, lengths, starts, arrivals, self.memory - getsizeof(self._xids))


def _take_xids(data: Bytes, lengths: Lengths, starts: Positions, arrivals: Arrivals, memory: int) -> ChangeBlock:
    """Read each frame's xid and move its type byte to the xid's last byte, in place in `data`."""
    frames = np.cumsum(lengths.astype(np.int64)) - lengths
    if (lengths <= STREAM_HEADER).any() or (data[frames] != _XLOG_DATA).any():
        raise ProtocolViolation("a frame in a stream is too short to name its transaction")
    kind = frames + XLOG_HEADER
    xids = data[kind + 1].astype(np.uint32)
    for place in range(2, 5):
        xids <<= np.uint32(8)
        xids |= data[kind + place]
    data[kind + 4] = data[kind]
    arrival = np.repeat(arrivals, np.diff(starts, append=len(lengths)))
    changes = np.flatnonzero((xids[1:] != xids[:-1]) | (arrival[1:] != arrival[:-1]))
    run_starts = np.concatenate([np.zeros(1, np.int64), changes + 1])
    run_xids, run_arrivals = xids[run_starts], arrival[run_starts]
    memory += run_starts.nbytes + run_xids.nbytes + run_arrivals.nbytes
    return ChangeBlock(data, lengths, run_starts, run_xids, run_arrivals, STREAM_HEADER, memory)


def reblocked(blocks: Iterable[ChangeBlock], bound: int = BLOCK_BYTES) -> Iterator[ChangeBlock]:
    """Yield the same frames in blocks of at most `bound` bytes; only a block of a single frame may be larger.

    Small consecutive blocks are joined, empty ones dropped.  A block of one larger frame, which may take a gigabyte, is not
    kept here once it is yielded, nor while the next is read.
    """
    pending: list[ChangeBlock] = []
    size = 0
    source = iter(blocks)
    while (whole := next(source, None)) is not None:
        if whole.count == 1 and whole.nbytes > bound:
            if pending:
                yield _joined(pending)
            pending, size = [whole], 0
            del whole
            yield pending.pop()
            continue
        for block in _pieces(whole, bound):
            if pending and (size + block.nbytes > bound or pending[0].header != block.header):
                yield _joined(pending)
                pending, size = [], 0
            pending.append(block)
            size += block.nbytes
    if pending:
        yield _joined(pending)


def _pieces(block: ChangeBlock, bound: int) -> Iterator[ChangeBlock]:
    if block.nbytes <= bound:
        if block.count:
            yield block
        return
    ends = np.cumsum(block.lengths.astype(np.int64))
    bounds, before = [0], 0
    while bounds[-1] < block.count:
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, before + bound, side="right"))))
        before = int(ends[bounds[-1] - 1])
    yield from block.cut(bounds)


def _joined(blocks: Sequence[ChangeBlock]) -> ChangeBlock:
    if len(blocks) == 1:
        return blocks[0]
    counts = np.fromiter((block.count for block in blocks), np.int64, len(blocks))
    firsts = np.cumsum(counts) - counts
    return ChangeBlock(
        np.concatenate([block.data for block in blocks]),
        np.concatenate([block.lengths for block in blocks]),
        np.concatenate([block.run_starts + first for block, first in zip(blocks, firsts, strict=True)]),
        np.concatenate([block.run_xids for block in blocks]),
        np.concatenate([block.run_arrivals for block in blocks]),
        blocks[0].header,
    )
