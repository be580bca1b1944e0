"""A log of changes in order of arrival: the older ones on disk, the newer ones in memory.

    SegmentFile  |  sealed blocks  |  the open block

A log supports four operations: append, move what is in memory to disk, read from the start, clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pubsub.errors import ProgramLimitExceeded
from pubsub.protocol.arrow_arrays import MAX_BYTES
from pubsub.reorderbuffer.block import STREAM_HEADER, ChangeBlock, OpenBlock, Xids
from pubsub.reorderbuffer.log import BLOCK_BYTES
from pubsub.reorderbuffer.segments import SegmentFile

Account = Callable[[int], None]
Counted = Callable[[ChangeBlock], None]


class ChangeLog:
    """A log of frames, each with `header` bytes before its message.

    The frames of a `tagged` log are XLogData whose messages name their (sub)transaction.  `memory` is the memory that
    the log holds, in bytes; the log calls `account` with each change of it.  It calls `counted` once for each block, on
    sealing it.
    """

    __slots__ = ("_account", "_blocks", "_counted", "_header", "_open", "_sealed_memory", "file", "memory", "tagged")

    def __init__(self, header: int, account: Account, counted: Counted, file: SegmentFile | None = None) -> None:
        self._header = header
        self._account = account
        self._counted = counted
        self._blocks: list[ChangeBlock] = []
        self._open: OpenBlock | None = None
        self._sealed_memory = 0
        self.memory = 0
        self.tagged = False
        self.file = file

    @property
    def header(self) -> int:
        """Bytes before the message in the frames of sealed blocks."""
        return STREAM_HEADER if self.tagged else self._header

    @property
    def empty(self) -> bool:
        return not self._blocks and self._open is None and self.file is None

    def append(self, frames: Sequence[bytes], xid: int, arrival: int, *, tagged: bool) -> None:
        """Append the `frames` (at least one) of (sub)transaction `xid`.

        `tagged` frames name their own, and sealing ignores `xid`.  Raises ProgramLimitExceeded for a frame longer than
        MAX_BYTES, ProtocolViolation like OpenBlock.seal, and ValueError if the log already holds frames of the other
        kind.
        """
        if tagged != self.tagged:
            if not self.empty:
                raise ValueError("tagged and other frames in one log")
            self.tagged = tagged
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        if len(data) > BLOCK_BYTES and len(frames) > 1:
            del data  # each half is joined again, and one of them may hold nearly all of it
            middle = len(frames) // 2
            self.append(frames[:middle], xid, arrival, tagged=tagged)
            self.append(frames[middle:], xid, arrival, tagged=tagged)
            return
        if len(data) > MAX_BYTES:
            raise ProgramLimitExceeded(f"a change of {len(data)} bytes", detail=f"The limit is {MAX_BYTES} bytes.")
        opened = self._open
        if opened is not None and opened.nbytes + len(data) > BLOCK_BYTES:
            self.seal()
            opened = None
        if opened is None:
            opened = self._open = OpenBlock(tagged=tagged)
        before = opened.memory
        opened.add(data, frames, xid, arrival)
        change = opened.memory - before
        if change:
            self.memory += change
            self._account(change)

    def seal(self) -> None:
        """Close the open block.  Raises ProtocolViolation like OpenBlock.seal, and leaves the block open then."""
        if self._open is not None:
            block = self._open.seal(self.header)
            self._open = None
            self._blocks.append(block)
            self._sealed_memory += block.memory
            self._weigh()
            self._counted(block)

    def spill(self, new_file: Callable[[int], SegmentFile], aborted: Xids) -> None:
        """Move the changes in memory to disk; drop those of the (sub)transactions `aborted`.

        `new_file` is called with the header's length in bytes and makes the log's file.  After an error, the changes
        not yet written are still in memory.
        """
        self.seal()
        while self._blocks:
            block = self._blocks[0]
            kept = block.without(aborted) if len(aborted) else block
            if kept.count:
                if self.file is None:
                    self.file = new_file(self.header)
                self.file.append(kept)
            del self._blocks[0]
            self._sealed_memory -= block.memory
            self._weigh()

    def read(self) -> Iterator[ChangeBlock]:
        """Yield all sealed blocks, those on disk first.  Raises like SegmentFile.read."""
        if self.file is not None:
            yield from self.file.read()
        yield from self._blocks

    def clear(self) -> None:
        """Forget all changes and remove the file.  Raises FileFailure; only the file remains then."""
        self._blocks.clear()
        self._open = None
        self._sealed_memory = 0
        self._weigh()
        if self.file is not None:
            self.file.remove()

    def _weigh(self) -> None:
        memory = self._sealed_memory + (self._open.memory if self._open is not None else 0)
        change, self.memory = memory - self.memory, memory
        self._account(change)
