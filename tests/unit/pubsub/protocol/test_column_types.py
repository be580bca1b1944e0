"""A column's type: by PostgreSQL's type and modifier, and by the option `types`."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.column_types import delta_type, folded_name, shaped_type, spark_ddl
from pubsub.protocol.shapes import TypeShape
from pubsub.sql.typechoices import TypeChoices

PAIR = TypeShape(
    20001,
    kind="c",
    name="public.pair",
    attributes=(("a", TypeShape(1007, element=TypeShape(23))), ("at", TypeShape(1184))),
)


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


@pytest.mark.parametrize(
    ("oid", "modifier", "ddl"),
    [
        (16, -1, "BOOLEAN"),
        (21, -1, "SMALLINT"),
        (23, -1, "INT"),
        (20, -1, "BIGINT"),
        (26, -1, "BIGINT"),
        (700, -1, "FLOAT"),
        (701, -1, "DOUBLE"),
        (1082, -1, "DATE"),
        (1114, 3, "TIMESTAMP_NTZ"),
        (1184, -1, "TIMESTAMP"),
        (17, -1, "BINARY"),
        (1700, -1, "STRING"),
        (1700, numeric(12, 2), "DECIMAL(12,2)"),
        (1700, numeric(38, 38), "DECIMAL(38,38)"),
        (1700, numeric(39, 0), "STRING"),
        (1700, numeric(5, -2), "STRING"),
        (1700, numeric(2, 5), "STRING"),
        (25, -1, "STRING"),
        (1043, 14, "STRING"),
        (2950, -1, "STRING"),
        (3802, -1, "STRING"),
        (1007, -1, "STRING"),
        (1083, -1, "STRING"),
        (99999, -1, "STRING"),
    ],
)
def test_delta_types(oid: int, modifier: int, ddl: str) -> None:
    assert spark_ddl(delta_type(oid, modifier)) == ddl


def test_pseudo_type_is_refused() -> None:
    with pytest.raises(FeatureNotSupported, match="anyelement"):
        delta_type(2283, -1, "p", "anyelement")


def _type(shape: TypeShape, choices: str, own: str | None = None) -> str:
    return spark_ddl(shaped_type(shape, TypeChoices.parse(choices).of_type, own))


def test_types_and_choices() -> None:
    prices = TypeShape(1231, (6 << 16 | 2) + 4, name="numeric[]", element=TypeShape(1700, (6 << 16 | 2) + 4))
    assert _type(prices, "") == _type(prices, "composites natural") == "STRING"
    assert _type(prices, "arrays natural") == _type(prices, "", "natural") == "ARRAY<DECIMAL(6,2)>"
    assert _type(prices, "numeric[] natural, arrays text") == "ARRAY<DECIMAL(6,2)>"
    assert _type(prices, "numeric[] text, arrays natural") == "STRING"
    assert _type(prices, "arrays natural, numeric text") == "ARRAY<STRING>"
    assert _type(prices, "arrays natural", "text") == "STRING"
    assert _type(PAIR, "arrays natural") == "STRING"
    assert _type(PAIR, "public.pair natural") == "STRUCT<`a`: ARRAY<INT>, `at`: TIMESTAMP>"
    assert _type(PAIR, "composites natural, arrays text, timestamptz text") == "STRUCT<`a`: STRING, `at`: STRING>"
    pairs = TypeShape(20002, name="public.pair[]", element=PAIR)
    assert _type(pairs, "public.pair[] natural") == "ARRAY<STRUCT<`a`: ARRAY<INT>, `at`: TIMESTAMP>>"
    assert _type(pairs, "public.pair[] natural, public.pair text") == "ARRAY<STRING>"
    documents = TypeShape(3802, name="jsonb")
    assert _type(documents, "") == "STRING"
    assert _type(documents, "jsonb variant") == _type(documents, "", "variant") == "VARIANT"
    within = TypeShape(20003, kind="c", name="x", attributes=(("j", documents),))
    assert _type(within, "jsonb variant", "natural") == "STRUCT<`j`: STRING>"


@pytest.mark.parametrize(
    ("shape", "own", "words"),
    [
        (TypeShape(1020, name="box[]", element=TypeShape(603), delimiter=";"), "natural", 'divided by ";"'),
        (TypeShape(1, kind="c", name="empty"), "natural", "no attributes"),
        (TypeShape(1, kind="c", attributes=(("a", TypeShape(23)), ("A", TypeShape(23)))), "natural", "only in case"),
        (TypeShape(1, kind="c", attributes=(("s", TypeShape(23)), ("ſ", TypeShape(23)))), "natural", "only in case"),
        (TypeShape(1, kind="c", attributes=(("a b", TypeShape(23)),)), "natural", '"a b"'),
        (TypeShape(114, name="json"), "variant", "jsonb"),
    ],
)
def test_types_that_are_refused(shape: TypeShape, own: str, words: str) -> None:
    with pytest.raises(FeatureNotSupported) as caught:
        shaped_type(shape, TypeChoices().of_type, own)
    assert words in (caught.value.detail or "")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("a", "A", True), ("s", "ſ", True), ("k", "\N{KELVIN SIGN}", True), ("i", "ı", True), ("i", "İ", True),
     ("σ", "ς", True), ("ß", "ss", False), ("ß", "ẞ", True), ("a", "b", False)],
)  # fmt: skip
def test_names_that_delta_does_not_tell_apart(one: str, other: str, same: bool) -> None:
    """As String.equalsIgnoreCase does, letter by letter: neither lower() nor casefold() is the same."""
    assert (folded_name(f"x{one}") == folded_name(f"x{other}")) is same
