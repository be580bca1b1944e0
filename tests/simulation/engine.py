"""A model of Spark: a JVM that commits, runs a copy's tasks one after the other, and carries out the statements of a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
from pyspark import TaskContext

from pubsub.delta.files import data_files, file_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Operation, Request, transaction
from pubsub.delta.places import Place, open_parquet
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import Commit
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.spark_writer import Staged
from tests.simulation.lake import Lake, LakeTransactions
from tests.simulation.life import Life
from tests.support.memory import apply_folded

PARALLELISM = 3


class _Accumulator:
    """A Spark accumulator."""

    def __init__(self, value: Any, param: Any = None) -> None:
        self.value, self._param = value, param

    def add(self, what: Any) -> None:
        if self._param is None:
            self.value += what
        else:
            self.value = self._param.addInPlace(self.value, what)


class _Parallel:
    """An RDD of the chunks' numbers; a task may fail, which fails the job."""

    def __init__(self, context: _Context, items: Iterable[int]) -> None:
        self._context, self._life, self._items = context, context.life, list(items)

    def foreach(self, task: Callable[[int], None]) -> None:
        told = TaskContext._getOrCreate()
        told._localProperties = self._context.properties
        told._attemptNumber = 0
        try:
            self._run(task)
        finally:
            TaskContext._taskContext = None

    def _run(self, task: Callable[[int], None]) -> None:
        chance = self._life.chance
        for item in self._items:
            self._life.check()
            if chance.trouble and chance.random.random() < 0.1:
                chance.tell("a task of a copy is locked out")
                raise RuntimeError("a task said: psycopg.errors.LockNotAvailable: lock timeout")
            chance.fail("a task of a copy")
            task(item)


class _Context:
    defaultParallelism = PARALLELISM  # noqa: N815
    master = "local[2]"

    def __init__(self, life: Life) -> None:
        self.life = life
        self.properties: dict[str, str] = {}

    def accumulator(self, value: Any, param: Any = None) -> _Accumulator:
        return _Accumulator(value, param)

    def parallelize(self, items: Iterable[int], _slices: int) -> _Parallel:
        return _Parallel(self, items)

    def setJobGroup(self, *_: Any, **__: Any) -> None: ...

    def setLocalProperty(self, name: str, value: str | None) -> None:
        self.properties.pop(name, None)
        if value is not None:
            self.properties[name] = value


class SparkSession:
    def __init__(self, life: Life, lake: Lake) -> None:
        self.sparkContext = _Context(life)
        self.life, self.lake = life, lake


class _Spark:
    """See pubsub.delta.spark.spark_session.Spark."""

    local = True
    jvm_pid = 1

    def __init__(self, life: Life, lake: Lake) -> None:
        self._life, self._lake = life, lake
        self.session = SparkSession(life, lake)

    def alive(self) -> bool:
        return True

    def running(self) -> SparkSession:
        return self.session

    def cancel(self, group: str) -> None: ...

    def kill_if_hung(self) -> None: ...

    def stop(self) -> None: ...


class SimulatedEngine(Engine):
    """The node's engine, in whose threads nothing waits; `fence` waits for the commits of JVMs whose daemons are dead."""

    def __init__(self, life: Life, lake: Lake) -> None:
        super().__init__(_Spark(life, lake))  # type: ignore[arg-type]
        self.transactions = LakeTransactions(lake, life)  # type: ignore[assignment]
        self._life, self._lake = life, lake

    async def fence(self) -> None:
        await self._life.wait()
        while self._lake.pending:
            await asyncio.sleep(0.1)
            self._life.check()


@dataclass(frozen=True)
class _Folded:
    images: pa.Table
    masked: pa.Table
    deleted_keys: pa.Table
    removed: pa.Table


@contextmanager
def at_version(spark: SparkSession, app_id: str, version: int) -> Iterator[None]:
    """Stand in for jvm_transactions.at_version: `write_statement` compares the versions itself."""
    yield


def write_statement(spark: SparkSession, staged: Staged, record: Commit) -> None:
    """Stand in for spark_writer._commit: one commit that has the batch's rows, in place of all files."""
    spark.life.check()
    log = TableLog(staged.table.path)
    log.refresh()
    if (log.application_version(record.app_id) or 0) != (record.previous or 0):
        raise RuntimeError("pubsub.VersionCheck: the table holds another version")
    table = file_rows.laid_out(log, staged.table)
    names = table.schema.names
    rows = Counter(
        tuple(row[name] for name in names)
        for part in file_rows.live_rows(log, list(log.files.values()), table)
        for row in part.to_pylist()
    )
    folded = _Folded(*map(_staged, (staged.images, staged.masked, staged.deleted_keys, staged.removed)))
    after = list(apply_folded(table, folded, staged.replace_all, rows).elements())  # type: ignore[arg-type]
    columns = [[row[place] for row in after] for place in range(len(names))]
    added = data_files.write(table, [pa.table(columns, schema=table.schema)])
    removed = [arrow_writer.remove_action(file, 0) for file in log.files.values()]
    actions = [*added, *removed, transaction(record.app_id, int(record.last))]
    spark.life.writes("before a Spark statement commits")
    spark.lake.meanwhile(table.path)
    request = Request(table.path, log.version, log.metadata["id"], actions, Operation.WRITE, record.user_metadata)
    fate = spark.lake.next_fate()
    if fate in ("refused", "failed", "unknown, not made"):
        raise Conflict("another writer was first") if fate == "refused" else RuntimeError(f"Spark {fate}")
    spark.lake.commit(request, spark.life.name)
    spark.life.writes("after a Spark statement commits")
    if fate is not None:
        raise RuntimeError("the connection to the JVM was lost")


def _staged(path: Place | None) -> pa.Table:
    if path is None:
        return pa.table({})
    with open_parquet(path) as file:
        found: pa.Table = file.read()
        return found


class InlineThreads:
    """Stands in for ThreadPoolExecutor where one thread waits for another: its work is done when its result is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._work: list[_Later] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for work in self._work:
            work.done()

    def submit(self, function: Callable[..., Any], *args: Any) -> _Later:
        self._work.append(_Later(lambda: function(*args)))
        return self._work[-1]


class _Later:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._is_done = work, False
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> None:
        if not self._is_done:
            self._is_done = True
            try:
                self._result = self._work()
            except BaseException as error:
                self._error = error

    def result(self) -> Any:
        self.done()
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self) -> BaseException | None:
        self.done()
        return self._error
