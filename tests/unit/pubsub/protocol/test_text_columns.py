"""PostgreSQL's text as Arrow columns: exact, or refused."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pubsub.protocol.refused_values import InvalidText
from pubsub.protocol.text.columns import from_text

UTC = datetime.UTC
TIMESTAMP = pa.timestamp("us")
TIMESTAMPTZ = pa.timestamp("us", "UTC")

GOOD: list[tuple[Any, str, Any]] = [
    (pa.int16(), "-32768", -32768),
    (pa.int32(), "2147483647", 2147483647),
    (pa.int64(), "-9223372036854775808", -(2**63)),
    (pa.bool_(), "t", True),
    (pa.bool_(), "f", False),
    (pa.decimal128(5, 2), "-123.45", Decimal("-123.45")),
    (pa.decimal128(5, 2), "1", Decimal("1.00")),
    (pa.decimal128(38, 0), "9" * 38, Decimal("9" * 38)),
    (pa.decimal128(38, 38), "-0." + "9" * 38, Decimal("-0." + "9" * 38)),
    (
        pa.decimal128(38, 10),
        "1234567890123456789012345678.0123456789",
        Decimal("1234567890123456789012345678.0123456789"),
    ),
    (pa.date32(), "0001-01-01", datetime.date(1, 1, 1)),
    (pa.date32(), "9999-12-31", datetime.date(9999, 12, 31)),
    (TIMESTAMP, "2024-02-29 23:59:59.999999", datetime.datetime(2024, 2, 29, 23, 59, 59, 999999)),
    (TIMESTAMP, "0001-01-01 00:00:00", datetime.datetime(1, 1, 1)),
    (TIMESTAMP, "1582-10-10 00:00:00.5", datetime.datetime(1582, 10, 10, 0, 0, 0, 500000)),
    (TIMESTAMPTZ, "2024-02-29 12:00:00+00", datetime.datetime(2024, 2, 29, 12, tzinfo=UTC)),
    (TIMESTAMPTZ, "9999-12-31 23:59:59.999999+00", datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
    (pa.float64(), "Infinity", math.inf),
    (pa.float64(), "-Infinity", -math.inf),
    (pa.float64(), "0.1", 0.1),
    (pa.float64(), "5e-324", 5e-324),
    (pa.float64(), "1.7976931348623157e+308", 1.7976931348623157e308),
    (pa.float32(), "3.4028235e+38", float(np.float32(3.4028235e38))),
    (pa.float32(), "1e-45", float(np.float32(1e-45))),
    (pa.float32(), "0.1", float(np.float32(0.1))),
    (pa.binary(), "\\x", b""),
    (pa.binary(), "\\x00fF5c78", b"\x00\xff\\x"),
    (pa.string(), "", ""),
    (pa.string(), " NULL\\N\u20ac\U0001f600 ", " NULL\\N\u20ac\U0001f600 "),
]

BAD: list[tuple[Any, bytes, str]] = [
    (pa.int16(), b"32768", "22003"),
    (pa.int64(), b"9223372036854775808", "22003"),
    (pa.int64(), b"0x1F", "22003"),
    (pa.int64(), b"1.0", "22003"),
    (pa.int64(), b"", "22003"),
    (pa.decimal128(5, 2), b"1.234", "22003"),
    (pa.decimal128(5, 2), b"1234.5", "22003"),
    (pa.decimal128(5, 2), b"NaN", "22003"),
    (pa.decimal128(5, 2), b"Infinity", "22003"),
    (pa.decimal128(38, 0), b"1" + b"0" * 38, "22003"),
    (pa.date32(), b"infinity", "22008"),
    (pa.date32(), b"-infinity", "22008"),
    (pa.date32(), b"0044-03-15 BC", "22008"),
    (pa.date32(), b"10000-01-01", "22008"),
    (pa.date32(), b"0000-01-01", "22008"),
    (pa.date32(), b"2024-02-30", "22008"),
    (TIMESTAMP, b"infinity", "22008"),
    (TIMESTAMP, b"0044-03-15 12:00:00 BC", "22008"),
    (TIMESTAMP, b"294276-12-31 23:59:59.999999", "22008"),
    (TIMESTAMP, b"2024-01-01 24:00:00", "22008"),
    (TIMESTAMP, b"2024-01-01 00:00:00.1234567", "22008"),
    (TIMESTAMP, b"2024-01-01 00:00:00+00", "22008"),
    (TIMESTAMPTZ, b"2024-01-01 00:00:00", "22008"),
    (TIMESTAMPTZ, b"-infinity", "22008"),
    (TIMESTAMPTZ, b"0001-01-01 00:00:00+00 BC", "22008"),
    (TIMESTAMPTZ, b"10000-01-01 00:00:00+00", "22008"),
    (TIMESTAMPTZ, b"0000-12-31 23:00:00+00", "22008"),
    (TIMESTAMPTZ, b"9999-12-31 23:00:00-02", "22008"),
    (TIMESTAMPTZ, b"0001-01-01 00:00:00+02", "22008"),
    (TIMESTAMPTZ, b"1900-01-01 00:00:00+00:19:32", "22008"),
    (pa.float64(), b"1e400", "22003"),
    (pa.float64(), b"1e-400", "22003"),
    (pa.float32(), b"1e39", "22003"),
    (pa.float32(), b"5e-324", "22003"),
    (pa.float64(), b"nan(1)", "22003"),
    (pa.float64(), b"one", "22003"),
    (pa.bool_(), b"true", "22P02"),
    (pa.bool_(), b"", "22P02"),
    (pa.bool_(), b"1", "22P02"),
    (pa.binary(), b"abc", "22P02"),
    (pa.binary(), b"", "22P02"),
    (pa.binary(), b"\\x0", "22P02"),
    (pa.binary(), b"\\x0g", "22P02"),
    (pa.binary(), b"\\x\\x", "22P02"),
    (pa.string(), b"\xff", "22021"),
    (pa.string(), b"\xed\xa0\x80", "22021"),
]


@pytest.mark.parametrize(("target", "text", "value"), GOOD)
def test_exact(target: Any, text: str, value: Any) -> None:
    """Convert a value alone, among NULLs, in a slice, and from a string array."""
    data = text.encode()
    assert from_text(pa.array([data], pa.binary()), target).to_pylist() == [value]
    mixed = pa.array([None, data, None, data], pa.binary())
    result = from_text(mixed, target)
    assert result.type == target
    assert result.to_pylist() == [None, value, None, value]
    assert result.null_count == 2
    result.validate(full=True)
    assert from_text(mixed.slice(1, 2), target).to_pylist() == [value, None]
    assert from_text(pa.array([text], pa.string()), target).to_pylist() == [value]


@pytest.mark.parametrize(("target", "text", "sqlstate"), BAD)
@pytest.mark.parametrize("index", [0, 3, 6])
def test_refused(target: Any, text: bytes, sqlstate: str, index: int) -> None:
    good = next(value.encode() for kind, value, _ in GOOD if kind == target)
    values: list[bytes | None] = [good, None, good, good, good, None, good, text]
    values[index] = text
    with pytest.raises(InvalidText) as caught:
        from_text(pa.array(values, pa.binary()), target)
    assert caught.value.index == index
    assert caught.value.text == text
    assert caught.value.sqlstate == sqlstate


@pytest.mark.parametrize("target", [kind for kind, _, _ in GOOD])
def test_empty_and_all_null(target: Any) -> None:
    assert from_text(pa.array([], pa.binary()), target).to_pylist() == []
    assert from_text(pa.array([None, None], pa.binary()), target).to_pylist() == [None, None]


def test_floats_keep_the_sign_of_zero_and_nan() -> None:
    result = from_text(pa.array([b"-0", b"0", b"NaN"]), pa.float64()).to_pylist()
    assert math.copysign(1, result[0]) == -1
    assert math.copysign(1, result[1]) == 1
    assert math.isnan(result[2])


def test_error_shows_no_more_than_a_part_of_the_value() -> None:
    with pytest.raises(InvalidText) as caught:
        from_text(pa.array([b"9" * 1000]), pa.int64())
    assert len(caught.value.message) < 200
    assert "BIGINT" in caught.value.message
