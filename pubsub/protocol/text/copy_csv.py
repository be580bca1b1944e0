"""Parse rows of `COPY … TO STDOUT (FORMAT csv)` into Arrow columns.  text.columns reads their values and the stream's.

In PostgreSQL's CSV an unquoted empty value is NULL and a quoted one is the empty string.  A value is quoted if it
contains a quote, a comma or a line end, or would look like NULL; a quote in it is doubled (copyto.c:
CopyAttributeOutCSV).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import pyarrow as pa
import pyarrow.csv as csv

from pubsub.errors import InvalidValue, ProgramLimitExceeded, ProtocolViolation
from pubsub.protocol.refused_values import InvalidText, printable
from pubsub.protocol.text.columns import from_text

MAX_COPY_BYTES: Final = (1 << 31) - 2
"""The most bytes that can be parsed at once."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class InvalidCopiedField(InvalidValue):
    """A copied value that its target column cannot hold.

    `row` is its row in the chunk, from 0; `column` is the column's name.  `key` identifies the row by its NOT NULL
    columns: (a, b)=(1, x).
    """

    def __init__(self, column: str, row: int, key: str, cause: InvalidText) -> None:
        super().__init__(cause.message, sqlstate=cause.sqlstate, context=f'column "{column}"')
        self.column = column
        self.row = row
        self.key = key


def parse_copy(data: bytes | list[bytes], fields: pa.Schema, hidden: Set[str] = frozenset()) -> pa.RecordBatch:
    """Parse whole rows of a copy's output into a batch with the schema `fields`.

    The copy has the same columns in the same order, at least one.  A list is emptied: a row of it may take a gigabyte, which whoever
    calls this would otherwise keep.  `hidden` names the columns whose values no error shows.

    Raises ProtocolViolation for malformed output, InvalidCopiedField for a value that its column cannot hold,
    ProgramLimitExceeded for more than MAX_COPY_BYTES.
    """
    if isinstance(data, list):
        text = b"".join(data)
        data.clear()
    else:
        text = data
    del data
    if not text:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in fields], schema=fields)
    if len(text) > MAX_COPY_BYTES:
        raise ProgramLimitExceeded(f"{len(text)} bytes of a copy cannot be parsed at once")
    if not text.endswith(b"\n"):
        raise ProtocolViolation("the copy's output ends within a row")
    if text.startswith(_BYTE_ORDER_MARK):
        text = _BYTE_ORDER_MARK + text  # Arrow drops one mark, and here it is a value's first character
    positions = [str(position) for position in range(len(fields))]  # not the names: they may repeat
    try:
        table = csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=positions),
            parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(positions, pa.binary()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        # Its text has the row.
        raise ProtocolViolation(
            "the copy's output is not CSV of the expected columns", detail=None if hidden else str(error)
        ) from (None if hidden else error)
    del text  # a value may take a gigabyte, and its conversion as much again
    return pa.RecordBatch.from_arrays(
        [_column(table, fields, position, hidden) for position in range(len(fields))], schema=fields
    )


def _column(table: pa.Table, fields: pa.Schema, position: int, hidden: Set[str]) -> pa.Array:
    field, texts = fields[position], table.column(position).combine_chunks()
    if isinstance(texts, pa.ChunkedArray):
        raise ProgramLimitExceeded(f'column "{field.name}" of a copy has too many bytes to be parsed at once')
    try:
        return from_text(texts, field.type)
    except InvalidText as error:
        key = _key(table, fields, error.index, hidden)
        if field.name not in hidden:
            raise InvalidCopiedField(field.name, error.index, key, error) from error
        raise InvalidCopiedField(field.name, error.index, key, error.without_value()) from None


def _key(table: pa.Table, fields: pa.Schema, row: int, hidden: Set[str]) -> str:
    shown = {
        field.name: printable(table.column(place)[row].as_py() or b"")
        for place, field in enumerate(fields)
        if not field.nullable and field.name not in hidden
    }
    return f"({', '.join(shown)})=({', '.join(shown.values())})"
