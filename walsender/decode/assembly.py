"""The changes of transactions in progress, on the way to the project's reorder buffer.

Most transactions are small, but the reorder buffer's blocks are made for large ones.  So a transaction's first frames
stay here as they are.  A transaction's frames are handed over when they exceed `HANDOVER_BYTES`; all frames are handed over
when together they exceed a quarter of work_mem.

Outputs with the same rules share an assembly: they need the same changes at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.transaction import Transaction
from walsender.decode.changes import HEAD
from walsender.decode.merge import merged
from walsender.decode.transactions import Part, Txn
from walsender.hot.walk import FRAME_OVERHEAD

HANDOVER_BYTES: Final = 256 << 10
BATCH: Final = 256
"""Changes that are sent at a time, before something else can have its turn."""
_CHUNK_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides which changes outputs need, and when.

    `key`: equal for outputs that can share changes.  `settled`: the same for outputs none of whose transactions began before
    they did.  `streaming`: transactions may be sent before they end.  `skips_origin(origin)`: whether changes from there are
    left out.  `prepares(gid)`: whether a prepared transaction is sent at its PREPARE.
    """

    key: Hashable
    settled: Hashable
    streaming: bool
    skips_origin: Callable[[int], bool]
    prepares: Callable[[bytes], bool]


class Changes:
    """Changes that were taken out of a transaction, for `users`: each reads them once, or leaves them.

    `size`: bytes of their frames; `spilled`: whether they were on disk.
    """

    def __init__(self, source: Sequence[bytes] | Transaction, users: set[Any], size: int) -> None:
        self._source = source
        self.size = size
        self.spilled = isinstance(source, Transaction) and source.spilled
        self._users = users
        if not users:
            self._release()

    @property
    def few(self) -> Sequence[bytes] | None:
        """The changes themselves, if they are no more than a batch."""
        source = self._source
        return None if isinstance(source, Transaction) or len(source) > BATCH else source

    def batches(self) -> Iterator[Sequence[bytes]]:
        """Yield the changes in order, in batches."""
        source = self._source
        if not isinstance(source, Transaction):
            for first in range(0, len(source), BATCH):
                yield source[first : first + BATCH]
            return
        for chunk in source.chunks(_CHUNK_BYTES):
            for block in chunk.blocks:
                data = block.data.tobytes()
                start = 0
                frames = []
                for length in block.lengths.tolist():
                    frames.append(data[start : start + length])
                    start += length
                for first in range(0, len(frames), BATCH):
                    yield frames[first : first + BATCH]

    def leave(self, user: Any) -> None:
        """Note that `user` needs them no more.  May be called again."""
        if user in self._users:
            self._users.discard(user)
            if not self._users:
                self._release()

    def _release(self) -> None:
        if isinstance(self._source, Transaction):
            self._source.release()
        self._source = ()


