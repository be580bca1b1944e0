"""Row hashes and their sums, without a server: known values of hashtextextended, ranges, multisets."""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from pubsub.digest.forms import LONGEST, RowForm, form_of
from pubsub.digest.hashing import hash_texts
from pubsub.digest.source import NOTHING, SourceTable
from pubsub.digest.sums import Hashed, Sums, bits_for, range_of, range_sql, surplus
from pubsub.digest.texts import canonical_texts, output_texts
from pubsub.errors import DataCorrupted
from pubsub.protocol.ids import Oid
from pubsub.protocol.output.variants import variant_text
from pubsub.protocol.text.variant import encode
from pubsub.publisher.definitions import ColumnDefinition
from pubsub.publisher.read_table import ReadTable


def column(name: str, oid: int = 25, typmod: int = -1) -> ColumnDefinition:
    return ColumnDefinition(name, 1, Oid(oid), typmod, "t", "b", Oid(oid), typmod, "b", False, "", True)


def hashed(*pairs: tuple[int, int]) -> Hashed:
    keys, rows = (np.array([pair[place] for pair in pairs], np.uint64) for place in (0, 1))
    return Hashed(keys, rows, pa.array([str(place) for place in range(len(pairs))], pa.string()))


@pytest.mark.parametrize(
    ("text", "seed", "expected"),
    [
        ("abc", 5, -8227931761584822072),
        ("hello world, this is", 5, -1041629880640469798),
    ],
)
def test_a_hash_is_postgresqls(text: str, seed: int, expected: int) -> None:
    """The values are those that a server of version 18 gave."""
    found = hash_texts(pa.array([text]), np.array([seed], np.uint64))
    assert found.view(np.int64).tolist() == [expected]


def test_rows_are_hashed_alike_alone_and_together() -> None:
    chance = random.Random(1)
    texts = ["x" * chance.choice([0, 1, 4, 11, 12, 13, 23, 24, 25, 100, 256]) + str(n) for n in range(300)]
    seeds = np.array([chance.getrandbits(64) if n % 7 else 0 for n in range(300)], np.uint64)
    together = hash_texts(pa.array(texts), seeds)
    alone = [int(hash_texts(pa.array([text]), seeds[n : n + 1])[0]) for n, text in enumerate(texts)]
    assert together.tolist() == alone
    assert len(set(alone)) == 300
    assert hash_texts(pa.array(texts).slice(10, 5), seeds[10:15]).tolist() == alone[10:15]


def test_canonical_texts() -> None:
    infinite = pa.array([1.0, -0.0, math.nan, None, math.inf])
    assert canonical_texts(infinite).to_pylist() == [
        "3ff0000000000000", "8000000000000000", "NaN", None, "7ff0000000000000",
    ]  # fmt: skip
    other_nan = pa.array(np.array([0x7FF8000000000001], np.int64)).view(pa.float64())
    assert canonical_texts(other_nan).to_pylist() == ["NaN"]
    assert canonical_texts(pa.array([date(2000, 1, 1), date(1999, 12, 31), None])).to_pylist() == [
        "00000000", "ffffffff", None,
    ]  # fmt: skip
    times = pa.array([datetime(2000, 1, 1, 0, 0, 0, 1, UTC), None], pa.timestamp("us", "UTC"))
    assert canonical_texts(times).to_pylist() == ["0000000000000001", None]
    assert canonical_texts(pa.array([b"\x00\xff", None, b""])).to_pylist() == ["00ff", None, ""]
    assert canonical_texts(pa.array([True, None, False])).to_pylist() == ["true", None, "false"]


def test_decimals_have_all_their_digits_and_no_exponent() -> None:
    values = [Decimal("0.00000001"), Decimal("-0.5"), Decimal(0), None, Decimal("-12345678901234567890.12345678")]
    kind = pa.decimal128(38, 8)
    assert output_texts(pa.array(values, kind)).to_pylist() == [
        "0.00000001", "-0.50000000", "0.00000000", None, "-12345678901234567890.12345678",
    ]  # fmt: skip
    assert output_texts(pa.array([Decimal(-7), Decimal(10) ** 37], pa.decimal128(38, 0))).to_pylist() == [
        "-7", "1" + "0" * 37,
    ]  # fmt: skip


def test_texts_of_times_lose_the_zeros_of_the_fraction_alone() -> None:
    times = pa.array([datetime(2024, 1, 2, 10, 20, 30), datetime(1, 1, 1, 0, 0, 0, 120000)], pa.timestamp("us"))
    assert output_texts(times).to_pylist() == ["2024-01-02 10:20:30", "0001-01-01 00:00:00.12"]


def test_arrays_and_composites_are_quoted_as_postgresql_quotes_them() -> None:
    words = pa.array([["a", None, "NULL", "null", "", "b c", 'q"\\', "{"], None, []], pa.list_(pa.string()))
    assert output_texts(words).to_pylist() == [r'{a,NULL,"NULL","null","","b c","q\"\\","{"}', None, "{}"]
    pairs = pa.array(
        [{"a": 1, "b": "x y"}, {"a": None, "b": ""}, None, {"a": 2, "b": 'q"\\('}],
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
    )
    assert output_texts(pairs).to_pylist() == ['(1,"x y")', '(,"")', None, r'(2,"q""\\(")']
    assert output_texts(words.slice(1)).to_pylist() == [None, "{}"]


