"""Access to values that are kept as PostgreSQL's text: elements of arrays, and -> and ->> on json and jsonb.

Python computes them, since DataFusion cannot: they are for the columns of the outermost SELECT only (values.Exact).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select import operators
from pubsub.node.select.types import BOOL, INT2, INT4, INT8, TEXT, UNKNOWN, VARCHAR, Type, numeric
from pubsub.node.select.values import Value, composed


def extracted(operator: str, document: Value, key: Value) -> Value:
    """Translate document -> key or document ->> key.

    The key is a text, or the index of an element, which counts from 0, or from -1 backwards from the end.
    """
    if document.type.name not in ("json", "jsonb") or not (
        key.type.is_text or key.type == UNKNOWN or key.type.is_integer
    ):
        raise operators.undefined(operator, document, key)
    if document.type.name == "jsonb" and document.type.scale:
        raise FeatureNotSupported(f"operator {document.type.name} {operator} is not supported for VARIANT")
    if document.type.name == "json" and operator == "->":
        raise FeatureNotSupported(
            "operator json -> is not supported", hint="Cast it to jsonb, or use ->>, which gives text."
        )
    by_place = key.type.is_integer
    as_text = operator == "->>"
    given = Value(INT4 if by_place else TEXT, key.engine)

    def find(text: str, where: Any) -> Any:
        from walsender.rowfilter.functions.json_values import as_text as shown
        from walsender.rowfilter.functions.json_values import read_document, written

        is_json = document.type.name == "json"
        found = _member(_JSON.decode(text) if is_json else read_document(text.encode()).value, where)
        if found is _NONE:
            return None
        if is_json and isinstance(found, dict | list):
            raise FeatureNotSupported("objects and arrays within json are not supported", hint="Cast it to jsonb.")
        return shown(found) if as_text else written(found)

    return Value(TEXT if as_text else document.type, None, composed(find, document, given))


_NONE: Final = object()
#: json keeps numbers as they were written.
_JSON: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def _member(value: Any, where: Any) -> Any:
    if isinstance(where, int):
        if not isinstance(value, list) or not -len(value) <= where < len(value):
            return _NONE
        return value[where]
    return value.get(where, _NONE) if isinstance(value, dict) else _NONE


def kept_element(array: Value, place: Value) -> Value:
    """Translate array[place] for an array that is kept as text, with any lower bound."""
    if not place.type.is_integer:
        raise PubsubError("array subscript must have type integer", sqlstate="42804")
    name = array.type.name.removesuffix("[]")
    type_, read = _ELEMENTS.get(name, (Type(name, kept=True), str))

    def find(value: str, where: int) -> Any:
        bounds, _, rest = value.rpartition("=") if value.startswith("[") else ("", "", value)
        if bounds.count("[") > 1 or rest.startswith("{{"):
            return None
        lower = int(bounds[1:].partition(":")[0]) if bounds else 1
        held = elements(rest)
        found = held[where - lower] if 0 <= where - lower < len(held) else None
        return None if found is None else read(found)

    return Value(type_, None, composed(find, array, place))


_ELEMENTS: Final[dict[str, tuple[Type, Callable[[str], Any]]]] = {
    "smallint": (INT2, int),
    "integer": (INT4, int),
    "bigint": (INT8, int),
    "numeric": (numeric(0), Decimal),
    "boolean": (BOOL, lambda text: text == "t"),
    "text": (TEXT, str),
    "character varying": (VARCHAR, str),
}


def elements(text: str) -> list[str | None]:
    """Parse the text of a one-dimensional array without bounds (arrayfuncs.c: array_out); None stands for NULL."""
    found: list[str | None] = []
    place = 1
    while place < len(text) - 1:
        if text[place] == '"':
            element, place = "", place + 1
            while text[place] != '"':
                place += text[place] == "\\"
                element += text[place]
                place += 1
            found.append(element)
            place += 1
        else:
            end = text.find(",", place)
            end = len(text) - 1 if end < 0 else end
            word = text[place:end]
            found.append(None if word.upper() == "NULL" else word)
            place = end
        place += 1  # the comma
    return found
