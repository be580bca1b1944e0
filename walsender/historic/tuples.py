"""The tuples that a heap record inserts, changes or deletes: for catalogs, whose every tuple is followed.

A catalog's tuples are not logged for logical decoding: a full-page image may stand in place of a tuple's bytes, and an
update may leave out the bytes that old and new tuple share.  Follows heapam_xlog.c (heap_xlog_insert, heap_xlog_update,
heap_xlog_delete, heap_xlog_multi_insert, heap_xlog_inplace).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from pubsub.errors import PubsubError
from walsender.historic.heappage import tuple_at
from walsender.types.layout import ROW_HEADER_BYTES, ROW_IN_TUPLE, TUPLE_FIXED_HEADER
from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import Rmgr
from walsender.xlog.record import BlockRef, Record, RelFileLocator

_U16: Final = Struct("<H")
_INSERT: Final = Struct("<HB")
_DELETE: Final = Struct("<IHBB")
_UPDATE: Final = Struct("<IHBBIH")
_MULTI: Final = Struct("<BxH")
_MULTI_TUPLE: Final = Struct("<HHHB")
_HEAP: Final = int(Rmgr.HEAP)
_HEAP2: Final = int(Rmgr.HEAP2)
_NO_TUPLES: Final = frozenset({f.XLOG_HEAP_TRUNCATE, f.XLOG_HEAP_CONFIRM, f.XLOG_HEAP_LOCK})

OldRow = Callable[[RelFileLocator, int, int], bytes | None]
"""Returns the row at (locator, block, offset number); None if it is not known."""


class TupleOperation(NamedTuple):
    """A change of one tuple.  `kind`: "insert", "delete", "inplace", or "remove" (aborts a speculative insertion)."""

    kind: str
    block: int
    offset: int
    row: bytes = b""


def changes_tuples(record: Record) -> bool:
    """Return whether the record inserts, deletes or changes tuples."""
    if record.rmgr == _HEAP:
        return record.info & f.XLOG_HEAP_OPMASK not in _NO_TUPLES
    return record.rmgr == _HEAP2 and record.info & f.XLOG_HEAP_OPMASK == f.XLOG_HEAP2_MULTI_INSERT


def logs_rows(record: Record) -> bool:
    """Return whether a record that changes tuples holds rows for logical decoding, new or old.  Raises WalCorrupted."""
    try:
        if record.rmgr == _HEAP2:
            return bool(_MULTI.unpack_from(record.main)[0] & f.XLH_INSERT_CONTAINS_NEW_TUPLE)
        operation = record.info & f.XLOG_HEAP_OPMASK
        if operation == f.XLOG_HEAP_INSERT:
            return bool(_INSERT.unpack_from(record.main)[1] & f.XLH_INSERT_CONTAINS_NEW_TUPLE)
        if operation == f.XLOG_HEAP_DELETE:
            return bool(_DELETE.unpack_from(record.main)[3] & f.XLH_DELETE_CONTAINS_OLD)
        if operation in {f.XLOG_HEAP_UPDATE, f.XLOG_HEAP_HOT_UPDATE}:
            return bool(
                _UPDATE.unpack_from(record.main)[3] & (f.XLH_UPDATE_CONTAINS_NEW_TUPLE | f.XLH_UPDATE_CONTAINS_OLD)
            )
    except struct.error as error:
        raise WalCorrupted("a heap record is too short", record.lsn) from error
    return False


def operations(record: Record, old_row: OldRow) -> list[TupleOperation]:
    """Return what the record does, in order.  Raises WalCorrupted."""
    try:
        return _operations(record, old_row)
    except (struct.error, IndexError) as error:
        raise WalCorrupted("a heap record is too short", record.lsn) from error


def places(record: Record) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the (block, offset) at which the record inserts, and those that it marks as deleted.

    Raises WalCorrupted.
    """
    inserted: set[tuple[int, int]] = set()
    deleted: set[tuple[int, int]] = set()
    try:
        operation = record.info & f.XLOG_HEAP_OPMASK
        block = record.blocks[0].block
        if record.rmgr == _HEAP2:
            inserted = {(block, offset) for offset in _multi_offsets(record)}
        elif operation == f.XLOG_HEAP_INSERT:
            inserted.add((block, _U16.unpack_from(record.main)[0]))
        elif operation == f.XLOG_HEAP_DELETE:
            deleted.add((block, _DELETE.unpack_from(record.main)[1]))
        elif operation in {f.XLOG_HEAP_UPDATE, f.XLOG_HEAP_HOT_UPDATE}:
            _, old_offset, _, _, _, new_offset = _UPDATE.unpack_from(record.main)
            inserted.add((block, new_offset))
            deleted.add((_old_block(record).block, old_offset))
    except (struct.error, IndexError) as error:
        raise WalCorrupted("a heap record is too short", record.lsn) from error
    return inserted, deleted


