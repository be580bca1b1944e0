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
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.errors import FeatureNotSupported, UndefinedObject
from pubsub.protocol.ids import Oid
from pubsub.protocol.shapes import TypeShape
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.mask_rules import MaskRule
from pubsub.sql.options import SubscriptionOptions
from pubsub.sql.typechoices import TypeChoices

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
    assert said.rule == ("", options.exclude, "")
    assert [one.name for one in said.left_out or ()] == list(left_out)


MASK = SubscriptionOptions(mask="s.t (ssn hash, name truncate 4)")
HASH, CUT, NULL = MaskRule("hash"), MaskRule("truncate", 4), MaskRule("null")


def test_names_decide_at_first_what_is_masked() -> None:
    choice = choose(MASK, USERS, None, None)
    assert choice.masks == {3: HASH, 2: CUT}
    assert choice.left_out == (), "it is closed"
    assert numbers(choice) == [1, 2, 3]
    assert choose(SubscriptionOptions(mask="* (ssn hash)", exclude="* (ssn)"), USERS, None, None).masked == {}
    with pytest.raises(UndefinedObject, match="option mask"):
        choose(MASK, table((1, "id"), (2, "name")), None, None)
    for rule in ("null", "redact", "truncate 3"):
        with pytest.raises(FeatureNotSupported, match=f"cannot be masked by {rule.split()[0]}: it is part of the key"):
            definition(SubscriptionOptions(mask=f"s.t (id {rule})"))
    assert '[[1,\\"hash\\"]]' in definition(SubscriptionOptions(mask="s.t (id hash)"))


@pytest.mark.parametrize("name", ["t", "renamed"])
def test_numbers_decide_from_then_on_what_is_masked(name: str) -> None:
    """A name that a mask has lets nothing be shown, nor masks it; what comes later is masked by its name."""
    held = definition(MASK)
    now = table((1, "id"), (2, "ssn"), (3, "name"), (4, "more"), name=name)
    assert choose(MASK, now, None, held).masks == {2: CUT, 3: HASH}
    assert choose(MASK, now, None, asking(held)).masks == {2: CUT, 3: HASH}
    shown = table((1, "id"), (2, "a"), (3, "b"), (4, "ssn"))
    assert choose(MASK, shown, None, asking(held)).masked == {"a": CUT, "b": HASH, "ssn": HASH}
    clear = definition(SubscriptionOptions(mask="s.t (ssn hash)"))
    renamed = table((1, "id"), (2, "ssn"), (3, "social"))
    assert choose(SubscriptionOptions(mask="s.t (ssn hash)"), renamed, None, clear).masked == {"social": HASH}


def test_other_masks_hold_when_somebody_asks() -> None:
    """Until then a copy masks what either text masks, and unmasks nothing."""
    held = definition(MASK)
    other = SubscriptionOptions(mask="s.t (ssn null, more null)")
    now = table((1, "id"), (2, "name"), (3, "ssn"), (4, "more"))
    before = choose(other, now, None, held)
    assert before.masked == {"name": CUT, "ssn": HASH}
    assert choose(other, now, None, definition(other, now, held)).masked == before.masked
    assert choose(other, now, None, asking(held)).masked == {"ssn": NULL, "more": NULL}
    nothing = SubscriptionOptions()
    assert choose(nothing, now, None, held).masked == {"name": CUT, "ssn": HASH}
    assert choose(nothing, now, None, asking(held)) == choose(nothing, now, None, None)
    # A table that was open, or had other options, is masked from its next copy on.
    assert choose(MASK, USERS, None, definition(SubscriptionOptions())).masks == {2: CUT, 3: HASH}
    excluded = definition(SubscriptionOptions(exclude="s.t (ssn)"))
    both = replace(MASK, exclude="s.t (ssn)")
    assert choose(both, USERS, None, excluded).masked == {"name": CUT}


