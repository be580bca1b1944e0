"""Read the rows of a publisher's table by COPY, a range of its blocks or the rows of some keys at a time, as Arrow.

A session holds the table as it was described, under the copy's snapshot, or finds that it no longer is
(read_table.hold_as_described).  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pubsub import faults, masking
from pubsub.delta.table import TargetTable
from pubsub.errors import InvalidValue, ProgramLimitExceeded
from pubsub.masks import NO_MASKS, MaskKey, Masks
from pubsub.protocol.arrow_arrays import repeated
from pubsub.publisher import copy_out
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.read_table import ReadTable, hold_as_described, lock_sql
from pubsub.publisher.snapshots import begin_session_under
from pubsub.sql.identifiers import quote_identifier
from tablesync.choose_copier import Range

if TYPE_CHECKING:
    from psycopg import Connection

# The longest a task waits for a lock: it holds one of Spark's places, which other commits and copies need.
_PATIENCE: Final = "5s"


@dataclass(frozen=True, slots=True)
class CopySource:
    """What to read; the table's columns are in the target's order.

    `row_filter`: the publications' WHERE as SQL.  `conninfo` may contain a password, so the repr leaves it out, and a job's
    closure holds it in part only (_InTasks); so it is with `mask_key`, without which a process uses that of its environment.
    """

    conninfo: str
    application_name: str
    table: ReadTable
    snapshot: str
    row_filter: str | None
    lsn: str = ""
    """The snapshot's LSN."""
    bytes: int = 0
    """The approximate size of the publisher's table."""
    longest: int | None = None
    """The most bytes that a row may take as COPY sends it; None: as many as it likes."""
    max_rate: float = 0
    """The most bytes to read per second, by all that read it at once; 0: as fast as they come."""
    masks: Masks = NO_MASKS
    """Columns that are masked as soon as they are read."""
    mask_key: MaskKey = b""

    def __repr__(self) -> str:
        return f"CopySource({self.table})"


def statement(source: CopySource, block_range: Range, keys: str | None = None) -> str:
    """Return COPY for one range, or with the condition `keys` for the rows that meet it (tablesync.c: copy_table)."""
    table = source.table
    columns = ", ".join(map(quote_identifier, table.columns))
    row_filter = None if source.row_filter is None else f"({source.row_filter})"
    rows = copy_out.part_of_table(table.schema, table.name, block_range, keys, row_filter, only=table.only)
    return f"COPY (SELECT {columns} FROM {rows}) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"


def wait_sql(source: CopySource) -> str:
    """Return SQL that waits for the lock that reading the table takes, and releases it."""
    return lock_sql(source.table)


def whole_rows(
    source: CopySource,
    block_range: Range,
    table: TargetTable,
    cut: Cut | None = None,
    same: Mapping[str, str | int] = MappingProxyType({}),
) -> Iterator[pa.Table]:
    """Yield the rows of one range as tables with all of the target's columns; `same`: values of those that are not copied."""
    schema = pa.schema([table.schema.field(name) for name in source.table.names])

    def whole(batch: pa.RecordBatch) -> pa.Table:
        columns = {
            field.name: batch.column(field.name)
            if field.name in source.table.names
            else repeated(pa.scalar(same.get(field.name), field.type), batch.num_rows)
            for field in table.schema
        }
        return pa.table(columns)

    # Not a loop, whose variables would keep rows while the next ones are read.
    yield from map(whole, read_range(source, block_range, schema, cut))


def read_range(
    source: CopySource, block_range: Range, schema: pa.Schema, cut: Cut | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one range as record batches.

    With a `cut`, waits for locks without limit; without one, as in a task, it soon raises psycopg's LockNotAvailable.
    Raises psycopg.Error, InvalidValue for a value that Delta cannot hold, and SerializationFailure (hold_as_described).
    """
    with session(source, cut) as connection, cut.watching(connection) if cut is not None else nullcontext():
        if cut is None:
            connection.execute(f"SET lock_timeout = '{_PATIENCE}'")
        begin_session_under(connection, source.snapshot)
        hold_as_described(connection, source.table)
        for rows in read(connection, source, statement(source, block_range), schema):
            yield rows
            del rows  # not kept while the next ones are read
            faults.point(f"copying {source.table}")
        connection.execute("COMMIT")


def session(source: CopySource, cut: Cut | None = None) -> Connection:
    """Open a connection to the publisher, with the usual session parameters.  Raises ConnectionFailure."""
    return copy_out.session(source.conninfo, source.application_name, cut)


def read(
    connection: Connection, source: CopySource, copy_statement: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield a COPY statement's rows, masked, some megabytes at a time.

    Raises psycopg.Error, InvalidValue, ProgramLimitExceeded, and NotInPrerequisiteState without the key of the masks.
    """
    from pubsub.protocol.text.copy_csv import InvalidCopiedField, parse_copy

    masks = source.masks
    key = masks.key(str(source.table), source.mask_key)

    def masked(rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = masking.apply(masks, dict(zip(schema.names, rows.columns, strict=True)), key)
        return pa.RecordBatch.from_arrays([*columns.values()], schema=schema)

    try:
        parse = partial(parse_copy, hidden=masks.rules.keys())
        read = copy_out.batches(connection, copy_statement, schema, parse, source.longest, source.max_rate)
        yield from map(masked, read) if masks else read
    except copy_out.RowTooLong as error:
        # The message says all: a task's error reaches the daemon without its hint.
        raise ProgramLimitExceeded(
            f'a row of table "{source.table}" takes {error.size} bytes, more than max_message_size, {source.longest}',
            hint='Raise "max_message_size" in pubsub.toml, or take the column out of the publication.',
        ) from None
    except InvalidCopiedField as error:
        raise InvalidValue(
            f'column "{error.column}" of table "{source.table}": {error.message} '
            f"(key {error.key}, copied at {source.lsn})",
            sqlstate=error.sqlstate,
        ) from error
