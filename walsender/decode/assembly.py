"""Transactions in progress: their subtransactions, and their changes on the way to the project's reorder buffer.

Most transactions are small, but the reorder buffer's blocks are made for large ones.  So a transaction's first frames
stay here as they are.  A transaction's frames are handed over when they exceed `HANDOVER_BYTES`; all frames are handed over
when together they exceed a quarter of work_mem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.transaction import Transaction
from walsender.decode.changes import HEAD
from walsender.decode.merge import merged
from walsender.hot.walk import FRAME_OVERHEAD

if TYPE_CHECKING:
    from walsender.decode.relations import Found

HANDOVER_BYTES: Final = 256 << 10
_CHUNK_BYTES: Final = 4 << 20


class Txn:
    """A top-level transaction in progress.  `xids`: its own and its subtransactions', without aborted ones."""

    __slots__ = (
        "aborted",
        "cache",
        "catalog_xids",
        "errors",
        "first_lsn",
        "frames",
        "handed_over",
        "has_base",
        "held",
        "invalidations",
        "messages",
        "prepared",
        "replay",
        "sent",
        "streamed",
        "subxids",
        "two_phase",
        "xid",
        "xids",
    )

    def __init__(self, xid: int, first_lsn: int) -> None:
        self.xid = xid
        self.first_lsn = first_lsn
        self.xids: set[int] = {xid}
        self.subxids: list[int] = []
        self.aborted: set[int] = set()
        self.frames: list[bytes] = []
        self.held = 0
        """Bytes in `frames`."""
        self.handed_over = False
        self.has_base = False
        """Whether it has done something that needs a snapshot; only then is it sent at all."""
        self.cache: dict[int, Found[Any]] | None = None
        """Relations by file as it sees them, once it has changed the catalog itself."""
        self.catalog_xids: set[int] = set()
        """The (sub)transactions that changed any catalog.  Kept, like `invalidations`, only for streaming."""
        self.invalidations = 0
        self.messages = False
        """Whether a logical message was ever among its changes; stays true once they have been sent."""
        self.errors: dict[int, tuple[int, PubsubError]] = {}
        """Errors that prevent sending it: the xid of the change's subtransaction, its LSN and the error."""
        self.sent: Any = None
        """Its SentTransaction, once part of it was sent or its PREPARE was seen."""
        self.prepared = False
        """Its PREPARE was seen: it survives a restart of the server."""
        self.two_phase = False
        """It is prepared, and sent at its PREPARE."""
        self.streamed = False
        self.replay: Any = None


