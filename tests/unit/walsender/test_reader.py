"""WalReader on handmade WAL: pages, segments, truncated and broken WAL."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pubsub.errors import FeatureNotSupported
from tests.unit.walsender.wal import GEOMETRY, SEGMENT, Wal, main_data, one_block, record_bytes, row
from walsender.decode import changes
from walsender.decode.transactions import Part, Txn
from walsender.hot.walk import FRAME_OVERHEAD, Skim, Walk, file_key
from walsender.xlog.errors import WalCorrupted, WalMissing
from walsender.xlog.formats import FORMATS, XLOG_BLCKSZ, XLOG_SWITCH, WalFormat
from walsender.xlog.reader import WalReader


def read(
    wal: Wal, step: int = 1 << 20, *, final: bool = True
) -> tuple[list[tuple[int, int, int, int, int]], WalReader]:
    reader = WalReader(GEOMETRY, wal.start, final=final)
    found = []
    for at in range(0, len(wal.data), step):
        reader.feed(wal.start + at, bytes(wal.data[at : at + step]))
        found += [(lsn, length, xid, info, rmgr) for _, _, length, lsn, xid, info, rmgr in reader.records()]
    return found, reader


def some(wal: Wal) -> None:
    for number in range(60):
        wal.record(main_data(bytes(number * 37 % 250)), xid=number, info=0x10, rmgr=10)
    wal.record(main_data(b"x" * 30000), xid=99, rmgr=9)  # spans several pages
    wal.record(main_data(b""), rmgr=11)


@pytest.mark.parametrize("step", [1, 7, 8, 100, 8191, 8192, 8193, 1 << 20])
def test_records_are_read_from_pieces_of_any_size(step: int) -> None:
    wal = Wal()
    some(wal)
    found, reader = read(wal, step)
    assert found == wal.records
    assert reader.position == wal.end
    assert reader.format is not None
    assert reader.format.version == 18


def test_a_record_across_the_end_of_a_segment() -> None:
    wal = Wal()
    while wal.end < 2 * SEGMENT + 5000:
        wal.record(main_data(bytes(3000)), xid=7, rmgr=10)
    found, _ = read(wal)
    assert found == wal.records


def test_a_record_that_ends_with_its_page() -> None:
    wal = Wal()
    wal.record(main_data(bytes(XLOG_BLCKSZ - 40 - 24 - 5)), rmgr=10)
    assert wal.end % XLOG_BLCKSZ == 0
    _, reader = read(wal)
    assert reader.position == wal.end  # the page's end, not the first byte after the next header
    wal.record(main_data(b"next"), rmgr=10)
    found, _ = read(wal)
    assert found[1][0] == wal.start + XLOG_BLCKSZ + 24


def test_switch_passes_over_the_rest_of_the_segment() -> None:
    wal = Wal()
    wal.record(main_data(b"before"), rmgr=10)
    wal.record(b"", rmgr=0, info=XLOG_SWITCH)
    wal.data += bytes(2 * SEGMENT - wal.end)  # no page headers there
    wal.record(main_data(b"after"), rmgr=10)
    for step in (1000, 1 << 22):
        found, reader = read(wal, step)
        assert found == wal.records
        assert reader.position == wal.end


@pytest.mark.parametrize("wal_format", FORMATS.values(), ids=lambda one: str(one.version))
def test_a_record_that_was_never_completed(wal_format: WalFormat) -> None:
    wal = Wal(magic=wal_format.page_magic)
    wal.record(main_data(b"one"), rmgr=10)
    previous = wal.previous
    cut = record_bytes(main_data(bytes(20000)), 5, 0, 10, previous)
    room = XLOG_BLCKSZ - wal.end % XLOG_BLCKSZ
    wal.data += cut[:room]
    wal._header(0, wal_format.overwrites_contrecord)
    wal.record(main_data(bytes(16)), rmgr=0, info=0xD0)
    wal.record(main_data(b"two"), rmgr=10)
    for step in (500, 1 << 20):
        assert read(wal, step)[0] == wal.records


@pytest.mark.parametrize("place", ["header", "payload", "crc", "length", "previous"])
def test_a_broken_record_stops_with_its_position(place: str) -> None:
    wal = Wal()
    some(wal)
    lsn = wal.records[30][0]
    at = lsn - wal.start + {"header": 16, "payload": 26, "crc": 20, "length": 1, "previous": 8}[place]
    wal.data[at] ^= 0x55
    with pytest.raises(WalCorrupted) as caught:
        read(wal)
    assert caught.value.lsn == lsn
    # The reader waits for WAL that may still be written.
    found, reader = read(wal, final=False)
    assert found == wal.records[:30]
    assert reader.torn is not None
    assert reader.torn.lsn == lsn


def test_a_torn_tail_is_read_once_it_is_there() -> None:
    wal = Wal()
    some(wal)
    whole = bytes(wal.data)
    reader = WalReader(GEOMETRY, wal.start, final=False)
    reader.feed(wal.start, whole[:9000] + bytes(7384))
    found = [record[3] for record in reader.records()]
    assert reader.torn is not None
    page = reader.restart_at(reader.position)
    reader.feed(page, whole[page - wal.start :])
    found += [record[3] for record in reader.records()]
    assert found == [record[0] for record in wal.records]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("step", [500, XLOG_BLCKSZ, 1 << 20])
def test_a_record_whose_rest_is_not_there(step: int, begun: bool) -> None:
    """Its next page is old content of a recycled file: the reader neither waits for WAL after it, nor holds any."""
    wal = Wal()
    some(wal)
    read_before = len(wal.records)
    lsn = wal.record(main_data(bytes(3 * XLOG_BLCKSZ)), rmgr=10)
    bad = (lsn // XLOG_BLCKSZ + 2) * XLOG_BLCKSZ
    data = wal.data[: bad - wal.start] + bytes(SEGMENT)
    # Also starting inside the record, where the reader looks for the first record after it.
    start = wal.start if begun else bad - XLOG_BLCKSZ
    for final in (False, True):
        reader = WalReader(GEOMETRY, start, final=final, find_first=not begun)
        found = 0
        with pytest.raises(WalCorrupted) if final else contextlib.nullcontext():
            for at in range(start - wal.start, len(data), step):
                reader.feed(wal.start + at, bytes(data[at : at + step]))
                for _ in reader.records():
                    found += 1
        assert found == (read_before if begun else 0)
        assert reader.torn is not None
        assert reader.torn.lsn == bad
        assert sum(map(len, reader._held)) <= step


def test_missing_and_repeated_bytes() -> None:
    wal = Wal()
    some(wal)
    reader = WalReader(GEOMETRY, wal.start)
    reader.feed(wal.start, bytes(wal.data[:5000]))
    reader.feed(wal.start, bytes(wal.data[:9000]))
    with pytest.raises(WalMissing):
        reader.feed(wal.start + 10000, b"x")
    reader.feed(wal.start + 8000, bytes(wal.data[8000:]))
    assert [record[3] for record in reader.records()] == [record[0] for record in wal.records]


def test_timelines_only_grow_but_for_what_is_read_again() -> None:
    """After a break the last record's page is read again, and the page after it may be of the next timeline."""
    wal = Wal()
    while len(wal.data) < 2 * XLOG_BLCKSZ:
        wal.record(main_data(bytes(180)))
    switch = wal.start + XLOG_BLCKSZ
    on_new = bytearray(wal.data)
    for page in range(XLOG_BLCKSZ, len(on_new), XLOG_BLCKSZ):
        struct.pack_into("<I", on_new, page + 4, 2)
    reader = WalReader(GEOMETRY, wal.start)
    reader.feed(wal.start, bytes(on_new[: XLOG_BLCKSZ + 30]))
    before = len(list(reader.records()))
    assert reader.timeline == 2
    assert reader.position < switch
    page = reader.restart_at(reader.position)
    assert page < switch
    reader.feed(page, bytes(on_new[page - wal.start :]))
    assert before + len(list(reader.records())) == len(wal.records)
    reader = WalReader(GEOMETRY, wal.start)
    on_new[4] = 3
    reader.feed(wal.start, bytes(on_new))
    with pytest.raises(WalCorrupted, match="out-of-sequence timeline ID 2 \\(after 3\\)"):
        list(reader.records())


