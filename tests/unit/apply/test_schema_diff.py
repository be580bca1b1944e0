"""What a changed Relation message requires of the Delta table: its key, and values that only partitions have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from apply.schema_changes.attributes import Attributes, LeftOut, of_definition, read
from apply.schema_changes.diff import Change, CopyAgain, Described, wanted
from apply.schema_changes.follow import _as_chosen, reading
from apply.schema_changes.table_definition import with_left
from pubsub.delta.table import TargetTable
from pubsub.errors import FeatureNotSupported, InvalidValue, NotInPrerequisiteState
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition, rewritten
from pubsub.sql.layouts import Layout
from pubsub.sql.mask_rules import MaskRule
from pubsub.sql.source import Source

INT, TEXT, DATE = 23, 25, 1082
TARGET = TargetTable("/w/t", pa.schema([pa.field("id", pa.int32(), False), pa.field("t", pa.string())]), ("id",), "s.t")


def column(number: int, name: str, oid: int = TEXT, **more: Any) -> ColumnDefinition:
    return ColumnDefinition(
        name, number, Oid(oid), -1, "t", "b", Oid(oid), -1, "b", False, "", True, **{"xmin": 5, **more}
    )


ID, T = column(1, "id", INT), column(2, "t")
TABLE = TableDefinition(Oid(1), "s", "t", "r", "d", (ID, T), ("id",), ("id",), 0, 0, False, 2, "1:1")


def change(now: TableDefinition, target: TargetTable = TARGET, *, keep: bool = True) -> Change | None:
    """Return what the change from TABLE to `now` requires."""
    described = Described(now, None)
    known: Attributes = of_definition(TABLE, ["id", "t"], "app", Lsn(0))
    numbers = tuple(one.attnum for one in now.columns)
    return wanted(target, known, described.as_message(1), numbers, described, keep=keep)


def key(now: TableDefinition, target: TargetTable = TARGET) -> tuple[str, ...]:
    found = change(now, target)
    return target.key if found is None or found.alteration is None else found.alteration.key


def test_a_replica_identity_alone_moves_the_key() -> None:
    assert change(TABLE) is None
    assert key(replace(TABLE, replica_identity="i", identity_key=("t",))) == ("t",)
    assert key(replace(TABLE, replica_identity="f", identity_key=())) == ("id",)
    assert key(replace(TABLE, replica_identity="n", identity_key=())) == ("id",)


@pytest.mark.parametrize("identity", ["d", "f", "n"])
def test_rows_that_may_repeat_the_key_have_none(identity: str) -> None:
    """The key was once kept after the primary key was dropped, and rows inserted twice became one."""
    assert key(replace(TABLE, replica_identity=identity, primary_key=(), identity_key=())) == ()


def test_under_full_the_primary_key_of_the_catalog_may_be_newer_than_the_stream() -> None:
    full = replace(TABLE, replica_identity="f", identity_key=())
    assert key(replace(full, primary_key=("t",))) == ()
    keyless = replace(TARGET, key=())
    assert key(full, keyless) == ()
    assert key(TABLE, keyless) == ("id",)


def test_a_dropped_column_is_kept_unless_rows_are_found_by_all_values() -> None:
    full = replace(TABLE, replica_identity="f", primary_key=(), identity_key=(), columns=(ID,))
    found = change(full)
    assert found is not None
    assert found.alteration is not None
    assert found.alteration.drop == ("t",)
    found = change(replace(TABLE, columns=(ID,)))
    assert found is not None
    assert found.attributes.kept == ((2, "t"),)


def test_a_column_that_an_earlier_copy_left_is_one_that_was_dropped() -> None:
    """It was taken for the Delta table's own: a new column of its name stopped the table."""
    target = replace(TARGET, schema=TARGET.schema.append(pa.field("c", pa.string())))
    known = with_left(of_definition(TABLE, ["id", "t"], "app", Lsn(0)), ["id", "c"])
    for now, keep, drop, add, kept in (
        (TABLE, True, (), [], ((-1, "c"),)),
        (TABLE, False, ("c",), [], ()),
        (replace(TABLE, columns=(ID, T, column(3, "c", INT)), attributes=3), True, ("c",), ["c"], ()),
        (replace(TABLE, columns=(ID, T, column(3, "d", INT)), attributes=3), True, (), ["d"], ((-1, "c"),)),
    ):
        described = Described(now, None)
        numbers = tuple(one.attnum for one in now.columns)
        found = wanted(target, known, described.as_message(1), numbers, described, keep=keep)
        if now is TABLE and keep:
            assert found is None
            continue
        assert found is not None
        assert found.alteration is not None
        assert (found.alteration.drop, [one.name for one, _ in found.alteration.add]) == (drop, add)
        assert found.attributes.kept == kept