class Assembly:
    """All transactions in progress.  `bound`: bytes of all frames that are kept here; the rest is in `buffer`."""

    def __init__(self, buffer: ReorderBuffer, bound: int) -> None:
        self.by_xid: dict[int, Txn] = {}
        """Transactions, by every xid that is known to belong to them."""
        self._buffer = buffer
        self._bound = bound
        self.held = 0
        """Bytes of all frames that are not in the reorder buffer."""

    def begin(self, xid: int, lsn: int) -> Txn:
        """Begin a top-level transaction."""
        txn = self.by_xid[xid] = Txn(xid, lsn)
        return txn

    def assign(self, top: int, xid: int, lsn: int) -> Txn:
        """Make `xid` a subtransaction of `top`; both may be new (ReorderBufferAssignChild)."""
        txn = self.by_xid.get(top)
        if txn is None:
            txn = self.begin(top, lsn)
        known = self.by_xid.get(xid)
        if known is txn:
            return txn
        if known is not None:
            # It was taken for a top-level transaction; that happens only if decoding began in the middle of it.
            txn.first_lsn = min(txn.first_lsn, known.first_lsn)
            txn.has_base |= known.has_base
            txn.messages |= known.messages
            if known.handed_over:
                self._buffer.assign(xid, top)
                txn.handed_over = True
            txn.frames = sorted(known.frames + txn.frames, key=_lsn)
            txn.held += known.held
            txn.errors |= known.errors
        self.by_xid[xid] = txn
        txn.xids.add(xid)
        txn.subxids.append(xid)
        return txn

    def append(self, txn: Txn, frame: bytes) -> None:
        """Append a change."""
        txn.frames.append(frame)
        size = len(frame) + FRAME_OVERHEAD
        txn.held += size
        self.held += size
        if txn.held >= HANDOVER_BYTES:
            self.hand_over(txn)

    def hand_over(self, txn: Txn) -> None:
        """Move the transaction's frames into the reorder buffer, in runs of one subtransaction each."""
        frames = txn.frames
        if frames:
            lsn = Lsn(txn.first_lsn)
            start = 0
            xid = _xid(frames[0])
            for number, frame in enumerate(frames):
                other = _xid(frame)
                if other != xid:
                    self._buffer.append(xid, frames[start:number], top=txn.xid, lsn=lsn)
                    start, xid = number, other
            self._buffer.append(xid, frames[start:], top=txn.xid, lsn=lsn)
            txn.frames = []
            self.held -= txn.held
            txn.held = 0
            txn.handed_over = True
        if self._buffer.exceeded:
            self._buffer.spill()

    def relieve(self) -> None:
        """Hand over all frames if more than the bound are held here."""
        if self.held > self._bound:
            for txn in {id(t): t for t in self.by_xid.values()}.values():
                self.hand_over(txn)

    def abort_subtransaction(self, txn: Txn, xid: int) -> None:
        """Drop the changes of `xid`, which was rolled back; the subtransactions inside it are aborted one by one."""
        txn.xids.discard(xid)
        txn.aborted.add(xid)
        txn.errors.pop(xid, None)
        self.by_xid.pop(xid, None)
        if txn.handed_over:
            self._buffer.abort(xid, top=txn.xid)
        if txn.frames:
            kept = [frame for frame in txn.frames if _xid(frame) != xid]
            if len(kept) != len(txn.frames):
                size = sum(map(len, kept)) + FRAME_OVERHEAD * len(kept)
                self.held -= txn.held - size
                txn.held = size
                txn.frames = kept

    def forget(self, txn: Txn) -> None:
        """Drop a transaction that has ended, with the changes that were not read."""
        for xid in (txn.xid, *txn.subxids):
            if self.by_xid.get(xid) is txn:
                del self.by_xid[xid]
        self.held -= txn.held
        txn.held = 0
        txn.frames = []
        if txn.handed_over:
            self._buffer.abort(txn.xid)
            txn.handed_over = False

    def changes(self, txn: Txn) -> Iterator[bytes]:
        """Take the frames so far out of the transaction, in order, without those of aborted subtransactions."""
        if not txn.handed_over:
            frames = txn.frames
            txn.frames = []
            self.held -= txn.held
            txn.held = 0
            # Frames that were handed over stay in the order of the WAL: a server's order needs all of them at hand.
            yield from merged(frames, (txn.xid, *txn.subxids)) if txn.messages and txn.subxids else frames
            return
        self.hand_over(txn)
        with self._buffer.take(txn.xid) as part:
            yield from _frames(part)

    def transactions(self) -> list[Txn]:
        """Return each transaction once, the oldest first."""
        return sorted({id(t): t for t in self.by_xid.values()}.values(), key=lambda t: t.first_lsn)

    def oldest_lsn(self) -> int:
        """Return the LSN where the oldest transaction in progress began; 0 if there is none."""
        return min((txn.first_lsn for txn in self.by_xid.values()), default=0)


def _frames(part: Transaction) -> Iterator[bytes]:
    for chunk in part.chunks(_CHUNK_BYTES):
        for block in chunk.blocks:
            data = block.data.tobytes()
            start = 0
            for length in block.lengths.tolist():
                yield data[start : start + length]
                start += length


def _xid(frame: bytes) -> int:
    return int.from_bytes(frame[1:5], "little")


def _lsn(frame: bytes) -> int:
    lsn: int = HEAD.unpack_from(frame)[3]
    return lsn