def test_wal_of_other_versions_is_refused() -> None:
    unknown = Wal(magic=0xD101)
    unknown.record(main_data(b"x"))
    with pytest.raises(WalCorrupted, match="invalid magic number D101"):
        read(unknown)
    wal = Wal()
    wal.record(main_data(bytes(5000)))
    wal.magic = 0xD113
    wal.record(main_data(bytes(5000)))
    with pytest.raises(FeatureNotSupported, match="PostgreSQL 16"):
        read(wal)


def test_reading_can_start_at_any_record() -> None:
    wal = Wal()
    some(wal)
    lsn = wal.records[40][0]
    reader = WalReader(GEOMETRY, lsn)
    page = lsn - lsn % XLOG_BLCKSZ
    reader.feed(page, bytes(wal.data[page - wal.start :]))
    assert [record[3] for record in reader.records()] == [record[0] for record in wal.records[40:]]


def test_find_first() -> None:
    wal = Wal()
    wal.record(main_data(bytes(12000)), rmgr=10)
    wal.record(main_data(b"first that begins there"), rmgr=10)
    page = wal.start + XLOG_BLCKSZ
    reader = WalReader(GEOMETRY, page, find_first=True)
    reader.feed(page, bytes(wal.data[XLOG_BLCKSZ:]))
    assert [record[3] for record in reader.records()] == [wal.records[1][0]]


