"""column_choice: names decide once, numbers from then on, until somebody asks again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from apply.schema_changes import column_choice
from apply.schema_changes.attributes import read, stored
from apply.schema_changes.column_choice import Choice, asking, of_table_made_anew, replicated
from apply.schema_changes.table_definition import described_json, target_table
from pubsub.errors import FeatureNotSupported, UndefinedObject
from pubsub.protocol.ids import Oid
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.options import SubscriptionOptions

EXCLUDE = SubscriptionOptions(exclude="s.t (ssn)")


def table(*columns: tuple[int, str], name: str = "t") -> TableDefinition:
    found = tuple(
        ColumnDefinition(column, number, Oid(25), -1, "t", "b", Oid(25), -1, "b", False, "", True)
        for number, column in columns
    )
    return TableDefinition(Oid(1), "s", name, "r", "d", found, ("id",), ("id",), 0, 0, False, 9, "1:1")


def choose(options: SubscriptionOptions, of: TableDefinition, attnames: list[str] | None, held: str | None) -> Choice:
    return column_choice.choose(options.layouts, of, attnames, held)


USERS = table((1, "id"), (2, "name"), (3, "ssn"))


def definition(options: SubscriptionOptions, of: TableDefinition = USERS, held: str | None = None) -> str:
    """Return the definition that a copy stores."""
    choice = choose(options, of, None, held)
    return described_json(target_table(of, None, "/t", choice=choice), of, choice=choice)


def numbers(choice: Choice) -> list[int]:
    return [column.attnum for column in choice.columns]


def test_names_decide_at_first() -> None:
    assert numbers(choose(EXCLUDE, USERS, None, None)) == [1, 2]
    assert choose(EXCLUDE, replace(USERS, name="other"), None, None).left_out is None, "an open table"
    assert numbers(choose(SubscriptionOptions(columns="* (id)"), USERS, None, None)) == [1]
    assert numbers(choose(EXCLUDE, USERS, ["id", "ssn"], None)) == [1], "of the published columns"
    with pytest.raises(UndefinedObject):
        choose(EXCLUDE, table((1, "id"), (3, "social")), None, None)
    with pytest.raises(FeatureNotSupported, match="part of the key"):
        definition(SubscriptionOptions(exclude="s.t (id)"))


LATER = table((1, "uid"), (2, "ssn"), (3, "social"), (4, "more"))


@pytest.mark.parametrize("name", ["t", "renamed"])
def test_numbers_decide_from_then_on(name: str) -> None:
    """Whatever the columns and the table are called, and whatever was added."""
    held = definition(EXCLUDE)
    now = replace(LATER, name=name, primary_key=("uid",), identity_key=("uid",))
    choice = choose(EXCLUDE, now, None, held)
    assert numbers(choice) == [1, 2]
    assert [(one.number, one.named) for one in choice.left_out or ()] == [(3, True), (4, False)]
    assert [column.attnum for column in replicated(stored(held), now.columns)] == [1, 2]
    again = definition(EXCLUDE, now, held)
    assert numbers(choose(EXCLUDE, now, None, again)) == [1, 2], "a copy after a copy"
    # Asked, what came later is let in, not what an option had named.
    asked = choose(EXCLUDE, now, None, asking(again))
    assert numbers(asked) == [1, 2, 4]
    assert numbers(choose(EXCLUDE, now, None, definition(EXCLUDE, now, asking(again)))) == [1, 2, 4]


def test_other_options_hold_when_somebody_asks() -> None:
    """Until then they only take away."""
    held = definition(EXCLUDE)
    now = table((1, "id"), (2, "name"), (3, "social"), (4, "more"))
    other = SubscriptionOptions(exclude="s.t (name)")
    assert numbers(choose(other, now, None, held)) == [1]
    assert numbers(choose(other, now, None, asking(held))) == [1, 3, 4]
    nothing = SubscriptionOptions()
    assert numbers(choose(nothing, now, None, held)) == [1, 2]
    assert choose(nothing, now, None, held).left_out is not None
    assert choose(nothing, now, None, asking(held)).left_out is None
    typo = SubscriptionOptions(exclude="s.t (socail)")
    with pytest.raises(UndefinedObject):
        choose(typo, now, None, asking(held))
    open_table = definition(SubscriptionOptions())
    assert asking(open_table) == open_table
    assert numbers(choose(EXCLUDE, USERS, None, open_table)) == [1, 2]


def test_a_column_that_is_not_published_for_a_while_stays_left_out() -> None:
    held = definition(EXCLUDE)
    listed = choose(EXCLUDE, USERS, ["id", "name"], held)
    again = described_json(target_table(USERS, ["id", "name"], "/t", choice=listed), USERS, choice=listed)
    said = read(json.loads(again)["attributes"])
    assert said is not None
    assert said.shapes[0][1] == (1, 2), "messages have published columns alone"
    now = table((1, "id"), (2, "name"), (3, "social"))
    assert numbers(choose(EXCLUDE, now, None, again)) == [1, 2]
    assert numbers(choose(EXCLUDE, now, None, asking(again))) == [1, 2]


def test_options_that_come_and_go_are_looked_at_when_somebody_asks() -> None:
    held = definition(EXCLUDE)
    more = SubscriptionOptions(exclude="s.t (ssn, name)")
    copied = definition(more, USERS, held)
    assert numbers(choose(more, USERS, None, held)) == [1]
    assert numbers(choose(EXCLUDE, USERS, None, asking(copied))) == [1, 2]


def test_a_history_keeps_columns_that_it_does_not_get() -> None:
    """Its Delta table has them from before; their numbers are not among those that it gets."""
    choice = choose(EXCLUDE, USERS, ["id", "name"], definition(EXCLUDE))
    target = target_table(USERS, ["id", "name"], "/t", choice=choice)
    target = replace(target, schema=target.schema.append(pa.field("ssn", pa.string())))
    said = read(json.loads(described_json(target, USERS, choice=choice))["attributes"])
    assert said is not None
    assert [*said.by_number] == [1, 2]


def test_how_tables_lie_is_no_matter_here() -> None:
    odd = replace(EXCLUDE, partition_by="s.t (id)", cluster_by="* (id)")
    assert numbers(choose(odd, USERS, None, None)) == [1, 2]


def test_a_table_that_is_made_anew_keeps_to_the_names_that_it_had() -> None:
    now = table((1, "id"), (2, "social"), (3, "name"), (4, "ssn"))
    assert of_table_made_anew(definition(SubscriptionOptions()), now) is None
    held = of_table_made_anew(definition(EXCLUDE), now)
    assert numbers(choose(EXCLUDE, now, None, held)) == [1, 3]
    asked = of_table_made_anew(asking(definition(EXCLUDE)), now)
    assert numbers(choose(EXCLUDE, now, None, asked)) == [1, 2, 3]


@pytest.mark.parametrize("left_out", [[], ["ssn"]])
def test_definitions_are_read_as_they_were_written(left_out: Sequence[str]) -> None:
    options = SubscriptionOptions(exclude="* (ssn)" if left_out else "s.u (ssn), * (nothing)")
    said = read(json.loads(definition(options))["attributes"])
    assert said is not None
    assert read(said.as_json()) == said
    assert said.rule == ("", options.exclude)
    assert [one.name for one in said.left_out or ()] == list(left_out)
