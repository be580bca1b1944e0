"""The initial copy as a Spark job: each task reads one ctid range by COPY, under the exported snapshot, as Arrow.

    driver                   executor's Python worker (one a task)
    ranges of blocks ──────► connect, SET TRANSACTION SNAPSHOT, COPY … TO STDOUT (FORMAT csv)
                             some megabytes of rows ─► pyarrow.csv ─► record batches ─► a data file of the table
    one commit ◄──────────── its `add`

So where Spark is local and the table is plain (apply.delta.direct).  Elsewhere the record batches go back to Spark, which
writes the table; what runs on a cluster's executors, this module and pubsub.protocol, is shipped with the job.  Blocks; runs
in one of Spark's threads.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from apply.delta import datafiles, direct
from apply.delta.alter import for_copy
from apply.delta.log import TableLog
from apply.delta.table import Commit, TargetTable, fits, has_files, quote
from pubsub import faults
from pubsub.errors import InvalidValue
from pubsub.protocol import types
from pubsub.publisher.connection import session_settings_sql
from pubsub.sql.identifiers import quote_identifier, quote_literal

# Rows handed to Arrow at once, in bytes of CSV.
_CHUNK_BYTES: Final = 4 << 20
_BLOCK_SIZE: Final = 8192
# A range is worth a task of its own from this size on; a task costs a connection and some tens of milliseconds.
_LEAST_RANGE_BLOCKS: Final = 16 * 1024 * 1024 // _BLOCK_SIZE
_MOST_RANGES: Final = 4096


@dataclass(frozen=True, slots=True)
class CopySource:
    """What to read: `columns` in the target's order, `blocks` None where a relation has no ctid of its own (a partitioned one).

    `row_filter` is the publications' WHERE as SQL.  `conninfo` may hold a password: it is kept out of the repr.
    """

    conninfo: Any
    application_name: str
    schema: str
    name: str
    columns: tuple[str, ...]
    snapshot: str
    row_filter: str | None
    blocks: int | None
    only: bool
    lsn: str = ""
    """Of the snapshot."""

    def __repr__(self) -> str:
        return f"CopySource({self.schema}.{self.name})"


def ranges(blocks: int | None, parallelism: int) -> list[tuple[int, int | None] | None]:
    """Block ranges (first, end exclusive), the last one open-ended: the table may grow until the snapshot is taken.

    None stands for the whole relation where ctid can not be used.
    """
    if blocks is None:
        return [None]
    count = min(max(blocks // _LEAST_RANGE_BLOCKS, 1), _MOST_RANGES)
    if count > 1:
        # Whole rounds of tasks: no core idles while the last range is read.
        count = -(-count // parallelism) * parallelism
    elif blocks >= _LEAST_RANGE_BLOCKS // 8:
        count = parallelism
    edges = [blocks * i // count for i in range(count)]
    return [(first, end) for first, end in itertools.zip_longest(edges, edges[1:])]


def statement(source: CopySource, block_range: tuple[int, int | None] | None) -> str:
    """COPY for one range (copy_table in tablesync.c copies the whole)."""
    columns = ", ".join(map(quote_identifier, source.columns))
    relation = f"{quote_identifier(source.schema)}.{quote_identifier(source.name)}"
    conditions = []
    if block_range is not None:
        first, end = block_range
        if first > 0:
            conditions.append(f"ctid >= '({first},0)'::pg_catalog.tid")
        if end is not None:
            conditions.append(f"ctid < '({end},0)'::pg_catalog.tid")
    if source.row_filter is not None:
        conditions.append(f"({source.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    only = "ONLY " if source.only else ""
    return f"COPY (SELECT {columns} FROM {only}{relation}{where}) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"


def copy(session: Any, source: CopySource, table: TargetTable, record: Commit, done: Any) -> None:
    """Copy the table in one commit, which replaces whatever an unfinished copy left.

    `done` is a Spark accumulator that counts the rows of finished ranges.  Raises what Spark raises; a failed range fails the job.
    """
    context = session.sparkContext
    parts = ranges(source.blocks, context.defaultParallelism)
    if context.master.startswith("local"):
        log = direct.log_of(table.path)
        if log is not None:
            table, definition = for_copy(log, table)
            _copy_directly(context, source, parts, log, table, record, done, definition)
            return
    else:
        _ship(context)
    schema = pa.schema([table.schema.field(name) for name in source.columns])
    ddl = ", ".join(f"{quote(f.name)} {types.spark_ddl(f.type)}" for f in schema)
    read = _reader(source, parts, schema, done)
    frame = session.range(0, len(parts), 1, len(parts)).mapInArrow(read, ddl)
    extra = [field for field in table.schema if field.name not in source.columns]
    if extra:
        frame = frame.selectExpr("*", *(f"CAST(NULL AS {types.spark_ddl(f.type)}) AS {quote(f.name)}" for f in extra))
    # An append to a table without files is the same, and has no old files to look for.
    other_columns = not fits(table)
    mode = "overwrite" if has_files(table.path) or other_columns else "append"
    frame.write.format("delta").mode(mode).options(
        overwriteSchema=str(other_columns).lower(),
        txnAppId=record.app_id,
        txnVersion=str(int(record.last)),
        userMetadata=record.user_metadata,
    ).save(table.path)


def _copy_directly(
    context: Any,
    source: CopySource,
    parts: list[tuple[int, int | None] | None],
    log: TableLog,
    table: TargetTable,
    record: Commit,
    done: Any,
    definition: Sequence[datafiles.Action],
) -> None:
    """The tasks write the data files; here they are committed.  When the job fails, what its tasks have written is removed."""
    name = str(uuid.uuid4())
    schema = pa.schema([table.schema.field(column) for column in source.columns])

    def write(index: int) -> list[datafiles.Action]:
        def rows() -> Iterator[Any]:
            for batch in read_range(source, parts[index], schema):
                done.add(batch.num_rows)
                columns = {
                    field.name: batch.column(field.name)
                    if field.name in source.columns
                    else pa.nulls(batch.num_rows, field.type)
                    for field in table.schema
                }
                yield pa.table(columns)

        return datafiles.write(table, rows(), number=index, name=name)

    try:
        added = context.parallelize(range(len(parts)), len(parts)).flatMap(write).collect()
        direct.commit_copy(log, table, added, record, definition)
    except BaseException:
        # A commit may fail after it was made (its fsync): the files are the table's then.
        if not any(name in path for path in log.files):
            datafiles.remove_copy(table.path, name)
        raise


def _reader(
    source: CopySource, parts: list[tuple[int, int | None] | None], schema: pa.Schema, done: Any
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that runs in the executors' Python workers."""

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                for rows in read_range(source, parts[index], schema):
                    done.add(rows.num_rows)
                    yield rows

    return read