@pytest.mark.parametrize("step", [8, 100, 8192, 1 << 20])
def test_irrelevant_records_are_skipped(step: int) -> None:
    wal = Wal()
    for number in range(300):
        above = b"\xfc\1\0\0\0" if number % 7 > 3 else b""
        wal.record(above + main_data(bytes(number * 91 % 700)), xid=number % 7, rmgr=11 if number % 3 else 10)
    wal.record(main_data(bytes(8192 - wal.end % 8192 - 29)), rmgr=11)  # ends at the page's end
    assert wal.end % 8192 == 0
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = walk({1: None, 2: None, 3: None}, irrelevant={11})
    found = []
    for at in range(0, len(wal.data), step):
        reader.feed(wal.start + at, bytes(wal.data[at : at + step]))
        for _, _, length, lsn, xid, info, rmgr in reader.records():
            found.append((lsn, length, xid, info, rmgr))
            assert reader.position == lsn + length + -length % 8 or reader.position // 8192 > lsn // 8192
    left = [one for one in wal.records if one[4] == 10 or one[2] not in {0, 1, 2, 3}]
    # Records that span pages are not skipped.
    assert [one for one in found if one in left] == left
    assert len(found) + reader.walk.taken == len(wal.records)
    assert len(found) < len(left) + 20 or step == 8
    assert reader.position == wal.end


def test_an_irrelevant_record_begins_its_transaction() -> None:
    wal = Wal()
    wal.record(main_data(b"a lock"), xid=700, rmgr=11)
    wal.record(main_data(bytes(300)), xid=701, rmgr=11)
    wal.record(b"\xfc\xbc\2\0\0" + main_data(b"of 700"), xid=702, rmgr=11)
    wal.record(main_data(b"the end"), rmgr=10)
    begun: list[int] = []
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = walk({}, irrelevant={11}, begin=lambda xid, lsn: begun.append(xid))
    reader.feed(wal.start, bytes(wal.data))
    assert [record[4] for record in reader.records()] == [701, 702, 0]
    assert begun == [700]


def test_page_images_of_tables_other_than_catalogs_are_skipped() -> None:
    wal = Wal()
    for number in (16400, 1259, 16400):
        head = struct.pack("<BBHHHBIIII", 0, 0x10, 0, 100, 24, 1, 1663, 5, number, 0)
        wal.record(head + bytes(100), info=0xB0)
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = walk({}, tables={file_key(1663, 1259): None})
    reader.feed(wal.start, bytes(wal.data))
    assert [record[3] for record in reader.records()] == [wal.records[1][0]]


