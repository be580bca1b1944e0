"""Transactions in progress, with their subtransactions (reorderbuffer.c: ReorderBufferTXN, ReorderBufferAssignChild).

A transaction is one for all outputs.  What they need of its changes is in its parts, one for each assembly (assembly.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pubsub.errors import PubsubError

if TYPE_CHECKING:
    from walsender.decode.relations import Found


class Txn:
    """A top-level transaction in progress.  `xids`: its own and its subtransactions', without aborted ones."""

    __slots__ = (
        "aborted",
        "cache",
        "catalog_xids",
        "first_lsn",
        "has_base",
        "invalidations",
        "messages",
        "parts",
        "subxids",
        "xid",
        "xids",
    )

    def __init__(self, xid: int, first_lsn: int) -> None:
        self.xid = xid
        self.first_lsn = first_lsn
        self.xids: set[int] = {xid}
        self.subxids: list[int] = []
        self.aborted: set[int] = set()
        self.has_base = False
        """Whether it has done something that needs a snapshot; only then is it sent at all."""
        self.cache: dict[int, Found] | None = None
        """Relations by file as it sees them, once it has changed the catalog itself."""
        self.catalog_xids: set[int] = set()
        """The (sub)transactions that changed any catalog.  Kept, like `invalidations`, only for streaming."""
        self.invalidations = 0
        self.messages = False
        """Whether a logical message was ever among its changes; stays true once they have been sent."""
        self.parts: list[Part] = []


class Part:
    """A transaction's changes in one assembly, and what its outputs were sent of them."""

    __slots__ = (
        "assembly",
        "errors",
        "frames",
        "handed_over",
        "held",
        "prepared_at",
        "sent",
        "streamed",
        "two_phase",
        "txn",
    )

    def __init__(self, assembly: Any, txn: Txn) -> None:
        self.assembly = assembly
        self.txn = txn
        self.frames: list[bytes] = []
        self.held = 0
        """Bytes in `frames`."""
        self.handed_over = False
        self.errors: dict[tuple[int, int], tuple[int, PubsubError]] = {}
        """Errors that prevent sending it, by output and the xid of the change's subtransaction: the change's LSN and the error.
        Output 0: all of them."""
        self.sent: dict[Any, Any] = {}
        """By output, what it knows of the transaction once part of it was sent or its PREPARE was seen (output.py)."""
        self.prepared_at = 0
        """Start of its PREPARE's record."""
        self.two_phase = False
        """It is prepared, and sent at its PREPARE."""
        self.streamed = False


class Transactions:
    """All transactions in progress.  `parts` makes a new transaction's parts, and `join` moves those of one into another's."""

    def __init__(self, parts: Callable[[Txn], list[Part]], join: Callable[[Part, Part], None]) -> None:
        self.by_xid: dict[int, Txn] = {}
        """Transactions, by every xid that is known to belong to them."""
        # Each once: one transaction may have millions of xids.
        self._open: dict[Txn, None] = {}
        self._parts = parts
        self._join = join

    def begin(self, xid: int, lsn: int) -> Txn:
        """Begin a top-level transaction."""
        txn = self.by_xid[xid] = Txn(xid, lsn)
        self._open[txn] = None
        txn.parts = self._parts(txn)
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
            for part, other in _alike(txn.parts, known.parts):
                self._join(part, other)
            if not known.subxids:
                self._open.pop(known, None)
        self.by_xid[xid] = txn
        txn.xids.add(xid)
        txn.subxids.append(xid)
        return txn

    def forget(self, txn: Txn) -> None:
        """Forget a transaction that has ended."""
        for xid in (txn.xid, *txn.subxids):
            if self.by_xid.get(xid) is txn:
                del self.by_xid[xid]
        self._open.pop(txn, None)

    def forget_one(self, xid: int) -> Txn | None:
        """Forget a (sub)transaction that was rolled back, whatever its parent does; return the transaction it was of."""
        txn = self.by_xid.pop(xid, None)
        if txn is not None and txn.xid == xid and not txn.subxids:
            # No record has said that it was a subtransaction.
            self._open.pop(txn, None)
        return txn

    def all(self) -> list[Txn]:
        """Return each transaction once, the oldest first."""
        return sorted(self._open, key=lambda txn: txn.first_lsn)

    def oldest_lsn(self) -> int:
        """Return the LSN where the oldest transaction in progress began; 0 if there is none."""
        return min((txn.first_lsn for txn in self._open), default=0)


def _alike(parts: Sequence[Part], others: Sequence[Part]) -> list[tuple[Part, Part]]:
    return [(part, other) for part in parts for other in others if other.assembly is part.assembly]
