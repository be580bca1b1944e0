"""Two daemons on one table: a commit worked out for another state of the table is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from apply.conflicts import Conflicts
from apply.pipeline.commit import commit_table
from apply.staging.destination import Destination
from apply.staging.staged_table import StagedTable
from catalog.records import CopyPlan
from pubsub.delta import alter
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files.data_files import write_table
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Request
from pubsub.delta.table import Commit, TargetTable, application_id, is_of_later_copy
from pubsub.delta.writers import arrow_writer, copy_chunks
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import Overtaken, SerializationFailure
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tablesync import copyjob
from tests.support.json_transactions import JsonTransactions

APP = application_id("node", 1, 2, 1)
COPIED_AGAIN = application_id("node", 1, 2, 2)


class Engine:
    async def run_without_spark(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


class Worker:
    """What a daemon knows of the table: where it is, and what it has staged."""

    def __init__(self, table: TargetTable, app_id: str = APP) -> None:
        self.table = table
        self.app_id = app_id
        self.log = TableLog(table.path, JsonTransactions())
        self.log.refresh()
        self.version = delta.committed_lsn(table.path, app_id) or INVALID_LSN

    def stage(self, first: int, last: int, *ids: int, after: int | None = None) -> StagedTable:
        added: Any = write_table(self.table, pa.table({"id": pa.array(ids, pa.int64())}))
        staged = DirectStaged(self.table, self.log, added, None, None, False, len(ids))
        after = self.version if after is None else after
        destination = Destination(2, self.table, self.app_id, Lsn(after))
        record = Commit(self.app_id, Lsn(first), Lsn(last))
        return StagedTable(destination, staged, record, len(ids), 0, 0, Conflicts())

    def commit(self, table: StagedTable) -> None:
        engine: Any = Engine()
        try:
            asyncio.run(commit_table(engine, table, self.version))
        finally:
            arrow_writer.discard(table.staged)  # type: ignore[arg-type]
        self.version = table.commit.last

    def copy(self, lsn: int, *ids: int) -> None:
        added = write_table(self.table, pa.table({"id": pa.array(ids, pa.int64())}))
        arrow_writer.commit_copy(self.log, self.table, added, Commit(self.app_id, Lsn(lsn), Lsn(lsn)))
        self.version = Lsn(lsn)


@pytest.fixture
def table(tmp_path: Path) -> TargetTable:
    table = TargetTable(str(tmp_path / "t"), pa.schema([pa.field("id", pa.int64())]), (), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    return table


def ids(table: TargetTable) -> list[int]:
    result = QueryBuilder().register("t", DeltaTable(table.path)).execute("SELECT id FROM t").read_all()
    return sorted(pa.table(result)["id"].to_pylist())


def no_orphans(table: TargetTable) -> None:
    """Every file was committed at some time."""
    commits = [path.read_text() for path in Path(table.path).glob("_delta_log/*.json")]
    for path in (path for pattern in ("*.parquet", "*.bin") for path in Path(table.path).glob(pattern)):
        assert any(path.name in commit for commit in commits), path


def test_a_batch_that_another_daemon_has_committed_in_part(table: TargetTable) -> None:
    """Transactions at 20, 25 and 30, a row each: A stages them in one batch, B commits the first alone."""
    a, b = Worker(table), Worker(table)
    late = a.stage(20, 30, 1, 2, 3)
    b.commit(b.stage(20, 20, 1))
    with pytest.raises(Overtaken, match="another process") as refused:
        a.commit(late)
    assert "0/14" in (refused.value.detail or "")
    assert ids(table) == [1]
    no_orphans(table)
    # A begins again from what the table holds.
    a = Worker(table)
    a.commit(a.stage(25, 30, 2, 3))
    assert ids(table) == [1, 2, 3]
    # And then B is late, by more than it has staged.
    with pytest.raises(Overtaken):
        b.commit(b.stage(25, 25, 2))
    assert ids(table) == [1, 2, 3]
    no_orphans(table)


def test_a_batch_that_is_there_already_is_done(table: TargetTable) -> None:
    """As after a commit whose outcome was not known, and as from a daemon whose batch ended at the same transaction."""
    a, b = Worker(table), Worker(table)
    late = a.stage(20, 30, 1, 2)
    b.commit(b.stage(20, 30, 1, 2))
    a.commit(late)
    assert ids(table) == [1, 2]
    no_orphans(table)
    a.commit(a.stage(40, 40, 3))
    assert ids(table) == [1, 2, 3]


def test_a_version_that_was_read_after_the_batch_was_staged(table: TargetTable) -> None:
    """A table that its sync worker hands over is looked at when the first batch of it is staged already."""
    a, b = Worker(table), Worker(table)
    b.commit(b.stage(20, 20, 1))
    late = a.stage(20, 30, 1, 2, 3, after=10)
    a.version = Lsn(20)
    with pytest.raises(Overtaken):
        a.commit(late)
    assert ids(table) == [1]
    no_orphans(table)
    # What it holds of the catch-up is before the batch.
    a.commit(a.stage(25, 30, 2, 3, after=22))
    assert ids(table) == [1, 2, 3]


def test_a_copy_of_another_daemon(table: TargetTable) -> None:
    a, b = Worker(table), Worker(table)
    b.copy(20, 1, 2)
    b.commit(b.stage(30, 30, 3))
    for lsn in (10, 40):
        with pytest.raises(Overtaken):
            a.copy(lsn, 1)
    # A batch for the table as a copy left it that is no more.
    with pytest.raises(Overtaken):
        a.commit(a.stage(25, 40, 3))
    assert ids(table) == [1, 2, 3]


def test_a_copy_that_a_later_one_has_replaced(table: TargetTable) -> None:
    a = Worker(table)
    b = Worker(table, COPIED_AGAIN)
    b.copy(20, 1, 2)
    with pytest.raises(Overtaken, match="another process"):
        a.copy(15, 1)
    with pytest.raises(Overtaken):
        a.commit(a.stage(15, 16, 1))
    assert ids(table) == [1, 2]


def test_chunks_of_another_daemon_are_not_taken(table: TargetTable) -> None:
    """They were read under another snapshot, though the plan and the copy's id are the same."""
    table = replace(table, schema=pa.schema([pa.field("id", pa.int64(), False)]), key=("id",))
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    plan = CopyPlan(1, Lsn(10), Lsn(10), log.version, (0, 5, 9), "", "f", ("ours", "ours again"))
    for chunk, attempt in enumerate(("ours", "theirs", "ours again")):
        added = write_table(table, pa.table({"id": pa.array([chunk], pa.int64())}))
        copy_chunks.commit(log, APP, attempt, chunk, added, Lsn(10))
    assert sorted(copyjob.kept(table, plan, APP)) == [0, 2]


