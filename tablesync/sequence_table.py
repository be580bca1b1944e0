"""The Delta table of a subscription's sequences: a row for each sequence that has been synchronized.

    schema_name  sequence_name  last_value  is_called  page_lsn

A script that promotes a copy reads it: SELECT setval(format('%I.%I', schema_name, sequence_name), last_value, is_called).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from catalog.records import SequenceValue
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import Folded

if TYPE_CHECKING:
    from pubsub.delta.writers.choose_writer import AnyStaged, TableWriters

_KEY: Final = ("schema_name", "sequence_name")
SCHEMA: Final = pa.schema(
    [
        pa.field("schema_name", pa.string(), nullable=False),
        pa.field("sequence_name", pa.string(), nullable=False),
        pa.field("last_value", pa.int64(), nullable=False),
        pa.field("is_called", pa.bool_(), nullable=False),
        pa.field("page_lsn", pa.string(), nullable=False),
    ]
)


def sequence_table(path: str) -> TargetTable:
    """Return the table at `path`."""
    return TargetTable(path, SCHEMA, _KEY, "pg_catalog.pg_sequences")


def stage(writers: TableWriters, table: TargetTable, values: Iterable[tuple[str, str, SequenceValue]]) -> AnyStaged:
    """Stage the table's rows, which take the place of all that it has: schema, name and value of each sequence.  Blocks."""
    rows = sorted((schema, name, v.last_value, v.is_called, str(v.lsn)) for schema, name, v in values)
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    images = pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)
    none = SCHEMA.empty_table()
    folded = Folded(
        images=images,
        masked=none,
        deleted_keys=none.select(list(_KEY)),
        removed=none,
        insert_only=False,
        truncated=True,
        inserts=len(rows),
        updates=0,
        deletes=0,
    )
    return writers.write(table, folded, replace_all=True)
