"""The kinds of WAL records that decoding looks at."""

from __future__ import annotations

from typing import Final

from walsender.xlog import formats as f
from walsender.xlog.formats import Rmgr

_LOOKED_AT: Final = frozenset(
    {Rmgr.XLOG, Rmgr.XACT, Rmgr.SMGR, Rmgr.DBASE, Rmgr.RELMAP, Rmgr.STANDBY, Rmgr.LOGICALMSG, Rmgr.HEAP, Rmgr.HEAP2}
)
# Kinds among these that are skipped as well: the first three unless every change is counted (accounting.py).
_NOT_COUNTED: Final = frozenset(
    {(Rmgr.XACT, f.XLOG_XACT_INVALIDATIONS), (Rmgr.HEAP2, f.XLOG_HEAP2_NEW_CID), (Rmgr.HEAP, f.XLOG_HEAP_LOCK)}
)
_NEVER: Final = frozenset({(Rmgr.SMGR, f.XLOG_SMGR_CREATE), (Rmgr.STANDBY, f.XLOG_STANDBY_LOCK)})


def irrelevant(*, counted: bool) -> bytes:
    """Build the table of record kinds to skip (walk.py).  `counted`: a server's memory is counted (accounting.py)."""
    kinds = bytearray(4096)
    for rmgr in range(256):
        for upper in range(16):
            kind = (rmgr, upper << 4)
            if rmgr not in _LOOKED_AT or kind in _NEVER or (kind in _NOT_COUNTED and not counted):
                kinds[rmgr << 4 | upper] = 1
    return bytes(kinds)