def read_range(
    source: CopySource, block_range: tuple[int, int | None] | None, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of one range as record batches.  Raises psycopg.Error, and InvalidValue for a value that Delta can not hold."""
    import psycopg

    from pubsub.protocol.copytext import InvalidCopiedField, parse_copy

    with psycopg.connect(
        source.conninfo, autocommit=True, application_name=source.application_name, client_encoding="UTF8"
    ) as connection:
        connection.execute(session_settings_sql(connection.info.server_version).encode())
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(source.snapshot)}".encode())
        try:
            for rows in _batches(connection.pgconn, statement(source, block_range), schema, parse_copy):
                yield rows
                faults.point(f"copying {source.schema}.{source.name}")
        except InvalidCopiedField as error:
            raise InvalidValue(
                f'column "{error.column}" of table "{source.schema}.{source.name}": {error.message} '
                f"(key {error.key}, copied at {source.lsn})",
                sqlstate=error.sqlstate,
            ) from error
        connection.execute("COMMIT")


def _batches(
    pgconn: Any, copy_statement: str, schema: pa.Schema, parse: Callable[..., pa.RecordBatch]
) -> Iterator[Any]:
    """COPY's rows, some megabytes at a time.  libpq gives one row a call: nothing else is done for a row here."""
    from psycopg import pq
    from psycopg.errors import error_from_result

    result = pgconn.exec_(copy_statement.encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise error_from_result(result)
    next_row = pgconn.get_copy_data
    held: list[bytes] = []
    size = 0
    while True:
        length, row = next_row(0)
        if length <= 0:
            break
        # A copy, so that libpq's buffer is freed at once: to keep a million of those costs six times the whole loop.
        held.append(bytes(row))
        size += length
        if size >= _CHUNK_BYTES:
            yield parse(held, schema)
            held.clear()
            size = 0
    result = pgconn.get_result()
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise error_from_result(result)
    while pgconn.get_result() is not None:
        pass
    if held:
        yield parse(held, schema)


def _ship(context: Any) -> None:
    """Send this project's code to the executors of a cluster, as one archive."""
    import shutil
    import tempfile

    import pubsub

    root = Path(pubsub.__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as directory:
        for package in ("pubsub", "apply", "tablesync"):
            shutil.copytree(root / package, Path(directory) / "code" / package)
        context.addPyFile(shutil.make_archive(str(Path(directory) / "pubsub-code"), "zip", Path(directory) / "code"))
