"""The numbers of the WAL's formats: those that differ between versions, as data, and those shared from 15 on.

Follows xlog_internal.h (XLOG_PAGE_MAGIC), rmgrlist.h, xlogrecord.h, heapam_xlog.h, xact.h, standbydefs.h, pg_control.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import Final

BLCKSZ: Final = 8192
"""Bytes of a page of a table; servers built otherwise are refused."""
XLOG_BLCKSZ: Final = 8192
"""Bytes of a page of the WAL; servers built otherwise are refused."""

MAX_RECORD_BYTES: Final = 1020 << 20
"""xlogrecord.h: XLogRecordMaxSize.  15 has no such bound, but cannot write longer records either."""


@dataclass(frozen=True, slots=True)
class WalFormat:
    """One major version's WAL."""

    version: int
    """Major version."""
    page_magic: int
    dropped_stats_bytes: int
    """Bytes of an item of dropped statistics in a commit or abort record (xact.h: xl_xact_stats_item)."""
    overwrites_contrecord: int = 0x0008
    """XLP_FIRST_IS_OVERWRITE_CONTRECORD: the flag of a page after a record that was never completed."""
    page_flags: int = 0x000F
    """XLP_ALL_FLAGS; up to 18 one of them (0x0004, XLP_BKP_REMOVABLE) says nothing to a reader."""
    counts_bare_updates: bool = True
    """Whether decoding queues an update that logs no new row, as those of catalogs, and so counts it (decode.c: DecodeUpdate)."""


FORMATS: Final[Mapping[int, WalFormat]] = MappingProxyType(
    {
        f.page_magic: f
        for f in (
            WalFormat(15, 0xD110, 12),
            WalFormat(16, 0xD113, 12),
            WalFormat(17, 0xD116, 12),
            WalFormat(18, 0xD118, 16),
            WalFormat(19, 0xD122, 16, overwrites_contrecord=0x0004, page_flags=0x0007, counts_bare_updates=False),
        )
    }
)
"""By page magic."""


def format_of_version(server_version: int) -> WalFormat | None:
    """Return the format of a server's WAL; `server_version` is libpq's number.  None if the version is not known."""
    major = server_version // 10000
    return next((f for f in FORMATS.values() if f.version == major), None)


# Pages

SHORT_HEADER: Final = 24
LONG_HEADER: Final = 40
PAGE_HEADER: Final = Struct("<HHIQI")
"""magic, info, timeline, page address, bytes left of a record that began on an earlier page."""
LONG_HEADER_REST: Final = Struct("<QII")
"""system identifier, segment size, WAL page size: at SHORT_HEADER of a segment's first page."""
XLP_FIRST_IS_CONTRECORD: Final = 0x0001
XLP_LONG_HEADER: Final = 0x0002

# Records

RECORD_HEADER: Final = Struct("<IIQBBxxI")
"""total length, xid, previous record's position, info, resource manager, CRC."""
RECORD_HEADER_BYTES: Final = 24

XLR_RMGR_INFO_MASK: Final = 0xF0
MAX_BLOCK_ID: Final = 32
BLOCK_ID_DATA_SHORT: Final = 255
BLOCK_ID_DATA_LONG: Final = 254
BLOCK_ID_ORIGIN: Final = 253
BLOCK_ID_TOPLEVEL_XID: Final = 252

BKPBLOCK_FORK_MASK: Final = 0x0F
BKPBLOCK_HAS_IMAGE: Final = 0x10
BKPBLOCK_HAS_DATA: Final = 0x20
BKPBLOCK_WILL_INIT: Final = 0x40
BKPBLOCK_SAME_REL: Final = 0x80
BKPBLOCK_IMAGE_OR_SAME_REL: Final = BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL

BKPIMAGE_HAS_HOLE: Final = 0x01
BKPIMAGE_COMPRESS_PGLZ: Final = 0x04
BKPIMAGE_COMPRESS_LZ4: Final = 0x08
BKPIMAGE_COMPRESS_ZSTD: Final = 0x10
BKPIMAGE_COMPRESSED: Final = BKPIMAGE_COMPRESS_PGLZ | BKPIMAGE_COMPRESS_LZ4 | BKPIMAGE_COMPRESS_ZSTD

RM_MAX_BUILTIN: Final = 22
RM_MIN_CUSTOM: Final = 128


class Rmgr(IntEnum):
    """Resource managers whose records are parsed; of the others' records only the header is read."""

    XLOG = 0
    XACT = 1
    SMGR = 2
    DBASE = 4
    RELMAP = 7
    STANDBY = 8
    HEAP2 = 9
    HEAP = 10
    LOGICALMSG = 21


