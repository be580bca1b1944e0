"""Copy a table initially by a Spark job: each task reads one ctid range by COPY under the exported snapshot, as Arrow.

A small table is read in one of the daemon's threads instead, because a job would take longer than reading its rows.

    driver                   executor's Python worker (one per task)
    ranges of blocks ──────► connect, SET TRANSACTION SNAPSHOT, COPY … TO STDOUT (FORMAT csv)
                             some megabytes of rows ─► pyarrow.csv ─► record batches ─► a data file of the table
    the chunk is kept ◄───── its `add`, as each task ends
    one commit of all chunks

This applies if the table is plain (pubsub.delta.writers.arrow_writer); the executors of a cluster must see its directory.
The copy's next attempt does not read a kept chunk again (pubsub.delta.writers.copy_chunks).  Otherwise the record batches go
back to Spark, which writes the table.  Blocks; runs in one of the engine's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from pubsub import faults, object_stores
from pubsub.delta.alter import for_copy
from pubsub.delta.files import constraints, data_files, partitions
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Transactions, UnknownOutcome
from pubsub.delta.sources import part_of
from pubsub.delta.table import (
    Commit,
    TargetTable,
    exists,
    filled_columns,
    fits,
    generation_of,
    has_files,
    partition_fields,
)
from pubsub.delta.writers import arrow_writer, copy_chunks
from pubsub.delta.writers.choose_writer import refuse_statement
from pubsub.processor_time import spent_on
from pubsub.protocol.column_types import is_nested, spark_ddl
from pubsub.protocol.type_contract import VARIANT
from pubsub.publisher.copy_out import Cut
from pubsub.sql.identifiers import quote_for_spark as quote
from tablesync import chunk_reader, history_copy, task_secrets
from tablesync.choose_copier import Range, ranges, takes_job
from tablesync.chunk_reader import CopySource
from tablesync.task_secrets import TaskSecrets

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.sql import SparkSession

    from catalog.records import CopyPlan


@dataclass(frozen=True, slots=True)
class _InTasks:
    """What a closure holds of a source: neither its connection string nor the keys of masks and of stores, which come with each
    task."""

    source: CopySource
    secrets: TaskSecrets

    def opened(self) -> CopySource:
        """Return the source, in a task, which reaches the stores then."""
        known = self.secrets.read()
        object_stores.configure(known["stores"])
        return replace(self.source, conninfo=known["conninfo"], mask_key=bytes.fromhex(known["mask_key"]))


def parallelism(session: SparkSession) -> int:
    """Return how many tasks run in parallel."""
    return int(session.sparkContext.defaultParallelism)


def was_locked(error: Exception) -> bool:
    """Return whether a job failed because a task met a lock on the publisher; Spark passes on the error's text only."""
    return "psycopg.errors.LockNotAvailable" in str(error)


def last_generation(path: str, copy: str) -> int:
    """Return the greatest generation of a copy that the table's log names, 0 for none; `copy`: any copy's application id.

    It is greater than the catalog's if that was restored from a backup.
    """
    if not exists(path):
        return 0
    log = arrow_writer.writable_log(path)
    return 0 if log is None else max((generation_of(other, copy) for other in log.applications), default=0)


def begin(table: TargetTable, earlier: CopyPlan | None, earlier_copy: str) -> tuple[int, bool]:
    """Prepare for a new copy; return the table's version, and whether the copy's chunks can be kept.

    They can if the table's rows can be changed without Spark, since the window then changes rows of kept chunks.
    Removes the files of the `earlier` copy's attempts, whose application id is `earlier_copy`, if it was never
    committed.  Raises FeatureNotSupported for a table with soft deletes, or of several sources, that only Spark can write.
    """
    log = arrow_writer.writable_log(table.path)
    if log is None or not arrow_writer.accepts(log, table, rewrites=bool(table.key)):
        refuse_statement(table)
    if log is None:
        return 0, False
    if earlier is not None and log.application_version(earlier_copy) is None:
        for name in earlier.attempts:
            data_files.remove_copy(table.path, name)
    return log.version, arrow_writer.accepts(log, table, rewrites=True)


def kept(table: TargetTable, plan: CopyPlan, copy: str) -> dict[int, list[Action]]:
    """Return the chunks that earlier attempts of the copy have finished; none if only Spark can write the table now."""
    log = arrow_writer.writable_log(table.path)
    if log is None or not arrow_writer.accepts(log, table, rewrites=True):
        return {}
    found = copy_chunks.committed(log, copy, plan.version)
    # A process on a copy of this node's directory may have kept chunks under this id, read under another snapshot.
    return {chunk: files for chunk, (attempt, files) in found.items() if attempt in plan.attempts}


