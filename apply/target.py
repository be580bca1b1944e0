"""What a publisher's table becomes: the columns of its Delta table and the key that names a row."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from apply.delta.table import TargetTable
from pubsub.errors import FeatureNotSupported
from pubsub.protocol import types
from pubsub.publisher.definitions import TableDefinition
from pubsub.sql.typechoices import TypeChoices


def target_table(
    definition: TableDefinition, published: Sequence[str] | None, path: str, choices: TypeChoices | None = None
) -> TargetTable:
    """The Delta table for `definition`; `published` are the column list's names, None for all; `choices` the
    subscription's option `types`.

    Raises FeatureNotSupported, naming the column, for what Delta can not hold.
    """
    qualified = f"{definition.schema}.{definition.name}"
    columns = [
        column
        for column in definition.columns
        if (column.name in published if published is not None else not column.generated)
    ]
    folded: dict[str, str] = {}
    for column in columns:
        other = folded.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise FeatureNotSupported(
                f'columns "{other}" and "{column.name}" of table "{qualified}" differ only in case',
                detail="Delta does not tell such columns apart.",
                hint="Rename one of them, or publish the table with a column list.",
            )
    names = {column.name for column in columns}
    key = row_key(definition, names)
    for column in columns:
        if column.name in key and not column.collation_deterministic:
            raise FeatureNotSupported(
                f'column "{column.name}" of the key of table "{qualified}" has a nondeterministic collation',
                detail="Values that are equal to PostgreSQL would be different keys to whoever reads the Delta table.",
                hint="Give the table a key without it: REPLICA IDENTITY USING INDEX, or FULL and no primary key.",
            )
    fields = []
    for column in columns:
        try:
            kind = types.delta_type(
                column.base_type_oid,
                column.base_typmod,
                column.base_type_kind,
                column.type_name,
                (choices or TypeChoices()).of(
                    definition.schema, definition.name, column.name, types.type_names(column.base_type_oid)
                ),
            )
        except FeatureNotSupported as error:
            raise FeatureNotSupported(
                f'column "{column.name}" of table "{qualified}": {error.message}', hint=error.hint
            ) from error
        fields.append(pa.field(column.name, kind, nullable=column.name not in key))
    return TargetTable(path, pa.schema(fields), key, qualified)


def row_key(definition: TableDefinition, names: set[str]) -> tuple[str, ...]:
    """The columns that name a row: those of the replica identity; under FULL and NOTHING the primary key, if it is published."""
    key = definition.identity_key if definition.replica_identity == "i" else definition.primary_key
    return tuple(key) if key and names.issuperset(key) else ()


def definition_json(table: TargetTable) -> str:
    """What the catalog keeps of it (apply.delta.table.load)."""
    return json.dumps({"columns": [field.name for field in table.schema], "key": list(table.key)}, ensure_ascii=False)