@pytest.mark.parametrize(
    "text",
    [
        '{"b": [1, 2.50, -0.001], "aa": {"c": null}}',
        '"\\u0001 \\" ä"',
        "[]",
        "{}",
        "-9223372036854775808",
        "12.0",
        "true",
    ],
)
def test_a_variant_is_written_as_jsonb_writes_it(text: str) -> None:
    assert variant_text(*encode(text.encode())) == text


def test_a_variant_of_another_writer_may_hold_what_jsonb_does_not() -> None:
    with pytest.raises(DataCorrupted, match="type 11"):
        variant_text(b"\x01\x00\x00", bytes([11 << 2, 0, 0, 0, 0]))


def test_a_long_text_is_hashed_by_its_digest() -> None:
    form = form_of(column("a"), pa.string(), "UTF8")
    texts = form.texts(pa.array(["x" * LONGEST, "y" * (LONGEST + 1), None])).to_pylist()
    assert texts[0] == "x" * LONGEST
    assert len(texts[1]) == 64
    assert texts[2] is None
    assert not form_of(column("a", 1043, 4 + 30), pa.string(), "UTF8").long
    latin = form_of(column("a"), pa.string(), "LATIN1")
    assert latin.texts(pa.array(["ä"])).to_pylist() == ["c3a4"]


def test_rows_of_many_columns_and_their_keys() -> None:
    names = [f"c{n}" for n in range(120)]
    forms = [form_of(column(name), pa.string(), "UTF8") for name in names]
    form = RowForm.of(forms, ["c3", "c1"])
    assert form.columns[:3] == ("c3", "c1", "c0")
    rows = pa.record_batch([pa.array(["a", "a", None]) for _ in names], names=names)
    keys, whole = form.hashes(rows)
    assert keys[0] == keys[1] != keys[2]
    assert whole[0] == whole[1] != whole[2]
    other = rows.set_column(119, "c119", pa.array(["a", "b", None]))
    assert form.hashes(other)[0].tolist() == keys.tolist()
    assert form.hashes(other)[1].tolist()[1] != whole[1]
    assert max(map(len, form.select("t").split("hashtextextended"))) < 4000
    without = RowForm.of(forms[:2], [])
    keys, whole = without.hashes(rows)
    assert keys.tolist() == whole.tolist()
    assert without.key_columns == ()


def test_ranges_and_sums() -> None:
    assert (bits_for(0), bits_for(10**6), bits_for(10**9)) == (4, 11, 14)
    assert range_sql("k", 4) == "(k >> 60) + 8"
    keys = np.array([0, 1 << 60, (1 << 64) - 1, 1 << 63], np.uint64)
    assert range_of(keys, 4).tolist() == [8, 9, 7, 0]
    ours, theirs = Sums(4), Sums(4)
    rows = np.array([5, (1 << 64) - 1, 1 << 40, 3], np.uint64)
    ours.add(keys, rows)
    ours.add(keys[:1], rows[:1])
    theirs.add_ranges(np.array([0, 7, 8, 9]), np.array([1, 1, 2, 1]), [3, 1 << 40, 10, -1])
    assert theirs.differing(ours).tolist() == []
    assert (ours.rows, theirs.rows) == (5, 5)
    ours.add(keys[1:2], rows[:1])
    assert theirs.differing(ours).tolist() == [9]


def test_equal_rows_are_counted() -> None:
    """{a, a} and {b, b} have the same count, and a sum by XOR would be the same, too."""
    ours, theirs = Sums(4), Sums(4)
    key = np.array([7, 7], np.uint64)
    ours.add(key, np.array([100, 100], np.uint64))
    theirs.add(key, np.array([200, 200], np.uint64))
    assert len(theirs.differing(ours)) == 1


def test_surplus() -> None:
    chance = random.Random(2)
    for _ in range(50):
        ours, theirs = (
            [(chance.randint(1, 4), chance.randint(1, 3)) for _ in range(chance.randint(0, 12))] for _ in range(2)
        )
        here, there = surplus(hashed(*ours), hashed(*theirs))
        assert Counter(ours[place] for place in here) == Counter(ours) - Counter(theirs)
        assert Counter(theirs[place] for place in there) == Counter(theirs) - Counter(ours)
    assert [len(side) for side in surplus(NOTHING, NOTHING)] == [0, 0]


def test_a_table_is_read_in_stretches() -> None:
    form = RowForm.of([form_of(column("a"), pa.string(), "UTF8")], [])
    table = SourceTable(ReadTable("s", "t", ("a",), True), "a > '1'", form, 10_000, 10_000 * 8192)
    assert table.stretches() == [(0, 4096), (4096, 8192), (8192, None)]
    assert sum(map(table.bytes_of, table.stretches())) == 10_000 * 8192
    assert "ctid >= '(4096,0)'" in table._source((4096, 8192))
    assert table._source(None, "b") == "ONLY s.t WHERE b AND (a > '1')"
    empty = SourceTable(ReadTable("s", "t", ("a",), True), None, form, 0, 0)
    assert empty.stretches() == [(0, None)]
    whole = SourceTable(ReadTable("s", "t", ("a",), False), None, form, None, 5)
    assert (whole.stretches(), whole.bytes_of(None)) == ([None], 5)
