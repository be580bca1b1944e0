"""Geometric types (geo_ops.c): numbers as float8out writes them."""

from __future__ import annotations

import struct

from pubsub.errors import DataCorrupted
from pubsub.protocol.output.numbers import float8out


def _floats(value: bytes, at: int, count: int) -> list[bytes]:
    if at + 8 * count > len(value):
        raise DataCorrupted("a geometric value is too short")
    return [float8out(value[at + 8 * i : at + 8 * i + 8]) for i in range(count)]


def _points(value: bytes, at: int, count: int) -> bytes:
    numbers = _floats(value, at, 2 * count)
    return b",".join(b"(" + numbers[i] + b"," + numbers[i + 1] + b")" for i in range(0, 2 * count, 2))


def _swapped(value: bytes, at: int = 0) -> bytes:
    count = (len(value) - at) // 8
    return struct.pack(f">{count}q", *struct.unpack_from(f"<{count}q", value, at))


def point_out(value: bytes) -> bytes:
    return _points(value, 0, 1)


def lseg_out(value: bytes) -> bytes:
    return b"[" + _points(value, 0, 2) + b"]"


def box_out(value: bytes) -> bytes:
    return _points(value, 0, 2)


def line_out(value: bytes) -> bytes:
    return b"{" + b",".join(_floats(value, 0, 3)) + b"}"


def circle_out(value: bytes) -> bytes:
    return b"<" + _points(value, 0, 1) + b"," + _floats(value, 16, 1)[0] + b">"


def path_out(value: bytes) -> bytes:
    count, closed = struct.unpack_from("<ii", value)
    points = _points(value, 12, count)
    return b"(" + points + b")" if closed else b"[" + points + b"]"


def polygon_out(value: bytes) -> bytes:
    (count,) = struct.unpack_from("<i", value)
    # The bounding box lies before the points.
    return b"(" + _points(value, 36, count) + b")"


def floats_send(value: bytes) -> bytes:
    return _swapped(value)


def path_send(value: bytes) -> bytes:
    count, closed = struct.unpack_from("<ii", value)
    return struct.pack(">bi", 1 if closed else 0, count) + _swapped(value, 12)


def polygon_send(value: bytes) -> bytes:
    (count,) = struct.unpack_from("<i", value)
    return struct.pack(">i", count) + _swapped(value, 36)
