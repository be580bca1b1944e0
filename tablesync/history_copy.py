"""A copy into a Delta table that keeps the past: what it reads stands after the rows that are there, which stay.

In mode history (change_rows) a row says that it begins; in mode scd2 (versions) the copy's commit ends the rows that are current.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from pubsub.delta import change_rows, metadata_columns, versions
from pubsub.delta.alter import widen
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action
from pubsub.delta.past import another_history, goes_on_keeping
from pubsub.delta.table import HISTORY, TargetTable, has_files, properties, query
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.column_types import spark_ddl
from pubsub.protocol.lsn import Lsn
from pubsub.sql.identifiers import quote_for_spark as quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def same_values(table: TargetTable, lsn: Lsn, generation: int) -> Mapping[str, str | int]:
    """Return the values, other than NULL, of columns that every row of the copy has alike."""
    return own_values(table, lsn) if table.history is None else change_rows.copied(lsn, generation)


def own_values(table: TargetTable, lsn: Lsn) -> Mapping[str, str | int]:
    """Return the values, other than NULL, that rows read from the publisher at an LSN have in a table's own columns.

    The table is no history.
    """
    scd2 = versions.copied(lsn) if table.versions else {}
    source = {} if table.source is None else {table.source.column: table.source.value}
    return {**metadata_columns.copied(table.metadata, lsn), **scd2, **source}


def prepare(log: TableLog | None, table: TargetTable, lsn: Lsn) -> None:
    """Make the Delta table ready for a copy at `lsn`: columns of one that keeps the past become as wide as the publisher's.

    Raises NotInPrerequisiteState for one that goes on past `lsn`: the publisher has lost those changes, or is another.
    """
    if not keeps_rows(table):
        return
    held = _last(log, table)
    what = "the past" if table.versions else "the history"
    if held > lsn:
        raise NotInPrerequisiteState(
            f'{what} of table "{table.relation}" ends at {held}, which the publisher has not reached',
            detail=f"The copy would begin at {lsn}. The publisher has lost changes, or is another.",
            hint=another_history(table),
        )
    if log is not None:
        widen(log, table)


def keeps_rows(table: TargetTable) -> bool:
    """Return whether the Delta table has rows that stay."""
    return table.keeps_past and goes_on_keeping(table, properties(table.path)) and has_files(table.path)


def _last(log: TableLog | None, table: TargetTable) -> Lsn:
    """Return the greatest LSN of the rows that are there: files that we wrote have it in their statistics."""
    last = 0
    for name in (versions.VALID_FROM_LSN, versions.VALID_TO_LSN) if table.versions else (change_rows.LSN,):
        known = _greatest(log, table, name) if log is not None else None
        if known is None:
            found = query(table.path, f'SELECT max("{name}") AS last FROM t').read_all().column("last")[0].as_py()
            known = found or 0
        last = max(last, known)
    return Lsn(last)


def _greatest(log: TableLog, table: TargetTable, name: str) -> int | None:
    """Return the greatest value of a column, 0 if it is NULL in all rows; None if some file has no statistics of it."""
    last = 0
    for file in log.files.values():
        bounds = file.bounds.get(table.stored_name(name))
        if bounds is not None:
            last = max(last, bounds[1])
        elif name != table.mark or not file_rows.known_live(log, table, file):
            return None
    return last


def begun_anew(log: TableLog, table: TargetTable, lsn: Lsn, generation: int, name: str, number: int) -> list[Action]:
    """Write the row which says that a history begins anew; none if it has no rows yet, or is a mirror."""
    if not (table.history is not None and HISTORY in log.properties and log.files):
        return []
    same = change_rows.begun_anew(lsn, generation)
    row = pa.table([pa.array([same.get(field.name)], field.type) for field in table.schema], schema=table.schema)
    return data_files.write(table, [row], name=name, number=number)


def before_frame(session: SparkSession, table: TargetTable, lsn: Lsn, generation: int) -> DataFrame:
    """Return what `begun_anew` writes as a frame, with the columns that change_rows adds."""
    same = change_rows.begun_anew(lsn, generation)
    return session.range(1).selectExpr(*(literal(same.get(field.name), field) for field in change_rows.FIELDS))


def literal(value: str | int | None, field: pa.Field) -> str:
    """Return the value as a column in Spark's SQL."""
    text = "NULL" if value is None else f"'{value}'"
    return f"CAST({text} AS {spark_ddl(field.type)}) AS {quote(field.name)}"
