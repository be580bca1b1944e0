"""PostGIS's geometry and geography: the stored form (gserialized.txt, gserialized2.c) as extended WKB (lwout_wkb.c).

The binary form is the WKB; the text is its hexadecimal digits.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted

_U4: Final = Struct("<I")
_HEAD: Final = Struct("<BI")
_NAN: Final = bytes.fromhex("000000000000f87f")

# Bits of a stored value's flags.
_Z: Final = 0x01
_M: Final = 0x02
_BOX: Final = 0x04
_GEODETIC: Final = 0x08
_EXTENDED: Final = 0x10
_SECOND_VERSION: Final = 0x40

_POINT: Final = 1
_POLYGON: Final = 3
_TRIANGLE: Final = 14
_LINES: Final = frozenset({_POINT, 2, 8})
"""Types that consist of coordinates only: point, line, circular string."""
_WKB_TYPES: Final = {13: 15, 14: 17, 15: 16}
"""WKB's type numbers for liblwgeom's polyhedral surface, triangle and TIN."""


def geometry_out(value: bytes) -> bytes:
    """Return the text of a geometry or geography.  Raises DataCorrupted."""
    return geometry_send(value).hex().upper().encode()


def geometry_send(value: bytes) -> bytes:
    """Return the binary form of a geometry or geography.  Raises DataCorrupted."""
    try:
        flags = value[3]
        srid = value[0] << 16 | value[1] << 8 | value[2]
        # 21 bits, signed.
        srid = srid & 0x1FFFFF if not srid & 0x100000 else (srid & 0x1FFFFF) - (1 << 21)
        dimensions = 2 + bool(flags & _Z) + bool(flags & _M)
        at = 4
        if flags & _SECOND_VERSION and flags & _EXTENDED:
            at += 8
        if flags & _BOX:
            at += 24 if flags & _GEODETIC else 8 * dimensions
        modifiers = (0x80000000 if flags & _Z else 0) | (0x40000000 if flags & _M else 0)
        parts: list[bytes] = []
        _write(value, at, 8 * dimensions, modifiers, max(srid, 0), parts, 0)
        return b"".join(parts)
    except (struct.error, IndexError) as error:
        raise DataCorrupted("a geometry is too short") from error


def _write(value: bytes, at: int, width: int, modifiers: int, srid: int, parts: list[bytes], depth: int) -> int:
    """Append the geometry at `at`, with `width` bytes per point, to `parts`; return its end.  `srid` 0 is left out."""
    if depth > 64:
        raise DataCorrupted("a geometry is nested too deeply")
    kind: int = _U4.unpack_from(value, at)[0]
    count: int = _U4.unpack_from(value, at + 4)[0]
    at += 8
    number = _WKB_TYPES.get(kind, kind) | modifiers
    parts.append(_HEAD.pack(1, number | 0x20000000) + _U4.pack(srid) if srid else _HEAD.pack(1, number))
    if kind == _POINT:
        parts.append(_points(value, at, count, width) if count else _NAN * (width // 8))
        return at + count * width
    if kind in _LINES:
        parts += (_U4.pack(count), _points(value, at, count, width))
        return at + count * width
    if kind == _TRIANGLE:
        parts += (_U4.pack(1), _U4.pack(count), _points(value, at, count, width)) if count else (_U4.pack(0),)
        return at + count * width
    if kind == _POLYGON:
        if count > len(value) // 4:
            raise DataCorrupted("a polygon has more rings than it can hold")
        rings = struct.unpack_from(f"<{count}I", value, at)
        at += (4 * count + 7) & ~7
        parts.append(_U4.pack(count))
        for ring in rings:
            parts += (_U4.pack(ring), _points(value, at, ring, width))
            at += ring * width
        return at
    if count > len(value) // 8:
        raise DataCorrupted("a collection has more parts than it can hold")
    parts.append(_U4.pack(count))
    for _ in range(count):
        at = _write(value, at, width, modifiers, 0, parts, depth + 1)
    return at


def _points(value: bytes, at: int, count: int, width: int) -> bytes:
    if at + count * width > len(value):
        raise DataCorrupted("a geometry is too short")
    return value[at : at + count * width]
