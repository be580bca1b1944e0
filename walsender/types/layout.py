"""Split a row's bytes into the bytes of each column.

A row is the part of a tuple that WAL holds: xl_heap_header (infomask2, infomask, hoff: 5 bytes), then the bytes after a
tuple's fixed header, null bitmap and padding first.  The bytes of a tuple on a page from byte 18 on are the same.

A value is None (NULL), the column's bytes (without a varlena's header, decompressed), or a `ToastPointer`.

Follows htup_details.h (heap_deform_tuple), tupmacs.h (att_align_pointer, att_addlength_pointer) and varatt.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import pyarrow as pa

from pubsub.errors import DataCorrupted
from walsender.xlog import pglz

ROW_HEADER: Final = Struct("<HHB")
ROW_HEADER_BYTES: Final = 5
TUPLE_FIXED_HEADER: Final = 23
"""Bytes of a tuple's header before its null bitmap (SizeofHeapTupleHeader)."""
ROW_IN_TUPLE: Final = 18
"""Where a row starts in a tuple on a page."""
HEAP_HASNULL: Final = 0x0001
HEAP_NATTS_MASK: Final = 0x07FF

VARTAG_ONDISK: Final = 18
_ALIGNMENT: Final = {"c": 1, "s": 2, "i": 4, "d": 8}
_U32: Final = Struct("<I")
_POINTER: Final = Struct("<iIII")

MAX_VALUE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ToastPointer:
    """A value that lies in a TOAST table (varatt.h: varatt_external)."""

    raw_size: int
    """Bytes of the uncompressed value with its header of 4."""
    external_size: int
    compression: int
    """0 pglz, 1 lz4, if external_size < raw_size - 4."""
    value_id: int
    toast_relid: int

    @property
    def compressed(self) -> bool:
        return self.external_size < self.raw_size - 4


Raw = bytes | ToastPointer | None


class ColumnLayout(NamedTuple):
    """A column's `length` in bytes (-1: varlena, -2: C string) and `alignment` in bytes.

    `missing`: the value that rows older than the column have.
    """

    length: int
    alignment: int
    missing: Raw = None


def alignment_of(attalign: str) -> int:
    """Return pg_attribute.attalign in bytes.  Raises DataCorrupted."""
    alignment = _ALIGNMENT.get(attalign)
    if alignment is None:
        raise DataCorrupted(f'invalid alignment "{attalign}" in a catalog')
    return alignment


def decompress(method: int, data: bytes, raw_size: int) -> bytes:
    """Decompress a value of `raw_size` bytes; `method` 0 is pglz, 1 lz4.  Raises DataCorrupted."""
    if not 0 <= raw_size <= MAX_VALUE_BYTES:
        raise DataCorrupted(f"a compressed value of {raw_size} bytes cannot be")
    if method == 0:
        return pglz.decompress(data, raw_size)
    if method == 1:
        try:
            plain: bytes = pa.Codec("lz4_raw").decompress(data, raw_size, asbytes=True)
        except (pa.ArrowException, OSError) as error:
            raise DataCorrupted("compressed lz4 data is corrupted") from error
        return plain
    raise DataCorrupted(f"invalid compression method id {method}")


def read_varlena(data: bytes, position: int) -> tuple[Raw, int]:
    """Read the varlena at `position`, aligned already; return it and where it ends.

    Raises DataCorrupted, IndexError, struct.error.
    """
    first = data[position]
    if first == 1:
        if data[position + 1] != VARTAG_ONDISK:
            raise DataCorrupted(f"unexpected tag {data[position + 1]} of an external value")
        raw_size, info, value_id, relid = _POINTER.unpack_from(data, position + 2)
        return ToastPointer(raw_size, info & 0x3FFFFFFF, info >> 30, value_id, relid), position + 18
    if first & 1:
        end = position + (first >> 1)
        value = data[position + 1 : end]
    else:
        (header,) = _U32.unpack_from(data, position)
        end = position + (header >> 2)
        if header & 3 == 2:
            (info,) = _U32.unpack_from(data, position + 4)
            if end > len(data) or end < position + 8:
                raise DataCorrupted("a value reaches past its tuple")
            return decompress(info >> 30, data[position + 8 : end], info & 0x3FFFFFFF), end
        value = data[position + 4 : end]
        if end < position + 4:
            raise DataCorrupted("a value reaches past its tuple")
    if end > len(data):
        raise DataCorrupted("a value reaches past its tuple")
    return value, end


class RowLayout:
    """The columns of one tuple descriptor, dropped ones included."""

    __slots__ = ("_count", "_missing", "_steps", "columns")

    def __init__(self, columns: Sequence[ColumnLayout]) -> None:
        self.columns = tuple(columns)
        self._steps = tuple((c.length, c.alignment - 1) for c in columns)
        self._missing = tuple(c.missing for c in columns)
        self._count = len(self.columns)

    def deform(self, row: bytes) -> list[Raw]:
        """Return every column's value.  Raises DataCorrupted and nothing else, whatever the bytes are."""
        try:
            return self._deform(row)
        except (IndexError, ValueError, struct.error) as error:
            raise DataCorrupted("a value reaches past its tuple") from error

    def _deform(self, row: bytes) -> list[Raw]:
        infomask2, infomask, hoff = ROW_HEADER.unpack_from(row)
        natts = infomask2 & HEAP_NATTS_MASK
        count = self._count
        steps = self._steps
        stored = natts < count
        if stored:
            steps = steps[:natts]
        # Alignment counts from the first column's byte, which in the tuple is a multiple of 8.
        base = hoff - ROW_IN_TUPLE
        if base < ROW_HEADER_BYTES or base > len(row):
            raise DataCorrupted("a tuple's header has an impossible length")
        data = row[base:] if base else row
        end = len(data)
        position = 0
        values: list[Raw] = []
        append = values.append
        if infomask & HEAP_HASNULL:
            bits = int.from_bytes(row[ROW_HEADER_BYTES : ROW_HEADER_BYTES + ((natts + 7) >> 3)], "little")
        else:
            bits = -1
        for length, mask in steps:
            if not bits & 1:
                bits >>= 1
                append(None)
                continue
            bits >>= 1
            if length > 0:
                position = (position + mask) & ~mask
                stop = position + length
                append(data[position:stop])
                position = stop
            elif length == -1:
                first = data[position]
                if not first:
                    position = (position + mask) & ~mask
                    first = data[position]
                if first & 1 and first != 1:
                    stop = position + (first >> 1)
                    append(data[position + 1 : stop])
                    position = stop
                else:
                    value, position = read_varlena(data, position)
                    append(value)
            else:
                stop = data.index(b"\0", position)
                append(data[position:stop])
                position = stop + 1
        if position > end:
            raise DataCorrupted("a value reaches past its tuple")
        if stored:
            values.extend(self._missing[natts:])
        return values


def toast_value(pointer: ToastPointer, stored: bytes) -> bytes:
    """Return the value of `pointer` from the joined bytes of its chunks.  Raises DataCorrupted."""
    if len(stored) != pointer.external_size:
        raise DataCorrupted(
            f"a TOASTed value has {len(stored)} bytes where its pointer says {pointer.external_size}",
            detail=f"Value {pointer.value_id} of TOAST table {pointer.toast_relid}.",
        )
    if not pointer.compressed:
        return stored
    # The compressed datum keeps its own header of raw size and method.
    if len(stored) < 4:
        raise DataCorrupted("compressed data is corrupted")
    (info,) = _U32.unpack_from(stored, 0)
    return decompress(info >> 30, stored[4:], info & 0x3FFFFFFF)
