"""Which comments a Delta table gets: the publisher's, and those of others where it has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pubsub.delta.comments import Comments, commented
from pubsub.delta.schema_json import fields, schema_string


def table(description: str | None = None, **columns: str | None) -> dict[str, Any]:
    """Return a metaData action of a table whose columns have these comments."""
    named = [
        {
            "name": name,
            "type": "integer",
            "nullable": True,
            "metadata": {"delta.columnMapping.id": 1, **({} if comment is None else {"comment": comment})},
        }
        for name, comment in columns.items()
    ]
    action = {"id": "x", "schemaString": schema_string(named), "configuration": {"a": "b"}}
    return action if description is None else {**action, "description": description}


def shown(metadata: Mapping[str, Any] | None) -> tuple[str | None, dict[str, str | None], list[str]]:
    assert metadata is not None
    columns = {one["name"]: one["metadata"].get("comment") for one in fields(metadata)}
    return metadata.get("description"), columns, json.loads(metadata["configuration"].get("pubsub.comments", "[]"))


def test_comments_come_change_and_go() -> None:
    first = commented(table(a=None, b=None), Comments("of t", {"a": "of a", "b": None}))
    assert shown(first) == ("of t", {"a": "of a", "b": None}, ["", "a"])
    assert first is not None
    assert first["configuration"]["a"] == "b"
    assert [one["metadata"]["delta.columnMapping.id"] for one in fields(first)] == [1, 1]
    assert commented(first, Comments("of t", {"a": "of a", "b": None})) is None, "nothing is to be committed"
    second = commented(first, Comments("of t", {"a": None, "b": "Größe 'x'"}))
    assert shown(second) == ("of t", {"a": None, "b": "Größe 'x'"}, ["", "b"])
    assert second is not None
    third = commented(second, Comments(None, {"a": None, "b": None}))
    assert shown(third) == (None, {"a": None, "b": None}, [])
    assert third is not None
    assert "pubsub.comments" not in third["configuration"]


def test_those_of_others_stay_where_the_publisher_has_none() -> None:
    theirs = table("theirs", a="theirs", b="theirs", own="theirs")
    assert commented(theirs, Comments(None, {"a": None, "b": None})) is None
    found = commented(theirs, Comments(None, {"a": None, "b": "of b"}))
    assert shown(found) == ("theirs", {"a": "theirs", "b": "of b", "own": "theirs"}, ["b"])


def test_of_several_sources_the_first_gives_a_comment() -> None:
    first = commented(table(a=None, b=None), Comments("one's", {"a": "one's", "b": None}), shared=True)
    assert first is not None
    second = commented(first, Comments("two's", {"a": None, "b": "two's"}), shared=True)
    assert shown(second) == ("one's", {"a": "one's", "b": "two's"}, ["", "a", "b"])


@pytest.mark.parametrize("record", ["", "{", "7", "null"])
def test_a_record_that_somebody_has_changed_names_nothing(record: str) -> None:
    metadata = {**table("x", a="x"), "configuration": {"pubsub.comments": record}}
    assert shown(commented(metadata, Comments("y", {"a": None}))) == ("y", {"a": "x"}, [""])
