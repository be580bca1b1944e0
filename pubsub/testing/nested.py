"""Delta's arrays, structs and variants as PostgreSQL's text, value by value, for comparisons.

It shares no code with the modules whose results it judges.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import re
import struct
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from pubsub.protocol.output.numbers import float4out, float8out

Text = Callable[[Any], str]

_IN_ARRAY: Final = re.compile(r'^$|^null$|[\s{}",\\]', re.IGNORECASE | re.ASCII)
_IN_RECORD: Final = re.compile(r'^$|[\s()",\\]', re.ASCII)
_ESCAPED: Final = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def is_nested(kind: pa.DataType) -> bool:
    """Whether this module renders columns of this type."""
    return bool(pa.types.is_nested(kind))


def texts(column: pa.Array) -> pa.LargeStringArray:
    """Return the texts of a nested column."""
    write = _writer(column.type)
    return pa.array([None if value is None else write(value) for value in _python(column)], pa.large_string())


def _python(column: pa.Array) -> list[Any]:
    if _is_variant(column.type):
        return [None if one is None else (one["metadata"], one["value"]) for one in column.to_pylist()]
    return list(column.to_pylist())


def _is_variant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and [(field.name, field.nullable) for field in kind] == [
        ("metadata", False),
        ("value", False),
    ]


def _writer(kind: pa.DataType) -> Text:
    kinds = pa.types
    if _is_variant(kind):
        return lambda value: _Variant(*value).text()
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_list_view(kind):
        element = _writer(kind.value_type)
        return lambda value: "{" + ",".join(_quoted_element(one, element) for one in value) + "}"
    if kinds.is_struct(kind):
        fields = [(field.name, _writer(field.type)) for field in kind]
        return lambda value: "(" + ",".join(_quoted_attribute(value[name], write) for name, write in fields) + ")"
    if kinds.is_boolean(kind):
        return lambda value: "t" if value else "f"
    if kinds.is_floating(kind):
        return lambda value: float_text(value, kind.bit_width)
    if kinds.is_date(kind):
        return datetime.date.isoformat
    if kinds.is_timestamp(kind):
        zone = "" if kind.tz is None else "+00"
        return lambda value: _stamp(value) + zone
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind):
        return lambda value: "\\x" + value.hex()
    if kinds.is_decimal(kind):
        return lambda value: format(value, "f")
    return str


def _quoted_element(value: Any, write: Text) -> str:
    if value is None:
        return "NULL"
    text = write(value)
    if not _IN_ARRAY.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted_attribute(value: Any, write: Text) -> str:
    if value is None:
        return ""
    text = write(value)
    if not _IN_RECORD.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


def _stamp(value: datetime.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(" ")
    return text.rstrip("0") if "." in text else text


def float_text(value: float, bits: int) -> str:
    """Write like float8out or float4out."""
    return (float8out(struct.pack("<d", value)) if bits == 64 else float4out(struct.pack("<f", value))).decode()


class _Variant:
    """A value of Parquet's VARIANT, read by its specification and written like jsonb."""

    def __init__(self, metadata: bytes, value: bytes) -> None:
        self._value = value
        size = (metadata[0] >> 6) + 1
        count = _number(metadata, 1, size)
        edges = [_number(metadata, 1 + size * (1 + place), size) for place in range(count + 1)]
        names = metadata[1 + size * (count + 2) :]
        self._names = [names[begin:end].decode() for begin, end in itertools.pairwise(edges)]

    def text(self) -> str:
        return self._at(0)

    def _at(self, at: int) -> str:
        kind, head = self._value[at] & 3, self._value[at] >> 2
        if kind == 0:
            return self._primitive(head, at + 1)
        if kind == 1:
            return _json_string(self._value[at + 1 : at + 1 + head].decode())
        return self._object(head, at + 1) if kind == 2 else self._array(head, at + 1)

    def _object(self, head: int, at: int) -> str:
        count_size, size, id_size = 4 if head >> 4 else 1, (head & 3) + 1, (head >> 2 & 3) + 1
        count = _number(self._value, at, count_size)
        ids = at + count_size
        edges = ids + count * id_size
        values = edges + (count + 1) * size
        found = {
            self._names[_number(self._value, ids + place * id_size, id_size)]: self._at(
                values + _number(self._value, edges + place * size, size)
            )
            for place in range(count)
        }
        ordered = sorted(found, key=lambda name: (len(name.encode()), name.encode()))
        return "{" + ", ".join(f"{_json_string(name)}: {found[name]}" for name in ordered) + "}"

    def _array(self, head: int, at: int) -> str:
        count_size, size = 4 if head >> 2 else 1, (head & 3) + 1
        count = _number(self._value, at, count_size)
        edges = at + count_size
        values = edges + (count + 1) * size
        places = (values + _number(self._value, edges + place * size, size) for place in range(count))
        return "[" + ", ".join(map(self._at, places)) + "]"

    def _primitive(self, kind: int, at: int) -> str:
        if kind < 3:
            return ("null", "true", "false")[kind]
        if kind < 7:
            return str(_number(self._value, at, 1 << kind - 3, signed=True))
        if 8 <= kind <= 10:
            unscaled = _number(self._value, at + 1, 4 << kind - 8, signed=True)
            return format(decimal.Decimal(unscaled).scaleb(-self._value[at], decimal.Context(prec=50)), "f")
        assert kind == 16
        length = _number(self._value, at, 4)
        return _json_string(self._value[at + 4 : at + 4 + length].decode())


def _number(data: bytes, at: int, size: int, *, signed: bool = False) -> int:
    return int.from_bytes(data[at : at + size], "little", signed=signed)


def _json_string(text: str) -> str:
    """Write a JSON string (json.c: escape_json)."""
    written = (_ESCAPED.get(sign) or (f"\\u{ord(sign):04x}" if sign < " " else sign) for sign in text)
    return '"' + "".join(written) + '"'
