"""Values in a form that Python compares as PostgreSQL does.

integers, oids, dates, times     int
float4, float8                   a `Number` of a float
numeric                          a `Number` of a Decimal, with its display scale
boolean                          bool
text, name, bpchar               bytes; bpchar without its trailing blanks
bytea, uuid, inet, cidr, json    bytes
bit, varbit                      bytes and length
interval                         `Interval`
jsonb                            `Document`
arrays                           `Array`
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import total_ordering
from struct import Struct
from typing import Any, Final

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.output.numbers import numeric_out
from pubsub.protocol.output.texts import jsonb_out, name_out
from walsender.rowfilter.functions.json_values import Document, read_document

FixedFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What functions depend on besides their arguments.

    `bytewise`: the collation compares bytes and knows only ASCII letters.  `version`: the server's, libpq's number.
    """

    encoding: str
    bytewise: bool
    version: int

    @property
    def utf8(self) -> bool:
        return is_utf8(self.encoding)


def is_utf8(encoding: str) -> bool:
    """Return whether Python's name of an encoding is one of UTF-8's."""
    return codecs.lookup(encoding).name == "utf-8"


Maker = Callable[[tuple[int, ...], Settings], FixedFunction | None]
"""Makes the function for arguments of these types; None: there is none."""


def fixed(function: FixedFunction) -> Maker:
    """Make a Maker that returns `function` for any types."""
    return lambda types, settings: function


Number = tuple[int, Any]
"""Class (-1: -infinity, 0: finite, 1: infinity, 2: NaN) and value (Decimal or float); compares as PostgreSQL does."""

_F4: Final = Struct("<f")
_F8: Final = Struct("<d")
_BITS: Final = Struct("<i")
_INTERVAL: Final = Struct("<qii")
_NOTHING: Final = Decimal(0)
_DAY: Final = 86_400_000_000


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Microseconds, days and months; compares as if months had 30 days (timestamp.c: interval_cmp_value)."""

    time: int
    day: int
    month: int

    @property
    def value(self) -> int:
        return (self.month * 30 + self.day) * _DAY + self.time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interval) and self.value == other.value

    def __lt__(self, other: Interval) -> bool:
        return self.value < other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Array(list[Any]):
    """An array's elements in order; `dims` and `lower`: lengths and lower bounds, as array_dims shows them."""

    def __init__(self, elements: Sequence[Any], dims: Sequence[int], lower: Sequence[int]) -> None:
        super().__init__(elements)
        self.dims = tuple(dims)
        self.lower = tuple(lower)


def float_number(value: float) -> Number:
    if value != value:
        return 2, 0.0
    if value in {math.inf, -math.inf}:
        return (1, 0.0) if value > 0 else (-1, 0.0)
    return 0, value


def plain_float(number: Number) -> float:
    kind, value = number
    return float(value) if kind == 0 else (-math.inf, 0.0, math.inf, math.nan)[kind + 1]


def numeric_number(text: str) -> Number:
    if text == "NaN":
        return 2, _NOTHING
    if text.endswith("Infinity"):
        return (-1 if text.startswith("-") else 1), _NOTHING
    return 0, Decimal(text)


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _unsigned(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _as_is(raw: bytes) -> bytes:
    return raw


def _bits(raw: bytes) -> tuple[bytes, int]:
    return raw[4:], _BITS.unpack_from(raw)[0]


def _jsonb(raw: bytes) -> Document:
    return read_document(jsonb_out(raw))


READERS: Final[dict[int, Callable[[bytes], Any]]] = {
    16: lambda raw: raw != b"\0",
    17: _as_is,
    18: _as_is,
    19: name_out,
    20: _signed,
    21: _signed,
    23: _signed,
    25: _as_is,
    26: _unsigned,
    28: _unsigned,
    114: _as_is,
    650: _as_is,
    700: lambda raw: float_number(_F4.unpack(raw)[0]),
    701: lambda raw: float_number(_F8.unpack(raw)[0]),
    774: _as_is,
    790: _signed,
    829: _as_is,
    869: _as_is,
    1042: lambda raw: raw.rstrip(b" "),
    1043: _as_is,
    1082: _signed,
    1083: _signed,
    1114: _signed,
    1184: _signed,
    1186: lambda raw: Interval(*_INTERVAL.unpack(raw)),
    1560: _bits,
    1562: _bits,
    1700: lambda raw: numeric_number(numeric_out(raw).decode()),
    2950: _as_is,
    3220: _unsigned,
    3802: _jsonb,
    5069: _unsigned,
}
"""By type oid: makes a value from its bytes."""

ARRAYS: Final = {
    199: 114,
    651: 650,
    1000: 16,
    1001: 17,
    1002: 18,
    1003: 19,
    1016: 20,
    1005: 21,
    1007: 23,
    1009: 25,
    1028: 26,
    1021: 700,
    1022: 701,
    1014: 1042,
    1015: 1043,
    1041: 869,
    1182: 1082,
    1183: 1083,
    1115: 1114,
    1185: 1184,
    1187: 1186,
    1231: 1700,
    2951: 2950,
    3221: 3220,
    3807: 3802,
}
"""Array type → type of its elements."""

STORAGE: Final = {
    16: (1, 1),
    17: (-1, 4),
    18: (1, 1),
    19: (64, 1),
    20: (8, 8),
    21: (2, 2),
    23: (4, 4),
    25: (-1, 4),
    26: (4, 4),
    114: (-1, 4),
    650: (-1, 4),
    700: (4, 4),
    701: (8, 8),
    869: (-1, 4),
    1042: (-1, 4),
    1043: (-1, 4),
    1082: (4, 4),
    1083: (8, 8),
    1114: (8, 8),
    1184: (8, 8),
    1186: (16, 8),
    1700: (-1, 4),
    2950: (16, 1),
    3220: (8, 8),
    3802: (-1, 4),
}
"""By type of an array's elements: their length and alignment."""


def reader(oid: int) -> Callable[[bytes], Any]:
    """Return the reader of values that are no arrays.  Raises FeatureNotSupported."""
    read = READERS.get(oid)
    if read is None:
        raise FeatureNotSupported(f"values of type {oid} are not supported there")
    return read
