"""Broken bytes in every reader of WAL: only the typed errors, and bounded memory."""

from __future__ import annotations

import contextlib
import random
import struct
from contextlib import suppress
from types import SimpleNamespace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pubsub.errors import DataCorrupted, FeatureNotSupported, PubsubError
from pubsub.protocol.output import geometry, numbers, texts, times
from tests.unit.walsender.wal import GEOMETRY, Wal, main_data, one_block, row
from walsender.decode.heap import heap_frame
from walsender.decode.transactions import Part, Txn
from walsender.historic.catalog_layouts import CatalogAttribute, CatalogDefinition, CatalogLayout
from walsender.historic.heappage import tuple_at, tuples_of
from walsender.historic.tracker import CatalogTracker
from walsender.historic.tuples import changes_tuples, operations, places
from walsender.hot.catalogs import RELATION, Catalogs, CatalogTable
from walsender.hot.walk import Skim, Walk, file_key
from walsender.plugins.encoder import compiled_encoder, interpreted_encoder
from walsender.rowfilter.nodetree import read_nodes
from walsender.types import registry
from walsender.types.layout import ColumnLayout, RowLayout
from walsender.types.registry import BUILTIN, TypeInfo
from walsender.xlog import pglz
from walsender.xlog.errors import WalCorrupted, WalMissing
from walsender.xlog.formats import FORMATS
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record
from walsender.xlog.xact import parse_end, parse_prepare, parse_running_xacts

COLUMNS = (
    [
        ColumnLayout(length, alignment)
        for length, alignment in ((4, 4), (-1, 4), (8, 8), (-1, 4), (2, 2), (-2, 1), (1, 1))
    ],
    [ColumnLayout(4, 4), ColumnLayout(-1, 4)],
    [ColumnLayout(-1, 8)] * 9,
)
INT4 = TypeInfo(23, "pg_catalog", "int4", 4, 4, numbers.int4out, numbers.reversed_bytes, "pg_catalog", "int4")
TEXT = TypeInfo(25, "pg_catalog", "text", -1, 4, texts.as_is, texts.as_is, "pg_catalog", "text")


def wal_of(payloads: list[bytes]) -> Wal:
    wal = Wal()
    for number, payload in enumerate(payloads):
        wal.record(payload, xid=number, rmgr=10)
    return wal


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 9000))
def test_reader(seed: int, damage: int, step: int) -> None:
    """Records before the damage come out unchanged; no record comes out that was not written."""
    r = random.Random(seed)
    wal = wal_of([main_data(r.randbytes(r.choice((0, 3, 50, 400, 20000)))) for _ in range(25)])
    data = bytearray(wal.data)
    places_hit = sorted(r.randrange(len(data)) for _ in range(damage))
    for place in places_hit:
        data[place] ^= r.randrange(1, 256)
    reader = WalReader(GEOMETRY, wal.start, final=r.random() < 0.5)
    found: list[tuple[int, int, int, int, int]] = []
    try:
        for at in range(0, len(data), step):
            reader.feed(wal.start + at, bytes(data[at : at + step]))
            found += [(lsn, length, xid, info, rmgr) for _, _, length, lsn, xid, info, rmgr in reader.records()]
    except (WalCorrupted, WalMissing, FeatureNotSupported):
        pass
    assert found == wal.records[: len(found)]
    untouched = [one for one in wal.records if one[0] + one[1] + 8192 < wal.start + places_hit[0]]
    assert len(found) >= len(untouched) or reader.torn is not None


