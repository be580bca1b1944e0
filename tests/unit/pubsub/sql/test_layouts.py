"""partition_by, cluster_by and table_properties: what they say of which table, and what they refuse."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.sql.layout_rules import (
    deletes_of,
    masks_of,
    matches,
    metadata_of,
    patterns_of,
    registers_of,
    renames_of,
    truncate_of,
)
from pubsub.sql.layouts import Layout, Layouts
from pubsub.sql.mask_rules import MaskRule


def test_what_says_most_about_a_table_counts() -> None:
    layouts = Layouts.parse(
        'public.orders (region, "Sub Region"), public.* (kind), * (day)',
        "s.t (Zip)",
        '* (team = shop, a = 1), public.* (a = 2), public.orders (delta.enableChangeDataFeed = true, "the owner" = "x, y", a = -3.5)',
    )
    assert layouts.of("public", "orders") == Layout(
        ("region", "Sub Region"),
        (),
        {"team": "shop", "a": "-3.5", "delta.enableChangeDataFeed": "true", "the owner": "x, y"},
    )
    assert layouts.of("public", "other") == Layout(("kind",), (), {"team": "shop", "a": "2"})
    assert layouts.of("x", "y") == Layout(("day",), (), {"team": "shop", "a": "1"})
    assert set(layouts.tables()) == {
        ("partition_by", "public", "orders"),
        ("cluster_by", "s", "t"),
        ("table_properties", "public", "orders"),
    }
    with pytest.raises(FeatureNotSupported, match=r'table "s\.t" cannot be partitioned and clustered'):
        layouts.of("s", "t")


def test_nothing_is_said_by_default() -> None:
    layouts = Layouts.parse("", "", "")
    assert not layouts.of("public", "t")
    assert list(layouts.tables()) == []


@pytest.mark.parametrize(
    "text",
    [
        "t (a)",
        "a.b.c (a)",
        "public.t",
        "public.t ()",
        "public.t (a",
        "public.t a)",
        "public.t (a),",
        "public.t (a) public.u (b)",
        "public.t (a,)",
        "public.t (a, a)",
        "public.t (a b)",
        "public.t (1)",
        "public.t ('a')",
        "public.t (a), public.t (b)",
        "*.t (a)",
        "* . * (a)",
        "public.t ((a))",
    ],
)
def test_columns_that_are_not_understood(text: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "cluster_by"') as caught:
        Layouts.parse("", text, "")
    assert caught.value.sqlstate == "22023"


@pytest.mark.parametrize("text", ["* (a)", "* (= a)", "* (a =)", "* (a = 1, a = 2)", "* ('a' = 1)", "public.t"])
def test_properties_that_are_not_understood(text: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "table_properties"'):
        Layouts.parse("", "", text)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("delta.enableChangeDataFeeds", 'Perhaps you meant "delta.enableChangeDataFeed".'),
        ("delta.appendOnly", None),
        ("delta.enableDeletionVectors", None),
        ("delta.deletedFileRetentionDuration", None),
        ("Delta.appendOnly", None),
        ("pubsub.key", None),
    ],
)
def test_properties_that_cannot_be_given(name: str, hint: str | None) -> None:
    with pytest.raises(UndefinedObject, match=f'table property "{name}" cannot be given') as caught:
        Layouts.parse("", "", f"* ({name} = true)")
    if hint is not None:
        assert caught.value.hint == hint


@pytest.mark.parametrize("name", ["delta.universalFormat.enabledFormats", "delta.enableIcebergCompatV2"])
def test_readers_of_iceberg_are_refused_by_name(name: str) -> None:
    with pytest.raises(FeatureNotSupported, match="not written for readers of Iceberg"):
        Layouts.parse("", "", f"* ({name} = iceberg)")


def test_lists_of_tables() -> None:
    assert patterns_of("copy_first", "") == ()
    found = patterns_of("copy_first", 'Public."T t", s.*, *')
    assert found == (("public", "T t"), ("s", None), (None, None))
    assert [matches(one, "s", "T t") for one in found] == [False, True, True]


@pytest.mark.parametrize("text", ["t", "s.t, s.t", "s.t,", "s.t u", "s.t (a)", "s.*.t", ","])
def test_lists_of_tables_that_are_not_understood(text: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "copy_first"'):
        patterns_of("copy_first", text)


def test_modes() -> None:
    """A mode of all tables is written alone; else each element has its own."""
    assert Layouts.parse("", "", "", "history").of("s", "t").mode == "history"
    layouts = Layouts.parse("", "", "", 'public.* (history), public."T t" (mirror)')
    assert layouts.of("public", "t").mode == "history"
    assert layouts.of("public", "T t").mode == "mirror"
    assert layouts.of("x", "t").mode == "mirror"
    assert not layouts.of("public", "t"), "it lies as any other"
    assert list(layouts.tables()) == [("mode", "public", "T t")]
    for text in (
        "histories",
        "History x",
        "* ()",
        "* (history, mirror)",
        "public.t",
        "'history'",
        "* (history), * (mirror)",
    ):
        with pytest.raises(PubsubError) as refused:
            Layouts.parse("", "", "", text)
        assert refused.value.sqlstate == "22023"


def test_columns_that_are_left_out() -> None:
    """Of columns the element that says most counts; what any element excludes is excluded."""
    layouts = Layouts.parse("", "", "", "", "* (id, a, b), s.t (id, c)", "s.* (c), * (b), s.u (a)")
    assert [name for name in ["id", "a", "b", "c"] if layouts.of("s", "t").leaves_out(name)] == ["a", "b", "c"]
    assert [name for name in ["id", "a", "b", "c"] if layouts.of("s", "u").leaves_out(name)] == ["a", "b", "c"]
    assert [name for name in ["id", "a", "b", "c"] if layouts.of("x", "y").leaves_out(name)] == ["b", "c"]
    assert layouts.of("x", "y").is_closed
    assert not layouts.of("x", "y"), "it lies as any other"
    assert not Layouts.parse("", "", "", "", "", "s.t (a)").of("s", "other").is_closed
    with pytest.raises(UndefinedObject, match=r'column "c" of table "s\.t" in subscription option columns'):
        layouts.require_columns("s", "t", ["id"])
    layouts.require_columns("s", "t", ["id", "c"])
    layouts.require_columns("x", "y", [])
    with pytest.raises(UndefinedObject, match=r'column "a" of table "\*\.\*" in subscription option columns'):
        layouts.require_columns_somewhere({("s", "t"): ["id", "b", "c"]})
    layouts.require_columns_somewhere({("s", "t"): ["id", "c"], ("s", "u"): ["a", "b"]})


def test_masks() -> None:
    """Of several elements that name a column, the one that says most about the table counts."""
    text = """* (name redact), s.* (name null, a hash), s.t (name truncate 4, "B b" truncate 0)"""
    layouts = Layouts.parse("", "", "", mask=text)
    redact, null, hashed = MaskRule("redact"), MaskRule("null"), MaskRule("hash")
    assert layouts.of("s", "t").mask == {"name": MaskRule("truncate", 4), "a": hashed, "B b": MaskRule("truncate", 0)}
    assert layouts.of("s", "u").mask == {"name": null, "a": hashed}
    assert layouts.choice_of("x", "y").mask == {"name": redact}
    assert layouts.of("x", "y").is_closed
    assert not Layouts.parse("", "", "", mask="s.t (a null)").of("s", "other").is_closed
    assert list(layouts.choices.tables()) == [("mask", "s", "t")]
    with pytest.raises(UndefinedObject, match=r'column "B b" of table "s\.t" in subscription option mask'):
        layouts.require_columns("s", "t", ["name"])
    with pytest.raises(UndefinedObject, match=r'column "a" of table "s\.\*" in subscription option mask'):
        layouts.require_columns_somewhere({("s", "t"): ["name", "B b"]})
    for rule in (redact, null, hashed, MaskRule("truncate", 12)):
        assert MaskRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "inside",
    [
        "a",
        "a hash 4",
        "a truncate",
        "a truncate -1",
        "a truncate 1.5",
        "a truncate 0x10",
        "a truncate 99999999999",
        "a truncate four",
        'a "hash"',
        "a clear",
        "a hash, a null",
        "hash",
        "",
        "a hash b null",
        "'a' hash",
    ],
)
def test_masks_that_are_refused(inside: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "mask"') as refused:
        masks_of(f"s.t ({inside})")
    assert refused.value.sqlstate == "22023"


def test_other_names() -> None:
    """Of several elements that name a column, the one that says most about the table counts; the table stays open."""
    layouts = Layouts.parse(
        "", "", "", rename="""* (email mail), s.* (email post, a b), s.t (email "E mail", "B b" a)"""
    )
    assert layouts.of("s", "t").rename == {"email": "E mail", "a": "b", "B b": "a"}
    assert layouts.of("s", "u").rename == {"email": "post", "a": "b"}
    assert layouts.choice_of("x", "y").rename == {"email": "mail"}
    assert not layouts.of("s", "t").is_closed
    assert list(layouts.choices.tables()) == [("rename", "s", "t")]
    layouts.require_columns("s", "t", [])
    with pytest.raises(UndefinedObject, match=r'column "B b" of table "s\.t" in subscription option rename'):
        layouts.require_columns("s", "t", ["email"], rename=True)
    with pytest.raises(UndefinedObject, match=r'column "a" of table "s\.\*" in subscription option rename'):
        layouts.require_columns_somewhere({("s", "t"): ["email", "B b"]})


@pytest.mark.parametrize(
    "inside", ["a", "a b c", "a b, a c", "a b, c b", "a = b", "'a' b", "a 'b'", "a 1", "a b,", "", "a.b c"]
)
def test_other_names_that_are_refused(inside: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "rename"') as refused:
        renames_of(f"s.t ({inside})")
    assert refused.value.sqlstate == "22023"


def test_how_rows_are_deleted() -> None:
    """As a mode, and not beside a history."""
    assert Layouts.parse("", "", "", deletes="soft").of("s", "t").deletes == "soft"
    layouts = Layouts.parse("", "", "", "public.h (history)", deletes="public.* (soft), public.t (hard)")
    assert layouts.deletes_of("public", "u") == "soft"
    assert layouts.deletes_of("public", "t") == layouts.deletes_of("x", "u") == "hard"
    assert list(layouts.tables()) == [("mode", "public", "h"), ("deletes", "public", "t")]
    with pytest.raises(FeatureNotSupported, match="cannot have mode = history and deletes = soft"):
        layouts.of("public", "h")
    versions = Layouts.parse("", "", "", "public.h (scd2)", deletes="public.* (soft)", truncate="* (ignore)")
    assert (versions.mode_of("public", "h"), versions.mode_of("public", "t")) == ("scd2", "mirror")
    with pytest.raises(FeatureNotSupported, match="cannot have mode = scd2 and deletes = soft"):
        versions.deletes_of("public", "h")
    with pytest.raises(FeatureNotSupported, match="cannot have mode = scd2 and truncate = ignore"):
        versions.truncate_of("public", "h")
    for text in ("gone", "public.t (history)", "public.t (soft, hard)", "'soft'"):
        with pytest.raises(PubsubError) as caught:
            deletes_of(text)
        assert caught.value.sqlstate == "22023", text


def test_what_a_truncate_does() -> None:
    """As how rows are deleted, and nothing but the default beside a history."""
    assert Layouts.parse("", "", "", truncate="ignore").of("s", "t").truncate == "ignore"
    layouts = Layouts.parse("", "", "", "public.h (history)", truncate="public.* (ignore), public.t (follow)")
    assert layouts.truncate_of("public", "u") == "ignore"
    assert layouts.truncate_of("public", "t") == layouts.truncate_of("x", "u") == "follow"
    assert list(layouts.tables()) == [("mode", "public", "h"), ("truncate", "public", "t")]
    with pytest.raises(FeatureNotSupported, match="cannot have mode = history and truncate = ignore"):
        layouts.of("public", "h")
    for text in ("no", "public.t (history)", "public.t (ignore, follow)", "'ignore'"):
        with pytest.raises(PubsubError) as caught:
            truncate_of(text)
        assert caught.value.sqlstate == "22023", text


def test_metadata() -> None:
    """Kinds, in the order of their columns, with names that may be others."""
    layouts = Layouts.parse(
        "", "", "", "s.h (history)", metadata='* (commit_time, lsn), public.t (op "What It Did", xid)'
    )
    assert layouts.metadata_of("s", "t") == (("lsn", "_pubsub_lsn"), ("commit_time", "_pubsub_commit_time"))
    assert layouts.metadata_of("public", "t") == (("xid", "_pubsub_xid"), ("op", "What It Did"))
    assert Layouts().metadata_of("s", "t") == ()
    with pytest.raises(FeatureNotSupported, match="cannot have mode = history and metadata"):
        layouts.metadata_of("s", "h")
    for text in ("lsn", "* ()", "* (when)", "* (lsn as a)", "* (lsn, lsn b)", "* (lsn a, xid a)", "* (lsn 'a')"):
        with pytest.raises(PubsubError) as caught:
            metadata_of(text)
        assert caught.value.sqlstate == "22023", text


def test_names_in_a_catalog() -> None:
    """A catalog, a schema in it, or the whole name of one table; the rest is the publisher's."""
    layouts = Layouts.parse("", "", "", register='public.t (lake.crm."All of `it`"), public.* (lake.bronze), * (other)')
    assert layouts.catalogs() == {"lake", "other"}
    assert [str(layouts.registered_as(*one)) for one in (("public", "t"), ("public", "u"), ("x", "Y z"))] == [
        "lake.crm.`All of ``it```",
        "lake.bronze.u",
        "other.x.`Y z`",
    ]
    assert Layouts.parse("", "", "", register="lake").registered_as("s", "t") == ("lake", "s", "t")
    assert Layouts.parse("", "", "", register='lake . "S"').registered_as("s", "t") == ("lake", "S", "t")
    assert Layouts.parse("", "", "", register="s.* (lake)").registered_as("public", "t") is None
    assert list(layouts.tables()) == [("register", "public", "t")]


@pytest.mark.parametrize(
    "text",
    [
        "a.b.c",
        "a.",
        ".a",
        "a b",
        "'a'",
        '""',
        "* (a.b.c)",
        "s.* (a.b.c)",
        "s.t (a.b.c.d)",
        "s.t (a.b,c)",
        "s.t ()",
        "a, b",
    ],
)
def test_names_in_a_catalog_that_are_refused(text: str) -> None:
    with pytest.raises(PubsubError) as refused:
        registers_of(text)
    assert refused.value.sqlstate in ("22023", "42601")
