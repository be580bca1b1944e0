"""The built-in functions that row filters may use, over values in a form that Python compares as PostgreSQL does.

    integers, oids, dates, times     int            numeric      a `Number`: exact, NaN above everything
    float4, float8                   Number too     text, name   bytes; bpchar without its trailing blanks
    boolean                          bool           bytea, uuid  bytes

Follows int.c, int8.c, float.c, numeric.c (cmp_numerics), varlena.c, like_match.c, bool.c.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from struct import Struct
from typing import Any, Final

from pubsub.errors import PubsubError
from pubsub.protocol.output.numbers import numeric_out
from pubsub.protocol.output.texts import name_out

FixedFunction = Callable[..., Any]

_F4: Final = Struct("<f")
_F8: Final = Struct("<d")
_INTERVAL: Final = Struct("<qii")

Number = tuple[int, Fraction]
"""Class (-1: -infinity, 0: finite, 1: infinity, 2: NaN) and value: compares as numeric and floats do."""

_ZERO: Final = Fraction(0)


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _unsigned(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _float(value: float) -> Number:
    if value != value:
        return 2, _ZERO
    if value in {math.inf, -math.inf}:
        return (1, _ZERO) if value > 0 else (-1, _ZERO)
    return 0, Fraction(value)


def _numeric(raw: bytes) -> Number:
    text = numeric_out(raw)
    if text == b"NaN":
        return 2, _ZERO
    if text.endswith(b"Infinity"):
        return (-1 if text.startswith(b"-") else 1), _ZERO
    return 0, Fraction(text.decode())


def _interval(raw: bytes) -> int:
    """timestamp.c: interval_cmp_value: months of 30 days."""
    time, day, month = _INTERVAL.unpack(raw)
    return int((month * 30 + day) * 86_400_000_000 + time)


def _as_is(raw: bytes) -> bytes:
    return raw


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
    700: lambda raw: _float(_F4.unpack(raw)[0]),
    701: lambda raw: _float(_F8.unpack(raw)[0]),
    829: _as_is,
    1042: lambda raw: raw.rstrip(b" "),
    1043: _as_is,
    1082: _signed,
    1083: _signed,
    1114: _signed,
    1184: _signed,
    1186: _interval,
    1700: _numeric,
    2950: _as_is,
    3220: _unsigned,
    5069: _unsigned,
}
"""From a value's bytes, by type."""

ARRAYS: Final = {
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
    1182: 1082,
    1183: 1083,
    1115: 1114,
    1185: 1184,
    1187: 1186,
    1231: 1700,
    2951: 2950,
    3221: 3220,
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
    700: (4, 4),
    701: (8, 8),
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
}
"""Length and alignment of an array's elements."""

_COMPARE: Final = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BYTEWISE_ALWAYS: Final = frozenset({"eq", "ne"})
_COMPARABLE: Final = re.compile(
    r"(int2|int4|int8|int24|int28|int42|int48|int82|int84|oid|float4|float8|float48|float84|numeric_|text|text_|bpchar|name"
    r"|nametext|textname|date_|time_|timestamp_|timestamptz_|uuid_|bytea|bool|char|pg_lsn_|interval_|macaddr_|xid8|xid)"
    r"(eq|ne|lt|le|gt|ge)"
)
_TEXTUAL: Final = frozenset({"text", "text_", "bpchar", "name", "nametext", "textname"})

_RANGES: Final = {2: (-(1 << 15), (1 << 15) - 1), 4: (-(1 << 31), (1 << 31) - 1), 8: (-(1 << 63), (1 << 63) - 1)}
_ARITHMETIC: Final = re.compile(r"int([248]{1,2})(pl|mi|mul|div|mod)")
_INTEGER_NAMES: Final = {2: "smallint", 4: "integer", 8: "bigint"}