HEAP_RECORDS = (
    one_block(row(b"\1\2\3\4", 1), struct.pack("<HB", 1, 8)),
    one_block(row(b"\1\2\3\4", 1), struct.pack("<IHBBIH", 5, 1, 0, 0x10, 0, 2)),
    one_block(b"\4\0\2\0" + row(b"\1", 1), struct.pack("<IHBBIH", 5, 1, 0, 0x70, 0, 2)),
    one_block(b"", struct.pack("<IHBB", 5, 3, 0, 0)),
    one_block(struct.pack("<HHHB", 4, 1, 0, 24) + bytes(5), struct.pack("<BxHH", 8, 1, 4)),
    struct.pack("<BBHHHBIIII", 0, 0x10, 0, 4000, 24, 1, 1663, 5, 1259, 0) + b"\xff\x03" + bytes(4000) + b"\1\0\0",
    struct.pack("<BBHHHBHIIII", 0, 0x10, 0, 40, 24, 0x05, 8000, 1663, 5, 1259, 0) + b"\xff\x03" + bytes(40) + b"\1\0\0",
    main_data(bytes(200)),
    b"\xfd\1\0\xfc\2\0\0\0" + main_data(b"xyz"),
)


@settings(max_examples=300)
@given(
    st.sampled_from(HEAP_RECORDS),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=5),
    st.integers(0, 40),
    st.sampled_from([1, 9, 10, 8]),
    st.sampled_from(range(0, 256, 16)),
)
def test_records(payload: bytes, changes: list[tuple[int, int]], cut: int, rmgr: int, info: int) -> None:
    data = bytearray(bytes(24) + payload[: max(len(payload) - cut, 0)])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        record = parse_record(bytes(data), 0, len(data), 100, 200, 1, info, rmgr)
        if changes_tuples(record):
            places(record)
            operations(record, lambda _l, _b, _o: row(b"\1\2\3\4\5\6\7\10", 1))
        for block in record.blocks:
            if block.image is not None:
                list(tuples_of(block.full_page(100)))
        for one in FORMATS.values():
            parse_end(record, one)
        parse_running_xacts(record)
        parse_prepare(record)
    except DataCorrupted:
        pass


@settings(max_examples=500)
@given(
    st.sampled_from(HEAP_RECORDS),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
    st.integers(0, 20),
    st.sampled_from([0x00, 0x10, 0x20, 0x40, 0x80]),
    st.booleans(),
)
def test_the_fast_walk_agrees_with_the_general_decoder(
    payload: bytes, changes: list[tuple[int, int]], cut: int, info: int, is_toast: bool
) -> None:
    data = bytearray(payload[: max(len(payload) - cut, 1)])
    for place, value in changes:
        data[place % len(data)] = value
    wal = Wal()
    wal.record(bytes(data), xid=7, info=info, rmgr=10)
    txn = Txn(7, 1)
    txn.parts = [Part(None, txn)]
    reader = WalReader(GEOMETRY, wal.start)
    relation = SimpleNamespace(code=2 * 3 + is_toast)
    by_file = dict.fromkeys((file_key(1663, 16400), file_key(1663, 1259)), relation)
    none = Catalogs({}, set())
    reader.walk = Walk(5, bytes(4096), {7: txn}, by_file, set(), none, Txn, lambda *_: None, 1 << 20, True)
    reader.feed(wal.start, bytes(wal.data))
    if not list(reader.records()):
        lsn, length, *_ = wal.records[0]
        record = parse_record(bytes(wal.data[40:]), 0, length, lsn, lsn, 7, info, 10)
        own = record.blocks[0].locator[1] in {0, 5}
        frame = heap_frame(record, 3, is_toast=is_toast) if own else None
        assert txn.parts[0].frames == ([] if frame is None else [frame])


@settings(max_examples=1000)
@given(
    st.sampled_from(HEAP_RECORDS),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
    st.integers(0, 20),
    st.sampled_from([1, 9, 10, 11]),
    st.sampled_from([0, 7]),
)
def test_damage_in_skipped_records_changes_nothing(
    payload: bytes, changes: list[tuple[int, int]], cut: int, rmgr: int, xid: int
) -> None:
    data = bytearray(payload[: max(len(payload) - cut, 1)])
    for place, value in changes:
        data[place % len(data)] = value
    wal = Wal()
    wal.record(bytes(data), xid=xid, rmgr=rmgr)
    seen: set[int] = set()
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = Skim(bytes(kind >> 4 != 1 for kind in range(4096)), {1259}, seen)
    reader.feed(wal.start, bytes(wal.data))
    if list(reader.records()):
        assert not seen
        # An undamaged record without anything relevant must be passed over.
        assert rmgr == 1 or bytes(data) != payload or b"\xfc" in payload[:4] or 1259 in files_of(wal)
        return
    assert rmgr != 1
    assert seen == {xid} - {0}
    assert 1259 not in files_of(wal)


