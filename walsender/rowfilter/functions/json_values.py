"""jsonb values: parsed, compared and written again (jsonb.c, jsonb_util.c)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeAlias

# A value as its text says, numbers as Decimal.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | Decimal | bool | None"


@dataclass(frozen=True, slots=True)
class Document:
    """A jsonb; `value` is None for null."""

    value: Json

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Document) and same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(written(self.value))


_DECODER: Final = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)


def read_document(text: bytes) -> Document:
    """Parse a jsonb's text, which is UTF-8 here."""
    return Document(_DECODER.decode(text.decode()))


def same(a: Json, b: Json) -> bool:
    """Return whether two values are equal (jsonb_util.c: compareJsonbContainers)."""
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and len(a) == len(b)
            and all(key in b and same(value, b[key]) for key, value in a.items())
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def contains(a: Json, b: Json, *, outermost: bool = True) -> bool:
    """Return whether `a` contains `b` (jsonb_util.c: JsonbDeepContains)."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(
            key in a and (contains(a[key], value, outermost=False) if _is_container(value) else same(a[key], value))
            for key, value in b.items()
        )
    if isinstance(a, list):
        if isinstance(b, list):
            return all(
                any(_is_container(one) and contains(one, wanted, outermost=False) for one in a)
                if _is_container(wanted)
                else any(same(one, wanted) for one in a)
                for wanted in b
            )
        # An array may contain a scalar by itself.
        return outermost and not isinstance(b, dict) and any(same(one, b) for one in a)
    return not _is_container(b) and same(a, b)


def _is_container(value: Json) -> bool:
    return isinstance(value, dict | list)


def written(value: Json) -> str:
    """Write a value as jsonb_out does."""
    if isinstance(value, dict):
        return "{" + ", ".join([f"{_quoted(key)}: {written(one)}" for key, one in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else f"{value:f}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_text(value: Json) -> str | None:
    """Return what ->> does: a string itself, NULL for null."""
    if isinstance(value, str):
        return value
    return None if value is None else written(value)
