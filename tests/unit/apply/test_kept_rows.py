"""kept_rows: a condition's columns are named once, and known by their numbers from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from apply.schema_changes.attributes import KeptRows, stored
from apply.schema_changes.column_choice import Choice, asking, choose, of_table_made_anew
from apply.schema_changes.kept_rows import published_filter, untold_column
from apply.schema_changes.table_definition import described_json, target_table
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.delta.table import TargetTable
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, UndefinedObject
from pubsub.protocol.ids import Oid
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.options import SubscriptionOptions

WHERE = SubscriptionOptions(where="s.t (state = 'on' AND (n > 1 OR state = 'new'))")
TYPES = {"text": 25, "int": 23, "float8": 701}


def table(
    *columns: tuple[int, str, str], identity: str = "d", kind: str = "r", key: Sequence[str] = ("id",)
) -> TableDefinition:
    found = tuple(
        ColumnDefinition(name, number, Oid(TYPES[of]), -1, of, "b", Oid(TYPES[of]), -1, "b", False, "", True)
        for number, name, of in columns
    )
    keyed = tuple(key)
    identified = () if identity in "fn" else keyed
    return TableDefinition(Oid(1), "s", "t", kind, identity, found, keyed, identified, 0, 0, False, 9, "1:1")


T = table((1, "id", "int"), (2, "state", "text"), (3, "n", "int"))


def chosen(options: SubscriptionOptions, of: TableDefinition = T, held: str | None = None) -> Choice:
    return choose(options.layouts, of, None, held)


def target(options: SubscriptionOptions, of: TableDefinition = T, held: str | None = None) -> TargetTable:
    layouts = options.layouts
    mode, truncate = layouts.mode_of("s", "t"), layouts.truncate_of("s", "t")
    return target_table(of, None, "/t", choice=chosen(options, of, held), mode=mode, truncate=truncate)


def definition(options: SubscriptionOptions, of: TableDefinition = T, held: str | None = None) -> str:
    """Return the definition that a copy stores."""
    return described_json(target(options, of, held), of, choice=chosen(options, of, held))


def sql(options: SubscriptionOptions, of: TableDefinition, held: str | None) -> str | None:
    return published_filter(None, chosen(options, of, held).where, of)


def test_a_copy_decides() -> None:
    choice = chosen(WHERE)
    assert choice.where == KeptRows("state = 'on' AND (n > 1 OR state = 'new')", {"state": 2, "n": 3})
    assert choice.goes_by_numbers
    held = definition(WHERE)
    said = stored(held)
    assert said is not None
    assert said.where == choice.where
    assert said.row_filter == target(WHERE).where
    relation = SubscriptionRel(
        1, 2, "s", "t", RelState.READY, None, 1, None, "/t", None, None, definition=held, estimated_rows=None
    )
    assert relation.kept_rows == "state = 'on' AND (n > 1 OR state = 'new')"
    assert relation.remembers_options
    assert chosen(SubscriptionOptions()).where is None
    with pytest.raises(
        UndefinedObject, match=r'column "state" of table "s.t" in subscription option where is not published'
    ):
        chosen(WHERE, table((1, "id", "int"), (3, "n", "int")))


def test_what_the_publisher_is_asked_for() -> None:
    own = """(("state" = 'on') AND (("n" > 1) OR ("state" = 'new')))"""
    where = chosen(WHERE).where
    assert published_filter(None, where, T) == own
    assert published_filter("(id > 3)", where, T) == f"((id > 3)) AND {own}"
    assert published_filter("(id > 3)", None, T) == "(id > 3)"


def test_numbers_from_then_on() -> None:
    held = definition(WHERE)
    renamed = table((1, "id", "int"), (2, "old", "text"), (3, "n", "int"), (4, "state", "text"))
    own = """(("old" = 'on') AND (("n" > 1) OR ("old" = 'new')))"""
    assert sql(WHERE, renamed, held) == own, "a copy that nobody asked for"
    assert sql(WHERE, renamed, asking(held)) == own, "the same text"
    other = replace(WHERE, where="s.t (state = 'x')")
    assert sql(other, renamed, held) == own
    assert sql(other, renamed, asking(held)) == """("state" = 'x')"""
    assert sql(SubscriptionOptions(), renamed, asking(held)) is None
    again = definition(WHERE, renamed, held)
    said = stored(again)
    assert said is not None
    assert said.row_filter is not None
    assert said.row_filter.columns == (("state", "old", 25), ("n", "n", 23))
    made = of_table_made_anew(again, table((1, "n", "int"), (2, "id", "int"), (3, "old", "text")))
    assert made is not None
    carried = stored(made)
    assert carried is not None
    assert carried.where == KeptRows(WHERE.layouts.choice_of("s", "t").where.text, {"state": 3, "n": 1})  # type: ignore[union-attr]


def test_a_column_that_is_gone() -> None:
    held = definition(WHERE)
    without = table((1, "id", "int"), (3, "n", "int"))
    with pytest.raises(
        NotInPrerequisiteState, match=r'column "state" of table "s.t", which the condition .* was dropped'
    ):
        target(WHERE, without, held)
    anew = table((1, "id", "int"), (3, "n", "int"), (4, "state", "text"))
    with pytest.raises(NotInPrerequisiteState, match="was dropped"):
        target(WHERE, anew, held)
    assert sql(WHERE, anew, asking(held)) is not None, "RESYNC TABLE takes the one of that name"


def test_a_rule_that_comes_later() -> None:
    held = definition(SubscriptionOptions(rename="s.t (n m)"))
    with_both = replace(WHERE, rename="s.t (n m)")
    assert sql(with_both, T, held) is not None, "the next copy, as with rename"
    assert target(with_both).where.columns == (("state", "state", 25), ("n", "m", 23))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("of", "lacking"),
    [
        (T, "n"),
        (replace(T, replica_identity="f", identity_key=()), None),
        (replace(T, identity_key=("state", "n"), replica_identity="i"), None),
        (replace(T, replica_identity="f", identity_key=(), kind="p"), "n"),
        (replace(T, replica_identity="f", identity_key=(), kind="p", primary_key=("n", "state")), None),
    ],
)
def test_what_old_rows_tell(of: TableDefinition, lacking: str | None) -> None:
    where = chosen(WHERE, of).where
    assert where is not None
    assert untold_column(where, of) == lacking


def test_tables_that_do_not_tell() -> None:
    assert target(WHERE).where is not None, "it is looked up"
    full = replace(T, replica_identity="f", identity_key=())
    for options in (replace(WHERE, mode="history"), replace(WHERE, mode="scd2"), replace(WHERE, truncate="ignore")):
        with pytest.raises(
            FeatureNotSupported, match=r'column "n" of table "s.t", which .* is not part of the replica identity'
        ):
            target(options)
        assert target(options, full).where is not None
    with pytest.raises(FeatureNotSupported, match="is not part of the replica identity"):
        target(WHERE, table((1, "id", "int"), (2, "state", "text"), (3, "n", "int"), identity="f", kind="p", key=()))
    assert target(WHERE, table((1, "id", "int"), (2, "state", "text"), (3, "n", "int"), key=())).where is not None, (
        "it only grows"
    )


def test_a_key_that_is_not_looked_up() -> None:
    of = table((1, "id", "float8"), (2, "state", "text"), (3, "n", "int"))
    with pytest.raises(FeatureNotSupported) as refused:
        target(WHERE, of)
    assert "floating-point numbers" in str(refused.value.detail)
    assert target(WHERE, replace(of, replica_identity="f", identity_key=())).where is not None


def test_columns_that_the_table_does_not_have_as_they_are() -> None:
    for options, how in (
        (replace(WHERE, exclude="s.t (n)"), "is left out"),
        (replace(WHERE, mask="s.t (n null)"), "is masked"),
    ):
        with pytest.raises(FeatureNotSupported, match=rf'column "n" of table "s.t", which .* {how}'):
            target(options)
    assert target(replace(WHERE, exclude="* (other)")).schema.field("n").type == pa.int32()