def copy(
    session: SparkSession,
    transactions: Transactions,
    source: CopySource,
    table: TargetTable,
    record: Commit,
    done: Accumulator[int],
    plan: CopyPlan,
) -> None:
    """Copy the table in one commit that replaces all its rows; keep each chunk when it is finished.

    `done` counts the rows of finished ranges.  Raises Spark's errors; a failed range fails the job.  Raises InvalidValue
    for a row that breaks a constraint of the Delta table.
    """
    context = session.sparkContext
    log = arrow_writer.writable_log(table.path, transactions)
    history_copy.prepare(log, table, record.last)
    secrets = {
        "conninfo": source.conninfo,
        "mask_key": source.mask_key.hex(),
        "stores": object_stores.configured(),
    }
    with task_secrets.sent(context, secrets) as given:
        at_once = min(parallelism(session), len(ranges(plan.edges)))
        held = _InTasks(replace(source, conninfo="", mask_key=b"", max_rate=source.max_rate / at_once), given)
        if log is None:
            _copy_by_statement(session, held, table, record, done, plan)
        else:
            table, definition = for_copy(log, table)
            _copy_directly(context, held, log, table, record, done, plan, definition)


def _copy_by_statement(
    session: SparkSession,
    held: _InTasks,
    table: TargetTable,
    record: Commit,
    done: Accumulator[int],
    plan: CopyPlan,
) -> None:
    """Let Spark write what tasks read, and commit it."""
    source, parts = held.source, ranges(plan.edges)
    schema = pa.schema([table.schema.field(name) for name in source.table.names])
    ddl = ", ".join(f"{quote(f.name)} {spark_ddl(f.type)}" for f in schema)
    other_columns = not fits(table)
    keeps = history_copy.keeps_rows(table)
    partitioned_by = partition_fields(table.path)
    if other_columns and not keeps:
        # The table gets exactly the publisher's columns.
        partitioned_by = [table.schema.field(one.name) for one in partitioned_by if one.name in table.schema.names]
        partitioned_by = [one for one in partitioned_by if not is_nested(one.type)]
    divided = replace(table, partitioned_by=tuple(field.name for field in partitioned_by))
    read = _reader(held, parts, schema, divided, done)
    frame = session.range(0, len(parts), 1, len(parts)).mapInArrow(read, ddl)
    made = filled_columns(table.path)
    # Spark fills other columns that the frame lacks, but not partition columns.
    needed = [*table.schema, *(() if other_columns else partitioned_by)]
    extra = {field.name: field for field in needed if field.name not in source.table.names and field.name not in made}
    if extra:
        same = history_copy.same_values(table, record.last, plan.generation)
        frame = frame.selectExpr("*", *(history_copy.literal(same.get(name), f) for name, f in extra.items()))
    arrow_writer.require_no_copy(table, record)
    # On a table without files an append does the same, without searching for old files.
    mode = "overwrite" if has_files(table.path) or other_columns else "append"
    if keeps:
        mode = "append"
        before = history_copy.before_frame(session, table, record.last, plan.generation)
        frame = frame.unionByName(before, allowMissingColumns=True)
    writer = frame.write.format("delta").mode(mode)
    writer = writer.options(
        **{"mergeSchema" if keeps else "overwriteSchema": str(other_columns).lower()},
        txnAppId=record.app_id,
        txnVersion=str(int(record.last)),
        userMetadata=record.user_metadata,
    )
    if other_columns and not keeps and partitioned_by:
        writer = writer.partitionBy(*divided.partitioned_by)  # without it the new schema would have no partitions
    try:
        writer.save(table.path)
    except Exception as error:
        violation = constraints.violated(error, table)
        if violation is None:
            raise
        raise violation from error


@spent_on("copying", whole=True)
def copy_in_thread(
    transactions: Transactions, source: CopySource, table: TargetTable, record: Commit, plan: CopyPlan, cut: Cut
) -> int | None:
    """Copy a small table without a Spark job; return the number of rows, or None, having done nothing, if it needs one.

    `cut` interrupts it.  Raises psycopg.Error, InvalidValue, and the commit's errors.
    """
    if takes_job(source.bytes, len(plan.edges)):
        return None
    log = arrow_writer.writable_log(table.path, transactions)
    if log is None:
        return None
    history_copy.prepare(log, table, record.last)
    table, definition = for_copy(log, table)
    name = plan.attempts[-1]
    for earlier in plan.attempts[:-1]:
        data_files.remove_copy(table.path, earlier)
    (part,) = ranges(plan.edges)
    with _cleared(log, table, name):
        same = history_copy.same_values(table, record.last, plan.generation)
        added = data_files.write(table, chunk_reader.whole_rows(source, part, table, cut, same), name=name)
        begun = history_copy.begun_anew(log, table, record.last, plan.generation, name, 1)
        arrow_writer.commit_copy(log, table, [*begun, *added], record, definition)
    return sum(arrow_writer.row_count(file) for file in added)


