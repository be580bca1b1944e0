"""Commits that came too late, or were lost: the table is no longer where a batch began, or where it ended.

Another daemon's commit comes after this one's look at the table and before its statement's transaction begins, as when
the process was stopped there.  Another program's store renames its commit over ours.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from py4j.protocol import Py4JJavaError

from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log.transactions import Conflict, Request
from pubsub.delta.places import place
from pubsub.delta.spark.jvm_transactions import DeltaTransactions, at_version, is_refusal
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import spark_writer
from pubsub.delta.writers.changeset import COUNT_COLUMN
from pubsub.delta.writers.spark_writer import Staged
from pubsub.errors import DataCorrupted, Overtaken
from pubsub.protocol.lsn import Lsn
from tests.scenarios.test_022_delta_transactions import Table as OfFiles

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64())])
APP = "pubsub/node/1/16384/3"


def rows(path: str) -> list[tuple[int, ...]]:
    found = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT id, n FROM t ORDER BY id, n").read_all()
    return [tuple(row.values()) for row in pa.table(found).to_pylist()]


def record(before: int, last: int, app_id: str = APP) -> Commit:
    return Commit(app_id, Lsn(last), Lsn(last), previous=Lsn(before) or None)


class Table:
    """A partitioned table, which only Spark's statements write, with the rows 1 to 3."""

    def __init__(self, spark: Spark, path: Path) -> None:
        self.spark = spark.session
        self.spark.sql(
            f"CREATE TABLE delta.`{path}` (id BIGINT, n BIGINT) USING delta PARTITIONED BY (n) "
            "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
        )
        self.target = TargetTable(str(path), COLUMNS, ("id",), "public.t")
        self.stages = path.parent
        spark_writer.commit(self.spark, self.append(1, 2, 3), record(0, 10))

    def append(self, *ids: int) -> Staged:
        return self._staged(images=self._file(pa.table({"id": [*ids], "n": [0] * len(ids)}, COLUMNS)))

    def change(self, one: int) -> Staged:
        keys = self._file(pa.table({"id": pa.array([one], pa.int64())}))
        return dataclasses.replace(self.append(one), deleted_keys=keys)

    def delete(self, one: int) -> Staged:
        return self._staged(deleted_keys=self._file(pa.table({"id": pa.array([one], pa.int64())})))

    def delete_row(self, one: int) -> Staged:
        gone = pa.table({"id": pa.array([one], pa.int64()), "n": pa.array([0], pa.int64()), COUNT_COLUMN: [1]})
        return self._staged(removed=self._file(gone))

    def replace(self, *ids: int) -> Staged:
        return dataclasses.replace(self.append(*ids), replace_all=True)

    def _file(self, content: pa.Table) -> Path:
        path = self.stages / f"staged-{len(list(self.stages.iterdir()))}.parquet"
        written = spark_writer._write(path, content)
        assert written is not None
        return written

    def _staged(self, **files: Any) -> Staged:
        nothing: dict[str, Any] = dict.fromkeys(("images", "masked", "deleted_keys", "removed", "key_range"))
        return Staged(self.target, self.stages, replace_all=False, rows=1, **{**nothing, **files})


