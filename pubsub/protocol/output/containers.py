"""Texts of arrays, composites and ranges, from the texts of their parts.

Follows arrayfuncs.c (array_out), rowtypes.c (record_out), rangetypes.c (range_deparse, range_bound_escape),
multirangetypes.c (multirange_out).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_ARRAY_SPECIAL: Final = frozenset(b'"\\{} \t\n\r\v\f')
_RECORD_SPECIAL: Final = frozenset(b'"\\(), \t\n\r\v\f')
_RANGE_SPECIAL: Final = frozenset(b'"\\()[], \t\n\r\v\f')

RANGE_EMPTY: Final = 0x01
RANGE_LB_INC: Final = 0x02
RANGE_UB_INC: Final = 0x04
RANGE_LB_INF: Final = 0x08
RANGE_UB_INF: Final = 0x10


def array_text(dims: Sequence[int], lower: Sequence[int], texts: Sequence[bytes | None], delimiter: bytes) -> bytes:
    """Return an array's text from its dimensions, lower bounds, and elements' texts in order, None for NULL."""
    if not texts:
        return b"{}"
    special = _ARRAY_SPECIAL | {delimiter[0]}
    written = [b"NULL" if text is None else _array_element(text, special) for text in texts]
    for dim in reversed(dims):
        written = [b"{" + delimiter.join(written[i : i + dim]) + b"}" for i in range(0, len(written), dim)]
    text = written[0]
    if any(bound != 1 for bound in lower):
        bounds = "".join(f"[{low}:{low + dim - 1}]" for low, dim in zip(lower, dims, strict=True))
        text = bounds.encode() + b"=" + text
    return text


def _array_element(text: bytes, special: frozenset[int]) -> bytes:
    if text and text.upper() != b"NULL" and special.isdisjoint(text):
        return text
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def record_text(texts: Iterable[bytes | None]) -> bytes:
    """Return a composite's text from its attributes' texts, None for NULL."""
    return b"(" + b",".join([b"" if text is None else _doubled(text, _RECORD_SPECIAL) for text in texts]) + b")"


def range_text(flags: int, lower: bytes | None, upper: bytes | None) -> bytes:
    """Return a range's text from its flags and its bounds' texts, None for an infinite bound."""
    if flags & RANGE_EMPTY:
        return b"empty"
    return b"".join(
        (
            b"[" if flags & RANGE_LB_INC else b"(",
            b"" if lower is None else _doubled(lower, _RANGE_SPECIAL),
            b",",
            b"" if upper is None else _doubled(upper, _RANGE_SPECIAL),
            b"]" if flags & RANGE_UB_INC else b")",
        )
    )


def multirange_text(ranges: Iterable[bytes]) -> bytes:
    """Return a multirange's text from its ranges' texts."""
    return b"{" + b",".join(ranges) + b"}"


def _doubled(text: bytes, special: frozenset[int]) -> bytes:
    if text and special.isdisjoint(text):
        return text
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'""') + b'"'