def test_rows_are_cut_out_on_the_way() -> None:
    wal = Wal()
    wal.record(one_block(row(b"first", 1), b"\1\0\x08"), xid=700, rmgr=10)
    wal.record(one_block(row(b"again", 1), b"\2\0\x08"), xid=700, rmgr=10)
    wal.record(one_block(row(b"other", 1), b"\3\0\x08", number=16401), xid=700, rmgr=10)  # not known
    wal.record(one_block(b"", struct.pack("<IHBB", 700, 1, 0, 2) + b"old"), xid=700, info=0x10, rmgr=10)
    wal.record(one_block(b"another database's", b"\4\0\x08", database=6), xid=701, rmgr=10)
    begun: dict[int, Txn] = {}

    def begin(xid: int, lsn: int) -> Txn:
        begun[xid] = Txn(xid, lsn)
        # An assembly for each kind of output: the frames are in all of them.
        begun[xid].parts = [Part(None, begun[xid]), Part(None, begun[xid])]
        return begun[xid]

    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = walk(begun, begin=begin, by_file={file_key(1663, 16400): SimpleNamespace(code=14)})
    reader.feed(wal.start, bytes(wal.data))
    assert [record[3] for record in reader.records()] == [wal.records[2][0]]
    head = changes.HEAD.pack
    lsns = [one[0] for one in wal.records]
    for part in begun[700].parts:
        assert part.frames == [
            head(changes.INSERT, 700, 7, lsns[0]) + row(b"first", 1),
            head(changes.INSERT, 700, 7, lsns[1]) + row(b"again", 1),
            head(changes.DELETE, 700, 7, lsns[3]) + b"\3\0\0\0old",
        ]
        assert part.held == sum(len(frame) + FRAME_OVERHEAD for frame in part.frames)
    assert [part.frames for part in begun[701].parts] == [[], []]
    assert begun[701].has_base


def test_what_is_looked_for_is_left_before_decoding_begins() -> None:
    time = bytes(8)
    database = time + struct.pack("<III", 1, 5, 1663)
    two_blocks = one_block(b"row", b"\1\0\x08")
    passed = [
        (700, 10, 0x00, one_block(b"row", b"\1\0\x08")),
        (701, 1, 0x00, main_data(time)),
        (702, 1, 0x80, main_data(database)),
        (703, 1, 0xA0, main_data(database)),
        (0, 0, 0xB0, struct.pack("<BBHHHBIIII", 0, 0x10, 0, 100, 24, 1, 1663, 5, 16400, 0) + bytes(100)),
        (704, 10, 0x20, two_blocks[:20] + b"\1\x80\0\0\7\0\0\0" + two_blocks[20:]),
    ]
    left = [
        (800, 10, 0x00, one_block(b"row", b"\1\0\x08", number=1259)),
        (801, 11, 0x00, b"\xfc\xbc\2\0\0" + main_data(b"of 700")),
        (802, 1, 0x80, main_data(time + struct.pack("<IIII", 3, 5, 1663, 1) + struct.pack("<I", 803))),
        (804, 1, 0x30, main_data(time)),
        (0, 8, 0x10, main_data(bytes(40))),
        (0, 0, 0x40, b""),  # XLOG_SWITCH: no record follows it in the segment
    ]
    wal = Wal()
    for xid, rmgr, info, payload in [one for both in zip(passed, left, strict=True) for one in both]:
        wal.record(payload, xid=xid, info=info, rmgr=rmgr)
    seen: set[int] = set()
    kinds = bytes(kind in {0x0A, 0x0B} or kind >> 4 not in {0, 1, 8} for kind in range(4096))
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = Skim(kinds, {1259}, seen)
    reader.feed(wal.start, bytes(wal.data))
    assert [(one[4], one[6], one[5]) for one in reader.records()] == [one[:3] for one in left]
    assert seen == {700, 701, 702, 703, 704}


def walk(
    by_xid: dict[int, Any],
    *,
    irrelevant: set[int] = frozenset(),  # type: ignore[assignment]
    begin: Callable[[int, int], Any] = Txn,
    by_file: dict[int, Any] | None = None,
    tables: dict[int, Any] | None = None,
) -> Walk:
    kinds = bytes(kind >> 4 in irrelevant for kind in range(4096))
    catalogs = SimpleNamespace(files=tables or {})
    return Walk(5, kinds, by_xid, by_file or {}, set(), catalogs, begin, lambda *_: None, 1 << 20, True)
