"""Find the known name that is closest to a mistyped one (varlena.c: ClosestMatchState)."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], most: int = 4) -> str | None:
    """Return the closest known name, the first among equals; None if none is close enough.

    The distance may be at most `most`, and at most half of the length of `name`.
    """
    best, least = None, min(most, len(name) // 2) + 1
    for one in known:
        if (distance := _distance(name, one)) < least:
            best, least = one, distance
    return best


def _distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: how many characters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for place, left in enumerate(one, start=1):
        before, row = row, [place]
        for column, right in enumerate(other, start=1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (left != right)))
    return row[-1]
