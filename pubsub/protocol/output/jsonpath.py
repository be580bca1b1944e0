"""jsonpath: the text of a stored expression (jsonpath.c: jsonpath_out, printJsonPathItem, jspInitByBuffer)."""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted, FeatureNotSupported
from pubsub.protocol.output.numbers import numeric_out
from pubsub.protocol.output.texts import escape_json

_U4: Final = Struct("<I")
_TWO: Final = Struct("<II")
_THREE: Final = Struct("<III")
_LAX: Final = 0x80000000
_LAST: Final = 0xFFFFFFFF
_MAX_DEPTH: Final = 1000

# Kinds of items, as jsonpath.h numbers them.
_STRING: Final = 1
_NUMERIC: Final = 2
_BOOL: Final = 3
_NOT: Final = 6
_IS_UNKNOWN: Final = 7
_PLUS: Final = 19
_MINUS: Final = 20
_ANY_KEY: Final = 22
_INDEX_ARRAY: Final = 23
_ANY: Final = 24
_KEY: Final = 25
_VARIABLE: Final = 28
_FILTER: Final = 29
_EXISTS: Final = 30
_LIKE_REGEX: Final = 42
_DECIMAL: Final = 46

_BINARY: Final = {
    4: b"&&",
    5: b"||",
    8: b"==",
    9: b"!=",
    10: b"<",
    11: b">",
    12: b"<=",
    13: b">=",
    14: b"+",
    15: b"-",
    16: b"*",
    17: b"/",
    18: b"%",
    41: b"starts with",
}
_PRIORITY: Final = {
    5: 0,
    4: 1,
    **dict.fromkeys((8, 9, 10, 11, 12, 13, 41), 2),
    14: 3,
    15: 3,
    **dict.fromkeys((16, 17, 18), 4),
    _PLUS: 5,
    _MINUS: 5,
}
_PLAIN: Final = {
    0: b"null",
    21: b"[*]",
    26: b"@",
    27: b"$",
    31: b".type()",
    32: b".size()",
    33: b".abs()",
    34: b".floor()",
    35: b".ceiling()",
    36: b".double()",
    38: b".keyvalue()",
    40: b"last",
    43: b".bigint()",
    44: b".boolean()",
    45: b".date()",
    47: b".integer()",
    48: b".number()",
    49: b".string()",
}
_METHODS: Final = {37: b".datetime(", 50: b".time(", 51: b".time_tz(", 52: b".timestamp(", 53: b".timestamp_tz("}
"""The methods with an optional argument."""
_FLAGS: Final = ((1, b"i"), (2, b"s"), (4, b"m"), (8, b"x"), (16, b"q"))


def jsonpath_out(value: bytes) -> bytes:
    """Return the text of a jsonpath.  Raises DataCorrupted, and FeatureNotSupported for an unknown version."""
    try:
        (header,) = _U4.unpack_from(value)
        if header & ~_LAX != 1:
            raise FeatureNotSupported(f"version {header & ~_LAX} of jsonpath is not known")
        parts: list[bytes] = [] if header & _LAX else [b"strict "]
        _item(value[4:], 0, parts, in_key=False, brackets=True, depth=0)
        return b"".join(parts)
    except (struct.error, IndexError) as error:
        raise DataCorrupted("a jsonpath is too short") from error


def jsonpath_send(value: bytes) -> bytes:
    return b"\1" + jsonpath_out(value)


def _item(data: bytes, at: int, out: list[bytes], *, in_key: bool, brackets: bool, depth: int) -> None:
    """Write the item at `at` and those that follow it in its path; nested items' positions are relative to `at`."""
    while True:
        if depth > _MAX_DEPTH:
            raise DataCorrupted("a jsonpath is nested too deeply")
        kind = data[at]
        (following,) = _U4.unpack_from(data, (at + 4) & ~3)
        content = ((at + 4) & ~3) + 4
        _print(data, at, kind, content, following != 0, out, in_key=in_key, brackets=brackets, depth=depth)
        if not following:
            return
        at += following
        if at >= len(data):
            raise DataCorrupted("a jsonpath's item lies behind its end")
        in_key = brackets = True
        depth += 1


