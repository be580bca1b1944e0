"""Conversion of a query result's fields, which are text, to Python values.

A publisher may answer anything: what is not of the expected form raises ProtocolViolation.
"""

from __future__ import annotations

from pubsub.errors import ProtocolViolation
from pubsub.protocol.ids import Oid

#: The longest text of a 64-bit integer, and of a numeric without a scale that is one, has fewer characters.
_MAX_DIGITS = 40


def text(value: str | None) -> str:
    """Return a field that is not NULL.  Raises ProtocolViolation."""
    if value is None:
        raise ProtocolViolation("the publisher answered a query with NULL where that cannot be")
    return value


def number(value: str | None) -> int:
    """Parse an integer that is not NULL.  Raises ProtocolViolation."""
    found = text(value)
    try:
        if len(found) < _MAX_DIGITS:
            return int(found)
    except ValueError:
        pass
    raise ProtocolViolation(f'the publisher answered a query with "{found[:_MAX_DIGITS]}" instead of a number')


def number_or_none(value: str | None) -> int | None:
    """Parse an integer or NULL.  Raises ProtocolViolation."""
    return None if value is None else number(value)


def truth(value: str | None) -> bool:
    """Parse a boolean; NULL is false."""
    return value == "t"


def array(value: str) -> tuple[str, ...]:
    """Parse a one-dimensional text[] without NULLs into its elements (arrayfuncs.c: array_out).  Raises ProtocolViolation."""
    if not (value.startswith("{") and value.endswith("}") and len(value) > 1):
        raise ProtocolViolation("the publisher answered a query with a malformed array")
    elements: list[str] = []
    rest = value[1:-1]
    at = 0
    while at < len(rest):
        element = ""
        if rest[at] == '"':
            at += 1
            try:
                while rest[at] != '"':
                    at += rest[at] == "\\"
                    element += rest[at]
                    at += 1
            except IndexError:
                raise ProtocolViolation("the publisher answered a query with a malformed array") from None
            at += 1
        else:
            end = rest.find(",", at)
            end = len(rest) if end < 0 else end
            element, at = rest[at:end], end
        elements.append(element)
        at += 1  # the comma
    return tuple(elements)


def as_oid(value: str | None) -> Oid:
    """Parse an OID that is not NULL.  Raises ProtocolViolation."""
    found = number(value)
    if not 0 <= found < 1 << 32:
        raise ProtocolViolation(f"the publisher answered a query with {found} instead of an oid")
    return Oid(found)
