"""Frames as received, in blocks.

A frame is the payload of one copy-both message: XLogData's 25-byte header and one pgoutput message.  A block is some
megabytes of concatenated frames and their lengths, the form that column decoding (rows.py) reads.  A frame's `bytes`
object lives only until its block is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from pubsub.protocol.copyboth import XLOG_HEADER

BLOCK_BYTES: Final = 2 << 20
"""The size at which a block is closed: of the order of a core's cache, since decoding walks a block once per column."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameBlock:
    """`data` holds the frames, `lengths` the bytes of each, in order of arrival."""

    data: bytes
    lengths: npt.NDArray[np.uint32]

    @classmethod
    def pack(cls, frames: Sequence[bytes]) -> Self:
        return cls(b"".join(frames), np.fromiter(map(len, frames), np.uint32, len(frames)))

    @property
    def header(self) -> int:
        """Bytes before the message in each frame."""
        return XLOG_HEADER

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return len(self.data) + self.lengths.nbytes

    def message_types(self) -> npt.NDArray[np.uint8]:
        """Return the type byte of each frame's pgoutput message; 0 if the frame is no XLogData or holds no message."""
        lengths = self.lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        data = np.frombuffer(self.data, np.uint8)
        if not data.size:
            return np.zeros(self.count, np.uint8)
        types = data.take(starts + XLOG_HEADER, mode="clip")
        types[(lengths <= XLOG_HEADER) | (data.take(starts, mode="clip") != ord("w"))] = 0
        return types


class FrameLog:
    """A growing sequence of frames.  `nbytes` and `count` are those of all frames appended."""

    __slots__ = ("_block_bytes", "_blocks", "_open", "_open_bytes", "count", "nbytes")

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[FrameBlock] = []
        self._open: list[bytes] = []
        self._open_bytes = 0
        self.nbytes = 0
        self.count = 0

    def append(self, frames: Sequence[bytes]) -> None:
        """Append frames in order.

        A block may exceed its bound by the frames of one call, which the size of the receiver's reads bounds.
        """
        size = sum(map(len, frames))
        self._open.extend(frames)
        self._open_bytes += size
        self.nbytes += size
        self.count += len(frames)
        if self._open_bytes >= self._block_bytes:
            self._close_block()

    def extend(self, blocks: Iterable[FrameBlock]) -> None:
        """Append whole blocks."""
        self._close_block()
        for block in blocks:
            self._blocks.append(block)
            self.nbytes += len(block.data)
            self.count += block.count

    def blocks(self) -> list[FrameBlock]:
        """Return all frames so far, as blocks."""
        self._close_block()
        return list(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self._open.clear()
        self._open_bytes = self.nbytes = self.count = 0

    def _close_block(self) -> None:
        if self._open:
            self._blocks.append(FrameBlock.pack(self._open))
            self._open.clear()
            self._open_bytes = 0