def test_values_of_an_added_column_in_partitions() -> None:
    """A partitioned table's own catalog rows have no missing values: old rows once got NULL instead of the default."""
    root = replace(TABLE, kind="p", attributes=3)
    found = change(replace(root, columns=(ID, T, column(3, "c", INT, missing="7"))))
    assert found is not None
    assert found.alteration is not None
    ((_, value),) = found.alteration.add
    assert value.as_py() == 7
    for odd in (column(3, "c", INT, missing="7", missing_differs=True), column(3, "c", INT, missing_differs=True)):
        with pytest.raises(CopyAgain):
            change(replace(root, columns=(ID, T, odd)))
    with pytest.raises(CopyAgain):
        change(replace(root, columns=(ID, T, column(3, "c", INT, missing="7")), storage="1:9"))


@pytest.mark.parametrize("name", ["note", "Note"])
def test_a_column_with_the_name_of_one_that_only_the_delta_table_has(name: str) -> None:
    """Delta once refused the commit, and nothing said why."""
    target = replace(TARGET, schema=TARGET.schema.append(pa.field("note", pa.string())))
    for columns in ((ID, T, column(3, name)), (ID, replace(T, name=name))):
        with pytest.raises(NotInPrerequisiteState, match=f'has a new column "{name}", .* a column "note" of its own'):
            change(replace(TABLE, columns=columns, attributes=3), target)
    assert change(replace(TABLE, columns=(ID, T, column(3, "c")), attributes=3), target) is not None


def test_a_value_of_older_rows_that_delta_does_not_have() -> None:
    """The error once named neither the column nor a way out."""
    added = column(3, "c", DATE, missing="infinity")
    with pytest.raises(InvalidValue, match=r'column "c" of table "s\.t": value "infinity" cannot be held') as found:
        change(replace(TABLE, columns=(ID, T, added), attributes=3))
    assert "types = 's.t.c text'" in str(found.value.hint)


INET, CIDR, XML, VARCHAR, BPCHAR, BIT, VARBIT = 869, 650, 142, 1043, 1042, 1560, 1562


@pytest.mark.parametrize(
    ("before", "now", "copied"),
    [
        (CIDR, INET, True),
        (XML, TEXT, True),
        (XML, VARCHAR, True),
        (TEXT, VARCHAR, False),
        (VARCHAR, BPCHAR, False),
        (BIT, VARBIT, False),
    ],
)
def test_a_type_whose_stored_values_have_another_text(before: int, now: int, copied: bool) -> None:
    """PostgreSQL rewrites no row; the texts of older rows, keys among them, once stayed those of the type before."""

    def altered(one: ColumnDefinition, other: ColumnDefinition) -> Change | None:
        known = of_definition(replace(TABLE, columns=(ID, one)), ["id", "t"], "app", Lsn(0))
        assert read(known.as_json()) == known
        described = Described(replace(TABLE, columns=(ID, other)), None)
        return wanted(TARGET, known, described.as_message(1), (1, 2), described, keep=True)

    def domain(of: int, oid: int = 99999) -> ColumnDefinition:
        return replace(column(2, "t", oid), base_type_oid=Oid(of), type_kind="d")

    for one, other in (
        (column(2, "t", before), column(2, "t", now)),
        (domain(before), column(2, "t", now)),
        (column(2, "t", before), domain(now)),
        (domain(before), domain(now, 99998)),
    ):
        if copied:
            with pytest.raises(CopyAgain, match="another text"):
                altered(one, other)
            continue
        found = altered(one, other)
        assert found is not None
        assert found.alteration is None
        assert found.attributes.columns[1].base == now
    found = altered(column(2, "t", now), domain(now))
    assert found is not None
    assert found.alteration is None


def test_which_columns_are_sent() -> None:
    """Of others a batch's NULLs are not the publisher's: Delta may make their values."""
    known = of_definition(TABLE, ["id", "t"], "app", Lsn(0))
    assert _as_chosen(TARGET, known).sent == {"id", "t"}
    dropped = replace(known, columns=known.columns[:1], kept=((2, "t"),))
    assert _as_chosen(TARGET, dropped).sent == {"id"}
    assert _as_chosen(TARGET, replace(known, masks={2: MaskRule.parse("null")})).sent == {"id"}


