"""pgvector's types (vector.c, halfvec.c, sparsevec.c: …_out, …_send)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted
from pubsub.protocol.output.numbers import float4out

_HEADER: Final = Struct("<hh")
_SPARSE: Final = Struct("<iii")
_F4: Final = Struct("<f")


def vector_out(value: bytes) -> bytes:
    """Return the text of a vector.  Raises DataCorrupted."""
    return _listed(_elements(value, "f"))


def vector_send(value: bytes) -> bytes:
    """Return the binary form of a vector.  Raises DataCorrupted."""
    return _sent(value, "f")


def halfvec_out(value: bytes) -> bytes:
    """Return the text of a halfvec.  Raises DataCorrupted."""
    return _listed(_elements(value, "e"))


def halfvec_send(value: bytes) -> bytes:
    """Return the binary form of a halfvec.  Raises DataCorrupted."""
    return _sent(value, "e")


def sparsevec_out(value: bytes) -> bytes:
    """Return the text of a sparsevec.  Raises DataCorrupted."""
    dimensions, _, places, numbers = _sparse(value)
    pairs = [b"%d:%b" % (place + 1, text) for place, text in zip(places, map(_text, numbers), strict=True)]
    return b"{" + b",".join(pairs) + b"}/%d" % dimensions


def sparsevec_send(value: bytes) -> bytes:
    """Return the binary form of a sparsevec.  Raises DataCorrupted."""
    dimensions, unused, places, numbers = _sparse(value)
    count = len(places)
    return struct.pack(f">iii{count}i{count}f", dimensions, count, unused, *places, *numbers)


def _elements(value: bytes, letter: str) -> tuple[float, ...]:
    try:
        count, _ = _HEADER.unpack_from(value)
        return struct.unpack_from(f"<{max(count, 0)}{letter}", value, _HEADER.size)
    except struct.error as error:
        raise DataCorrupted("a vector is too short") from error


def _sent(value: bytes, letter: str) -> bytes:
    numbers = _elements(value, letter)
    return struct.pack(f">hh{len(numbers)}{letter}", *_HEADER.unpack_from(value), *numbers)


def _sparse(value: bytes) -> tuple[int, int, tuple[int, ...], tuple[float, ...]]:
    try:
        dimensions, count, unused = _SPARSE.unpack_from(value)
        if not 0 <= count <= len(value) // 8:
            raise DataCorrupted("a sparse vector has more elements than it can hold")
        places = struct.unpack_from(f"<{count}i", value, _SPARSE.size)
        numbers = struct.unpack_from(f"<{count}f", value, _SPARSE.size + 4 * count)
    except struct.error as error:
        raise DataCorrupted("a sparse vector is too short") from error
    return dimensions, unused, places, numbers


def _listed(numbers: Iterable[float]) -> bytes:
    return b"[" + b",".join(map(_text, numbers)) + b"]"


def _text(number: float) -> bytes:
    return float4out(_F4.pack(number))
