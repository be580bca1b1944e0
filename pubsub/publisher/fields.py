"""Fields of a query's result, which come as text, as Python values."""

from __future__ import annotations


def text(value: str | None) -> str:
    """A field that is not NULL."""
    assert value is not None
    return value


def number(value: str | None) -> int:
    """An integer that is not NULL."""
    return int(text(value))


def truth(value: str | None) -> bool:
    """A boolean; NULL is false."""
    return value == "t"