def _operations(record: Record, old_row: OldRow) -> list[TupleOperation]:
    block = record.blocks[0]
    main = record.main
    if record.rmgr == _HEAP2:
        return _multi_insert(record, block)
    operation = record.info & f.XLOG_HEAP_OPMASK
    if operation == f.XLOG_HEAP_INSERT:
        (offset,) = _U16.unpack_from(main)
        return [TupleOperation("insert", block.block, offset, _row(record, block, offset))]
    if operation == f.XLOG_HEAP_DELETE:
        _, offset, _, flags = _DELETE.unpack_from(main)
        return [TupleOperation("remove" if flags & f.XLH_DELETE_IS_SUPER else "delete", block.block, offset)]
    if operation == f.XLOG_HEAP_INPLACE:
        (offset,) = _U16.unpack_from(main)
        if block.data is None:
            return [TupleOperation("inplace", block.block, offset, _from_image(record, block, offset))]
        old = _known(old_row, record, block, offset)
        return [TupleOperation("inplace", block.block, offset, old[: old[4] - ROW_IN_TUPLE] + block.data)]
    return _update(record, block, old_row)


def _update(record: Record, block: BlockRef, old_row: OldRow) -> list[TupleOperation]:
    _, old_offset, _, flags, _, new_offset = _UPDATE.unpack_from(record.main)
    old_block = _old_block(record)
    if block.data is None:
        row = _from_image(record, block, new_offset)
    else:
        data = block.data
        at = 0
        prefix = suffix = 0
        if flags & f.XLH_UPDATE_PREFIX_FROM_OLD:
            (prefix,) = _U16.unpack_from(data, at)
            at += 2
        if flags & f.XLH_UPDATE_SUFFIX_FROM_OLD:
            (suffix,) = _U16.unpack_from(data, at)
            at += 2
        row = data[at:]
        if prefix or suffix:
            old = _known(old_row, record, old_block, old_offset)
            old_data = old[old[4] - ROW_IN_TUPLE :]
            header = ROW_HEADER_BYTES + row[4] - TUPLE_FIXED_HEADER
            tail = old_data[len(old_data) - suffix :] if suffix else b""
            row = row[:header] + old_data[:prefix] + row[header:] + tail
    return [
        TupleOperation("delete", old_block.block, old_offset),
        TupleOperation("insert", block.block, new_offset, row),
    ]


def _old_block(record: Record) -> BlockRef:
    """Return the block of an update's old tuple: block 1 if there is one, else the new tuple's block.

    Later blocks are of the visibility map.
    """
    return next((block for block in record.blocks if block.number == 1), record.blocks[0])


def _multi_insert(record: Record, block: BlockRef) -> list[TupleOperation]:
    offsets = _multi_offsets(record)
    data = block.data
    if data is None:
        return [TupleOperation("insert", block.block, o, _from_image(record, block, o)) for o in offsets]
    found: list[TupleOperation] = []
    position = 0
    for offset in offsets:
        position = (position + 1) & ~1
        length, infomask2, infomask, hoff = _MULTI_TUPLE.unpack_from(data, position)
        position += _MULTI_TUPLE.size
        if position + length > len(data):
            raise WalCorrupted("a tuple reaches past its record", record.lsn)
        row = struct.pack("<HHB", infomask2, infomask, hoff) + data[position : position + length]
        position += length
        found.append(TupleOperation("insert", block.block, offset, row))
    return found


def _multi_offsets(record: Record) -> tuple[int, ...]:
    _, count = _MULTI.unpack_from(record.main)
    if record.info & f.XLOG_HEAP_INIT_PAGE:
        return tuple(range(1, count + 1))
    return struct.unpack_from(f"<{count}H", record.main, 4)


def _row(record: Record, block: BlockRef, offset: int) -> bytes:
    return block.data if block.data is not None else _from_image(record, block, offset)


def _from_image(record: Record, block: BlockRef, offset: int) -> bytes:
    try:
        return tuple_at(block.full_page(record.lsn), offset)[4]
    except WalCorrupted:
        raise
    except PubsubError as error:
        raise WalCorrupted(error.message, record.lsn) from error


def _known(old_row: OldRow, record: Record, block: BlockRef, offset: int) -> bytes:
    row = old_row(block.locator, block.block, offset)
    if row is None:
        raise WalCorrupted(f"the old tuple ({block.block},{offset}) of a catalog's update is not known", record.lsn)
    return row