def _copy_directly(
    context: SparkContext,
    held: _InTasks,
    log: TableLog,
    table: TargetTable,
    record: Commit,
    done: Accumulator[int],
    plan: CopyPlan,
    definition: Sequence[Action],
) -> None:
    """Let tasks write data files, and commit them.  If the job fails, remove the files that no commit names."""
    from tablesync.chunk_accumulator import Landing  # imports pyspark, a second that a daemon without a copy can save

    name = plan.attempts[-1]
    parts = ranges(plan.edges)
    # If the copy's commit maps columns anew, the next attempt gives them other physical names.
    keeps = plan.fingerprint is not None and len(parts) > 1 and not (definition and table.mapped)
    finished = kept(table, plan, record.app_id) if keeps else {}
    for files in finished.values():
        done.add(sum(arrow_writer.row_count(file) for file in files))
    for earlier in plan.attempts[:-1]:
        data_files.remove_copy(table.path, earlier, but=_paths(finished))
    same = history_copy.same_values(table, record.last, plan.generation)
    landing = Landing()
    landed = context.accumulator([], landing)

    def write(index: int) -> None:
        source = held.opened()

        def counted(part: pa.Table) -> pa.Table:
            done.add(part.num_rows)
            return part

        rows = map(counted, chunk_reader.whole_rows(source, parts[index], table, same=same))
        landed.add([(index, data_files.write(table, rows, number=index, name=_name_of_attempt(name)))])

    def keep() -> None:
        while (chunk := landing.queue.get()) is not None:
            if not _is_local(context):
                copy_chunks.require_whole(log, chunk[1])
            # The last one is followed at once by the copy's own commit.
            if keeps and len(finished) + 1 < len(parts):
                copy_chunks.commit(log, record.app_id, name, *chunk, plan.until, part=part_of(table))
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
        begun = history_copy.begun_anew(log, table, record.last, plan.generation, name, len(parts))
        arrow_writer.commit_copy(log, table, [*begun, *added], record, definition)
    if not _is_local(context):
        # What executors left that were lost.
        data_files.remove_copy(table.path, name, but=_paths({**finished, len(parts): begun}))


def _is_local(context: SparkContext) -> bool:
    return context.master is not None and context.master.startswith("local")


def _name_of_attempt(name: str) -> str:
    """Return the name for the files of a task that Spark may have begun before, on an executor that was lost."""
    from pyspark import TaskContext

    task = TaskContext.get()
    again = task.attemptNumber() if task is not None else 0
    return f"{name}-{again}" if again else name


@contextmanager
def _cleared(
    log: TableLog, table: TargetTable, name: str, kept: Mapping[int, Sequence[Action]] | None = None
) -> Iterator[None]:
    """If the body fails, remove the uncommitted files of the attempt `name`, except those of `kept` chunks."""
    try:
        yield
    except UnknownOutcome:
        raise
    except BaseException:
        # A commit may fail after it was made, in its fsync; then the files belong to the table.
        if not any(name in path for path in log.files):
            data_files.remove_copy(table.path, name, but=_paths(kept or {}))
        raise


def _paths(finished: Mapping[int, Sequence[Action]]) -> set[str]:
    return {file["add"]["path"] for files in finished.values() for file in files}


def _reader(
    held: _InTasks, parts: list[Range], schema: pa.Schema, table: TargetTable, done: Accumulator[int]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that runs in the executors' Python workers."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        source = held.opened()
        for batch in batches:
            for index in batch.column(0).to_pylist():
                for rows in chunk_reader.read_range(source, parts[index], schema):
                    partitions.require_storable(table, rows)
                    done.add(rows.num_rows)
                    yield _as_spark_has_them(rows)

    return read


def _as_spark_has_them(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert variants to the form of Spark's Arrow batches: the same two parts in another order, and marked."""
    parts = [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, {"variant": "true"})]
    for place, field in enumerate(rows.schema):
        if field.type == VARIANT:
            column = rows.column(place)
            marked = pa.StructArray.from_arrays(
                [column.field("value"), column.field("metadata")], fields=parts, mask=column.is_null()
            )
            rows = rows.set_column(place, pa.field(field.name, marked.type, field.nullable), marked)
    return rows