def find(name: str, types: tuple[int, ...], *, encoding: str, bytewise: bool) -> FixedFunction | None:
    """The function that pg_proc calls `name` with arguments of `types`; None where it is not here.

    `bytewise`: the collation compares bytes, and knows no letters but ASCII's.
    """
    if found := _COMPARABLE.fullmatch(name):
        if found[1] in _TEXTUAL and found[2] not in _BYTEWISE_ALWAYS and not bytewise:
            return None
        return _COMPARE[found[2]]
    if found := _ARITHMETIC.fullmatch(name):
        return _integer(found[1], found[2])
    if name in _NUMERIC:
        return _NUMERIC[name]
    if name in _CASTS:
        return _cast(name, types)
    made = _texts(encoding).get(name)
    if made is not None:
        return made
    if bytewise:
        return _C_TEXTS.get(name)
    return None


def _integer(widths: str, what: str) -> FixedFunction:
    width = max(int(w) for w in widths)
    low, high = _RANGES[width]

    def function(a: int, b: int) -> int:
        if what in {"div", "mod"}:
            if b == 0:
                raise PubsubError("division by zero", sqlstate="22012")
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            value = quotient if what == "div" else a - quotient * b
        else:
            value = {"pl": operator.add, "mi": operator.sub, "mul": operator.mul}[what](a, b)
        if not low <= value <= high:
            raise PubsubError(f"{_INTEGER_NAMES[width]} out of range", sqlstate="22003")
        return value

    return function


def _exact(function: Callable[[Fraction, Fraction], Fraction]) -> FixedFunction:
    def applied(a: Number, b: Number) -> Number:
        if a[0] or b[0]:
            # Infinities follow the rules of floats, which are numeric's too.
            x = (-math.inf, 0.0, math.inf, math.nan)[a[0] + 1] if a[0] else (float(a[1] > 0) - float(a[1] < 0))
            y = (-math.inf, 0.0, math.inf, math.nan)[b[0] + 1] if b[0] else (float(b[1] > 0) - float(b[1] < 0))
            if function is operator.mul:
                return _float(x * y)
            return _float(x + y if function is operator.add else x - y)
        return 0, function(a[1], b[1])

    return applied


def _modulo(a: int, b: int) -> int:
    value: int = _integer("8", "mod")(a, b)
    return value


_NUMERIC: Final[dict[str, FixedFunction]] = {
    "numeric_add": _exact(operator.add),
    "numeric_sub": _exact(operator.sub),
    "numeric_mul": _exact(operator.mul),
    "numeric_uminus": lambda a: (-a[0] if a[0] in {-1, 1} else a[0], -a[1]),
    "int2um": operator.neg,
    "int4um": operator.neg,
    "int8um": operator.neg,
    "int2abs": abs,
    "int4abs": abs,
    "int8abs": abs,
    "abs": lambda a: abs(a) if isinstance(a, int) else (1 if a[0] in {-1, 1} else a[0], abs(a[1])),
    "mod": _modulo,
    "booland_statefunc": lambda a, b: a and b,
    "date_pli": operator.add,
    "date_mii": operator.sub,
    "date_mi": operator.sub,
}

_CASTS: Final = frozenset({"int2", "int4", "int8", "numeric", "float4", "float8", "text", "varchar", "bpchar", "bool"})
_INT_TYPES: Final = frozenset({20, 21, 23, 26})


def _to_float4(value: int | Number) -> Number:
    number = value if isinstance(value, tuple) else (0, Fraction(value))
    return number if number[0] else _float(_F4.unpack(_F4.pack(float(number[1])))[0])


def _cast(name: str, types: tuple[int, ...]) -> FixedFunction | None:
    source = types[0] if types else 0
    if name in {"int2", "int4", "int8"} and source in _INT_TYPES and len(types) == 1:
        width = int(name[3])
        low, high = _RANGES[width]

        def integer(a: int) -> int:
            if not low <= a <= high:
                raise PubsubError(f"{_INTEGER_NAMES[width]} out of range", sqlstate="22003")
            return a

        return integer
    if name == "numeric" and source in _INT_TYPES and len(types) == 1:
        return lambda a: (0, Fraction(a))
    if name == "float8" and source in {21, 23, 20}:
        return lambda a: _float(float(a))
    if name == "float8" and source == 700:
        return lambda a: a
    if name == "float8" and source == 1700:
        return lambda a: a if a[0] else _float(float(a[1]))
    if name == "float4" and source in {701, 1700, 21, 23, 20}:
        return _to_float4
    if name == "bool" and source == 23:
        return lambda a: a != 0
    if name == "text" and source in {19, 18, 1042}:
        return _as_is
    return None


