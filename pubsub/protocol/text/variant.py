"""jsonb as VARIANT: each value's text encoded in Parquet's variant format (Apache Parquet, VariantEncoding.md).

A variant has two parts: the metadata, which lists the names of all fields in it, and the value, which refers to names
by number.  An integer takes the smallest of 1, 2, 4 and 8 bytes that holds it; any other number is a decimal of at most
38 digits with the scale that jsonb shows.  Values are encoded one by one, in Python.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, NoReturn

import pyarrow as pa

from pubsub.protocol.refused_values import OtherShape
from pubsub.protocol.type_contract import VARIANT

_DEEPEST: Final = 400
"""The deepest nesting of arrays and objects: readers recurse."""

_LARGEST: Final = 1 << 24
"""The most bytes of a value that every Spark version reads."""

# The two low bits of a value's first byte.
_PRIMITIVE, _SHORT_STRING, _OBJECT, _ARRAY = range(4)
_NULL, _TRUE, _FALSE = (bytes((kind << 2 | _PRIMITIVE,)) for kind in (0, 1, 2))
_INTEGERS: Final = tuple(
    (1 << width * 8 - 1, struct.Struct(f"<B{code}"), kind << 2)
    for width, code, kind in ((1, "b", 3), (2, "h", 4), (4, "i", 5), (8, "q", 6))
)
_DECIMALS: Final = ((9, 4, 8 << 2), (18, 8, 9 << 2), (38, 16, 10 << 2))
_STRING: Final = 16 << 2
_SHORT: Final = 63


class NoVariant(Exception):
    """A value that a VARIANT cannot hold exactly."""


def variants(texts: pa.BinaryArray) -> pa.StructArray:
    """Convert texts to VARIANT values.

    Raises OtherShape for a number of more than 38 digits, for nesting more than 400 deep, for more than 16 MB, and for
    text that is not JSON.
    """
    found: list[tuple[bytes, bytes] | None] = []
    for index, text in enumerate(texts.to_pylist()):
        try:
            found.append(None if text is None else encode(text))
        except (NoVariant, ValueError, RecursionError) as error:
            raise OtherShape(index) from error
    metadata, values = (pa.array([b"" if one is None else one[part] for one in found], pa.binary()) for part in (0, 1))
    none = pa.array([one is None for one in found], pa.bool_())
    return pa.StructArray.from_arrays([metadata, values], fields=list(VARIANT), mask=none)


def encode(text: bytes) -> tuple[bytes, bytes]:
    """Encode a jsonb's text as metadata and value.  Raises NoVariant, ValueError, RecursionError."""
    encoder = _Encoder()
    value = encoder.value(_decode(text.decode()), 0)
    if len(value) > _LARGEST:
        raise NoVariant
    return _metadata(encoder.numbers), value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


_decode: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant).decode


def _metadata(names: Iterable[str]) -> bytes:
    """Return the dictionary of names: a header (version 1, not marked as sorted), the count, the offsets, the names."""
    written = [name.encode() for name in names]
    total = sum(map(len, written))
    size = _bytes_for(max(total, len(written)))
    return (
        bytes((1 | size - 1 << 6,))
        + len(written).to_bytes(size, "little")
        + _offsets(map(len, written), size)
        + b"".join(written)
    )


def _bytes_for(number: int) -> int:
    return max(1, (number.bit_length() + 7) // 8)


def _offsets(lengths: Iterable[int], size: int) -> bytes:
    at, found = 0, [bytes(size)]
    for length in lengths:
        at += length
        found.append(at.to_bytes(size, "little"))
    return b"".join(found)


class _Encoder:
    """The encoder of one value; `numbers` maps field names to their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def value(self, value: Any, depth: int) -> bytes:
        if value is None:
            return _NULL
        if value is True:
            return _TRUE
        if value is False:
            return _FALSE
        if isinstance(value, str):
            data = value.encode()
            if len(data) <= _SHORT:
                return bytes((len(data) << 2 | _SHORT_STRING,)) + data
            return struct.pack("<BI", _STRING, len(data)) + data
        if isinstance(value, int):
            return _integer(value)
        if isinstance(value, Decimal):
            return _decimal(value)
        if depth >= _DEEPEST:
            raise NoVariant
        return self._object(value, depth) if isinstance(value, dict) else self._array(value, depth)

    def _object(self, value: dict[str, Any], depth: int) -> bytes:
        """Encode an object: its names' numbers in the order of the names, then the values' offsets, then the values."""
        names = sorted(value, key=str.encode)
        numbers = [self.numbers.setdefault(name, len(self.numbers)) for name in names]
        written = [self.value(value[name], depth + 1) for name in names]
        size = _bytes_for(sum(map(len, written)))
        id_size = _bytes_for(max(numbers, default=0))
        large = len(names) > 0xFF
        head = _OBJECT | (size - 1 | id_size - 1 << 2 | large << 4) << 2
        ids = b"".join([number.to_bytes(id_size, "little") for number in numbers])
        return b"".join((_counted(head, len(names), large), ids, _offsets(map(len, written), size), *written))

    def _array(self, value: list[Any], depth: int) -> bytes:
        written = [self.value(one, depth + 1) for one in value]
        size = _bytes_for(sum(map(len, written)))
        large = len(written) > 0xFF
        head = _ARRAY | (size - 1 | large << 2) << 2
        return b"".join((_counted(head, len(written), large), _offsets(map(len, written), size), *written))


def _counted(head: int, count: int, large: bool) -> bytes:
    return bytes((head,)) + count.to_bytes(4 if large else 1, "little")


def _integer(value: int) -> bytes:
    for bound, layout, kind in _INTEGERS:
        if -bound <= value < bound:
            return layout.pack(kind, value)
    return _scaled(value, 0)


def _decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or exponent > 0:
        raise NoVariant
    unscaled = int("".join(map(str, digits)))
    return _scaled(-unscaled if sign else unscaled, -exponent)


def _scaled(unscaled: int, scale: int) -> bytes:
    for digits, width, kind in _DECIMALS:
        if abs(unscaled) < 10**digits and scale <= digits:
            return bytes((kind, scale)) + unscaled.to_bytes(width, "little", signed=True)
    raise NoVariant
