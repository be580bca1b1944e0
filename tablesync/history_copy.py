"""A copy into a Delta table in mode history: what it reads stands after the rows that are there, which stay (change_rows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from pubsub.delta import change_rows, metadata_columns
from pubsub.delta.alter import widen
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action
from pubsub.delta.table import HISTORY, TargetTable, another_history, has_files, properties, query
from pubsub.delta.writers import arrow_writer
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.column_types import spark_ddl
from pubsub.protocol.lsn import Lsn
from pubsub.sql.identifiers import quote_for_spark as quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def same_values(table: TargetTable, lsn: Lsn, generation: int) -> Mapping[str, str | int]:
    """Return the values, other than NULL, of columns that every row of the copy has alike."""
    if table.history is None:
        return metadata_columns.copied(table.metadata, lsn)
    return change_rows.copied(lsn, generation)


def prepare(log: TableLog | None, table: TargetTable, lsn: Lsn) -> None:
    """Make the Delta table ready for a copy at `lsn`: a history's columns become as wide as the publisher's.

    Raises NotInPrerequisiteState for a history that goes on past `lsn`: the publisher has lost those changes, or is another.
    """
    if not keeps_rows(table):
        return
    held = _last(log, table)
    if held > lsn:
        raise NotInPrerequisiteState(
            f'the history of table "{table.relation}" ends at {held}, which the publisher has not reached',
            detail=f"The copy would begin at {lsn}. The publisher has lost changes, or is another.",
            hint=another_history(table),
        )
    if log is not None:
        widen(log, table)


def keeps_rows(table: TargetTable) -> bool:
    """Return whether the table is a history with rows."""
    return table.history is not None and HISTORY in properties(table.path) and has_files(table.path)


def _last(log: TableLog | None, table: TargetTable) -> Lsn:
    """Return the greatest LSN of the history: files that we wrote have it in their statistics."""
    name = table.stored_name(change_rows.LSN)
    bounds = [file.bounds.get(name) for file in log.files.values()] if log is not None else [None]
    known = [bound[1] for bound in bounds if bound is not None]
    if len(known) == len(bounds):
        return Lsn(max(known))
    found = query(table.path, f'SELECT max("{change_rows.LSN}") AS last FROM t').read_all().column("last")[0].as_py()
    return Lsn(found or 0)


def begun_anew(log: TableLog, table: TargetTable, lsn: Lsn, generation: int, name: str, number: int) -> list[Action]:
    """Write the row which says that a history begins anew; none if it has no rows yet, or is a mirror."""
    if not (arrow_writer.keeps_history(log, table) and log.files):
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