# info & XLR_RMGR_INFO_MASK, by resource manager

XLOG_CHECKPOINT_SHUTDOWN: Final = 0x00
XLOG_CHECKPOINT_ONLINE: Final = 0x10
XLOG_SWITCH: Final = 0x40
XLOG_PARAMETER_CHANGE: Final = 0x60
XLOG_FPW_CHANGE: Final = 0x80
XLOG_END_OF_RECOVERY: Final = 0x90
XLOG_FPI_FOR_HINT: Final = 0xA0
XLOG_FPI: Final = 0xB0
XLOG_LOGICAL_DECODING_STATUS_CHANGE: Final = 0xF0
"""From 19 on."""

XLOG_DBASE_CREATE_FILE_COPY: Final = 0x00
XLOG_DBASE_CREATE_WAL_LOG: Final = 0x10
XLOG_DBASE_DROP: Final = 0x20

XLOG_SMGR_CREATE: Final = 0x10
XLOG_SMGR_TRUNCATE: Final = 0x20

XLOG_STANDBY_LOCK: Final = 0x00
XLOG_RUNNING_XACTS: Final = 0x10

XLOG_HEAP_OPMASK: Final = 0x70
XLOG_HEAP_INIT_PAGE: Final = 0x80
XLOG_HEAP_INSERT: Final = 0x00
XLOG_HEAP_DELETE: Final = 0x10
XLOG_HEAP_UPDATE: Final = 0x20
XLOG_HEAP_TRUNCATE: Final = 0x30
XLOG_HEAP_HOT_UPDATE: Final = 0x40
XLOG_HEAP_CONFIRM: Final = 0x50
XLOG_HEAP_LOCK: Final = 0x60
XLOG_HEAP_INPLACE: Final = 0x70

XLOG_HEAP2_MULTI_INSERT: Final = 0x50
XLOG_HEAP2_NEW_CID: Final = 0x70

XLH_INSERT_LAST_IN_MULTI: Final = 0x02
XLH_INSERT_IS_SPECULATIVE: Final = 0x04
XLH_INSERT_CONTAINS_NEW_TUPLE: Final = 0x08
XLH_INSERT_ON_TOAST_RELATION: Final = 0x10
XLH_UPDATE_CONTAINS_OLD_TUPLE: Final = 0x04
XLH_UPDATE_CONTAINS_OLD_KEY: Final = 0x08
XLH_UPDATE_CONTAINS_NEW_TUPLE: Final = 0x10
XLH_UPDATE_PREFIX_FROM_OLD: Final = 0x20
XLH_UPDATE_SUFFIX_FROM_OLD: Final = 0x40
XLH_UPDATE_FROM_OLD: Final = XLH_UPDATE_PREFIX_FROM_OLD | XLH_UPDATE_SUFFIX_FROM_OLD
XLH_UPDATE_CONTAINS_OLD: Final = XLH_UPDATE_CONTAINS_OLD_TUPLE | XLH_UPDATE_CONTAINS_OLD_KEY
XLH_DELETE_CONTAINS_OLD: Final = 0x02 | 0x04
XLH_DELETE_IS_SUPER: Final = 0x08
XLH_DELETE_NO_LOGICAL: Final = 0x20
"""From 19 on: the row is of the transient table of a REPACK (CONCURRENTLY)."""
XLH_TRUNCATE_CASCADE: Final = 0x01
XLH_TRUNCATE_RESTART_SEQS: Final = 0x02

XLOG_XACT_OPMASK: Final = 0x70
XLOG_XACT_HAS_INFO: Final = 0x80
XLOG_XACT_COMMIT: Final = 0x00
XLOG_XACT_PREPARE: Final = 0x10
XLOG_XACT_ABORT: Final = 0x20
XLOG_XACT_COMMIT_PREPARED: Final = 0x30
XLOG_XACT_ABORT_PREPARED: Final = 0x40
XLOG_XACT_ASSIGNMENT: Final = 0x50
XLOG_XACT_INVALIDATIONS: Final = 0x60

XACT_XINFO_HAS_DBINFO: Final = 0x001
XACT_XINFO_HAS_SUBXACTS: Final = 0x002
XACT_XINFO_HAS_RELFILELOCATORS: Final = 0x004
XACT_XINFO_HAS_INVALS: Final = 0x008
XACT_XINFO_HAS_TWOPHASE: Final = 0x010
XACT_XINFO_HAS_ORIGIN: Final = 0x020
XACT_XINFO_HAS_GID: Final = 0x080
XACT_XINFO_HAS_DROPPED_STATS: Final = 0x100

WAL_LEVEL_LOGICAL: Final = 2
