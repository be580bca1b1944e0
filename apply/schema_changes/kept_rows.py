"""The option where: which of the publisher's rows a Delta table gets, decided when it is copied.

The condition names columns once, as the publisher calls them then; from then on they are known by their numbers, as those that are
left out or renamed (column_choice).  So a column that is renamed at the publisher stays the condition's, under any name.  One that is
dropped leaves a condition of which nobody can say any more which rows meet it: the table's next row, or copy, is an error until the
option has another text and RESYNC TABLE is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from apply.schema_changes.attributes import Attributes, KeptRows
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.layouts import Layouts, no_column
from pubsub.sql.row_conditions import RowCondition

if TYPE_CHECKING:
    import pyarrow as pa

    from pubsub.row_filters import RowFilter


def chosen(
    layouts: Layouts, definition: TableDefinition, published: Sequence[ColumnDefinition], before: Attributes | None
) -> tuple[KeptRows | None, str | None]:
    """Return Attributes.where and filtering for a copy of a table.  `before`: its attributes of before.

    Raises UndefinedObject for a column that is not published.
    """
    condition = layouts.choice_of(definition.schema, definition.name).where
    partitioned = definition.kind == "p"
    gone = before is not None and before.where is not None and not _all_there(before.where, definition)
    if before is None or before.filtering is None or (before.asked and (gone or before.filtering != layouts.filtering)):
        if condition is None:
            return None, None
        numbers = {column.name: column.attnum for column in published}
        for name in condition.columns:
            if name not in numbers:
                raise no_column("where", definition.schema, definition.name, name)
        return KeptRows(
            condition.text, {name: numbers[name] for name in condition.columns}, partitioned
        ), layouts.filtering
    if before.where is None:
        return None, before.filtering
    return KeptRows(before.where.text, before.where.numbers, partitioned), before.filtering


def _all_there(where: KeptRows, definition: TableDefinition) -> bool:
    return {column.attnum for column in definition.columns}.issuperset(where.numbers.values())


def under_other_numbers(where: KeptRows | None, before: Mapping[int, str], now: TableDefinition) -> KeptRows | None:
    """Return the condition for a table that was dropped and created again; `before`: the names of the columns by their old numbers."""
    if where is None:
        return None
    numbers = {column.name: column.attnum for column in now.columns}
    return KeptRows(
        where.text,
        {name: numbers.get(before.get(number, ""), 0) for name, number in where.numbers.items()},
        now.kind == "p",
    )


def columns_of(where: KeptRows, definition: TableDefinition) -> dict[str, ColumnDefinition]:
    """Return the condition's columns as the publisher has them now, by the names that it has for them.

    Raises NotInPrerequisiteState if one of them was dropped.
    """
    now = {column.attnum: column for column in definition.columns}
    for name, number in where.numbers.items():
        if number not in now:
            raise dropped(f"{definition.schema}.{definition.name}", name)
    return {name: now[number] for name, number in where.numbers.items()}


def published_filter(published: str | None, where: KeptRows | None, definition: TableDefinition) -> str | None:
    """Return the SQL condition of the rows that a table gets: the publications' row filter, and its own condition.

    Raises as `columns_of`.
    """
    if where is None:
        return published
    names = {name: column.name for name, column in columns_of(where, definition).items()}
    own = RowCondition.parse(where.text).sql(names)
    return own if published is None else f"({published}) AND {own}"


def untold_column(where: KeptRows, definition: TableDefinition) -> str | None:
    """Return a column of the condition that the publisher's old rows lack; None if they have all (matching_rows.untold)."""
    sent = definition.identity_key
    if definition.replica_identity == "f":
        if definition.kind != "p":
            return None
        sent = definition.primary_key
    return min((c.name for c in columns_of(where, definition).values() if c.name not in sent), default=None)


def row_filter(
    where: KeptRows,
    definition: TableDefinition,
    here: Mapping[int, str],
    masked: Mapping[str, object],
    schema: pa.Schema,
) -> RowFilter:
    """Return the condition of a Delta table's rows.  `here`: the table's names of its columns, by number; `masked`: those masked.

    Raises FeatureNotSupported and InvalidValue for a condition that is not exactly the publisher's here, and as `columns_of`.
    """
    from pubsub.row_filters import RowFilter, Typed, require_exact

    relation = f"{definition.schema}.{definition.name}"
    columns = columns_of(where, definition)
    found, typed = [], {}
    for name, column in columns.items():
        mine = here.get(column.attnum)
        if mine is None:
            raise _unfit(relation, name, "is left out")
        if mine in masked:
            raise _unfit(relation, name, "is masked")
        typed[name] = Typed(
            name,
            int(column.base_type_oid),
            column.base_type_kind,
            schema.field(mine).type,
            column.type_name,
            column.collation_deterministic,
        )
        found.append((name, mine, int(column.base_type_oid)))
    require_exact(RowCondition.parse(where.text), typed, relation)
    return RowFilter(where.text, tuple(found), where.partitioned)


def _unfit(relation: str, name: str, how: str) -> FeatureNotSupported:
    return FeatureNotSupported(
        f'column "{name}" of table "{relation}", which the condition of the option where names, {how}',
        detail="Rows are compared by the values that the Delta table has.",
        hint="Use a row filter of the publication, or let the table have the column.",
    )


def dropped(relation: str, name: str) -> NotInPrerequisiteState:
    """Return the error for a column of the condition that the publisher's table has no longer."""
    return NotInPrerequisiteState(
        f'column "{name}" of table "{relation}", which the condition of the option where names, was dropped',
        hint=f"ALTER SUBSCRIPTION … SET (where = …) without it, and RESYNC TABLE {relation}.",
    )
