"""Types of PostgreSQL's extensions (hstore_io.c, hstore.h, ltree_io.c, ltxtquery_io.c, ltree.h, cube.c, cubedata.h)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted, FeatureNotSupported
from pubsub.protocol.output.numbers import float8out

_U2: Final = Struct("<H")
_U4: Final = Struct("<I")
_NEW_VERSION: Final = 0x80000000
_COUNT: Final = 0x0FFFFFFF
_IS_NULL: Final = 0x40000000
_END: Final = 0x3FFFFFFF
_LEVEL: Final = Struct("<5H")
_LEVEL_NOT: Final = 0x10
_LEVEL_COUNT: Final = 0x20
_MAX_LEVELS: Final = 65535
_VARIANT: Final = Struct("<iHB")
_ITEM: Final = Struct("<hhiBBH")
_OPERAND: Final = 2
_POINT: Final = 0x80000000


def hstore_text(pairs: Iterable[tuple[bytes | None, bytes | None]]) -> bytes:
    return b", ".join([_quoted(key) + b"=>" + _quoted(value) for key, value in pairs])


def _quoted(text: bytes | None) -> bytes:
    if text is None:
        return b"NULL"
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def hstore_out(value: bytes) -> bytes:
    """Return the text of an hstore.  Raises DataCorrupted, and FeatureNotSupported for a value stored before 9.0."""
    return hstore_text(_pairs(value))


def hstore_send(value: bytes) -> bytes:
    pairs = _pairs(value)
    parts = [struct.pack(">I", len(pairs))]
    parts += [
        b"\xff\xff\xff\xff" if text is None else struct.pack(">I", len(text)) + text for pair in pairs for text in pair
    ]
    return b"".join(parts)


def _pairs(value: bytes) -> list[tuple[bytes | None, bytes | None]]:
    try:
        (header,) = _U4.unpack_from(value)
        if not header & _NEW_VERSION:
            raise FeatureNotSupported("values of hstore that were stored by PostgreSQL 8.4 cannot be read")
        count = header & _COUNT
        entries = struct.unpack_from(f"<{2 * count}I", value, 4)
    except struct.error as error:
        raise DataCorrupted("an hstore is too short") from error
    base = 4 + 8 * count
    texts: list[bytes | None] = []
    start = 0
    for entry in entries:
        end = entry & _END
        if not start <= end <= len(value) - base:
            raise DataCorrupted("an hstore is too short")
        texts.append(None if entry & _IS_NULL else value[base + start : base + end])
        start = end
    return list(zip(texts[0::2], texts[1::2], strict=True))


def ltree_out(value: bytes) -> bytes:
    """Return the text of an ltree.  Raises DataCorrupted."""
    try:
        (count,) = _U2.unpack_from(value)
        levels: list[bytes] = []
        # Each level is aligned to 8 bytes, counted from the value's 4-byte header, which is not in `value`.
        at = 4
        for _ in range(count):
            (length,) = _U2.unpack_from(value, at)
            levels.append(value[at + 2 : at + 2 + length])
            at += (length + 2 + 7) & ~7
        return b".".join(levels)
    except struct.error as error:
        raise DataCorrupted("an ltree is too short") from error


def ltree_send(value: bytes) -> bytes:
    return b"\1" + ltree_out(value)


def lquery_out(value: bytes) -> bytes:
    """Return the text of an lquery.  Raises DataCorrupted (ltree_io.c: deparse_lquery)."""
    try:
        (count,) = _U2.unpack_from(value)
        levels = []
        # Alignment to 8 bytes counts from the value's 4-byte header, which is not in `value`.
        at = 12
        for _ in range(count):
            length, flags, variants, low, high = _LEVEL.unpack_from(value, at)
            text = b"".join(_variants(value, at + 16, variants)) if variants else b"*"
            if flags & _LEVEL_NOT and variants:
                text = b"!" + text
            if flags & _LEVEL_COUNT or not variants:
                text += _repeats(low, high, anything=not variants)
            levels.append(text)
            at += (length + 7) & ~7
        return b".".join(levels)
    except struct.error as error:
        raise DataCorrupted("an lquery is too short") from error


def _variants(value: bytes, at: int, count: int) -> Iterable[bytes]:
    for number in range(count):
        _, length, flags = _VARIANT.unpack_from(value, at)
        yield (b"|" if number else b"") + value[at + 7 : at + 7 + length] + _marks(flags)
        at += 8 + ((length + 7) & ~7)


def _marks(flags: int) -> bytes:
    return (b"%" if flags & 4 else b"") + (b"@" if flags & 2 else b"") + (b"*" if flags & 1 else b"")


def _repeats(low: int, high: int, *, anything: bool) -> bytes:
    if low == high:
        return f"{{{low}}}".encode()
    if low == 0 and high == _MAX_LEVELS and anything:
        return b""
    return f"{{{low or ''},{'' if high == _MAX_LEVELS else high}}}".encode()


def lquery_send(value: bytes) -> bytes:
    return b"\1" + lquery_out(value)


def ltxtquery_out(value: bytes) -> bytes:
    """Return the text of an ltxtquery.  Raises DataCorrupted (ltxtquery_io.c: infix)."""
    try:
        (count,) = _U4.unpack_from(value)
        return _condition(value, 0, count, outermost=True)[0] if count else b""
    except (struct.error, RecursionError) as error:
        raise DataCorrupted("an ltxtquery is too short") from error


def _condition(value: bytes, item: int, count: int, *, outermost: bool) -> tuple[bytes, int]:
    """Return the item's text, and the number of the item after it."""
    if item >= count:
        raise DataCorrupted("an ltxtquery ends within")
    kind, _, operator, flags, length, distance = _ITEM.unpack_from(value, 4 + item * _ITEM.size)
    if kind == _OPERAND:
        start = 4 + count * _ITEM.size + distance
        return value[start : start + length] + _marks(flags), item + 1
    if operator == ord("!"):
        of_operator = item + 1 < count and _ITEM.unpack_from(value, 4 + (item + 1) * _ITEM.size)[0] != _OPERAND
        text, after = _condition(value, item + 1, count, outermost=of_operator)
        return b"!( " + text + b" )" if of_operator else b"!" + text, after
    # The right operand comes first.
    right, after = _condition(value, item + 1, count, outermost=False)
    left, after = _condition(value, after, count, outermost=False)
    text = left + b" " + bytes((operator & 0xFF,)) + b" " + right
    return (b"( " + text + b" )" if operator == ord("|") and not outermost else text), after


