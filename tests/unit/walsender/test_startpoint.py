"""At which checkpoint decoding has to begin, so that everything from a position on is decoded whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from walsender.startpoint import _Search, _Segment
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


def _list(lsn: int, *xids: int) -> Callable[[_Segment], None]:
    return lambda segment: segment.take_list(lsn, xids)


def _shutdown(lsn: int) -> Callable[[_Segment], None]:
    return lambda segment: segment.take_shutdown(lsn)


def _prepare(xid: int) -> Callable[[_Segment], None]:
    return lambda segment: segment.take_prepare(xid)


def _end(*xids: int) -> Callable[[_Segment], None]:
    def take(segment: _Segment) -> None:
        segment.take_end(xids)
        segment.ended_before_start.update(xids)

    return take


@pytest.mark.parametrize(
    ("segments", "found"),
    [
        # A shutdown at 200, and the start at 300.  The redo positions are 100 and 200; one segment begins at 150.
        ([[_list(110)], [_shutdown(200)]], 200),
        ([[_list(110, 7)], [_shutdown(200)]], None),  # 7 is prepared since before 100, or was lost in a crash
        ([[_list(110, 7), _end(7)], [_shutdown(200)]], 200),
        ([[_list(110, 7)], [_end(7), _shutdown(200)]], 200),
        ([[_list(110)], [_prepare(7), _shutdown(200)]], 100),
        ([[_list(110), _prepare(7)], [_shutdown(200)]], 100),
        ([[_list(110), _prepare(7)], [_end(7), _shutdown(200)]], 200),
        ([[_list(110), _prepare(7)], [_shutdown(200), _list(250, 7), _end(7)]], 200),  # it ended before the start
        ([[_list(110), _prepare(7)], [_shutdown(200), _list(250, 7)]], 100),
        ([[_list(110, 7)], [_shutdown(200), _list(250)]], 200),  # it did not outlive the shutdown
        ([[_list(110), _prepare(7), _shutdown(140)], [_shutdown(200)]], 100),
        ([[], [_shutdown(200)]], 200),  # the WAL tells nothing before it
        ([[], [_prepare(7), _shutdown(200)]], None),
    ],
)
def test_who_is_prepared_at_a_shutdown(segments: list[list[Callable[[_Segment], None]]], found: int | None) -> None:
    wal_format = format_of_version(180000)
    assert wal_format is not None
    search = _Search(300, wal_format)
    search.redos += [100, 200] if segments[0] else [200]
    answer = None
    for first, events in ((150, segments[1]), (0, segments[0])):
        segment = _Segment()
        for event in events:
            # What ended before a list or a shutdown does not count for what runs at the start.
            if event.__qualname__.startswith(("_list", "_shutdown")):
                segment.ended_before_start.clear()
            event(segment)
        search.add(segment)
        answer = answer or search.found(first)
    search.settle()
    assert (answer or search.found(0)) == found
