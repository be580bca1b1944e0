"""row_filters: what is exact, what is refused, and constants at the edges of their columns' types."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.row_filters import RowFilter, Typed, require_exact
from pubsub.sql.row_conditions import RowCondition

COLUMNS = {
    "s": Typed("s", 21, "b", pa.int16(), "smallint"),
    "i": Typed("i", 23, "b", pa.int32(), "integer"),
    "m": Typed("m", 1700, "b", pa.decimal128(5, 2), "numeric(5,2)"),
    "other": Typed("other", 1700, "b", pa.decimal128(9, 4), "numeric(9,4)"),
    "t": Typed("t", 25, "b", pa.string(), "text"),
    "folded": Typed("folded", 25, "b", pa.string(), "text", deterministic=False),
    "e": Typed("e", 99999, "e", pa.string(), "mood"),
    "u": Typed("u", 2950, "b", pa.string(), "uuid"),
    "d": Typed("d", 1082, "b", pa.date32(), "date"),
    "w": Typed("w", 1114, "b", pa.timestamp("us"), "timestamp without time zone"),
    "z": Typed("z", 1184, "b", pa.timestamp("us", "UTC"), "timestamp with time zone"),
    "o": Typed("o", 16, "b", pa.bool_(), "boolean"),
    "f": Typed("f", 701, "b", pa.float64(), "double precision"),
    "c": Typed("c", 1042, "b", pa.string(), "character(3)"),
    "free": Typed("free", 1700, "b", pa.string(), "numeric"),
    "as_text": Typed("as_text", 23, "b", pa.string(), "integer"),
    "pair": Typed("pair", 99998, "c", pa.string(), "pair"),
    "j": Typed("j", 3802, "b", pa.string(), "jsonb"),
}


@pytest.mark.parametrize(
    "text",
    [
        "s < 1.5 OR i = s OR m >= 1e9", "t = 'x' OR t LIKE '%' OR e IN ('a') OR u <> 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "d BETWEEN '2026-01-01' AND '2026-12-31' OR w < '2026-01-31 10:00'",
        "z >= '2026-01-31 10:00:00.5+02:30' OR z = '2026-01-31 00:00Z'",
        "o OR o = false OR o IS DISTINCT FROM 'off' OR NOT o", "f IS NULL OR c IS NOT NULL OR free IS NULL OR j IS NULL",
        "i = '12' OR m = '1.5'",
    ],
)  # fmt: skip
def test_exact(text: str) -> None:
    require_exact(RowCondition.parse(text), COLUMNS, "public.t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t < 'x'", 'column "t" of table "public.t" has type text, and cannot be compared by <'),
        ("folded = 'x'", 'column "folded" of table "public.t" has type text, and cannot be compared by ='),
        ("e LIKE 'x'", 'column "e" of table "public.t" has type mood, and cannot be compared by LIKE'),
        ("u > '00000000-0000-0000-0000-00000000000a'", "cannot be compared by >"),
        ("o < true", "cannot be compared by <"),
        ("f = 1", "has type double precision"),
        ("f IN (1)", "cannot be looked for by IN"),
        ("c = 'x'", "has type character(3)"),
        ("free = 1", "has type numeric"),
        ("as_text = 1", "has type integer"),
        ("j = '{}'", "has type jsonb"),
        ("pair IS NULL", "cannot be compared by IS NULL"),
        ("i", "cannot be a condition by itself"),
        ("t = e", "cannot be compared with a column"),
        ("m = other", 'cannot be compared with column "other" of type numeric(9,4)'),
        ("i = m", 'cannot be compared with column "m"'),
        ("t = 1", "1 is no constant of its type"),
        ("t = true", "TRUE is no constant of its type"),
        ("i = true", "TRUE is no number"),
        ("d = '31.01.2026'", "is not written as 2026-01-31"),
        ("d = 'infinity'", "is not written as 2026-01-31"),
        ("d = '2026-01-31 10:00'", "is not written as 2026-01-31"),
        ("w = '2026-01-31 10:00+00'", "has an offset, which its type ignores"),
        ("z = '2026-01-31 10:00'", "has no offset"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(FeatureNotSupported) as refused:
        require_exact(RowCondition.parse(text), COLUMNS, "public.t")
    assert message in refused.value.message
    assert "public.t" in refused.value.message


@pytest.mark.parametrize(
    ("text", "sqlstate"),
    [
        ("i = 'x'", "22P02"), ("i = '1.5'", "22P02"), ("s = '40000'", "22003"), ("m = ''", "22P02"), ("o = 'x'", "22P02"),
        ("u = 'x'", "22P02"), ("d = '2026-02-30'", "22008"), ("w = '2026-01-31 25:00'", "22008"),
    ],
)  # fmt: skip
def test_constants_that_the_publisher_would_not_take(text: str, sqlstate: str) -> None:
    with pytest.raises(PubsubError) as refused:
        require_exact(RowCondition.parse(text), COLUMNS, "public.t")
    assert refused.value.sqlstate == sqlstate


def found(text: str, values: pa.Array, oid: int) -> list[int]:
    mask = RowFilter(text, (("x", "here", oid),)).matches({"here": values})
    return [number for number, one in enumerate(mask) if one]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("x < 1.5", [0, 1]), ("x <= 1.5", [0, 1]), ("x > 1.5", [2]), ("x = 1.5", []), ("x <> 1.5", [0, 1, 2]),
        ("x < 40000", [0, 1, 2]),
        ("x >= 40000", []), ("x > -40000", [0, 1, 2]), ("x <= -40000", []), ("x IN (1, 1.5, 40000)", [1]),
        ("x NOT IN (1.5)", [0, 1, 2]),
        ("x IS DISTINCT FROM 1", [0, 2, 3]), ("x IS DISTINCT FROM 40000", [0, 1, 2, 3]), ("x = 1 IS UNKNOWN", [3]),
        ("NOT (x = 40000)", [0, 1, 2]), ("x = 1 OR x IS NULL", [1, 3]), ("x <= 32767", [0, 1, 2]), ("x < -32768", []),
    ],
)  # fmt: skip
def test_constants_beyond_a_column(text: str, rows: list[int]) -> None:
    assert found(text, pa.array([-32768, 1, 32767, None], pa.int16()), 21) == rows


def test_numbers_of_more_digits() -> None:
    values = pa.array([Decimal("-999.99"), Decimal("0.01"), Decimal("999.99")], pa.decimal128(5, 2))
    assert found("x > 0.0099999999999999999999999999999999999", values, 1700) == [1, 2]
    assert found("x < 0.0100000000000000000000000000000000001", values, 1700) == [0, 1]
    assert found("x <= 1000", values, 1700) == [0, 1, 2]
    assert found("x = 0.010", values, 1700) == [1]


def test_texts() -> None:
    values = pa.array(["a", "A", "a ", "aé\n", "", None])
    assert found("x = 'a'", values, 25) == [0]
    assert found("x LIKE 'a__'", values, 25) == [3]
    assert found("x LIKE '%'", values, 25) == [0, 1, 2, 3, 4]
    assert found("NOT x LIKE 'a%'", values, 25) == [1, 4]


def test_uuids_in_any_spelling() -> None:
    values = pa.array(["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"])
    assert found("x = 'A0EEBC999C0B4EF8BB6D6BB9BD380A11'", values, 2950) == [0]
