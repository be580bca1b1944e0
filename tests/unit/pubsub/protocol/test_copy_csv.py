"""Rows of a copy as columns."""

from __future__ import annotations

import traceback
from decimal import Decimal

import pyarrow as pa
import pytest

from pubsub.errors import ProtocolViolation
from pubsub.protocol.text.copy_csv import InvalidCopiedField, parse_copy

ONE = pa.schema([("only", pa.string())])
TWO = pa.schema([("id", pa.int64()), ("note", pa.string())])


def test_null_and_empty_string_differ() -> None:
    batch = parse_copy(b'1,\n2,""\n,x\n', TWO)
    assert batch.to_pylist() == [{"id": 1, "note": None}, {"id": 2, "note": ""}, {"id": None, "note": "x"}]
    assert batch.schema == TWO


def test_a_single_column_has_empty_lines() -> None:
    assert parse_copy(b'\n""\nx\n\n', ONE).column(0).to_pylist() == [None, "", "x", None]


def test_quoting() -> None:
    data = b'1,"a,b"\n2,"say ""hi"""\n3,"two\nlines\r\n"\n4,"\\."\n5,NULL\n6,\\N\n7,"""\n"\n8, x \n'
    assert parse_copy(data, TWO).column(1).to_pylist() == [
        "a,b",
        'say "hi"',
        "two\nlines\r\n",
        "\\.",
        "NULL",
        "\\N",
        '"\n',
        " x ",
    ]


def test_a_first_value_that_looks_like_a_byte_order_mark() -> None:
    assert parse_copy("\ufeffa\n\ufeffb\n".encode(), ONE).column(0).to_pylist() == ["\ufeffa", "\ufeffb"]


def test_chunks_of_rows_and_no_rows() -> None:
    rows = [b"1,a\n2,", b"b\n"]
    assert parse_copy(rows, TWO).num_rows == 2
    assert not rows  # a large one is not kept while it is parsed
    assert parse_copy(b"", TWO).to_pylist() == []
    assert parse_copy([], TWO).schema == TWO


def test_names_do_not_matter() -> None:
    schema = pa.schema([("a", pa.int64()), ("a", pa.int64()), ("1", pa.decimal128(4, 1)), ("0", pa.bool_())])
    batch = parse_copy(b"1,2,3.5,t\n", schema)
    assert [column.to_pylist() for column in batch.columns] == [[1], [2], [Decimal("3.5")], [True]]


def test_long_rows() -> None:
    long = b"x" * (3 << 20)
    assert parse_copy(b"1," + long + b"\n2,y\n", TWO).column(1).to_pylist() == [long.decode(), "y"]


@pytest.mark.parametrize("data", [b"1,a", b"1,a\n2\n", b"1,a,b\n"])
def test_malformed(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_copy(data, TWO)


def test_a_bad_value_is_named() -> None:
    with pytest.raises(InvalidCopiedField) as caught:
        parse_copy(b"1,a\n2,b\n3.5,c\n", TWO)
    assert (caught.value.column, caught.value.row) == ("id", 2)
    keyed = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.bool_())])
    with pytest.raises(InvalidCopiedField) as caught:
        parse_copy(b"1,t\n22,x\n", keyed)
    assert caught.value.key == "(id)=(22)"
    rows = b"1,t\n22,secret\n"
    with pytest.raises(InvalidCopiedField) as caught:
        parse_copy(rows, keyed, hidden={"id", "v"})
    assert caught.value.row == 1
    assert "masked value" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)) + caught.value.key
    assert "secret" not in shown
    assert "22" not in caught.value.key
