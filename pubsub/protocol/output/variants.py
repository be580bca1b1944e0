"""A VARIANT's value as jsonb's text (Apache Parquet, VariantEncoding.md; jsonb.c: JsonbToCString).

`pubsub.protocol.text.variant` says which values are written; others, which another writer may have put there, are refused.
"""

from __future__ import annotations

import itertools
import json
from decimal import Context, Decimal
from typing import Any, Final

from pubsub.errors import DataCorrupted

_PRIMITIVE, _SHORT_STRING, _OBJECT = range(3)
_WORDS: Final = ("null", "true", "false")
_FIRST_INTEGER, _FIRST_DECIMAL, _STRING = 3, 8, 16
_EXACT: Final = Context(prec=50)


def variant_text(metadata: bytes, value: bytes) -> str:
    """Return the value's text.  Raises DataCorrupted for a value that jsonb has no form for."""
    width = (metadata[0] >> 6) + 1
    count = _number(metadata, 1, width)
    edges = [_number(metadata, 1 + width * (1 + place), width) for place in range(count + 1)]
    texts = metadata[1 + width * (count + 2) :]
    names = [texts[begin:end].decode() for begin, end in itertools.pairwise(edges)]
    return _text(names, value, 0)


def exact_text(row: str, *variants: Any) -> str:
    """Return a text of `row` and of Spark's VARIANT values (VariantVal), equal only if all of them are as jsonb: 1.0 is not 1.

    A value that jsonb has no form for is told apart by its bytes.  Spark's to_json leaves out the zeros after the point.
    """
    return json.dumps([row, *map(_exact, variants)])


def _exact(variant: Any) -> str | None:
    if variant is None:
        return None
    try:
        return variant_text(bytes(variant.metadata), bytes(variant.value))
    except DataCorrupted:
        return f"{bytes(variant.metadata).hex()} {bytes(variant.value).hex()}"


def _text(names: list[str], value: bytes, at: int) -> str:
    kind, head = value[at] & 3, value[at] >> 2
    if kind == _PRIMITIVE:
        return _primitive(value, head, at + 1)
    if kind == _SHORT_STRING:
        return _string(value[at + 1 : at + 1 + head])
    if kind == _OBJECT:
        return _object(names, value, head, at + 1)
    return _array(names, value, head, at + 1)


def _object(names: list[str], value: bytes, head: int, at: int) -> str:
    count_width, offset_width, id_width = 4 if head >> 4 else 1, (head & 3) + 1, (head >> 2 & 3) + 1
    count = _number(value, at, count_width)
    ids = at + count_width
    offsets = ids + count * id_width
    values = offsets + (count + 1) * offset_width
    fields = {}
    for place in range(count):
        name = names[_number(value, ids + place * id_width, id_width)]
        fields[name] = values + _number(value, offsets + place * offset_width, offset_width)
    # jsonb has shorter keys first (jsonb_util.c: lengthCompareJsonbString).
    ordered = sorted(fields, key=lambda name: (len(name.encode()), name.encode()))
    return "{" + ", ".join(f"{_json(name)}: {_text(names, value, fields[name])}" for name in ordered) + "}"


def _array(names: list[str], value: bytes, head: int, at: int) -> str:
    count_width, offset_width = 4 if head >> 2 else 1, (head & 3) + 1
    count = _number(value, at, count_width)
    offsets = at + count_width
    values = offsets + (count + 1) * offset_width
    places = (values + _number(value, offsets + place * offset_width, offset_width) for place in range(count))
    return "[" + ", ".join(_text(names, value, place) for place in places) + "]"


def _primitive(value: bytes, kind: int, at: int) -> str:
    if kind < len(_WORDS):
        return _WORDS[kind]
    if kind < _FIRST_INTEGER + 4:
        return str(_number(value, at, 1 << kind - _FIRST_INTEGER, signed=True))
    if _FIRST_DECIMAL <= kind < _FIRST_DECIMAL + 3:
        unscaled = _number(value, at + 1, 4 << kind - _FIRST_DECIMAL, signed=True)
        return format(Decimal(unscaled).scaleb(-value[at], _EXACT), "f")
    if kind == _STRING:
        length = _number(value, at, 4)
        return _string(value[at + 4 : at + 4 + length])
    raise DataCorrupted(f"a VARIANT has a value of type {kind}, which jsonb does not have")


def _number(data: bytes, at: int, width: int, *, signed: bool = False) -> int:
    return int.from_bytes(data[at : at + width], "little", signed=signed)


def _string(data: bytes) -> str:
    return _json(data.decode())


def _json(text: str) -> str:
    """Write a string as jsonb does (json.c: escape_json), which escapes no more than it must."""
    return json.dumps(text, ensure_ascii=False)
