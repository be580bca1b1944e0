"""rename changes the names of a Delta table's columns, and nothing else that an ALTER TABLE at the publisher asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from apply.schema_changes.attributes import Attributes, of_definition, read
from apply.schema_changes.diff import Change, CopyAgain, Described, wanted
from apply.schema_changes.follow import reading
from pubsub.delta.table import TargetTable
from pubsub.errors import FeatureNotSupported
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition

NAMES = st.sampled_from("abcdef")
#: varchar and text, which are one type in Delta, integer, which is another one, and a numeric that grows.
TYPES = st.sampled_from([(25, -1), (1043, 9), (23, -1), (1700, (5 << 16 | 2) + 4), (1700, (9 << 16 | 2) + 4)])


def column(number: int, name: str, kind: tuple[int, int]) -> ColumnDefinition:
    oid, typmod = Oid(kind[0]), kind[1]
    return ColumnDefinition(name, number, oid, typmod, "t", "b", oid, typmod, "b", False, "", True)


def table(columns: list[ColumnDefinition], key: int, identity: str, count: int) -> TableDefinition:
    names = tuple(one.name for one in columns if one.attnum == key)
    full = () if identity in "fn" else names
    return TableDefinition(Oid(1), "s", "t", "r", identity, tuple(columns), names, full, 0, 0, False, count, "1:1")


@st.composite
def altered(draw: st.DrawFn) -> tuple[TableDefinition, TableDefinition]:
    """A table before and after ALTER TABLEs."""
    names = draw(st.permutations("abcd"))
    before = [column(number, name, draw(TYPES)) for number, name in enumerate(names, 1)]
    identities = st.sampled_from("ddfn")
    after = [one for one in before if one.attnum == 1 or draw(st.integers(0, 3))]
    for place, one in enumerate(after):
        if not draw(st.integers(0, 3)):
            oid, typmod = draw(TYPES)
            after[place] = column(one.attnum, "", (oid, typmod))
    after += [column(number, "", draw(TYPES)) for number in range(5, 5 + draw(st.integers(0, 2)))]
    fresh = draw(st.permutations("abcdef"))
    kept = {one.attnum: one.name for one in before}
    if draw(st.booleans()):
        after = [replace(one, name=name) for one, name in zip(after, fresh, strict=False)]
    else:
        after = [replace(one, name=kept.get(one.attnum, "ef"[one.attnum % 2])) for one in after]
    key = draw(st.sampled_from([0, 1, 1, 1]))
    return table(before, 1, draw(identities), 4), table(after, key, draw(identities), max(4, after[-1].attnum))


def target(known: Attributes) -> TargetTable:
    kinds = {25: pa.string(), 1043: pa.string(), 23: pa.int32()}
    fields = [
        pa.field(one.name, kinds.get(one.type_oid) or pa.decimal128((one.type_modifier - 4) >> 16, 2), one.number > 1)
        for one in known.columns
    ]
    return TargetTable("/w/t", pa.schema(fields), (known.columns[0].name,), "s.t")


def found(
    before: TableDefinition, after: TableDefinition, renames: Mapping[int, str], keep: bool
) -> tuple[Attributes, TargetTable, Change | None] | str:
    names = [one.name for one in before.columns]
    known = of_definition(before, names, "app", Lsn(0), renames=renames, naming="text" if renames else None)
    described, numbers = Described(after, None), tuple(one.attnum for one in after.columns)
    try:
        change = wanted(target(known), known, described.as_message(1), numbers, described, keep=keep)
    except CopyAgain as again:
        return again.reason.partition('"')[0]
    except FeatureNotSupported:
        return "two columns would have one name"
    return known, target(known), change


@given(altered(), st.sets(st.integers(1, 4), min_size=1), st.booleans())
def test_nothing_but_names_differs(
    tables: tuple[TableDefinition, TableDefinition], chosen: set[int], keep: bool
) -> None:
    before, after = tables
    # Names that nobody else ever has.
    renames = {number: f"{number} x" for number in chosen}
    plain, other = found(before, after, {}, keep), found(before, after, renames, keep)
    if isinstance(plain, str) or isinstance(other, str):
        assert plain == other
        return
    (known, _, change), (known_here, table_here, here) = plain, other
    states = (known if change is None else change.attributes, known_here if here is None else here.attributes)
    of_plain, of_here = states
    assert read(of_here.as_json()) == of_here
    assert [one.number for one in of_here.columns] == [one.number for one in of_plain.columns]
    assert [one.published for one in of_here.columns] == [one.name for one in of_plain.columns]
    assert [one.name for one in of_here.columns] == [renames.get(one.number, one.name) for one in of_plain.columns]
    assert of_here.published == of_plain.published
    assert dict(of_plain.kept).keys() <= dict(of_here.kept).keys(), (
        "a chosen name never has to make room, nor takes any"
    )
    asked, asked_here = (None if one is None else one.alteration for one in (change, here))
    if asked is None or asked_here is None:
        assert asked is None or not (asked.retype or asked.add or asked.drop), "only names had to change"
        assert asked_here is None
        return
    by_name = {one.name: renames.get(one.number, one.name) for one in of_plain.columns}
    assert asked_here.key == tuple(by_name[name] for name in asked.key)
    assert asked_here.retype == {by_name[name]: kind for name, kind in asked.retype.items()}
    assert [field.name for field, _ in asked_here.add] == [by_name[field.name] for field, _ in asked.add]
    of_numbers = {name: number for number, name in known.names.items()}
    assert asked_here.rename == {old: new for old, new in asked.rename.items() if of_numbers[old] not in renames}
    # Rows under the message before go where they belong.
    fields = reading(table_here, known_here, tuple(one.attnum for one in before.columns)).fields
    assert [field.name for field in fields if field is not None] == [one.name for one in known_here.columns]


@given(
    altered(), st.dictionaries(st.integers(1, 4), NAMES.flatmap(lambda c: st.sampled_from([c, c.upper()])), min_size=1)
)
def test_names_that_meet_are_refused(tables: tuple[TableDefinition, TableDefinition], renames: dict[int, str]) -> None:
    """No alteration leaves two columns whose names Delta does not tell apart."""
    before, after = tables
    names = [renames.get(one.attnum, one.name).lower() for one in before.columns]
    if len({*names}) < len(names):
        return
    result = found(before, after, renames, True)
    if isinstance(result, str) or result[2] is None:
        return  # refused, copied again, or nothing to do
    state = result[2].attributes
    shown = [name.lower() for name in state.names.values()]
    assert len({*shown}) == len(shown)
