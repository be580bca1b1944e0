"""Conversion of a query result's fields, which are text, to Python values."""

from __future__ import annotations

from pubsub.protocol.ids import Oid


def text(value: str | None) -> str:
    """Return a field that is not NULL."""
    assert value is not None
    return value


def number(value: str | None) -> int:
    """Parse an integer that is not NULL."""
    return int(text(value))


def truth(value: str | None) -> bool:
    """Parse a boolean; NULL is false."""
    return value == "t"


def array(value: str) -> tuple[str, ...]:
    """Parse a one-dimensional text[] without NULLs into its elements (arrayfuncs.c: array_out)."""
    elements: list[str] = []
    rest = value[1:-1]
    at = 0
    while at < len(rest):
        element = ""
        if rest[at] == '"':
            at += 1
            while rest[at] != '"':
                at += rest[at] == "\\"
                element += rest[at]
                at += 1
            at += 1
        else:
            end = rest.find(",", at)
            end = len(rest) if end < 0 else end
            element, at = rest[at:end], end
        elements.append(element)
        at += 1  # the comma
    return tuple(elements)


def as_oid(value: str | None) -> Oid:
    """Parse an OID that is not NULL."""
    return Oid(number(value))