@pytest.fixture(scope="module")
def table(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(spark, tmp_path_factory.mktemp("overtaken") / "t")


def late(monkeypatch: pytest.MonkeyPatch, other: Callable[[], None]) -> None:
    """Let `other` happen after the next commit's look at the table, before its statement."""
    commit = spark_writer._commit

    def stopped(*arguments: Any) -> None:
        monkeypatch.setattr(spark_writer, "_commit", commit)
        other()
        commit(*arguments)

    monkeypatch.setattr(spark_writer, "_commit", stopped)


@pytest.mark.full
@pytest.mark.parametrize("what", ["change", "append", "delete", "delete_row", "replace"])
def test_another_daemon_commits_just_before_the_statement(
    table: Table, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    held = int(DeltaTable(table.target.path).transaction_version(APP) or 0)
    batch: Staged = getattr(table, what)(1)
    late(
        monkeypatch,
        lambda: spark_writer.commit(table.spark, table.append(100 + held), record(held, held + 1)),
    )
    before = rows(table.target.path)
    with pytest.raises(Overtaken):
        spark_writer.commit(table.spark, batch, record(held, held + 5))
    assert rows(table.target.path) == sorted([*before, (100 + held, 0)])
    # The next one begins where the table is, in the same thread: nothing of the check is left.
    spark_writer.commit(table.spark, table.append(200 + held), record(held + 1, held + 2))
    assert rows(table.target.path) == sorted([*before, (100 + held, 0), (200 + held, 0)])


@pytest.mark.full
def test_a_later_copy_begins_just_before_the_statement(spark: Spark, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "t")
    own = record(10, 20)
    with pytest.MonkeyPatch.context() as patch:
        late(
            patch,
            lambda: spark_writer.commit(table.spark, table.replace(7), record(0, 30, "pubsub/node/1/16384/4")),
        )
        with pytest.raises(Overtaken):
            spark_writer.commit(table.spark, table.append(8), own)
    assert rows(table.target.path) == [(7, 0)]


def test_a_refusal_is_told_from_other_errors(spark: Spark, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "t")
    with pytest.raises(Exception, match="VersionCheck") as refused, at_version(spark.session, APP, 11):
        spark.session.sql(f"DELETE FROM delta.`{table.target.path}`")
    assert is_refusal(refused.value)
    with pytest.raises(Exception, match="nowhere") as other, at_version(spark.session, APP, 10):
        spark.session.sql(f"DELETE FROM delta.`{table.target.path}` WHERE nowhere = 1")
    assert not is_refusal(other.value)
    with at_version(spark.session, APP, 10):
        spark.session.sql(f"DELETE FROM delta.`{table.target.path}`")
    assert rows(table.target.path) == []


def rename_over(path: str) -> None:
    """Put another program's commit in place of the newest one, as a store does that looks and then renames."""
    newest = max((place(path) / "_delta_log").glob("*.json"))
    theirs = newest.with_suffix(".tmp")
    theirs.write_text('{"commitInfo":{"timestamp":1,"operation":"theirs","operationParameters":{}}}\n')
    os.replace(theirs, newest)


def test_a_statements_commit_that_another_program_replaced_is_made_again(
    spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(spark, tmp_path / "t")
    commit = spark_writer._commit

    def replaced(*arguments: Any) -> None:
        monkeypatch.setattr(spark_writer, "_commit", commit)
        commit(*arguments)
        rename_over(table.target.path)

    monkeypatch.setattr(spark_writer, "_commit", replaced)
    staged, own = table.append(4), record(10, 20)
    with pytest.raises(Conflict):
        spark_writer.commit(table.spark, staged, own)
    assert len(rows(table.target.path)) == 3
    spark_writer.commit(table.spark, staged, own)
    assert len(rows(table.target.path)) == 4
    # One that is replaced later is found before the next.
    rename_over(table.target.path)
    with pytest.raises(DataCorrupted, match="not the one that was written to") as lost:
        spark_writer.commit(table.spark, table.append(5), record(20, 30))
    assert "RESYNC" in (lost.value.hint or "")


def test_a_commit_of_our_files_that_another_program_replaced_is_made_again(
    spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = OfFiles(spark, tmp_path / "t")
    table.commit(0, 1, added=[1, 2])
    commit = DeltaTransactions.commit

    def replaced(self: DeltaTransactions, request: Request) -> str:
        monkeypatch.setattr(DeltaTransactions, "commit", commit)
        name = commit(self, request)
        rename_over(request.path)
        return name

    monkeypatch.setattr(DeltaTransactions, "commit", replaced)
    table.commit(1, 2, added=[3], deleted=[1])
    assert table.ids() == [2, 3]
    assert table.log.version == 3, "theirs, and ours after it"
    assert {row.id for row in spark.session.read.format("delta").load(table.target.path).collect()} == {2, 3}
    # One that is replaced later is found before the next.  The files that it named are not merged meanwhile.
    rename_over(table.target.path)
    with pytest.raises(DataCorrupted, match="not the one that was written to"):
        rewrite(table.log, lambda: table.target, lambda files: files)
    with pytest.raises(DataCorrupted, match="not the one that was written to") as lost:
        table.commit(2, 3, added=[4])
    assert "RESYNC" in (lost.value.hint or "")
    assert table.ids() == [1, 2]


def test_a_link_that_was_made_and_answered_with_an_error(spark: Spark, tmp_path: Path) -> None:
    """NFS repeats a request whose answer was lost, and is told that the name is taken: by this very file."""
    jvm: Any = spark.session._jvm
    paths = jvm.java.nio.file.Paths
    store = jvm.java.lang.Class.forName("pubsub.LinkLogStore")
    kind = jvm.java.lang.Class.forName("java.nio.file.Path")
    link = store.getDeclaredMethod("link", _array(spark, jvm.java.lang.Class, kind, kind))
    link.setAccessible(True)
    aside, other, name = (tmp_path / each for each in ("aside", "other", "00000000000000000001.json"))
    aside.write_text("ours")
    other.write_text("theirs")
    ours = paths.get(str(aside), _array(spark, jvm.java.lang.String))
    target = paths.get(str(name), _array(spark, jvm.java.lang.String))
    for _ in range(2):
        link.invoke(None, _array(spark, jvm.java.lang.Object, ours, target))
        assert name.samefile(aside)
    taken = paths.get(str(other), _array(spark, jvm.java.lang.String))
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        link.invoke(None, _array(spark, jvm.java.lang.Object, taken, target))
    assert name.samefile(aside)


def _array(spark: Spark, kind: Any, *values: Any) -> Any:
    made = spark.session._sc._gateway.new_array(kind, len(values))  # type: ignore[union-attr]
    for number, value in enumerate(values):
        made[number] = value
    return made
