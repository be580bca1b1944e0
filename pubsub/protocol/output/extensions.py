"""Types of extensions that come with PostgreSQL (hstore_io.c, hstore.h, ltree_io.c, ltree.h); citext is a text."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted, FeatureNotSupported

_U2: Final = Struct("<H")
_U4: Final = Struct("<I")
_NEW_VERSION: Final = 0x80000000
_COUNT: Final = 0x0FFFFFFF
_IS_NULL: Final = 0x40000000
_END: Final = 0x3FFFFFFF


def hstore_text(pairs: Iterable[tuple[bytes | None, bytes | None]]) -> bytes:
    return b", ".join([_quoted(key) + b"=>" + _quoted(value) for key, value in pairs])


def _quoted(text: bytes | None) -> bytes:
    if text is None:
        return b"NULL"
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def hstore_out(value: bytes) -> bytes:
    """Raises DataCorrupted; FeatureNotSupported for what was stored before 9.0."""
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
            raise FeatureNotSupported("values of hstore that were stored by PostgreSQL 8.4 can not be read")
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
    """Raises DataCorrupted."""
    try:
        (count,) = _U2.unpack_from(value)
        levels: list[bytes] = []
        # Each level begins on a multiple of 8 bytes, counted from the value's header of 4.
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
