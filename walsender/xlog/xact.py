"""Parsers of the records about transactions: commits, aborts, PREPAREs, lists of running transactions.

Follows xactdesc.c (ParseCommitRecord, ParseAbortRecord, ParsePrepareRecord), twophase.c (TwoPhaseFileHeader) and
standbydefs.h (xl_running_xacts).  Times are microseconds since 2000-01-01 UTC.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import WalFormat
from walsender.xlog.record import Record

_I64: Final = Struct("<q")
_U32: Final = Struct("<I")
_DB: Final = Struct("<II")
_ORIGIN: Final = Struct("<Qq")
_PREPARE: Final = Struct("<IIIIqIiiiiii?xHQq")
_RUNNING: Final = Struct("<ii?xxxIII")
_INVALIDATION_BYTES: Final = 16
_LOCATOR_BYTES: Final = 12


class XactEnd(NamedTuple):
    """A commit or abort, of a plain or a prepared transaction."""

    time: int
    """The origin's time if the record has an origin, as recorded: it may be 0 for a rollback."""
    database: int
    """0: not recorded."""
    subxids: tuple[int, ...]
    twophase_xid: int
    """The prepared transaction that ends; 0: the record's own transaction ends."""
    gid: bytes
    origin_lsn: int
    invalidations: int
    """Number of invalidation messages."""


@dataclass(frozen=True, slots=True)
class XactPrepare:
    xid: int
    database: int
    time: int
    subxids: tuple[int, ...]
    gid: bytes
    origin_lsn: int
    origin_time: int


@dataclass(frozen=True, slots=True)
class RunningXacts:
    """A list of running transactions.

    `xids` holds subtransactions too, unless it `overflowed`: then it holds none.  `next_xid` is the first not yet assigned.
    """

    xids: tuple[int, ...]
    next_xid: int
    oldest_running: int
    overflowed: bool = False

    def ended(self, xids: Iterable[int]) -> list[int]:
        """Return those of the transactions, which had begun before the list, that have ended, as far as the list tells."""
        listed = frozenset(self.xids)
        before = [(xid, precedes(xid, self.oldest_running)) for xid in xids]
        return [xid for xid, is_old in before if is_old or (not self.overflowed and xid not in listed)]


def precedes(xid: int, other: int) -> bool:
    """Return whether a transaction began before another, as their 32 bits wrap around (transam.c: TransactionIdPrecedes)."""
    return (xid - other) & 0xFFFFFFFF >= 1 << 31


def parse_end(record: Record, wal_format: WalFormat) -> XactEnd:
    """Parse COMMIT, ABORT, COMMIT PREPARED or ABORT PREPARED.  Raises WalCorrupted."""
    try:
        return _parse_end(record, wal_format)
    except (struct.error, IndexError, ValueError) as error:
        raise WalCorrupted("the record of a transaction's end is too short", record.lsn) from error


def _parse_end(record: Record, wal_format: WalFormat) -> XactEnd:
    data = record.main
    (time,) = _I64.unpack_from(data)
    position = 8
    xinfo = 0
    if record.info & f.XLOG_XACT_HAS_INFO:
        (xinfo,) = _U32.unpack_from(data, position)
        position += 4
    database = 0
    if xinfo & f.XACT_XINFO_HAS_DBINFO:
        database, _ = _DB.unpack_from(data, position)
        position += 8
    subxids: tuple[int, ...] = ()
    if xinfo & f.XACT_XINFO_HAS_SUBXACTS:
        count = _count(data, position, 4)
        subxids = struct.unpack_from(f"<{count}I", data, position + 4)
        position += 4 + 4 * count
    if xinfo & f.XACT_XINFO_HAS_RELFILELOCATORS:
        position += 4 + _LOCATOR_BYTES * _count(data, position, _LOCATOR_BYTES)
    if xinfo & f.XACT_XINFO_HAS_DROPPED_STATS:
        position += 4 + wal_format.dropped_stats_bytes * _count(data, position, wal_format.dropped_stats_bytes)
    invalidations = 0
    if xinfo & f.XACT_XINFO_HAS_INVALS:
        invalidations = _count(data, position, _INVALIDATION_BYTES)
        position += 4 + _INVALIDATION_BYTES * invalidations
    twophase_xid = 0
    gid = b""
    if xinfo & f.XACT_XINFO_HAS_TWOPHASE:
        (twophase_xid,) = _U32.unpack_from(data, position)
        position += 4
        if xinfo & f.XACT_XINFO_HAS_GID:
            end = data.index(b"\0", position)
            gid = data[position:end]
            position = end + 1
    origin_lsn = 0
    if xinfo & f.XACT_XINFO_HAS_ORIGIN:
        origin_lsn, time = _ORIGIN.unpack_from(data, position)
    return XactEnd(time, database, subxids, twophase_xid, gid, origin_lsn, invalidations)


def parse_prepare(record: Record) -> XactPrepare:
    """Parse PREPARE TRANSACTION.  Raises WalCorrupted."""
    try:
        fields = _PREPARE.unpack_from(record.main)
        _, _, xid, database, time, _, subxacts, _, _, _, _, _, _, gid_length, origin_lsn, origin_time = fields
        position = 72
        gid = record.main[position : position + gid_length].rstrip(b"\0")
        position += (gid_length + 7) & ~7
        if subxacts < 0 or position + 4 * subxacts > len(record.main):
            raise WalCorrupted("the record of a prepared transaction is too short", record.lsn)
        subxids = struct.unpack_from(f"<{subxacts}I", record.main, position)
    except struct.error as error:
        raise WalCorrupted("the record of a prepared transaction is too short", record.lsn) from error
    return XactPrepare(xid, database, time, subxids, gid, origin_lsn, origin_time)


def parse_running_xacts(record: Record) -> RunningXacts | None:
    """Parse a list of running transactions; None for the resource manager's other records.  Raises WalCorrupted."""
    if record.info & 0xF0 != f.XLOG_RUNNING_XACTS:
        return None
    try:
        count, subcount, overflowed, next_xid, oldest, _ = _RUNNING.unpack_from(record.main)
        total = count + subcount
        if count < 0 or subcount < 0 or 24 + 4 * total > len(record.main):
            raise WalCorrupted("the list of running transactions is too short", record.lsn)
        xids = struct.unpack_from(f"<{total}I", record.main, 24)
    except struct.error as error:
        raise WalCorrupted("the list of running transactions is too short", record.lsn) from error
    return RunningXacts(xids, next_xid, oldest, overflowed)


def _count(data: bytes, position: int, size: int) -> int:
    """Read the count of the items of `size` bytes that follow.  Raises IndexError unless they are all there."""
    count = int.from_bytes(data[position : position + 4], "little", signed=True)
    if count < 0 or position + 4 + count * size > len(data):
        raise IndexError
    return count