def test_a_masked_column_that_is_not_published_for_a_while_stays_masked() -> None:
    held = definition(MASK)
    listed = choose(MASK, USERS, ["id", "name"], held)
    again = described_json(target_table(USERS, ["id", "name"], "/t", choice=listed), USERS, choice=listed)
    now = table((1, "id"), (2, "name"), (3, "social"))
    assert choose(MASK, now, None, asking(again)).masked == {"name": CUT, "social": HASH}


def test_a_table_that_is_made_anew_is_masked_by_the_names_that_it_had() -> None:
    held = definition(MASK, table((1, "id"), (2, "ssn"), (3, "name")))
    renamed = definition(MASK, table((1, "id"), (2, "a"), (3, "b")), held)
    now = table((1, "id"), (2, "b"), (3, "a"), (4, "ssn"), name="other")
    anew = of_table_made_anew(renamed, now)
    choice = choose(MASK, now, None, anew)
    assert choice.masked == {"a": HASH, "b": CUT}
    assert numbers(choice) == [1, 2, 3]


def test_masks_are_read_as_they_were_written() -> None:
    choice = choose(MASK, USERS, None, None)
    target = target_table(USERS, None, "/t", choice=choice)
    target = replace(target, masks=replace(target.masks, fingerprint="f"))
    said = read(json.loads(described_json(target, USERS, choice=choice))["attributes"])
    assert said is not None
    assert read(said.as_json()) == said
    assert said.masked == target.masks
    assert said.rule == ("", "", MASK.mask)
    # What an earlier release wrote has the texts of two options.
    old = json.loads(said.as_json()) | {"rule": ["a", "b"]}
    assert (earlier := read(json.dumps(old))) is not None
    assert earlier.rule == ("a", "b", "")


def test_the_value_of_older_rows_is_not_stored_of_a_masked_column() -> None:
    """It would be in the Delta table's log."""
    columns = tuple(replace(one, missing="secret") if one.name != "id" else one for one in USERS.columns)
    found = definition(MASK, replace(USERS, columns=columns))
    assert "secret" not in found
    said = read(json.loads(found)["attributes"])
    assert said is not None
    assert [one.missing for one in said.columns] == [None, "", ""]


def typed(oid: int, name: str, element: int = 0) -> TableDefinition:
    one = replace(USERS.columns[1], type_oid=Oid(oid), base_type_oid=Oid(oid), type_name=name)
    if element:
        one = replace(one, held=TypeShape(oid, name=name, element=TypeShape(element)))
    return replace(USERS, columns=(USERS.columns[0], one))


@pytest.mark.parametrize(("oid", "element"), [(790, 0), (2205, 0), (1033, 0), (2210, 2205)])
def test_types_whose_text_is_not_the_values_alone_are_not_hashed(oid: int, element: int) -> None:
    of = typed(oid, "some type", element)
    with pytest.raises(FeatureNotSupported, match=r'column "name" of table "s\.t" has type some type'):
        definition(SubscriptionOptions(mask="s.t (name hash)"), of)
    definition(SubscriptionOptions(mask="s.t (name redact)"), of)


@pytest.mark.parametrize("rule", ["hash", "redact", "truncate 3", "null"])
def test_masked_columns_are_text(rule: str) -> None:
    of = typed(23, "integer")
    choice = choose(SubscriptionOptions(mask=f"s.t (name {rule})"), of, None, None)
    kind = target_table(of, None, "/t", choice=choice).schema.field("name").type
    assert kind == (pa.int32() if rule == "null" else pa.string())
    natural = TypeChoices.parse("s.t.name natural")
    if rule == "null":
        target_table(of, None, "/t", natural, choice)
        return
    target_table(of, None, "/t", TypeChoices.parse("s.t.name text, int4 natural"), choice)
    with pytest.raises(FeatureNotSupported, match="and replicated as natural"):
        target_table(of, None, "/t", natural, choice)


