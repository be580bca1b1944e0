"""pubsub.cli.output: values as PostgreSQL's text and as JSON."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from pubsub.cli.output import Format, plain, render, text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "t"),
        (False, "f"),
        (1.0, "1"),
        (1.5, "1.5"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (b"\x00\xff", "\\x00ff"),
        (Decimal("1E+3"), "1000"),
        (Decimal("1.50"), "1.50"),
        (date(2024, 2, 29), "2024-02-29"),
        (datetime(2024, 1, 2, 3, 4, 5, 120000), "2024-01-02 03:04:05.12"),
        (datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2024-01-02 01:04:05+00"),
        (("a", None, "b c", 'q"', ""), '{a,NULL,"b c","q\\"",""}'),
        (("NULL",), '{"NULL"}'),
    ],
)
def test_text(value: Any, shown: str) -> None:
    assert text(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2**53, 2**53),
        (2**53 + 1, "9007199254740993"),
        (-(2**53) - 1, "-9007199254740993"),
        (Decimal("12.34"), 12.34),
        (Decimal("12.30"), 12.3),
        (Decimal(7), 7),
        (Decimal("0.1000000000000000000001"), "0.1000000000000000000001"),
        (Decimal("12345678901234567890.5"), "12345678901234567890.5"),
        (Decimal("NaN"), "NaN"),
        (float("inf"), "Infinity"),
        (datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2024-01-02T01:04:05Z"),
        (datetime(2024, 1, 2, 3, 4, 5), "2024-01-02T03:04:05"),
        (("a", 1), ["a", 1]),
        (b"\x01", "\\x01"),
        (None, None),
        (True, True),
    ],
)
def test_json_is_exact_or_text(value: Any, shown: Any) -> None:
    assert plain(value) == shown
    assert type(plain(value)) is type(shown)


def test_table_as_psql_prints_it() -> None:
    shown = render(("id", "note"), [(1, "a"), (20, "b\nc"), (None, None)], Format.TABLE)
    assert shown.splitlines() == [
        " id | note",
        "----+------",
        "  1 | a",
        " 20 | b   +",
        "    | c",
        "    |",
        "(3 rows)",
    ]


def test_no_rows() -> None:
    assert render(("a",), [], Format.TABLE).splitlines() == [" a", "---", "(0 rows)"]
    assert render(("a",), [], Format.CSV) == "a\n"
    assert json.loads(render(("a",), [], Format.JSON)) == []


def test_csv_tells_null_from_empty() -> None:
    assert render(("a", 'b"'), [(None, ""), ("x,y", " z")], Format.CSV) == 'a,"b"""\n,""\n"x,y"," z"\n'


def test_json_is_an_array_of_objects() -> None:
    rows = [("0/16B3748", datetime(2024, 1, 1, tzinfo=UTC)), ("ü", None)]
    assert json.loads(render(("lsn", "at"), rows, Format.JSON)) == [
        {"lsn": "0/16B3748", "at": "2024-01-01T00:00:00Z"},
        {"lsn": "ü", "at": None},
    ]