def files_of(wal: Wal) -> set[int]:
    """Return the files that the WAL's only record names.  Raises WalCorrupted."""
    lsn, length, *_ = wal.records[0]
    record = parse_record(bytes(wal.data[40:]), 0, length, lsn, lsn, 0, 0, 10)
    assert not record.top_xid
    return {block.locator[2] for block in record.blocks}


CATALOG = CatalogDefinition("pg_class", ("oid", "relfilenode"), ("oid", "relfilenode", "relrewrite"))
ATTRIBUTES = [CatalogAttribute(name, 26, 4, 4) for name in ("oid", "relfilenode", "relrewrite")]
CATALOG_RECORDS = (
    (0x00, one_block(row(bytes(12) + b"text", 4), struct.pack("<HB", 9, 0), number=1259)),
    (0x00, one_block(row(bytes(11) + b"\1", 3), struct.pack("<HB", 9, 0), number=1259)),
    (0x10, one_block(b"", struct.pack("<IHBB", 5, 3, 0, 0), number=1259)),
    (0x10, one_block(b"", struct.pack("<IHBB", 5, 4, 0, 8), number=1259)),
    (0x20, one_block(row(bytes(12), 3), struct.pack("<IHBBIH", 5, 1, 0, 0, 0, 9), number=1259)),
    (0x40, one_block(b"\4\0\3\0" + row(bytes(5), 3), struct.pack("<IHBBIH", 5, 1, 0, 0x60, 0, 9), number=1259)),
    (0x70, one_block(bytes(12), struct.pack("<H", 2) + bytes(18), number=1259)),
    (0x60, one_block(b"", struct.pack("<IHBB", 5, 3, 0, 0), number=1259)),
)
UNUSUAL = {CATALOG_RECORDS[1][1], CATALOG_RECORDS[3][1], CATALOG_RECORDS[7][1]}
MULTI_INSERTS = tuple(
    (info, one_block(rows, struct.pack("<BxH", 8, 2) + listed, number=1259))
    for info, listed in ((0x50, b"\5\0\7\0"), (0xD0, b""))
    for rows in ((struct.pack("<HHHB", 13, 3, 0, 24) + bytes(13)) * 2,)
)


def catalog() -> CatalogTracker:
    table = CatalogTable(CatalogLayout(CATALOG, ATTRIBUTES, "utf-8", invalidates=RELATION))
    for number in range(1, 5):
        table.insert(number, row(struct.pack("<III", 100 + number, number, 0), 3), 7 * (number & 1))
    return CatalogTracker(5, 1663, {file_key(1663, 1259): table}, {"pg_class": 1259}, lambda xid: True)


def contents(tracker: CatalogTracker) -> object:
    (table,) = tracker.catalogs.files.values()
    return (
        {tid: (t.row, t.xmin, t.xmax) for tid, t in table.tuples.items()},
        {key: table.find(key, {7})[0].number("relfilenode") for key in range(100, 106) if table.find(key, {7})},
        {xid: [(tid, inserted) for _, tid, inserted in touched] for xid, touched in tracker.catalogs.touched.items()},
        tracker.catalogs.generations,
    )


