"""The initial copy as a Spark job: each task reads one ctid range by COPY, under the exported snapshot, as Arrow.

A small table is read right here instead: a job takes longer than its rows.

    driver                   executor's Python worker (one a task)
    ranges of blocks ──────► connect, SET TRANSACTION SNAPSHOT, COPY … TO STDOUT (FORMAT csv)
                             some megabytes of rows ─► pyarrow.csv ─► record batches ─► a data file of the table
    the chunk is kept ◄───── its `add`, as each task ends
    one commit of all

This is the way where Spark is local and the table is plain (pubsub.delta.arrow_writer).  The copy's next attempt does not
read a kept chunk again (pubsub.delta.copy_chunks).  Elsewhere the record batches go back to Spark, which writes the table.
The code that a cluster's executors run, this module and pubsub.protocol, is shipped with the job.  Blocks; runs in one of
Spark's threads.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from pubsub import faults
from pubsub.delta import arrow_writer, copy_chunks, data_files
from pubsub.delta.alter import for_copy
from pubsub.delta.commit_files import UnknownOutcome
from pubsub.delta.log import TableLog
from pubsub.delta.table import Commit, TargetTable, fits, has_files, quote
from pubsub.errors import ConnectionFailure, InvalidValue, NotInPrerequisiteState
from pubsub.protocol import types
from pubsub.protocol.contract import VARIANT
from pubsub.publisher.connection import session_settings_sql
from pubsub.publisher.conninfo import parse_conninfo, split_report
from pubsub.publisher.snapshots import BEGIN, file_sql, lock_sql
from pubsub.sql.identifiers import quote_identifier, quote_literal, quote_qualified

if TYPE_CHECKING:
    from catalog.records import CopyPlan

# Rows handed to Arrow at once, in bytes of CSV.
_CHUNK_BYTES: Final = 4 << 20
_BLOCK_SIZE: Final = 8192
# A range is worth a task of its own from this size on; a task costs a connection and some tens of milliseconds.
_LEAST_RANGE_BLOCKS: Final = 16 * 1024 * 1024 // _BLOCK_SIZE
# A table is worth a job from this size on, TOAST counted.
LEAST_JOB_BYTES: Final = 2 * 1024 * 1024
_MOST_RANGES: Final = 4096
# So long a task waits for a lock: it has one of Spark's places, which others' commits and copies need.
_PATIENCE: Final = "5s"


@dataclass(frozen=True, slots=True)
class CopySource:
    """What to read: `columns` in the target's order.

    `row_filter` is the publications' WHERE as SQL.  `conninfo` may hold a password: it is kept out of the repr.
    """

    conninfo: Any
    application_name: str
    schema: str
    name: str
    columns: tuple[str, ...]
    snapshot: str
    row_filter: str | None
    only: bool
    lsn: str = ""
    """Of the snapshot."""
    oid: int = 0
    file: int = 0
    """What pg_relation_filenode() must say: rows have other ctids once the table was rewritten.  0: it has none."""
    bytes: int = 0
    """Of the table at the publisher, about."""

    def __repr__(self) -> str:
        return f"CopySource({self.schema}.{self.name})"


Range = tuple[int, int | None] | None


class Cut:
    """Calling it breaks the watched connection, from another thread and whatever it waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._told = False

    def __call__(self) -> None:
        with self._lock:
            self._told = True
            self._break()

    @contextmanager
    def watching(self, connection: Any) -> Iterator[None]:
        """The connection of the body, a psycopg one."""
        with self._lock:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))
            if self._told:
                self._break()
        try:
            yield
        finally:
            with self._lock:
                self._socket.close()
                self._socket = None

    def _break(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the other side was first
                self._socket.shutdown(socket.SHUT_RDWR)


def edges(blocks: int | None, parallelism: int) -> tuple[int, ...]:
    """The first block of each chunk of a table; none for one that has no ctid of its own (`blocks` None: a partitioned one)."""
    if blocks is None:
        return ()
    count = min(max(blocks // _LEAST_RANGE_BLOCKS, 1), _MOST_RANGES)
    if count > 1:
        # Whole rounds of tasks: no core idles while the last range is read.
        count = -(-count // parallelism) * parallelism
    elif blocks >= LEAST_JOB_BYTES // _BLOCK_SIZE:
        count = parallelism
    return tuple(blocks * i // count for i in range(count))


def ranges(edges: Sequence[int]) -> list[Range]:
    """Block ranges (first, end exclusive), the last one open-ended: the table may grow until the snapshot is taken.

    None stands for the whole relation where ctid can not be used.
    """
    return [(first, end) for first, end in itertools.zip_longest(edges, edges[1:])] or [None]


def parallelism(session: Any) -> int:
    """How many tasks run side by side."""
    return int(session.sparkContext.defaultParallelism)


def statement(source: CopySource, block_range: Range, keys: str | None = None) -> str:
    """COPY for one range (copy_table in tablesync.c copies the whole), or with `keys`, a condition, for the rows that meet it."""
    columns = ", ".join(map(quote_identifier, source.columns))
    relation = f"{quote_identifier(source.schema)}.{quote_identifier(source.name)}"
    conditions = []
    if block_range is not None:
        first, end = block_range
        if first > 0:
            conditions.append(f"ctid >= '({first},0)'::pg_catalog.tid")
        if end is not None:
            conditions.append(f"ctid < '({end},0)'::pg_catalog.tid")
    if keys is not None:
        conditions.append(keys)
    if source.row_filter is not None:
        conditions.append(f"({source.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    only = "ONLY " if source.only else ""
    return f"COPY (SELECT {columns} FROM {only}{relation}{where}) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"


def wait_sql(source: CopySource) -> str:
    """Waits for the lock that reading the table takes, and lets it go."""
    only = "ONLY " if source.only else ""
    return f"SELECT FROM {only}{quote_qualified(source.schema, source.name)} LIMIT 0"


def was_locked(error: Exception) -> bool:
    """Whether a job failed because a task met a lock on the publisher: Spark has the task's error as text."""
    return "psycopg.errors.LockNotAvailable" in str(error)


def begin(table: TargetTable, earlier: CopyPlan | None, earlier_copy: str) -> tuple[int, bool]:
    """Before a new copy: the table's version, and whether finished chunks can be kept and written over one another.

    What the `earlier` copy's attempts have written, under the application id `earlier_copy`, is removed if it was never committed.
    """
    log = arrow_writer.log_of(table.path)
    if log is None:
        return 0, False
    if earlier is not None and log.application_version(earlier_copy) is None:
        for name in earlier.attempts:
            data_files.remove_copy(table.path, name)
    return log.version, arrow_writer.accepts(log, table, rewrites=True)


def kept(table: TargetTable, plan: CopyPlan, copy: str) -> dict[int, list[data_files.Action]]:
    """The chunks that earlier attempts of the copy have finished; nothing, if the table has become Spark's to write."""
    log = arrow_writer.log_of(table.path)
    if log is None or not arrow_writer.accepts(log, table, rewrites=True):
        return {}
    found = copy_chunks.committed(log, copy, plan.version)
    # Another process with a copy of this node's directory may have kept chunks under this id, read under its own snapshot.
    return {chunk: files for chunk, (attempt, files) in found.items() if attempt in plan.attempts}


def copy(session: Any, source: CopySource, table: TargetTable, record: Commit, done: Any, plan: CopyPlan) -> None:
    """Copy the table in one commit, which replaces whatever it holds, keeping each chunk as it is finished.

    `done` is a Spark accumulator that counts the rows of finished ranges.  Raises what Spark raises; a failed range fails the job.
    """
    context = session.sparkContext
    parts = ranges(plan.edges)
    if context.master.startswith("local"):
        log = arrow_writer.log_of(table.path)
        if log is not None:
            table, definition = for_copy(log, table)
            _copy_directly(context, source, log, table, record, done, plan, definition)
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
    arrow_writer.require_no_copy(table, record)
    # An append to a table without files is the same, and has no old files to look for.
    other_columns = not fits(table)
    mode = "overwrite" if has_files(table.path) or other_columns else "append"
    frame.write.format("delta").mode(mode).options(
        overwriteSchema=str(other_columns).lower(),
        txnAppId=record.app_id,
        txnVersion=str(int(record.last)),
        userMetadata=record.user_metadata,
    ).save(table.path)


def copy_here(source: CopySource, table: TargetTable, record: Commit, plan: CopyPlan, cut: Cut) -> int | None:
    """`copy` of a small table without a job; gives the number of rows, or None, with nothing done, where it takes Spark.

    `cut` breaks it off.  Raises psycopg.Error, InvalidValue and what the commit raises.
    """
    if source.bytes >= LEAST_JOB_BYTES or len(plan.edges) > 1:
        return None
    log = arrow_writer.log_of(table.path)
    if log is None:
        return None
    table, definition = for_copy(log, table)
    name = plan.attempts[-1]
    for earlier in plan.attempts[:-1]:
        data_files.remove_copy(table.path, earlier)
    (part,) = ranges(plan.edges)
    with _cleared(log, table, name):
        added = data_files.write(table, _whole_rows(source, part, table, cut), name=name)
        arrow_writer.commit_copy(log, table, added, record, definition)
    return sum(arrow_writer.row_count(file) for file in added)


def _copy_directly(
    context: Any,
    source: CopySource,
    log: TableLog,
    table: TargetTable,
    record: Commit,
    done: Any,
    plan: CopyPlan,
    definition: Sequence[data_files.Action],
) -> None:
    """The tasks write the data files; here they are committed.  When the job fails, what no commit names is removed."""
    from tablesync.finished_chunks import Landing  # pyspark: a second that a daemon without a copy does not spend

    name = plan.attempts[-1]
    parts = ranges(plan.edges)
    # Columns that the copy's commit maps anew have other names in the next attempt.
    keeps = plan.fingerprint is not None and len(parts) > 1 and not (definition and table.mapped)
    finished = kept(table, plan, record.app_id) if keeps else {}
    for files in finished.values():
        done.add(sum(arrow_writer.row_count(file) for file in files))
    for earlier in plan.attempts[:-1]:
        data_files.remove_copy(table.path, earlier, but=_paths(finished))
    landing = Landing()
    landed = context.accumulator([], landing)

    def write(index: int) -> None:
        def rows() -> Iterator[Any]:
            for part in _whole_rows(source, parts[index], table):
                done.add(part.num_rows)
                yield part

        landed.add([(index, data_files.write(table, rows(), number=index, name=name))])

    def keep() -> None:
        while (chunk := landing.queue.get()) is not None:
            if keeps:
                copy_chunks.commit(log, record.app_id, name, *chunk, plan.until)
            finished[chunk[0]] = chunk[1]
            faults.point(f"{len(finished)} chunks of {table.relation}")

    missing = [index for index in range(len(parts)) if index not in finished]
    with _cleared(log, table, name, finished if keeps else {}):
        with ThreadPoolExecutor(1, thread_name_prefix="chunks") as keeper:
            keeping = keeper.submit(keep)
            try:
                if missing:
                    context.parallelize(missing, len(missing)).foreach(write)
            finally:
                landing.queue.put(None)
            keeping.result()
        added = [file for _, files in sorted(finished.items()) for file in files]
        arrow_writer.commit_copy(log, table, added, record, definition)


@contextmanager
def _cleared(
    log: TableLog, table: TargetTable, name: str, kept: Mapping[int, Sequence[data_files.Action]] | None = None
) -> Iterator[None]:
    """When the body fails, the files of the attempt `name` that no commit has are removed, but for chunks that are `kept`."""
    try:
        yield
    except UnknownOutcome:
        raise
    except BaseException:
        # A commit may fail after it was made (its fsync): the files are the table's then.
        if not any(name in path for path in log.files):
            data_files.remove_copy(table.path, name, but=_paths(kept or {}))
        raise


def _whole_rows(source: CopySource, block_range: Range, table: TargetTable, cut: Cut | None = None) -> Iterator[Any]:
    """The rows of one range as tables with all of the target's columns."""
    schema = pa.schema([table.schema.field(column) for column in source.columns])
    for batch in read_range(source, block_range, schema, cut):
        columns = {
            field.name: batch.column(field.name)
            if field.name in source.columns
            else types.nulls(batch.num_rows, field.type)
            for field in table.schema
        }
        yield pa.table(columns)


def _paths(finished: Mapping[int, Sequence[data_files.Action]]) -> set[str]:
    return {file["add"]["path"] for files in finished.values() for file in files}


def _reader(
    source: CopySource, parts: list[Range], schema: pa.Schema, done: Any
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function that runs in the executors' Python workers."""

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                for rows in read_range(source, parts[index], schema):
                    done.add(rows.num_rows)
                    yield _as_spark_has_them(rows)

    return read


def _as_spark_has_them(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With variants as Spark's Arrow batches have them: the same two parts, in another order, and marked."""
    parts = [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, {"variant": "true"})]
    for place, field in enumerate(rows.schema):
        if field.type == VARIANT:
            column = rows.column(place)
            marked = pa.StructArray.from_arrays(
                [column.field("value"), column.field("metadata")], fields=parts, mask=column.is_null()
            )
            rows = rows.set_column(place, pa.field(field.name, marked.type, field.nullable), marked)
    return rows


def read_range(
    source: CopySource, block_range: Range, schema: pa.Schema, cut: Cut | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one range as record batches.  Raises psycopg.Error, and InvalidValue for a value that Delta can not hold.

    With a `cut` it may wait for a lock as long as that takes; a task soon raises psycopg's LockNotAvailable.
    """
    with session(source) as connection, cut.watching(connection) if cut is not None else nullcontext():
        if cut is None:
            connection.execute(f"SET lock_timeout = '{_PATIENCE}'")
        connection.execute(BEGIN)
        connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(source.snapshot)}".encode())
        if source.file:
            _require_file(connection, source)
        for rows in read(connection, source, statement(source, block_range), schema):
            yield rows
            faults.point(f"copying {source.schema}.{source.name}")
        connection.execute("COMMIT")


def _require_file(connection: Any, source: CopySource) -> None:
    """The table is the one that was planned for, and is not rewritten until the transaction ends."""
    connection.execute(lock_sql(source.schema, source.name).encode())
    ((file,),) = connection.execute(file_sql(source.oid).encode()).fetchall()
    if file != source.file:
        raise NotInPrerequisiteState(
            f'table "{source.schema}.{source.name}" was rewritten or truncated while it was copied',
            detail="Its rows have moved since the copy began.",
        )


def session(source: CopySource) -> Any:
    """A psycopg connection to the publisher, with the session parameters of every other.  Raises ConnectionFailure."""
    import psycopg

    parse_conninfo(source.conninfo)  # psycopg's own errors would quote it
    try:
        connection = psycopg.connect(
            source.conninfo, autocommit=True, application_name=source.application_name, client_encoding="UTF8"
        )
    except psycopg.Error as error:
        message, detail, hint = split_report(str(error).removeprefix("connection failed: "))
        # Not from it: what stands in its frames is the connection string.
        raise ConnectionFailure(f"could not connect to the publisher: {message}", detail=detail, hint=hint) from None
    try:
        connection.execute(session_settings_sql(connection.info.server_version).encode())
    except BaseException:
        connection.close()
        raise
    return connection


def read(connection: Any, source: CopySource, copy_statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows that a COPY statement gives, some megabytes at a time.  Raises as read_range does."""
    from pubsub.protocol.copytext import InvalidCopiedField, parse_copy

    try:
        yield from _batches(connection.pgconn, copy_statement, schema, parse_copy)
    except InvalidCopiedField as error:
        raise InvalidValue(
            f'column "{error.column}" of table "{source.schema}.{source.name}": {error.message} '
            f"(key {error.key}, copied at {source.lsn})",
            sqlstate=error.sqlstate,
        ) from error


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

    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as directory:
        for package in ("pubsub", "apply", "tablesync"):
            shutil.copytree(root / package, Path(directory) / "code" / package)
        context.addPyFile(shutil.make_archive(str(Path(directory) / "pubsub-code"), "zip", Path(directory) / "code"))