@functools.lru_cache(256)
def _like(pattern: str) -> re.Pattern[str]:
    """like_match.c: MatchText: % and _, the backslash before one taken as it is."""
    parts: list[str] = []
    escaped = False
    for character in pattern:
        if escaped:
            parts.append(re.escape(character))
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "%":
            parts.append(".*")
        elif character == "_":
            parts.append(".")
        else:
            parts.append(re.escape(character))
    if escaped:
        raise PubsubError("LIKE pattern must not end with escape character", sqlstate="22025")
    return re.compile("".join(parts), re.DOTALL)


@functools.cache
def _texts(encoding: str) -> dict[str, FixedFunction]:
    """Functions of text that do not ask the collation."""

    def characters(function: Callable[[str], Any]) -> FixedFunction:
        def applied(text: bytes) -> Any:
            value = function(text.decode(encoding))
            return value.encode(encoding) if isinstance(value, str) else value

        return applied

    def substring(text: bytes, start: int, length: int | None = None) -> bytes:
        decoded = text.decode(encoding)
        if length is not None and length < 0:
            raise PubsubError("negative substring length not allowed", sqlstate="22011")
        end = len(decoded) if length is None else start - 1 + length
        return decoded[max(start - 1, 0) : max(end, 0)].encode(encoding)

    def left(text: bytes, count: int) -> bytes:
        return text.decode(encoding)[:count].encode(encoding)

    def right(text: bytes, count: int) -> bytes:
        decoded = text.decode(encoding)
        return (decoded[max(len(decoded) - count, 0) :] if count >= 0 else decoded[-count:]).encode(encoding)

    def like(text: bytes, pattern: bytes) -> bool:
        return _like(pattern.decode(encoding)).fullmatch(text.decode(encoding)) is not None

    def not_like(text: bytes, pattern: bytes) -> bool:
        return not like(text, pattern)

    return {
        "length": characters(len),
        "char_length": characters(len),
        "character_length": characters(len),
        "octet_length": len,
        "textlike": like,
        "like": like,
        "bpcharlike": like,
        "namelike": like,
        "textnlike": not_like,
        "notlike": not_like,
        "bpcharnlike": not_like,
        "namenlike": not_like,
        "textcat": operator.add,
        "substr": substring,
        "substring": substring,
        "left": left,
        "right": right,
        "btrim": lambda text, *which: _strip(text, which, encoding, str.strip),
        "ltrim": lambda text, *which: _strip(text, which, encoding, str.lstrip),
        "rtrim": lambda text, *which: _strip(text, which, encoding, str.rstrip),
        "starts_with": bytes.startswith,
        "boolnot": operator.not_,
    }


_ASCII_UPPER: Final = bytes.maketrans(bytes(range(97, 123)), bytes(range(65, 91)))
_ASCII_LOWER: Final = bytes.maketrans(bytes(range(65, 91)), bytes(range(97, 123)))

_C_TEXTS: Final[dict[str, FixedFunction]] = {
    "lower": lambda text: text.translate(_ASCII_LOWER),
    "upper": lambda text: text.translate(_ASCII_UPPER),
    "texticlike": lambda text, pattern: (
        _like(pattern.translate(_ASCII_LOWER).decode("latin-1")).fullmatch(
            text.translate(_ASCII_LOWER).decode("latin-1")
        )
        is not None
    ),
    "texticnlike": lambda text, pattern: (
        _like(pattern.translate(_ASCII_LOWER).decode("latin-1")).fullmatch(
            text.translate(_ASCII_LOWER).decode("latin-1")
        )
        is None
    ),
}


def _strip(text: bytes, which: tuple[bytes, ...], encoding: str, strip: Callable[[str, str], str]) -> bytes:
    return strip(text.decode(encoding), which[0].decode(encoding) if which else " ").encode(encoding)
