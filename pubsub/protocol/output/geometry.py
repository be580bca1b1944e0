"""Geometric types (geo_ops.c).  `number` writes the coordinates: float8out, or what a session's settings require."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from pubsub.errors import DataCorrupted
from pubsub.protocol.output.numbers import float8out

Number = Callable[[bytes], bytes]


def _floats(value: bytes, at: int, count: int, number: Number) -> list[bytes]:
    if at + 8 * count > len(value):
        raise DataCorrupted("a geometric value is too short")
    return [number(value[at + 8 * i : at + 8 * i + 8]) for i in range(count)]


def _points(value: bytes, at: int, count: int, number: Number) -> bytes:
    numbers = _floats(value, at, 2 * count, number)
    return b",".join(b"(" + numbers[i] + b"," + numbers[i + 1] + b")" for i in range(0, 2 * count, 2))


def _swapped(value: bytes, at: int = 0) -> bytes:
    count = (len(value) - at) // 8
    return struct.pack(f">{count}q", *struct.unpack_from(f"<{count}q", value, at))


def point_out(value: bytes, number: Number = float8out) -> bytes:
    return _points(value, 0, 1, number)


def lseg_out(value: bytes, number: Number = float8out) -> bytes:
    return b"[" + _points(value, 0, 2, number) + b"]"


def box_out(value: bytes, number: Number = float8out) -> bytes:
    return _points(value, 0, 2, number)


def line_out(value: bytes, number: Number = float8out) -> bytes:
    return b"{" + b",".join(_floats(value, 0, 3, number)) + b"}"


def circle_out(value: bytes, number: Number = float8out) -> bytes:
    return b"<" + _points(value, 0, 1, number) + b"," + _floats(value, 16, 1, number)[0] + b">"


def path_out(value: bytes, number: Number = float8out) -> bytes:
    count, closed = struct.unpack_from("<ii", value)
    points = _points(value, 12, count, number)
    return b"(" + points + b")" if closed else b"[" + points + b"]"


def polygon_out(value: bytes, number: Number = float8out) -> bytes:
    (count,) = struct.unpack_from("<i", value)
    # The bounding box lies before the points.
    return b"(" + _points(value, 36, count, number) + b")"


def floats_send(value: bytes) -> bytes:
    return _swapped(value)


def path_send(value: bytes) -> bytes:
    count, closed = struct.unpack_from("<ii", value)
    return struct.pack(">bi", 1 if closed else 0, count) + _swapped(value, 12)


def polygon_send(value: bytes) -> bytes:
    (count,) = struct.unpack_from("<i", value)
    return struct.pack(">i", count) + _swapped(value, 36)


OUTPUTS: Final[dict[int, Callable[..., bytes]]] = {
    600: point_out,
    601: lseg_out,
    602: path_out,
    603: box_out,
    604: polygon_out,
    628: line_out,
    718: circle_out,
}
"""The output functions by oid; each takes `number`."""