def test_storage_says_whether_rows_were_written_anew() -> None:
    assert not rewritten("16385:16385", "16385:16385")
    assert rewritten("16385:16385", "16385:16400")
    assert not rewritten("1:1 2:7", "2:7 3:3"), "one was detached, one is new"
    assert rewritten("1:1", "1:1 3:4"), "the new one was rewritten"


def without(left_out: list[LeftOut] | None, now: TableDefinition, layout: Layout | None = None) -> Change | None:
    """Return what a change from TABLE to `now` requires of a table that does not get these columns."""
    described = Described(now, None)
    gone = {one.name for one in left_out or ()}
    names = [name for name in ("id", "t") if name not in gone]
    known = of_definition(TABLE, names, "app", Lsn(0), left_out)
    target = replace(TARGET, schema=pa.schema([TARGET.schema.field(name) for name in names]))
    numbers = tuple(one.attnum for one in now.columns)
    return wanted(target, known, described.as_message(1), numbers, described, keep=True, layout=layout)


WITHOUT_T = [LeftOut(2, "t", True)]


def test_a_column_that_is_left_out_stays_out_under_any_name() -> None:
    assert without(WITHOUT_T, TABLE) is None
    renamed = without(WITHOUT_T, replace(TABLE, columns=(ID, replace(T, name="other"))))
    assert renamed is not None
    assert renamed.alteration is None
    assert renamed.attributes.left_out == (LeftOut(2, "other", True),)
    assert without(WITHOUT_T, replace(TABLE, columns=(ID, replace(T, type_oid=Oid(INT))))) is None
    # The same name for another column: the first is gone.
    again = without(
        WITHOUT_T, replace(TABLE, columns=(ID, column(3, "t")), attributes=3), Layout(exclude=frozenset("t"))
    )
    assert again is not None
    assert again.attributes.left_out == (LeftOut(3, "t", True),)


@pytest.mark.parametrize(
    ("left_out", "layout"), [([], None), (None, Layout(exclude=frozenset("x"))), (WITHOUT_T, None)]
)
def test_columns_that_come_later_stay_out(left_out: list[LeftOut] | None, layout: Layout | None) -> None:
    """Also in a table that has had no such column so far, and in one of which the options say something since then."""
    later = replace(TABLE, columns=(ID, T, column(3, "c", missing="secret")), attributes=3)
    found = without(left_out, later, layout)
    assert found is not None
    assert found.alteration is None
    assert LeftOut(3, "c", False) in (found.attributes.left_out or ())
    open_table = without(None, later)
    assert open_table is not None
    assert open_table.alteration is not None


def test_a_key_that_is_left_out_identifies_nothing() -> None:
    found = without(WITHOUT_T, replace(TABLE, replica_identity="i", identity_key=("t",)))
    assert found is not None
    assert found.alteration is not None
    assert found.alteration.key == ()


def renamed(now: TableDefinition, renames: dict[int, str], layout: Layout | None = None) -> Change | None:
    """Return what a change from TABLE to `now` requires of a Delta table that has other names for these columns."""
    described = Described(now, None)
    known = of_definition(TABLE, ["id", "t"], "app", Lsn(0), renames=renames, naming="text")
    names = [column.name for column in known.columns]
    target = replace(
        TARGET,
        schema=pa.schema([field.with_name(name) for field, name in zip(TARGET.schema, names, strict=True)]),
        key=(names[0],),
    )
    numbers = tuple(one.attnum for one in now.columns)
    return wanted(target, known, described.as_message(1), numbers, described, keep=True, layout=layout)


def test_a_chosen_name_stays_under_any_name_at_the_publisher() -> None:
    assert renamed(TABLE, {1: "ident", 2: "text"}) is None
    other = replace(
        TABLE, columns=(replace(ID, name="uid"), replace(T, name="other")), primary_key=("uid",), identity_key=("uid",)
    )
    found = renamed(other, {1: "ident", 2: "text"})
    assert found is not None
    assert found.alteration is None
    assert [(one.name, one.published) for one in found.attributes.columns] == [("ident", "uid"), ("text", "other")]
    # A column whose name was not chosen follows the publisher's.
    found = renamed(other, {1: "ident"})
    assert found is not None
    assert found.alteration is not None
    assert found.alteration.rename == {"t": "other"}
    assert found.alteration.key == ("ident",)
    # The publisher takes the chosen name over, and another column its former one.
    found = renamed(replace(TABLE, columns=(ID, replace(T, name="text"), column(3, "t")), attributes=3), {2: "text"})
    assert found is not None
    assert found.alteration is not None
    assert [field.name for field, _ in found.alteration.add] == ["t"]
    assert not found.alteration.rename


