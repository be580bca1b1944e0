"""Functions of arrays (arrayfuncs.c, array_userfuncs.c)."""

from __future__ import annotations

from typing import Final

from walsender.rowfilter.functions.values import Array, Maker, fixed


def _equal(a: Array, b: Array) -> bool:
    # Here NULLs are equal to each other.
    return a.dims == b.dims and a.lower == b.lower and list(a) == list(b)


def _contains(a: Array, b: Array) -> bool:
    return all(one is not None and one in a for one in b)


def _overlap(a: Array, b: Array) -> bool:
    return any(one is not None and one in b for one in a)


def _length(array: Array, dimension: int) -> int | None:
    return array.dims[dimension - 1] if 0 < dimension <= len(array.dims) else None


def _lower(array: Array, dimension: int) -> int | None:
    return array.lower[dimension - 1] if 0 < dimension <= len(array.dims) else None


def _upper(array: Array, dimension: int) -> int | None:
    length, lower = _length(array, dimension), _lower(array, dimension)
    return None if length is None or lower is None else lower + length - 1


FUNCTIONS: Final[dict[str, Maker]] = {
    "array_eq": fixed(_equal),
    "array_ne": fixed(lambda a, b: not _equal(a, b)),
    "arraycontains": fixed(_contains),
    "arraycontained": fixed(lambda a, b: _contains(b, a)),
    "arrayoverlap": fixed(_overlap),
    "array_length": fixed(_length),
    "array_lower": fixed(_lower),
    "array_upper": fixed(_upper),
    "array_ndims": fixed(lambda array: len(array.dims) or None),
    "cardinality": fixed(len),
}