class Assembly:
    """The changes that outputs with the same `rules` need.

    `bound`: bytes of all frames that are kept here; the rest is in `buffer`.  `memory` counts what a server would hold; None
    unless transactions may be streamed.
    """

    def __init__(self, rules: Rules, buffer: ReorderBuffer, bound: int) -> None:
        self.rules = rules
        self.memory: Any = None
        self.outputs: dict[Any, int] = {}
        """The outputs, each with the LSN from which on transactions must begin to be sent from here."""
        self.parts: set[Part] = set()
        self.closed = False
        """Whether transactions that begin now are sent from another assembly."""
        self._buffer = buffer
        self._bound = bound
        self.held = 0
        """At least the bytes of all frames that are not in the reorder buffer."""

    def count_exceeded(self) -> None:
        """Count for the outputs that work_mem was reached."""
        for output in self.outputs:
            output.statistics.mem_exceeded_count += 1

    def add(self, txn: Txn) -> Part:
        """Add a transaction that begins."""
        part = Part(self, txn)
        self.parts.add(part)
        return part

    def outputs_of(self, txn: Txn) -> list[Any]:
        """Return the outputs to which the transaction is sent from here."""
        first_lsn = txn.first_lsn
        return [output for output, since in self.outputs.items() if since <= first_lsn]

    def join(self, part: Part, other: Part) -> None:
        """Move the changes of `other`, which proved to be a subtransaction of `part`."""
        if other.handed_over:
            self._buffer.assign(other.txn.xid, part.txn.xid)
            part.handed_over = True
        part.frames = sorted(other.frames + part.frames, key=_lsn)
        part.held += other.held
        part.errors |= other.errors
        self.parts.discard(other)

    def append(self, part: Part, frame: bytes) -> None:
        """Append a change."""
        part.frames.append(frame)
        size = len(frame) + FRAME_OVERHEAD
        part.held += size
        self.held += size
        if part.held >= HANDOVER_BYTES:
            self.hand_over(part)

    def hand_over(self, part: Part) -> None:
        """Move the transaction's frames into the reorder buffer, in runs of one subtransaction each."""
        frames = part.frames
        if frames:
            top, lsn = part.txn.xid, Lsn(part.txn.first_lsn)
            start = 0
            xid = _xid(frames[0])
            for number, frame in enumerate(frames):
                other = _xid(frame)
                if other != xid:
                    self._buffer.append(xid, frames[start:number], top=top, lsn=lsn)
                    start, xid = number, other
            self._buffer.append(xid, frames[start:], top=top, lsn=lsn)
            part.frames = []
            self.held -= part.held
            part.held = 0
            part.handed_over = True
        if self._buffer.exceeded:
            if self.memory is None:
                self.count_exceeded()
            self._buffer.spill()

    def relieve(self) -> None:
        """Hand over all frames if more than the bound are held here."""
        if self.held > self._bound:
            self.held = sum(part.held for part in self.parts)
            if self.held > self._bound:
                for part in list(self.parts):
                    self.hand_over(part)

    def abort_subtransaction(self, part: Part, xid: int) -> None:
        """Drop the changes of `xid`, which was rolled back; the subtransactions inside it are aborted one by one."""
        for key in [key for key in part.errors if key[1] == xid]:
            del part.errors[key]
        if part.handed_over:
            self._buffer.abort(xid, top=part.txn.xid)
        if part.frames:
            kept = [frame for frame in part.frames if _xid(frame) != xid]
            if len(kept) != len(part.frames):
                size = sum(map(len, kept)) + FRAME_OVERHEAD * len(kept)
                self.held -= part.held - size
                part.held = size
                part.frames = kept

    def forget(self, part: Part) -> None:
        """Drop what is left of a transaction that has ended, with the changes that were not taken."""
        self.parts.discard(part)
        self.held -= part.held
        part.held = 0
        part.frames = []
        if part.handed_over:
            self._buffer.abort(part.txn.xid)
            part.handed_over = False

    def take(self, part: Part, users: set[Any]) -> Changes:
        """Take the changes so far out of the transaction, in order, without those of aborted subtransactions."""
        txn = part.txn
        if not part.handed_over:
            frames: Sequence[bytes] = part.frames
            size = part.held
            part.frames = []
            self.held -= size
            part.held = 0
            # Frames that were handed over stay in the order of the WAL: a server's order needs all of them at hand.
            if txn.messages and txn.subxids:
                frames = merged(frames, (txn.xid, *txn.subxids))
            return Changes(frames, users, size)
        self.hand_over(part)
        taken = self._buffer.take(txn.xid)
        return Changes(taken, users, taken.nbytes)

    def close(self) -> None:
        """Forget everything, and remove the files."""
        self.parts.clear()
        self._buffer.close()


def _xid(frame: bytes) -> int:
    return int.from_bytes(frame[1:5], "little")


def _lsn(frame: bytes) -> int:
    lsn: int = HEAD.unpack_from(frame)[3]
    return lsn