def test_a_retyped_column_with_another_name() -> None:
    numeric = 1700
    one, other = (
        replace(column(2, "t", numeric), base_typmod=(size << 16 | 2) + 4, type_modifier=size) for size in (5, 9)
    )
    table = replace(TABLE, columns=(ID, one))
    known = of_definition(table, ["id", "t"], "app", Lsn(0), renames={2: "amount"}, naming="text")
    target = replace(TARGET, schema=pa.schema([TARGET.schema.field("id"), pa.field("amount", pa.decimal128(5, 2))]))
    described = Described(replace(table, columns=(ID, replace(other, name="sum"))), None)
    found = wanted(target, known, described.as_message(1), (1, 2), described, keep=True)
    assert found is not None
    assert found.alteration is not None
    assert found.alteration.retype == {"amount": pa.decimal128(9, 2)}
    assert not found.alteration.rename


def test_a_column_that_takes_a_chosen_name_is_refused() -> None:
    message = '(?i)would have one name here, "text"'
    for name in ("text", "Text"):
        with pytest.raises(FeatureNotSupported, match=message):
            renamed(replace(TABLE, columns=(ID, T, column(3, name)), attributes=3), {2: "text"})
        with pytest.raises(FeatureNotSupported, match=message):
            renamed(replace(TABLE, columns=(replace(ID, name=name), T)), {2: "text"})
    with pytest.raises(FeatureNotSupported, match=r'"t" and "T" of table "s\.t" differ only in case'):
        change(replace(TABLE, columns=(ID, T, column(3, "T")), attributes=3))
    # The option may have another name for it by then.
    layout = Layout(rename={"text": "more", "t": "ignored"})
    found = renamed(replace(TABLE, columns=(ID, T, column(3, "text")), attributes=3), {2: "text"}, layout)
    assert found is not None
    assert found.alteration is not None
    assert [field.name for field, _ in found.alteration.add] == ["more"]
    assert found.attributes.renames == {2: "text", 3: "more"}
    assert found.attributes.columns[2].published == "text"


def test_rows_are_read_by_numbers_where_names_are_other_ones() -> None:
    """Two columns may have exchanged their names."""
    known = of_definition(TABLE, ["id", "t"], "app", Lsn(0), renames={1: "t", 2: "id"}, naming="text")
    target = replace(TARGET, schema=pa.schema([pa.field("t", pa.int32(), False), pa.field("id", pa.string())]))
    assert _as_chosen(target, known).closed
    assert not _as_chosen(TARGET, of_definition(TABLE, ["id", "t"], "app", Lsn(0))).closed
    assert [field.name for field in reading(target, known, (1, 2)).fields if field is not None] == ["t", "id"]


def test_what_would_change_the_rows_of_other_sources() -> None:
    """Columns are added, and dropped ones stay; a renamed one takes a copy; another type or key is refused."""
    schema = pa.schema([*TARGET.schema, pa.field("_pubsub_source", pa.string()), pa.field("theirs", pa.int32())])
    known = of_definition(TABLE, ["id", "t"], "app", Lsn(0))
    target = _as_chosen(replace(TARGET, schema=schema, source=Source("_pubsub_source", "one")), known)
    assert target.others == {"theirs"}
    assert target.replicated == ["id", "t", "theirs"]
    found = change(replace(TABLE, attributes=3, columns=(ID, T, column(3, "theirs", INT))), target)
    assert found is not None
    assert found.alteration is not None
    assert [field.name for field, _ in found.alteration.add] == ["theirs"], "it is theirs and this one's then"
    with pytest.raises(NotInPrerequisiteState, match="of its own"):
        change(replace(TABLE, attributes=3, columns=(ID, T, column(3, "_pubsub_source"))), target)
    with pytest.raises(NotInPrerequisiteState, match="of its own"):
        change(replace(TABLE, attributes=3, columns=(ID, T, column(3, "THEIRS", INT))), target)
    found = change(replace(TABLE, columns=(ID,)), target)
    assert found is not None
    assert found.attributes.kept == ((2, "t"),)
    with pytest.raises(CopyAgain, match="other sources"):
        change(replace(TABLE, columns=(ID, replace(T, name="u"))), target)
    with pytest.raises(
        NotInPrerequisiteState, match=r'other columns identify the rows of table "s\.t" of source "one"'
    ):
        change(replace(TABLE, replica_identity="i", identity_key=("t",)), target)
