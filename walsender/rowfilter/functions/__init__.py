"""The built-in functions that row filters may use, by the names and argument types that pg_proc has.

values.py says in what form they take values.  Each other module has a family of functions, as a table from name to
`Maker`.  A function in none of them is not supported, and refused by name.
"""

from __future__ import annotations

from typing import Final

from walsender.rowfilter.functions import arrays, comparison, documents, networks, numbers, patterns, texts, times
from walsender.rowfilter.functions.values import (
    ARRAYS,
    READERS,
    STORAGE,
    Array,
    FixedFunction,
    Maker,
    Settings,
    is_utf8,
    reader,
)

__all__ = ["ARRAYS", "READERS", "STORAGE", "Array", "FixedFunction", "Settings", "find", "is_utf8", "reader"]

_FAMILIES: Final[tuple[dict[str, Maker], ...]] = (
    numbers.FUNCTIONS,
    texts.FUNCTIONS,
    patterns.FUNCTIONS,
    times.FUNCTIONS,
    documents.FUNCTIONS,
    arrays.FUNCTIONS,
    networks.FUNCTIONS,
)


def find(name: str, types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
    """Return the function that pg_proc calls `name` with arguments of `types`; None if it is not supported."""
    found = comparison.find(name, settings) or numbers.integers(name)
    if found is not None:
        return found
    for family in _FAMILIES:
        maker = family.get(name)
        made = maker(types, settings) if maker is not None else None
        if made is not None:
            return made
    return None