@settings(max_examples=500)
@given(
    st.sampled_from([*((10, *one) for one in CATALOG_RECORDS), *((9, *one) for one in MULTI_INSERTS)]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=2),
    st.integers(0, 12),
    st.booleans(),
)
@example((9, *MULTI_INSERTS[0]), [(2, 28)], 12, False)  # rows of a number that is none
def test_fast_catalog_changes_agree_with_the_general_decoder(
    kind: tuple[int, int, bytes], changes: list[tuple[int, int]], cut: int, whole: bool
) -> None:
    rmgr, info, payload = kind
    data = bytearray(payload if whole else payload[: max(len(payload) - cut, 1)])
    for place, value in changes if not whole else ():
        data[place % len(data)] = value
    wal = Wal()
    wal.record(bytes(data), xid=7, info=info, rmgr=rmgr)
    txn = Txn(7, 1)
    seen: list[int] = []
    quick, general = catalog(), catalog()
    reader = WalReader(GEOMETRY, wal.start)
    reader.walk = Walk(
        5, bytes(4096), {7: txn}, {}, set(), quick.catalogs, Txn, lambda _, at: seen.append(at), 1 << 20, True
    )
    reader.feed(wal.start, bytes(wal.data))
    if list(reader.records()):
        assert contents(quick) == contents(general)
        assert not whole or payload in UNUSUAL
        return
    lsn, length, *_ = wal.records[0]
    record = parse_record(bytes(wal.data[40:]), 0, length, lsn, lsn, 7, info, rmgr)
    if record.blocks[0].locator[1] not in {0, 5}:
        assert contents(quick) == contents(general)
        return
    assert general.apply(record) == bool(seen)
    assert contents(quick) == contents(general)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from(COLUMNS), st.booleans())
def test_rows(data: bytes, columns: list[ColumnLayout], as_row: bool) -> None:
    layout = RowLayout(columns)
    described = [(23, c.length, c.alignment, texts.as_is, True) for c in columns if c.length != -2]
    with contextlib.suppress(DataCorrupted):
        layout.deform(row(data, len(columns)) if as_row else data)
    for make in (compiled_encoder, interpreted_encoder):
        with suppress(DataCorrupted, struct.error, IndexError):  # the caller adds the position to such errors
            make(described, len(described))(b"", row(data, len(described)), 0)


@settings(max_examples=300)
@given(st.binary(max_size=120))
def test_pages_and_compression(data: bytes) -> None:
    page = (data * 80)[:8192].ljust(8192, b"\0")
    for function in (
        lambda: list(tuples_of(page)),
        lambda: tuple_at(page, data[0] if data else 1),
        lambda: pglz.decompress(data, 500),
        lambda: pglz.decompress(data, 500, whole=False),
    ):
        with suppress(DataCorrupted):
            function()  # type: ignore[no-untyped-call]


VARIABLE = [
    BUILTIN[oid] for oid in (17, 25, 602, 604, 650, 869, 1560, 1562, 1700, 2970, 3361, 3402, 3614, 3615, 3802, 4072)
]
VARIABLE += registry.EXTENSIONS.values()
ARRAYS = [registry.array_type(INT4, ","), registry.array_type(TEXT, ","), registry.vector_type(INT4)]
RANGE = registry.RangeType(TEXT)


@settings(max_examples=500)
@given(st.binary(max_size=80))
def test_values(data: bytes) -> None:
    """The bytes come from a tuple whose checksum was right; broken ones still raise only errors of known kinds."""
    functions = [f for pair in (*VARIABLE, *ARRAYS) for f in pair]
    functions += [RANGE.out, RANGE.send, RANGE.multirange_out, RANGE.multirange_send]
    for function in functions:
        with contextlib.suppress(PubsubError, struct.error, IndexError, ValueError):
            function(data)


def test_fixed_values_never_fail() -> None:
    r = random.Random(1)
    for _ in range(2000):
        data = r.randbytes(24)
        for function, size in (
            (numbers.float8out, 8),
            (numbers.float4out, 4),
            (times.date_out, 4),
            (times.timestamp_out, 8),
            (times.interval_out, 16),
            (geometry.circle_out, 24),
            (texts.uuid_out, 16),
        ):
            assert function(data[:size])


@settings(max_examples=200)
@given(st.text(alphabet="{}()[]:abOPVAR 0123456789<>\\-", max_size=80))
def test_node_trees(text: str) -> None:
    with contextlib.suppress(DataCorrupted):
        read_nodes(text)
