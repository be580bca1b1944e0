"""Rows to pgoutput's tuples, written byte by byte: encoder.py's work if this module is compiled.

Interpreted it would be slow; then the closures of encoder.py are used.  Both, and the general path (layout.py,
pgoutput.py), give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i16_be, write_i32_be
from mypy_extensions import i16, i32, i64

# How a column's value is written.
_INT2: Final = 0
_INT4: Final = 1
_INT8: Final = 2
_OID: Final = 3
_TIMESTAMP: Final = 4
_TIMESTAMPTZ: Final = 5
_FIXED: Final = 6
_TEXT: Final = 7
_VARLENA: Final = 8

_KINDS: Final = {21: _INT2, 23: _INT4, 20: _INT8, 26: _OID, 28: _OID, 1114: _TIMESTAMP, 1184: _TIMESTAMPTZ}

_SECOND: Final = 1_000_000
_DAY: Final = 86_400_000_000
# 0001-01-01 and 10000-01-01 in microseconds from 2000-01-01: years between them have four digits and are AD.
_FIRST: Final = -63_082_281_600_000_000
_LAST: Final = 252_455_616_000_000_000


class RowEncoder:
    """Writes the tuples of one relation.

    `columns`: type, length, alignment, output function, whether that returns the bytes as they are, whether the column
    is sent.  `count` columns are sent.  No column's length is -2.
    """

    def __init__(
        self, columns: Sequence[tuple[int, int, int, Callable[[bytes], bytes], bool, bool]], count: int
    ) -> None:
        kinds = []
        for oid, length, _, _, plain, _ in columns:
            if length > 0:
                kinds.append(_KINDS.get(oid, _FIXED))
            else:
                kinds.append(_TEXT if plain else _VARLENA)
        self._kinds = bytes(kinds)
        self._sent = bytes([sent for _, _, _, _, _, sent in columns])
        self._masks = bytes([alignment - 1 for _, _, alignment, _, _, _ in columns])
        self._lengths: list[int] = [length for _, length, _, _, _, _ in columns]
        self._outs: list[Any] = [out for _, _, _, out, _, _ in columns]
        self._natts: i64 = len(columns)
        self._count: i64 = count

    def encode(self, head: bytes, data: bytes, at: int) -> bytes | None:
        """Return `head` and the tuple of the row data[at:]; None: take the general path.

        Raises IndexError if there are too few bytes, and what output functions raise.
        """
        start: i64 = at
        size: i64 = len(data)
        natts = self._natts
        word: i64 = i64(read_i32_le(data, start))
        if word & 0x07FF != natts:
            return None
        has_nulls = (word >> 16) & 1 != 0
        base: i64 = start + data[start + 4] - 18
        bits: i64 = start + 5
        if base < bits or base > size:
            return None
        kinds, sent, masks = self._kinds, self._sent, self._masks
        writer = BytesWriter()
        writer.write(head)
        writer.append(78)  # N
        write_i16_be(writer, i16(self._count))
        position = base
        number: i64 = 0
        while number < natts:
            wanted = sent[number] != 0
            if has_nulls and (data[bits + (number >> 3)] >> (number & 7)) & 1 == 0:
                if wanted:
                    writer.append(110)  # n
                number += 1
                continue
            kind: i64 = kinds[number]
            mask: i64 = masks[number]
            if kind < _TEXT:
                position = base + ((position - base + mask) & ~mask)
                length: i64 = self._lengths[number]
                if position + length > size:
                    raise IndexError
                if wanted:
                    if kind == _INT4:
                        _integer(writer, i64(read_i32_le(data, position)))
                    elif kind == _INT8:
                        _integer(writer, read_i64_le(data, position))
                    elif kind == _INT2:
                        _integer(writer, i64(read_i16_le(data, position)))
                    elif kind == _OID:
                        _integer(writer, i64(read_i32_le(data, position)) & 0xFFFFFFFF)
                    elif kind == _FIXED or not _timestamp(writer, read_i64_le(data, position), kind == _TIMESTAMPTZ):
                        _value(writer, self._outs[number](data[position : position + length]))
                position += length
                number += 1
                continue
            first: i64 = data[position]
            if first == 0:
                position = base + ((position - base + mask) & ~mask)
                first = data[position]
            end: i64 = 0
            if first & 1 != 0:
                if first == 1:
                    return None
                end = position + (first >> 1)
                position += 1
            else:
                if first & 2 != 0:
                    return None
                end = position + ((i64(read_i32_le(data, position)) & 0xFFFFFFFF) >> 2)
                position += 4
            if end > size or end < position:
                return None
            if wanted:
                if kind == _TEXT:
                    _value(writer, data[position:end])
                else:
                    _value(writer, self._outs[number](data[position:end]))
            position = end
            number += 1
        return writer.getvalue()


def _value(writer: BytesWriter, text: bytes) -> None:
    writer.append(116)  # t
    write_i32_be(writer, i32(len(text)))
    writer.write(text)


def _integer(writer: BytesWriter, value: i64) -> None:
    """Write an integer in decimal."""
    if value < -999_999_999_999_999_999 or value > 999_999_999_999_999_999:
        _value(writer, b"%d" % value)
        return
    rest: i64 = value
    length: i32 = 1
    if value < 0:
        rest = -value
        length = 2
    power: i64 = 1
    while power * 10 <= rest:
        power *= 10
        length += 1
    writer.append(116)
    write_i32_be(writer, length)
    if value < 0:
        writer.append(45)
    while power > 0:
        digit: i64 = rest // power
        writer.append(48 + digit)
        rest -= digit * power
        power //= 10


def _timestamp(writer: BytesWriter, value: i64, zone: bool) -> bool:
    """Write a time in microseconds since 2000-01-01; False if its year lacks four digits (times.py: _date, _time)."""
    if value < _FIRST or value >= _LAST:
        return False
    days: i64 = value // _DAY
    rest: i64 = value - days * _DAY
    extra: i64 = days + 2451545 + 32044
    quad: i64 = extra // 146097
    extra -= quad * 146097
    century: i64 = extra // 36524
    if century > 3:
        century = 3
    extra -= century * 36524
    four: i64 = extra // 1461
    extra -= four * 1461
    in_four: i64 = extra // 365
    if in_four > 3:
        in_four = 3
    day_of_year: i64 = extra - in_four * 365
    index: i64 = (5 * day_of_year + 2) // 153
    day: i64 = day_of_year - (153 * index + 2) // 5 + 1
    month: i64 = index + 3
    year: i64 = quad * 400 + century * 100 + four * 4 + in_four - 4800
    if index >= 10:
        month = index - 9
        year += 1
    second: i64 = rest // _SECOND
    fraction: i64 = rest - second * _SECOND
    length: i32 = 19
    digits: i64 = 0
    if fraction != 0:
        digits = 6
        while fraction % 10 == 0:
            fraction //= 10
            digits -= 1
        length += i32(digits + 1)
    if zone:
        length += 3
    writer.append(116)
    write_i32_be(writer, length)
    _two(writer, year // 100)
    _two(writer, year % 100)
    writer.append(45)
    _two(writer, month)
    writer.append(45)
    _two(writer, day)
    writer.append(32)
    _two(writer, second // 3600)
    writer.append(58)
    _two(writer, second // 60 % 60)
    writer.append(58)
    _two(writer, second % 60)
    if digits != 0:
        writer.append(46)
        power: i64 = 1
        while digits > 1:
            power *= 10
            digits -= 1
        while power > 0:
            digit: i64 = fraction // power
            writer.append(48 + digit)
            fraction -= digit * power
            power //= 10
    if zone:
        writer.append(43)
        writer.append(48)
        writer.append(48)
    return True


def _two(writer: BytesWriter, value: i64) -> None:
    writer.append(48 + value // 10)
    writer.append(48 + value % 10)
