"""The option gather: which Delta table a table is in, and as which source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import PubsubError
from pubsub.sql.sharing import Sharing, gathered
from pubsub.sql.source import Source


def _of(text: str, schema: str, table: str) -> tuple[tuple[str, str], str | None]:
    found = Sharing(rules=gathered(text))
    source = found.source_of(schema, table)
    return found.place_of(schema, table), None if source is None else source.value


@pytest.mark.parametrize(
    ("text", "table", "place", "value"),
    [
        ("tenant_*.* (tenants)", ("tenant_7", "orders"), ("tenants", "orders"), "tenant_7"),
        ("tenant_*.* (tenants)", ("tenant", "orders"), ("tenant", "orders"), None),
        ("*.* (public)", ("public", "orders"), ("public", "orders"), "public"),
        ("public.orders_* (public.orders)", ("public", "orders_2025"), ("public", "orders"), "orders_2025"),
        ("public.orders_* (public.orders)", ("other", "orders_2025"), ("other", "orders_2025"), None),
        ("shop_*.sales_* (all.sales)", ("shop_1", "sales_eu"), ("all", "sales"), "shop_1.sales_eu"),
        ("shop_*.sales_* (all.sales)", ("shop_1", "sales_"), ("all", "sales"), "shop_1.sales_"),
        # The first that fits; names as in SQL.
        ("A*.t (x), *.t (y)", ("a1", "t"), ("x", "t"), "a1"),
        ("A*.t (x), *.t (y)", ("A1", "t"), ("y", "t"), "A1"),
        ('"A "*"-b".t (x."T")', ("A 1-b", "t"), ("x", "T"), "A 1-b.t"),
        ('"A*".t (x)', ("A1", "t"), ("A1", "t"), None),
        ('"A*".t (x)', ("A*", "t"), ("x", "t"), "A*"),
        ('*"1"*"2".t (x)', ("a1b2", "t"), ("x", "t"), "a1b2"),
        ('*"1"*"2".t (x)', ("a1b23", "t"), ("a1b23", "t"), None),
        ("", ("a", "t"), ("a", "t"), None),
    ],
)
def test_where_a_table_is(text: str, table: tuple[str, str], place: tuple[str, str], value: str | None) -> None:
    assert _of(text, *table) == (place, value)


@pytest.mark.parametrize(
    "text",
    [
        *("a.b", "a (b)", "a.b ()", "a.b (c.d.e)", "a.b c.d (x)", "a.b (x),", "'x'.b (c)", "a.* (b) c", "a. (x)"),
        *(".a (x)", "a.b (*)", "a b.c (x)", "a.**b (x)", "a.b.c (x)"),
    ],
)
def test_what_it_cannot_be(text: str) -> None:
    with pytest.raises(PubsubError) as refused:
        gathered(text)
    assert refused.value.sqlstate == "22023"


def test_a_source_of_a_subscription_is_that_of_all_its_tables() -> None:
    found = Sharing("tenant", "seven")
    assert found.source_of("a", "t") == Source("tenant", "seven")
    assert found.place_of("a", "t") == ("a", "t")
    assert found
    assert not Sharing()


def test_a_name_that_is_no_source_is_refused() -> None:
    with pytest.raises(PubsubError, match="invalid value"):
        _of("*.t (x)", "a\nb", "t")


@given(st.lists(st.text("ab", max_size=2), min_size=1, max_size=5), st.text("ab", min_size=1, max_size=8))
def test_a_star_is_any_characters(parts: list[str], name: str) -> None:
    """As a plain search that tries everything says."""
    text = "*".join(f'"{one}"' if one else "" for one in parts)
    if not text or "**" in text:
        return

    def fits(pattern: tuple[str, ...], rest: str) -> bool:
        if len(pattern) == 1:
            return rest == pattern[0]
        tail = rest[len(pattern[0]) :] if rest.startswith(pattern[0]) else None
        return tail is not None and any(fits(pattern[1:], tail[at:]) for at in range(len(tail) + 1))

    assert (_of(f"{text}.t (x)", name, "t")[0] == ("x", "t")) == fits(tuple(parts), name)


def test_many_stars_take_no_time() -> None:
    """What is searched for between two of them is found where it is first: else this took days."""
    assert _of("*".join(["", *"a" * 25, "b"]) + ".t (x)", "a" * 63, "t")[1] is None
