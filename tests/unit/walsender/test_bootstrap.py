"""The catalogs' files come in page by page: what is dead takes no memory, and a page that was being written no harm."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from pubsub.errors import DataCorrupted
from walsender.historic.bootstrap import CatalogBootstrap, WindowScan
from walsender.historic.heappage import (
    HEAP_XMAX_COMMITTED,
    HEAP_XMAX_INVALID,
    HEAP_XMAX_IS_MULTI,
    HEAP_XMAX_LOCK_ONLY,
    HEAP_XMIN_COMMITTED,
    HEAP_XMIN_INVALID,
)
from walsender.historic.upstream import CatalogFile, Upstream
from walsender.xlog.formats import BLCKSZ

SERVER = Upstream(180000, 5, "UTF8", 1, 16 << 20, True, True)
FILE = CatalogFile("pg_class", 1259, 5000, "base/5/5000", ())
LIVE = HEAP_XMIN_COMMITTED | HEAP_XMAX_INVALID
DELETED = HEAP_XMIN_COMMITTED | HEAP_XMAX_COMMITTED


def page(*tuples: tuple[int, int, int]) -> bytes:
    """Make a page of tuples, each with its xmin, xmax and infomask."""
    data = bytearray(BLCKSZ)
    upper = BLCKSZ
    for number, (xmin, xmax, mask) in enumerate(tuples):
        found = struct.pack("<II10xHHB9x", xmin, xmax, 0, mask, 24)
        upper -= 32
        data[upper : upper + len(found)] = found
        struct.pack_into("<I", data, 24 + 4 * number, upper | 1 << 15 | len(found) << 17)
    struct.pack_into("<HHH", data, 12, 24 + 4 * len(tuples), upper, BLCKSZ)
    return bytes(data)


def scanned(oldest_running: int | None, seen: Sequence[int] = ()) -> WindowScan:
    scan = WindowScan(5, [FILE])
    scan.ends.oldest_running = oldest_running
    scan.seen.update(seen)
    return scan


@pytest.mark.parametrize(
    ("xmin", "xmax", "mask", "is_kept"),
    [
        (10, 0, LIVE, True),
        (10, 90, DELETED, False),
        (10, 95, DELETED, True),  # deleted by a transaction that has a record in the WAL
        (10, 100, DELETED, True),  # … that was running at the list
        (10, 150, DELETED, True),
        (10, 4_294_967_290, DELETED, False),  # transaction ids have wrapped around
        (10, 90, HEAP_XMIN_COMMITTED, True),  # how it ended is not known
        (10, 90, DELETED | HEAP_XMAX_LOCK_ONLY, True),
        (10, 90, DELETED | HEAP_XMAX_IS_MULTI, True),
        (90, 0, HEAP_XMIN_INVALID | HEAP_XMAX_INVALID, False),  # rolled back
        (95, 0, HEAP_XMIN_INVALID | HEAP_XMAX_INVALID, True),
        (150, 0, HEAP_XMIN_INVALID | HEAP_XMAX_INVALID, True),
        (90, 0, HEAP_XMIN_COMMITTED | HEAP_XMIN_INVALID | HEAP_XMAX_INVALID, True),  # frozen
    ],
)
def test_tuples_that_were_dead_are_dropped(xmin: int, xmax: int, mask: int, is_kept: bool) -> None:
    bootstrap = CatalogBootstrap([FILE], SERVER, scanned(100, [95]))
    assert bootstrap.take(FILE, 7, page((xmin, xmax, mask))) == 8
    assert [block for block, _ in bootstrap._tuples(FILE)] == [7] * is_kept
    # Without a list of running transactions nothing is known.
    bootstrap = CatalogBootstrap([FILE], SERVER, scanned(None, [95]))
    bootstrap.take(FILE, 7, page((xmin, xmax, mask)))
    assert [block for block, _ in bootstrap._tuples(FILE)] == [7]


def test_transactions_that_only_the_server_knows() -> None:
    scan = scanned(100)
    bootstrap = CatalogBootstrap([FILE], SERVER, scan)
    bootstrap.take(FILE, 0, page((50, 60, 0), (70, 0, LIVE), (51, 61, HEAP_XMAX_LOCK_ONLY)) + page((52, 0, 0)))
    assert bootstrap.undecided() == {50, 60, 51, 52}
    scan.seen.add(60)
    assert bootstrap.undecided() == {50, 51, 52}
    assert bootstrap.needed({50, 51, 70}) == {50, 51}
    scan.pages[False, SERVER.tablespace, 5000, 0] = []
    assert bootstrap.needed({50, 52}) == {52}, "the page as the file had it is not what it was at R"


def test_a_page_that_was_being_written_is_the_wals() -> None:
    scan = scanned(100)
    bootstrap = CatalogBootstrap([FILE], SERVER, scan)
    torn = b"\xff" * BLCKSZ
    assert bootstrap.take(FILE, 0, page((10, 0, LIVE)) + torn) == 2
    with pytest.raises(DataCorrupted) as caught:
        list(CatalogBootstrap._tuples(bootstrap, FILE))
    assert caught.value.context == "block 1 of pg_class"
    bootstrap.take(FILE, 0, page((10, 0, LIVE)) + torn)
    scan.pages[False, SERVER.tablespace, 5000, 1] = [(3, 11, 0, LIVE, b"row")]
    assert [(block, found[:3]) for block, found in bootstrap._tuples(FILE)] == [(0, (1, 10, 0)), (1, (3, 11, 0))]
    # A page that the WAL has is not looked at in the file.
    for torn_ones in (torn + torn, page((10, 0, LIVE)) + torn):
        bootstrap = CatalogBootstrap([FILE], SERVER, scan)
        bootstrap.take(FILE, 0, torn_ones)
        assert list(bootstrap._pages[FILE.name]) == [0]
