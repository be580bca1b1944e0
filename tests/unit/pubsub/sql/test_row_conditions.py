"""row_conditions: what is read, how it binds, and what is refused."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.sql.layouts import Layouts, conditions_of
from pubsub.sql.options import Option, SubscriptionOptions, resolve
from pubsub.sql.row_conditions import RowCondition


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("a = 1", '("a" = 1)'),
        ("1 < A", '("a" > 1)'),
        ("\"A a\" != 'it''s'", "(\"A a\" <> 'it''s')"),
        ("a = 1 OR b = 2 AND NOT c = 3", '(("a" = 1) OR (("b" = 2) AND (NOT ("c" = 3))))'),
        ("(a = 1 OR b = 2) AND c", '((("a" = 1) OR ("b" = 2)) AND "c")'),
        ("NOT a = 1 IS NULL", '(NOT (("a" = 1) IS UNKNOWN))'),
        ("NOT NOT a", '"a"'),
        ("a BETWEEN -1 AND 2 AND b", '((("a" >= (-1)) AND ("a" <= 2)) AND "b")'),
        ("a NOT IN (1, 2.50, '3')", "(NOT (\"a\" IN (1, 2.50, '3')))"),
        ("a LIKE 'x\\_%'", "(\"a\" LIKE  E'x\\\\_%')"),
        ("a IS NOT NULL", '(NOT ("a" IS NULL))'),
        ("a ISNULL OR b NOTNULL", '(("a" IS NULL) OR (NOT ("b" IS NULL)))'),
        ("(a = 1) IS NOT TRUE", '(NOT (("a" = 1) IS TRUE))'),
        ("a IS DISTINCT FROM 1", '("a" IS DISTINCT FROM 1)'),
        ("a = TRUE", '("a" = TRUE)'),
        ("a > 0x10", '("a" > 16)'),
        ("a > - 123456789012345678901234567890.123", '("a" > (-123456789012345678901234567890.123))'),
        ("a = b", '("a" = "b")'),
    ],
)
def test_conditions_as_sql(text: str, sql: str) -> None:
    condition = RowCondition.parse(text)
    assert condition.sql({name: name for name in condition.columns}) == sql
    again = RowCondition.parse(sql.replace("LIKE  E'x\\\\", "LIKE 'x\\"))
    assert again.expression == condition.expression, "what is made of it means the same"


def test_the_publisher_s_present_names() -> None:
    condition = RowCondition.parse("a = 1 AND (b OR a < 3)")
    assert condition.columns == ("a", "b")
    assert condition.sql({"a": 'x"y', "b": "select"}) == '(("x""y" = 1) AND ("select" OR ("x""y" < 3)))'


@pytest.mark.parametrize(
    "text",
    [
        "lower(a) = 'x'", "a + 1 > 2", "a::text = 'x'", "date '2026-01-01' < a", "a = NULL", "1 = 1", "'x'", "TRUE", "a = (b = c)",
        "a ~ 'x'", "a || b = 'x'", "a LIKE b", "a = -b", "a IN (b)", "a BETWEEN b AND 2", "(a AND b) = 1", "a = 1e2000",
    ],
)  # fmt: skip
def test_sql_that_is_not_taken(text: str) -> None:
    with pytest.raises(FeatureNotSupported):
        RowCondition.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a =",
        "a = 1 b",
        "(a",
        "a)",
        "a IN ()",
        "a IN (1",
        "a IS",
        "a IS 1",
        "NOT",
        "a BETWEEN 1",
        "select = 1",
        "a AND",
        "a ILIKE 'x'",
    ],
)
def test_syntax_errors(text: str) -> None:
    with pytest.raises(SqlSyntaxError, match="syntax error at"):
        RowCondition.parse(text)


def test_a_pattern_that_ends_in_its_escape() -> None:
    with pytest.raises(PubsubError) as refused:
        RowCondition.parse("a LIKE 'x\\'")
    assert refused.value.sqlstate == "22025"
    RowCondition.parse("a LIKE 'x\\\\'")


def test_depth_is_bounded() -> None:
    with pytest.raises(FeatureNotSupported, match="levels of parentheses"):
        RowCondition.parse("(" * 60 + "a" + ")" * 60)
    RowCondition.parse("(" * 40 + "a" + ")" * 40)
    RowCondition.parse(" AND ".join(f"(a = {number})" for number in range(1000)))


def test_the_option() -> None:
    layouts = Layouts.parse("", "", "", where="public.t (a = 1 AND (b OR c)), s.* (d <> ') ,('), * (NOT e)")
    assert [layouts.choice_of(*name).where.text for name in (("public", "t"), ("s", "x"), ("o", "t"))] == [  # type: ignore[union-attr]
        "a = 1 AND (b OR c)",
        "d <> ') ,('",
        "NOT e",
    ]
    assert Layouts.parse("", "", "", where="public.t (a = 1)").choice_of("public", "u").where is None
    assert list(layouts.tables()) == [("where", "public", "t")]
    for text in (
        "public.t",
        "public.t ()",
        "public.t (a = 1",
        "t (a = 1)",
        "public.t (a = 1), public.t (a = 2)",
        "public.t (a) (b)",
    ):
        with pytest.raises(PubsubError) as refused:
            conditions_of(text)
        assert refused.value.sqlstate == "22023", text


def test_what_it_excludes() -> None:
    options = resolve([Option("where", "public.t (a = 1)")], ["where", "schema_changes"])
    assert options == SubscriptionOptions(where="public.t (a = 1)", specified=frozenset({"where"}))
    with pytest.raises(PubsubError, match="schema_changes = refuse and where = … are mutually exclusive options"):
        resolve([Option("where", "public.t (a = 1)"), Option("schema_changes", "refuse")], ["where", "schema_changes"])