def test_a_table_has_some_value() -> None:
    with pytest.raises(FeatureNotSupported, match="leaves no value"):
        definition(
            SubscriptionOptions(mask="s.t (id null, name null, ssn null)"),
            replace(USERS, primary_key=(), identity_key=(), replica_identity="f"),
        )


def test_the_catalog_shows_what_is_masked() -> None:
    """And that what is left of such a column is text, whatever the publisher's type is."""
    of = replace(typed(23, "integer"), columns=(*typed(23, "integer").columns, USERS.columns[2]))
    text = definition(SubscriptionOptions(mask="s.t (name redact, ssn null)"), of)
    relation = SubscriptionRel(
        1, 2, "s", "t", RelState.READY, None, 1, None, "/t", None, None, definition=text, estimated_rows=None
    )
    assert relation.masked == ("name", "ssn")
    assert relation.column_types == {"id": (25, -1), "name": (25, -1), "ssn": (25, -1)}
    clear = replace(relation, definition=definition(SubscriptionOptions(mask="s.t (name null)"), of))
    assert clear.column_types["name"] == (23, -1)
    assert replace(relation, definition=None).masked == ()


RENAME = SubscriptionOptions(rename="s.t (ssn social, id ident)")


def here(choice: Choice) -> dict[str, str]:
    return {column.name: choice.here(column) for column in choice.columns}


def test_names_decide_at_first_what_is_renamed() -> None:
    choice = choose(RENAME, USERS, None, None)
    assert here(choice) == {"id": "ident", "name": "name", "ssn": "social"}
    assert choice.left_out is None, "it is open"
    target = target_table(USERS, None, "/t", choice=choice)
    assert (target.schema.names, target.key, target.closed) == (["ident", "name", "social"], ("ident",), True)
    both = choose(replace(RENAME, mask="* (ssn null, name hash)", exclude="* (nothing)"), USERS, None, None)
    assert both.masked == {"social": NULL, "name": HASH}
    assert both.read == {"id": "ident", "name": "name"}
    assert choose(SubscriptionOptions(rename="s.u (ssn a)"), USERS, None, None).naming is None
    with pytest.raises(UndefinedObject, match="option rename"):
        choose(RENAME, table((1, "id"), (2, "name")), None, None)


@pytest.mark.parametrize("name", ["t", "renamed"])
def test_numbers_decide_from_then_on_what_is_renamed(name: str) -> None:
    """A name that the option has renames nothing else; what comes later joins, and is renamed by its name."""
    held = definition(RENAME)
    now = table((1, "uid"), (2, "ssn"), (3, "name"), (4, "id"), (5, "more"), name=name)
    now = replace(now, primary_key=("uid",), identity_key=("uid",))
    later = "ident" if name == "t" else "id"  # which the first one has
    for before in (held, asking(held), definition(RENAME, USERS, held)):
        found = here(choose(RENAME, now, None, before))
        assert found == {"uid": "ident", "ssn": "ssn", "name": "social", "id": later, "more": "more"}
    said = read(json.loads(held)["attributes"])
    assert said is not None
    assert [replicated(said, now.columns)] == [[*now.columns]]


def test_other_names_hold_when_somebody_asks() -> None:
    held = definition(RENAME)
    other = SubscriptionOptions(rename="s.t (name full_name)")
    before = {"id": "ident", "name": "name", "ssn": "social"}
    assert here(choose(other, USERS, None, held)) == before
    again = definition(other, USERS, held)
    assert here(choose(other, USERS, None, again)) == before
    assert here(choose(other, USERS, None, asking(again))) == {"id": "id", "name": "full_name", "ssn": "ssn"}
    nothing = SubscriptionOptions()
    assert here(choose(nothing, USERS, None, held)) == before
    assert choose(nothing, USERS, None, asking(held)) == choose(nothing, USERS, None, None)
    # A column that the earlier text named and that has another name by now is no error, until names are looked at.
    now = table((1, "id"), (2, "name"), (3, "later"))
    assert here(choose(RENAME, now, None, held))["later"] == "social"
    with pytest.raises(UndefinedObject):
        choose(SubscriptionOptions(rename="s.t (ssn a)"), now, None, asking(held))
    # A table that was open, or had other options, is renamed from its next copy on.
    assert here(choose(RENAME, USERS, None, definition(SubscriptionOptions()))) == before
    excluded = definition(SubscriptionOptions(exclude="s.t (ssn)"))
    assert here(choose(replace(RENAME, exclude="s.t (ssn)"), USERS, None, excluded)) == {"id": "ident", "name": "name"}
    # What is excluded is not decided by the text of rename.
    both = definition(replace(RENAME, exclude="s.t (name)"))
    assert numbers(choose(replace(other, exclude="s.t (name)"), USERS, None, asking(both))) == [1, 3]


