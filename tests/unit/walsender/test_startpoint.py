"""At which checkpoint decoding has to begin, so that everything from a position on is decoded whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from walsender.startpoint import _Search
from walsender.xlog.formats import format_of_version


def _found(start: int, redos: Sequence[int], lists: Sequence[tuple[int, set[int]]], alive: set[int]) -> int | None:
    wal_format = format_of_version(180000)
    assert wal_format is not None
    search = _Search(start, wal_format)
    search.redos += redos
    search._lists += [(lsn, frozenset(xids)) for lsn, xids in lists]
    search._alive = frozenset(alive)
    return search.found(0)


@pytest.mark.parametrize(
    ("lists", "alive", "found"),
    [
        ([(110, set()), (210, set())], set(), 200),
        ([(110, set()), (210, {7})], set(), 200),  # 7 ended before the start
        ([(110, set()), (210, {7})], {7}, 100),  # it still runs at the start
        ([(110, {7}), (210, {7})], {7}, None),
        # The start lies between a checkpoint's redo position and its list: what commits there would not be decoded.
        ([(110, set()), (310, set())], set(), 100),
        ([(310, set())], set(), None),
        ([(110, set()), (300, set())], set(), 200),  # a shutdown's checkpoint
    ],
)
def test_which_checkpoint_serves(lists: list[tuple[int, set[int]]], alive: set[int], found: int | None) -> None:
    assert _found(300, [100, 200], lists, alive) == found
