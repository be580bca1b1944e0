"""Names in SQL and in paths."""

from __future__ import annotations

import pytest

from pubsub.errors import PubsubError, SqlSyntaxError
from pubsub.sql.identifiers import (
    QualifiedName,
    decode_path,
    encode_path,
    parse_qualified_name,
    quote_identifier,
    quote_literal,
    table_path,
)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("orders", "orders"),
        ("_a1", "_a1"),
        ("Orders", '"Orders"'),
        ("a b", '"a b"'),
        ('a"b', '"a""b"'),
        ("a$b", '"a$b"'),
        ("select", '"select"'),
        ("int", '"int"'),
        ("left", '"left"'),
        ("public", "public"),
        ("é", '"é"'),
        ("1a", '"1a"'),
        ("a\n", '"a\n"'),
    ],
)
def test_quote_identifier(name: str, quoted: str) -> None:
    assert quote_identifier(name) == quoted


@pytest.mark.parametrize(("value", "quoted"), [("a", "'a'"), ("a'b", "'a''b'"), ("a\\b", " E'a\\\\b'")])
def test_quote_literal(value: str, quoted: str) -> None:
    assert quote_literal(value) == quoted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Orders", QualifiedName(None, "orders")),
        ('Public."Or""ders"', QualifiedName("public", 'Or"ders')),
        ("public.select", QualifiedName("public", "select")),
    ],
)
def test_parse_qualified_name(text: str, expected: QualifiedName) -> None:
    assert parse_qualified_name(text) == expected


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a b", "select", "'a'", "a,b"])
def test_malformed_names_are_refused(text: str) -> None:
    with pytest.raises(SqlSyntaxError):
        parse_qualified_name(text)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("orders_2", "orders_2"),
        ("Orders", "Orders"),
        ("my table", "my-20table"),
        ("a-b", "a-2db"),
        ("..", "-2e-2e"),
        ("a/b", "a-2fb"),
        ("é", "-c3-a9"),
        ("\n", "-0a"),
    ],
)
def test_encode_path(name: str, part: str) -> None:
    assert encode_path(name) == part
    assert decode_path(part) == name


@pytest.mark.parametrize("part", ["", "a b", "..", "a/b", "-2", "-6f", "-ff", "-2E"])
def test_decode_path_refuses_what_encode_path_never_writes(part: str) -> None:
    with pytest.raises(PubsubError):
        decode_path(part)


def test_a_table_s_path() -> None:
    assert table_path("s3a://bucket/w/", "sales", "public", "a b") == "s3a://bucket/w/sales/public/a-20b"
    with pytest.raises(PubsubError):
        table_path("/w", "", "public", "t")
