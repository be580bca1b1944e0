"""Say in PostgreSQL's words, and with its SQLSTATEs, which constraint of the Delta table a row breaks.

Nothing of the batch is committed then.  The batch comes again until the row or the constraint is changed.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from pubsub.delta.table import TargetTable
from pubsub.errors import InvalidValue

# Delta's and Spark's error classes, with what they name.
_CHECK: Final = re.compile(
    r"\[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES\] (?:CHECK constraint )?(.+?) (\(.*?)? ?violated by row", re.DOTALL
)
_NOT_NULL: Final = re.compile(
    r"\[DELTA_NOT_NULL_CONSTRAINT_VIOLATED\] NOT NULL constraint violated for column: (\S+?)\.?\s"
)
_LENGTH: Final = re.compile(r"\[EXCEED_LIMIT_LENGTH\] Exceeds char/varchar type length limitation: (\d+)")


def violated(error: BaseException, table: TargetTable) -> InvalidValue | None:
    """Return what an exception of Spark's statement says of a constraint; None if it is about something else."""
    text = f"{error}\n"
    if found := _CHECK.search(text):
        detail = " ".join(text[found.end() :].split("\n\tat ", maxsplit=1)[0].split())
        return _violation(
            table,
            f'new row for relation "{table.relation}" violates check constraint "{found[1].strip("`")}"',
            "23514",
            f"The row {detail}." if detail else None,
        )
    if found := _NOT_NULL.search(text):
        return _not_null(table, found[1].strip("`"))
    if found := _LENGTH.search(text):
        return _violation(table, f"value too long for type character varying({found[1]})", "22001", None)
    return None


def require_not_null(table: TargetTable, rows: pa.Table) -> None:
    """Raise InvalidValue if a column that may not be NULL is NULL in one of the rows of the table's columns."""
    for field in table.schema:
        if not field.nullable and rows.column(field.name).null_count:
            raise _not_null(table, field.name)


def _not_null(table: TargetTable, column: str) -> InvalidValue:
    message = f'null value in column "{column}" of relation "{table.relation}" violates not-null constraint'
    return _violation(table, message, "23502", None)


def _violation(table: TargetTable, message: str, sqlstate: str, detail: str | None) -> InvalidValue:
    return InvalidValue(
        message,
        sqlstate=sqlstate,
        detail=detail,
        hint="Drop the constraint from the Delta table, or skip the transaction (ALTER SUBSCRIPTION … SKIP).",
        context=f'Delta table "{table.path}"',
    )