def _print(
    data: bytes,
    at: int,
    kind: int,
    content: int,
    goes_on: bool,
    out: list[bytes],
    *,
    in_key: bool,
    brackets: bool,
    depth: int,
) -> None:
    def inner(offset: int, brackets: bool = False) -> None:
        _item(data, at + offset, out, in_key=False, brackets=brackets, depth=depth + 1)

    def operand(offset: int) -> None:
        inner(offset, _PRIORITY.get(data[at + offset], 6) <= _PRIORITY.get(kind, 6))

    plain = _PLAIN.get(kind)
    if plain is not None:
        out.append(plain)
    elif kind in {_STRING, _KEY, _VARIABLE}:
        (length,) = _U4.unpack_from(data, content)
        if kind == _KEY and in_key:
            out.append(b".")
        elif kind == _VARIABLE:
            out.append(b"$")
        out.append(escape_json(data[content + 4 : content + 4 + length]))
    elif kind == _NUMERIC:
        (header,) = _U4.unpack_from(data, content)
        text = numeric_out(data[content + 4 : content + (header >> 2)])
        out.append(b"(" + text + b")" if goes_on else text)
    elif kind == _BOOL:
        out.append(b"true" if data[content] else b"false")
    elif kind in _BINARY:
        left, right = _TWO.unpack_from(data, content)
        out.append(b"(" if brackets else b"")
        operand(left)
        out.append(b" " + _BINARY[kind] + b" ")
        operand(right)
        out.append(b")" if brackets else b"")
    elif kind in {_NOT, _IS_UNKNOWN, _FILTER, _EXISTS}:
        (argument,) = _U4.unpack_from(data, content)
        out.append({_NOT: b"!(", _IS_UNKNOWN: b"(", _FILTER: b"?(", _EXISTS: b"exists ("}[kind])
        inner(argument)
        out.append(b") is unknown" if kind == _IS_UNKNOWN else b")")
    elif kind in {_PLUS, _MINUS}:
        (argument,) = _U4.unpack_from(data, content)
        out.append((b"(" if brackets else b"") + (b"+" if kind == _PLUS else b"-"))
        operand(argument)
        out.append(b")" if brackets else b"")
    elif kind == _ANY_KEY:
        out.append(b".*" if in_key else b"*")
    elif kind == _INDEX_ARRAY:
        (count,) = _U4.unpack_from(data, content)
        out.append(b"[")
        for number in range(count):
            first, last = _TWO.unpack_from(data, content + 4 + 8 * number)
            out.append(b"," if number else b"")
            inner(first)
            if last:
                out.append(b" to ")
                inner(last)
        out.append(b"]")
    elif kind == _ANY:
        out.append((b"." if in_key else b"") + _levels(*_TWO.unpack_from(data, content)))
    elif kind == _LIKE_REGEX:
        flags, expression, length = _THREE.unpack_from(data, content)
        out.append(b"(" if brackets else b"")
        operand(expression)
        out.append(b" like_regex " + escape_json(data[content + 12 : content + 12 + length]))
        if flags:
            out.append(b' flag "' + b"".join([letter for bit, letter in _FLAGS if flags & bit]) + b'"')
        out.append(b")" if brackets else b"")
    elif kind in _METHODS:
        (argument,) = _U4.unpack_from(data, content)
        out.append(_METHODS[kind])
        if argument:
            inner(argument)
        out.append(b")")
    elif kind == _DECIMAL:
        left, right = _TWO.unpack_from(data, content)
        out.append(b".decimal(")
        if left:
            inner(left)
        if right:
            out.append(b",")
            inner(right)
        out.append(b")")
    else:
        raise DataCorrupted(f"unrecognized jsonpath item type: {kind}")


def _levels(first: int, last: int) -> bytes:
    if first == 0 and last == _LAST:
        return b"**"
    if first == last:
        return b"**{last}" if first == _LAST else b"**{%d}" % first
    if first == _LAST:
        return b"**{last to %d}" % last
    return b"**{%d to last}" % first if last == _LAST else b"**{%d to %d}" % (first, last)