def test_a_table_that_is_made_anew_has_the_names_that_it_had() -> None:
    renamed = definition(RENAME, table((1, "id"), (2, "name"), (3, "a")), definition(RENAME))
    now = table((1, "a"), (2, "id"), (3, "ssn"), (4, "more"), name="other")
    anew = of_table_made_anew(renamed, now)
    choice = choose(RENAME, now, None, anew)
    assert here(choice) == {"a": "social", "id": "ident", "ssn": "ssn", "more": "more"}
    assert choice.left_out is None
    closed = of_table_made_anew(definition(replace(RENAME, exclude="s.t (name)")), now)
    assert here(choose(replace(RENAME, exclude="s.t (name)"), now, None, closed)) == {"id": "ident", "ssn": "social"}


def test_other_names_are_read_as_they_were_written() -> None:
    for options in (RENAME, replace(RENAME, exclude="* (name)"), SubscriptionOptions(rename="* (ssn ssn)")):
        for text in (definition(options), asking(definition(options))):
            said = read(json.loads(text)["attributes"])
            assert said is not None
            assert read(said.as_json()) == said
            assert said.naming == options.rename
            assert said.asked == (text != definition(options))
    said = read(json.loads(definition(RENAME))["attributes"])
    assert said is not None
    assert [(one.name, one.published) for one in said.columns] == [
        ("ident", "id"),
        ("name", "name"),
        ("social", "ssn"),
    ]
    assert said.published == {"id": 1, "name": 2, "ssn": 3}
    assert said.known((("id", 25, -1), ("name", 25, -1), ("ssn", 25, -1))) == (1, 2, 3), "messages have the publisher's"


@pytest.mark.parametrize(
    "rename",
    [
        "s.t (ssn name)",
        "s.t (ssn NAME)",
        's.t (ssn "Name")',
        's.t (ssn x, name "X")',
        '* (id ssn, ssn _ssn, name "SSN")',
    ],
)
def test_two_columns_of_one_name_are_refused(rename: str) -> None:
    with pytest.raises(FeatureNotSupported, match=r'of table "s\.t" would have one name here, "'):
        definition(SubscriptionOptions(rename=rename))
    definition(SubscriptionOptions(rename="s.t (ssn name, name ssn)"))
    definition(SubscriptionOptions(rename="s.t (ssn name)", exclude="s.t (name)"))


def test_the_catalog_shows_what_is_renamed() -> None:
    relation = SubscriptionRel(
        1,
        2,
        "s",
        "t",
        RelState.READY,
        None,
        1,
        None,
        "/t",
        None,
        None,
        definition=definition(RENAME),
        estimated_rows=None,
    )
    assert relation.renamed == (("id", "ident"), ("ssn", "social"))
    assert relation.remembers_options
    assert not relation.closed
    assert [*relation.column_types] == ["ident", "name", "social"]
    pinned = replace(relation, definition=definition(SubscriptionOptions(rename="* (ssn ssn)")))
    assert (pinned.renamed, pinned.remembers_options) == ((), True)
    assert not replace(relation, definition=definition(SubscriptionOptions())).remembers_options
