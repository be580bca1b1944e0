"""A WAL record and its parts: blocks, full-page images, main data (xlogreader.c: DecodeXLogRecord).

`parse_record` parses any record.  Most records do not come here: the walk reads what it needs of them by itself
(hot/walk.py).  On broken bytes `parse_record` raises WalCorrupted and nothing else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from struct import Struct
from typing import Final

import pyarrow as pa

from pubsub.errors import DataCorrupted
from walsender.xlog import pglz
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import (
    BKPBLOCK_FORK_MASK,
    BKPBLOCK_HAS_DATA,
    BKPBLOCK_HAS_IMAGE,
    BKPBLOCK_SAME_REL,
    BKPBLOCK_WILL_INIT,
    BKPIMAGE_COMPRESS_LZ4,
    BKPIMAGE_COMPRESS_PGLZ,
    BKPIMAGE_COMPRESSED,
    BKPIMAGE_HAS_HOLE,
    BLCKSZ,
    BLOCK_ID_DATA_LONG,
    BLOCK_ID_DATA_SHORT,
    BLOCK_ID_ORIGIN,
    BLOCK_ID_TOPLEVEL_XID,
    MAX_BLOCK_ID,
    RECORD_HEADER_BYTES,
)

_BLOCK: Final = Struct("<BBH")
_IMAGE: Final = Struct("<HHB")
_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_LOCATOR: Final = Struct("<III")
_ONE_BLOCK: Final = Struct("<BBHIIIIBB")
"""A block's id, flags, data length, locator and number; the main data's id and length."""

RelFileLocator = tuple[int, int, int]
"""Tablespace, database (0: shared), file number."""

GLOBAL_TABLESPACE: Final = 1664
"""Where the files of shared catalogs are."""


@dataclass(slots=True)
class BlockRef:
    """A block that a record touches.  `data` and `image` are None if the record has none."""

    number: int
    locator: RelFileLocator
    fork: int
    block: int
    will_init: bool
    data: bytes | None
    image: bytes | None
    """As stored, without the hole and perhaps compressed; `full_page` restores the page."""
    hole_offset: int
    hole_length: int
    image_info: int

    def full_page(self, lsn: int) -> bytes:
        """Restore the page of BLCKSZ bytes.  Raises WalCorrupted (xlogreader.c: RestoreBlockImage)."""
        image = self.image
        if image is None:
            raise WalCorrupted("a full-page image is missing", lsn)
        raw_size = BLCKSZ - self.hole_length
        if self.image_info & BKPIMAGE_COMPRESSED:
            try:
                if self.image_info & BKPIMAGE_COMPRESS_PGLZ:
                    image = pglz.decompress(image, raw_size, whole=False)
                else:
                    codec = "lz4_raw" if self.image_info & BKPIMAGE_COMPRESS_LZ4 else "zstd"
                    image = pa.Codec(codec).decompress(image, raw_size, asbytes=True)
            except (DataCorrupted, pa.ArrowException, OSError) as error:
                raise WalCorrupted(f"could not restore the image of block {self.block}: {error}", lsn) from error
        if len(image) != raw_size:
            raise WalCorrupted(f"the image of block {self.block} has {len(image)} bytes, not {raw_size}", lsn)
        if not self.hole_length:
            return image
        return image[: self.hole_offset] + bytes(self.hole_length) + image[self.hole_offset :]


@dataclass(slots=True)
class Record:
    """A parsed record.

    `lsn` is where it starts, `end_lsn` the byte after it (XLogReaderState: ReadRecPtr, EndRecPtr), or `lsn` if the
    caller does not need it.
    """

    lsn: int
    end_lsn: int
    xid: int
    rmgr: int
    info: int
    blocks: list[BlockRef]
    main: bytes
    origin: int
    """Replication origin; 0: none."""
    top_xid: int
    """The top-level transaction of `xid`, on the first record of a subtransaction; else 0."""


def parse_record(
    data: bytes, start: int, length: int, lsn: int, end_lsn: int, xid: int, info: int, rmgr: int
) -> Record:
    """Parse the record of `length` bytes at `data[start]`.  Raises WalCorrupted."""
    main = start + RECORD_HEADER_BYTES
    if length > RECORD_HEADER_BYTES + 2 and data[main] == BLOCK_ID_DATA_SHORT and data[main + 1] == length - 26:
        # Main data alone, as in most commits and aborts.
        return Record(lsn, end_lsn, xid, rmgr, info, [], data[main + 2 : start + length], 0, 0)
    if length > _ONE_BLOCK.size + RECORD_HEADER_BYTES:
        block_id, flags, size, space, database, number, block, main_id, main_size = _ONE_BLOCK.unpack_from(data, main)
        at = main + _ONE_BLOCK.size
        if (
            main_id == BLOCK_ID_DATA_SHORT
            and block_id == 0
            and flags & (BKPBLOCK_HAS_IMAGE | BKPBLOCK_SAME_REL | BKPBLOCK_HAS_DATA)
            == (BKPBLOCK_HAS_DATA if size else 0)
            and at + size + main_size == start + length
        ):
            # One block without an image, and main data, as in most other records.
            ref = BlockRef(
                0,
                (space, database, number),
                flags & BKPBLOCK_FORK_MASK,
                block,
                bool(flags & BKPBLOCK_WILL_INIT),
                data[at : at + size] if size else None,
                None,
                0,
                0,
                0,
            )
            return Record(lsn, end_lsn, xid, rmgr, info, [ref], data[at + size : start + length], 0, 0)
    try:
        return _parse(data, start, length, lsn, end_lsn, xid, info, rmgr)
    except (struct.error, IndexError) as error:
        raise WalCorrupted("record with an invalid length of its parts", lsn) from error


def _parse(data: bytes, start: int, length: int, lsn: int, end_lsn: int, xid: int, info: int, rmgr: int) -> Record:
    position = start + RECORD_HEADER_BYTES
    end = start + length
    total = 0  # bytes of data that the headers read so far announce
    main_length = 0
    origin = top_xid = 0
    headers: list[tuple[int, int, RelFileLocator, int, int, int, int, int, int]] = []
    locator: RelFileLocator | None = None
    last_id = -1
    while end - position > total:
        block_id = data[position]
        if block_id <= MAX_BLOCK_ID:
            if block_id <= last_id:
                raise WalCorrupted(f"out-of-order block_id {block_id}", lsn)
            last_id = block_id
            _, fork_flags, data_length = _BLOCK.unpack_from(data, position)
            position += 4
            image_length = hole_offset = hole_length = image_info = 0
            if bool(fork_flags & BKPBLOCK_HAS_DATA) != (data_length > 0):
                raise WalCorrupted("the flag for a block's data and the data's length do not agree", lsn)
            if fork_flags & BKPBLOCK_HAS_IMAGE:
                image_length, hole_offset, image_info = _IMAGE.unpack_from(data, position)
                position += 5
                if image_info & BKPIMAGE_COMPRESSED:
                    if image_info & BKPIMAGE_HAS_HOLE:
                        (hole_length,) = _U16.unpack_from(data, position)
                        position += 2
                else:
                    hole_length = BLCKSZ - image_length
                if hole_length < 0 or hole_offset + hole_length > BLCKSZ or image_length > BLCKSZ:
                    raise WalCorrupted("a full-page image with an impossible hole", lsn)
                if bool(image_info & BKPIMAGE_HAS_HOLE) != (hole_length > 0):
                    raise WalCorrupted("a full-page image whose hole and its flag do not agree", lsn)
            if fork_flags & BKPBLOCK_SAME_REL:
                if locator is None:
                    raise WalCorrupted("BKPBLOCK_SAME_REL set but no previous rel", lsn)
            else:
                locator = _LOCATOR.unpack_from(data, position)
                position += 12
            (block,) = _U32.unpack_from(data, position)
            position += 4
            total += data_length + image_length
            headers.append(
                (block_id, fork_flags, locator, block, data_length, image_length, hole_offset, hole_length, image_info)
            )
        elif block_id == BLOCK_ID_DATA_SHORT:
            main_length = data[position + 1]
            position += 2
            total += main_length
            break
        elif block_id == BLOCK_ID_DATA_LONG:
            (main_length,) = _U32.unpack_from(data, position + 1)
            position += 5
            total += main_length
            break
        elif block_id == BLOCK_ID_ORIGIN:
            (origin,) = _U16.unpack_from(data, position + 1)
            position += 3
        elif block_id == BLOCK_ID_TOPLEVEL_XID:
            (top_xid,) = _U32.unpack_from(data, position + 1)
            position += 5
        else:
            raise WalCorrupted(f"invalid block_id {block_id}", lsn)
    if end - position != total:
        raise WalCorrupted("record with an invalid length of its parts", lsn)
    blocks: list[BlockRef] = []
    for block_id, flags, where, block, data_length, image_length, hole_offset, hole_length, image_info in headers:
        image = None
        if flags & BKPBLOCK_HAS_IMAGE:
            image = data[position : position + image_length]
            position += image_length
        payload = None
        if flags & BKPBLOCK_HAS_DATA:
            payload = data[position : position + data_length]
            position += data_length
        blocks.append(
            BlockRef(
                block_id,
                where,
                flags & BKPBLOCK_FORK_MASK,
                block,
                bool(flags & BKPBLOCK_WILL_INIT),
                payload,
                image,
                hole_offset,
                hole_length,
                image_info,
            )
        )
    return Record(lsn, end_lsn, xid, rmgr, info, blocks, data[position:end], origin, top_xid)
