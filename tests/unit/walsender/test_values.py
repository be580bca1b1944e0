"""Values: from a tuple's bytes to text; what needs a server is in test_070_walsender."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import DataCorrupted, PubsubError
from pubsub.protocol.output import numbers, texts, times, xml
from tests.unit.walsender.wal import row
from walsender.historic.encodings import python_encoding
from walsender.plugins.encoder import Encoder, compiled_encoder, interpreted_encoder
from walsender.rowfilter.functions import Settings, find
from walsender.rowfilter.functions.json_values import Document
from walsender.rowfilter.functions.values import Interval
from walsender.rowfilter.nodetree import Node, read_nodes
from walsender.types.layout import ColumnLayout, RowLayout, ToastPointer
from walsender.xlog import pglz


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, b"0.1"),
        (-0.0, b"-0"),
        (1e15, b"1e+15"),
        (123456789012345.0, b"123456789012345"),
        (1e-4, b"0.0001"),
        (1e-5, b"1e-05"),
        (1e23, b"9.999999999999999e+22"),  # not the midpoint 1e+23
        (5e-324, b"5e-324"),
        (float("inf"), b"Infinity"),
        (float("nan"), b"NaN"),
    ],
)
def test_float8(value: float, text: bytes) -> None:
    assert numbers.float8out(struct.pack("<d", value)) == text


@pytest.mark.parametrize(("value", "text"), [(1.1, b"1.1"), (1e6, b"1e+06"), (999999, b"999999"), (1e-5, b"1e-05")])
def test_float4(value: float, text: bytes) -> None:
    assert numbers.float4out(struct.pack("<f", value)) == text


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (0, b"2000-01-01"),
        (59, b"2000-02-29"),
        (-730119, b"0001-01-01"),
        (-730120, b"0001-12-31 BC"),
        (2**31 - 1, b"infinity"),
    ],
)
def test_date(days: int, text: bytes) -> None:
    assert times.date_out(struct.pack("<i", days)) == text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((0, 0, 0), b"00:00:00"),
        ((3_600_000_000, 1, 14), b"1 year 2 mons 1 day 01:00:00"),
        ((1, -1, -1), b"-1 mons -1 days +00:00:00.000001"),
        ((0, 1, -12), b"-1 years +1 day"),
    ],
)
def test_interval(parts: tuple[int, int, int], text: bytes) -> None:
    assert times.interval_out(struct.pack("<qii", *parts)) == text


def test_texts() -> None:
    assert texts.bit_out(struct.pack("<i", 5) + b"\xa8") == b"10101"
    assert texts.escape_json(b'a"\n\x01') == b'"a\\"\\n\\u0001"'
    assert texts.char_out(b"\xff") == b"\\377"


def test_pglz() -> None:
    assert pglz.decompress(b"\x02a\x0f\x01\x02", 21) == b"a" * 21
    with pytest.raises(DataCorrupted):
        pglz.decompress(b"\x01\x00\x05", 10)  # points before the data
    with pytest.raises(DataCorrupted):
        pglz.decompress(b"\x00ab", 10)


LAYOUT = RowLayout([ColumnLayout(4, 4), ColumnLayout(-1, 4), ColumnLayout(8, 8), ColumnLayout(4, 4, b"\x07\0\0\0")])


def test_deform() -> None:
    values = struct.pack("<i", 5) + bytes(((3 + 1) << 1 | 1,)) + b"abc" + struct.pack("<q", 9)
    assert LAYOUT.deform(row(values, 3)) == [b"\5\0\0\0", b"abc", struct.pack("<q", 9), b"\x07\0\0\0"]
    nulls = row(struct.pack("<q", 9), 3, bitmap=b"\x04")
    assert LAYOUT.deform(nulls) == [None, None, struct.pack("<q", 9), b"\x07\0\0\0"]
    pointer = (
        struct.pack("<i", 1) + b"\x01\x12" + struct.pack("<iIII", 104, 100, 7, 8) + bytes(2) + struct.pack("<q", 1)
    )
    assert LAYOUT.deform(row(pointer, 3))[1] == ToastPointer(104, 100, 0, 7, 8)


@pytest.mark.parametrize("make", [interpreted_encoder, compiled_encoder])
def test_encoder_writes_what_the_general_way_does(make: Callable[..., Encoder]) -> None:
    columns = [
        (23, 4, 4, numbers.int4out, True),
        (25, -1, 4, texts.as_is, True),
        (20, 8, 8, numbers.int8out, True),
        (1700, -1, 4, numbers.numeric_out, False),
        (16, 1, 1, numbers.boolout, True),
    ]
    encode = make(columns, 4)
    numeric = bytes(((4 + 1) << 1 | 1,)) + struct.pack("<HH", 0x8000, 5)
    values = struct.pack("<i", -5) + b"\x07ab" + bytes(1) + struct.pack("<q", 2**40) + numeric + b"\x01"
    expected = b"N\0\4t\0\0\0\2-5t\0\0\0\2abt\0\0\0\x0d1099511627776t\0\0\0\1t"
    assert encode(b"I", b"head" + row(values, 5), 4) == b"I" + expected
    some_null = row(struct.pack("<q", 3) + b"\x00", 5, bitmap=b"\x14")
    assert encode(b"", some_null, 0) == b"N\0\4nnt\0\0\0\x013t\0\0\0\1f"
    assert encode(b"", row(values, 4), 0) is None  # older than a column
    external = struct.pack("<i", 1) + b"\x01\x12" + bytes(16)
    assert encode(b"", row(external, 5), 0) is None


def test_node_tree() -> None:
    tree = read_nodes(
        "{OPEXPR :opno 521 :args ({VAR :varattno 2 :vartype 23} {CONST :consttype 23 :constisnull false :constlen 4 "
        ":constvalue 4 [ 10 0 0 0 -1 0 0 0 ]}) :x <> :l (i 1 2) :location -1}"
    )
    assert isinstance(tree, Node)
    assert tree.number("opno") == 521
    assert tree.fields["x"] is None
    assert tree.fields["l"] == ["1", "2"]
    assert [tree.kind, *(node.kind for node in tree.items("args"))] == ["OPEXPR", "VAR", "CONST"]
    assert tree.items("args")[1].fields["constvalue"] == bytes((10, 0, 0, 0, 255, 0, 0, 0))
    with pytest.raises(DataCorrupted):
        read_nodes("{OPEXPR :args (")


def function(name: str, *types: int, bytewise: bool = False, version: int = 180000) -> Any:
    return find(name, types, Settings("utf-8", bytewise, version))


def test_functions() -> None:
    assert function("int4lt", 23, 23)(1, 2) is True
    assert function("textlike", 25, 25)("äx%".encode(), b"_x\\%") is True
    assert function("int4mod", 23, 23)(-7, 3) == -1
    assert function("text_lt", 25, 25) is None  # asks the collation
    assert function("lower", 25) is None
    assert function("pg_sleep", 701) is None


@pytest.mark.parametrize(
    ("name", "types", "values", "sqlstate"),
    [
        ("int4pl", (23, 23), (2**31 - 1, 1), "22003"),
        ("int2mul", (21, 21), (300, 300), "22003"),
        ("int8div", (20, 20), (1, 0), "22012"),
        ("int4", (1700,), ((2, Decimal(0)),), "0A000"),
        ("int4", (701,), ((1, 0.0),), "22003"),
        ("numeric_div", (1700, 1700), ((0, Decimal(1)), (0, Decimal(0))), "22012"),
        ("numeric", (1700, 23), ((0, Decimal("99.96")), (3 << 16 | 1) + 4), "22003"),
        ("float8div", (701, 701), ((0, 1.0), (0, 0.0)), "22012"),
        ("float8mul", (701, 701), ((0, 1e300), (0, 1e300)), "22003"),
        ("float8mul", (701, 701), ((0, 1e-300), (0, 1e-300)), "22003"),
        ("float4", (701,), ((0, 1e300),), "22003"),
        ("sqrt", (701,), ((0, -1.0),), "2201F"),
        ("power", (701, 701), ((0, 0.0), (0, -1.0)), "2201F"),
        ("ln", (701,), ((0, 0.0),), "2201E"),
        ("exp", (701,), ((0, -1e9),), "22003"),
        ("textregexeq", (25, 25), (b"a", b"(?=a)*"), "2201B"),
        ("substr", (25, 23, 23), (b"abc", 1, -1), "22011"),
        ("split_part", (25, 25, 23), (b"abc", b"b", 0), "22023"),
        ("textlike", (25, 25), (b"a", b"a\\"), "22025"),
        ("textregexeq", (25, 25), (b"a", b"a**"), "2201B"),
        ("textregexeq", (25, 25), (b"a", b"(a"), "2201B"),
        ("textregexeq", (25, 25), (b"a", b"[[:none:]]"), "2201B"),
        ("textregexeq", (25, 25), (b"a", b"\\q"), "2201B"),
        ("textregexeq", (25, 25), (b"a", b"\\w"), "0A000"),  # asks the collation
        ("texticregexeq", (25, 25), (b"a", b"A"), "0A000"),
        ("date_mi", (1082, 1082), (2**31 - 1, 0), "22008"),
        ("date_pli", (1082, 23), (2**31 - 2, 1000), "22008"),
        ("timestamp_pl_interval", (1114, 1186), (0, Interval(0, 2**31 - 2, 0)), "22008"),
        ("timestamp_mi", (1114, 1114), (2**63 - 1, 2**63 - 1), "22008"),
        ("extract", (25, 1082), (b"hour", 0), "0A000"),
        ("extract", (25, 1114), (b"parsec", 0), "22023"),
        ("jsonb_array_length", (3802,), (Document({}),), "22023"),
    ],
)
def test_functions_fail_as_postgresql_does(
    name: str, types: tuple[int, ...], values: tuple[Any, ...], sqlstate: str
) -> None:
    with pytest.raises(PubsubError) as raised:
        function(name, *types)(*values)
    assert raised.value.sqlstate == sqlstate


def test_numerics_of_many_digits_are_not_rounded() -> None:
    many = Decimal("6792042489284456660614.9665991734062")
    assert function("abs", 1700)((0, many.copy_negate())) == (0, many)
    assert function("numeric_uminus", 1700)((0, many)) == (0, many.copy_negate())


def test_differences_of_infinite_timestamps() -> None:
    assert function("timestamp_mi", 1114, 1114)(2**63 - 1, 0) > Interval(0, 2**30, 0)
    with pytest.raises(PubsubError):
        function("timestamp_mi", 1114, 1114, version=160000)(2**63 - 1, 0)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6), st.integers(-4, 8))
def test_rounding_is_half_away_from_zero(value: Decimal, scale: int) -> None:
    kind, rounded = function("round", 1700, 23)((0, value), scale)
    distance = abs(Fraction(rounded) - Fraction(value))
    assert kind == 0
    assert distance <= Fraction(10) ** -scale / 2
    assert distance < Fraction(10) ** -scale / 2 or abs(rounded) > abs(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (b"<a/>", b'<?xml version="1.0" encoding="LATIN1"?><a/>'),
        (b"\n<a/>", b'<?xml version="1.0" encoding="LATIN1"?>\n<a/>'),
        (b"<?xml version='1.1' standalone='no'?>t", b'<?xml version="1.1" encoding="LATIN1" standalone="no"?>t'),
        (b"<?xml broken?>", b"<?xml broken?>"),
    ],
)
def test_xml_in_binary_names_its_encoding(value: bytes, written: bytes) -> None:
    assert xml.xml_send("LATIN1")(value) == written


def test_encodings_are_known_to_python() -> None:
    for encoding in ("LATIN10", "ISO_8859_8", "WIN866", "WIN874", "WIN1258", "EUC_JIS_2004", "EUC_CN"):
        assert "a".encode(python_encoding(encoding)) == b"a"
    with pytest.raises(PubsubError, match="MULE_INTERNAL"):
        python_encoding("MULE_INTERNAL")