def ltxtquery_send(value: bytes) -> bytes:
    return b"\1" + ltxtquery_out(value)


def cube_out(value: bytes) -> bytes:
    """Return the text of a cube.  Raises DataCorrupted."""
    dimensions, numbers = _cube(value)
    lower, upper = numbers[:dimensions], numbers[dimensions:]
    text = b"(" + b", ".join(map(_float8, lower)) + b")"
    return text if not upper or upper == lower else text + b",(" + b", ".join(map(_float8, upper)) + b")"


def cube_send(value: bytes) -> bytes:
    """Return the binary form of a cube.  Raises DataCorrupted."""
    _, numbers = _cube(value)
    return struct.pack(f">I{len(numbers)}d", _U4.unpack_from(value)[0], *numbers)


def _cube(value: bytes) -> tuple[int, tuple[float, ...]]:
    try:
        (header,) = _U4.unpack_from(value)
        dimensions = header & ~_POINT
        count = dimensions if header & _POINT else 2 * dimensions
        if 4 + 8 * count > len(value):
            raise DataCorrupted("a cube is too short")
        return dimensions, struct.unpack_from(f"<{count}d", value, 4)
    except struct.error as error:
        raise DataCorrupted("a cube is too short") from error


def _float8(number: float) -> bytes:
    return float8out(struct.pack("<d", number))