def test_an_alteration_of_another_daemon(table: TargetTable) -> None:
    a, b = Worker(table), Worker(table)
    b.commit(b.stage(20, 20, 1))
    kind = pa.int64()
    change = Alteration((), "public.t", add=((pa.field("c", kind), pa.scalar(7, kind)),))
    with pytest.raises(Overtaken):
        alter.alter(JsonTransactions(), table, change, {}, Commit(APP, Lsn(30), Lsn(30), previous=a.version or None))
    altered = alter.alter(JsonTransactions(), table, change, {}, Commit(APP, Lsn(30), Lsn(30), previous=Lsn(20)))
    assert altered.schema.names == ["id", "c"]
    # The same again, by one that has not seen it: nothing of the rows has changed.
    with pytest.raises(Overtaken) as refused:
        alter.alter(JsonTransactions(), table, change, {}, Commit(APP, Lsn(30), Lsn(30), previous=Lsn(20)))
    assert refused.value.detail == "Its columns were altered."
    assert [field.name for field in DeltaTable(table.path).schema().fields] == ["id", "c"]
    no_orphans(table)


def test_files_are_merged_beside_another_daemon_s_batches(table: TargetTable) -> None:
    a = Worker(table)
    for number in (1, 2):
        a.commit(a.stage(number * 10, number * 10, number))
    one, b = Worker(table), Worker(table)

    def load() -> TargetTable:
        b.commit(b.stage(30, 30, 3))
        return table

    assert rewrite(one.log, load, lambda files: files)
    assert ids(table) == [1, 2, 3]
    assert len(DeltaTable(table.path).file_uris()) == 2
    no_orphans(table)


def test_which_copy_is_later() -> None:
    assert is_of_later_copy(COPIED_AGAIN, APP)
    assert is_of_later_copy(copy_chunks.application_id(application_id("node", 1, 2, 10), 3), COPIED_AGAIN)
    assert not is_of_later_copy(APP, APP)
    assert not is_of_later_copy(copy_chunks.application_id(APP, 7), APP)
    assert not is_of_later_copy(APP, COPIED_AGAIN)
    assert not is_of_later_copy(application_id("node", 1, 22, 5), APP)
    assert not is_of_later_copy("others", APP)
    assert not is_of_later_copy(APP, "app")


class Refusing(JsonTransactions):
    """Delta that refuses the first commits, as for a table of which it still knows an earlier one."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def commit(self, request: Request) -> str:
        self.refusals -= 1
        if self.refusals >= 0:
            raise Conflict("the table is not at version -1")
        return super().commit(request)


def test_a_table_that_is_refused_at_first_is_created(tmp_path: Path) -> None:
    """It was taken for one that another had made: a table whose directory was deleted then stopped alone once more."""
    table = TargetTable(str(tmp_path / "a"), pa.schema([pa.field("id", pa.int64())]), (), "public.a")
    assert delta.create_empty(Refusing(1), table, {})
    assert delta.exists(table.path)
    other = TargetTable(str(tmp_path / "b"), table.schema, (), "public.b")
    with pytest.raises(SerializationFailure):
        delta.create_empty(Refusing(100), other, {})
