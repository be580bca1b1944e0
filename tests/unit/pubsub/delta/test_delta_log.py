"""What a table's log tells about other writers, and about a table that was replaced or restored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from pubsub.delta.files.data_files import write_table
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import Commit, TargetTable, application_id, create_empty
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import DataCorrupted, UndefinedTable
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions


class Foreign:
    """A table of ours, with commits such as other writers make."""

    def __init__(self, path: Path) -> None:
        self.table = TargetTable(str(path), pa.schema([pa.field("id", pa.int64(), False)]), ("id",), "public.t")
        assert create_empty(JsonTransactions(), self.table, {})
        self.log = TableLog(str(path), JsonTransactions())
        self.log.refresh()
        self.number = 0

    def ours(self, app_id: str = "app") -> None:
        self.number += 1
        (add,) = write_table(self.table, pa.table({"id": pa.array([self.number], pa.int64())}))
        transaction = {"txn": {"appId": app_id, "version": self.number}}
        self.log.commit([add, transaction], Operation.WRITE)

    def theirs(
        self, operation: str, *actions: dict[str, object], metadata: Commit | None = None, **parameters: object
    ) -> None:
        other = TableLog(self.table.path, JsonTransactions())
        other.refresh()
        info = {"operation": operation, "engineInfo": "E", "operationParameters": parameters}
        said = {} if metadata is None else {"userMetadata": metadata.user_metadata}
        lines = [{"commitInfo": info | said}, *actions]
        name = Path(self.table.path) / "_delta_log" / f"{other.version + 1:020}.json"
        name.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def found(self, log: TableLog | None = None, app_id: str = "app") -> list[tuple[int, str, str]]:
        log = log or self.log
        log.refresh()
        return [(c.version, c.operation, c.engine) for c in log.written_by_others(app_id)]


ADD: dict[str, object] = {
    "add": {"path": "f", "size": 1, "modificationTime": 0, "partitionValues": {}, "dataChange": True}
}
SAME: dict[str, object] = {
    "add": {"path": "g", "size": 1, "modificationTime": 0, "partitionValues": {}, "dataChange": False}
}


def test_commits_of_others_are_found_where_they_can_change_rows(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.theirs("WRITE", ADD)
    # The application has committed nothing yet: this is the content that it starts with.
    assert t.found() == []
    t.ours()
    assert t.found() == []
    t.theirs("OPTIMIZE", SAME)
    t.theirs("SET TBLPROPERTIES")
    assert t.found() == []
    t.theirs("UPDATE", ADD)
    assert t.found() == [(5, "UPDATE", "E")]
    assert t.found() == [(5, "UPDATE", "E")], "until it is known"
    # A new process finds it too.
    assert t.found(TableLog(t.table.path, JsonTransactions())) == [(5, "UPDATE", "E")]
    t.log.forget_others("app", 5)
    assert t.found() == []
    t.ours()
    assert t.found() == []
    assert t.found(TableLog(t.table.path, JsonTransactions())) == []


@pytest.mark.parametrize("rows", [[ADD], []], ids=["rows", "none"])
def test_a_later_copy_replaces_what_others_have_changed(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    t = Foreign(tmp_path / "t")
    one, two = (application_id("node", 1, 2, generation) for generation in (1, 2))
    t.ours(one)
    t.ours(one)
    assert t.found(app_id=one) == []
    t.theirs("RESTORE", ADD, version=1)
    t.theirs("WRITE", *rows, {"txn": {"appId": two, "version": 9}}, metadata=Commit(two, Lsn(9), Lsn(9), copied=True))
    t.theirs("MERGE", ADD)
    assert t.found(app_id=two) == [(5, "MERGE", "E")]
    assert [version for version, _, _ in t.found(app_id=one)] == [4, 5]


def test_what_comes_while_others_commits_are_recorded_is_not_forgotten(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.ours()
    assert t.found() == []
    t.theirs("UPDATE", ADD)
    assert t.found() == [(2, "UPDATE", "E")]
    t.theirs("DELETE", ADD)
    t.log.refresh()
    t.log.forget_others("app", 2)
    assert t.found() == [(3, "DELETE", "E")]


def test_files_that_somebody_looks_at_stay_those_of_one_version(tmp_path: Path) -> None:
    """Rows are looked up in one thread while another commits a merge of the table's files."""
    t = Foreign(tmp_path / "t")
    t.ours()
    t.ours()
    looked_at = iter(t.log.files)
    names = [next(looked_at)]
    t.theirs("OPTIMIZE", SAME, *({"remove": {"path": path}} for path in t.log.files))
    t.log.refresh()
    assert len([*names, *looked_at]) == 2
    assert list(t.log.files) == ["g"]


def test_the_writer_of_a_file_is_found(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.ours()
    (ours,) = t.log.files
    t.theirs("UPDATE", ADD)
    copied: dict[str, object] = {"commitInfo": {"operation": "UPDATE", "operationMetrics": {"numCopiedRows": "3"}}}
    other = Path(t.table.path) / "_delta_log" / f"{3:020}.json"
    other.write_text("\n".join(map(json.dumps, (copied, {"add": ADD["add"] | {"path": "mixed"}}))))  # type: ignore[operator]
    vector = {"storageType": "i", "pathOrInlineDv": "x", "sizeInBytes": 1, "cardinality": 1}
    t.theirs("DELETE", {"add": ADD["add"] | {"path": ours, "deletionVector": vector}}, {"remove": {"path": ours}})  # type: ignore[operator]
    t.theirs("OPTIMIZE", SAME)
    for log in (t.log, TableLog(t.table.path, JsonTransactions())):
        log.refresh()
        writers = {path: file.writers for path, file in log.files.items()}
        assert writers == {ours: {"app"}, "f": frozenset(), "mixed": None, "g": None}


def test_restoring_a_table_to_before_a_replicated_commit_is_an_error(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.ours()
    t.theirs("WRITE", ADD)
    # This restores the node's last commit, so that nothing of the node is lost.
    t.theirs("RESTORE", ADD, version=1)
    assert [operation for _, operation, _ in t.found()] == ["WRITE", "RESTORE"]
    t.log.forget_others("app", 3)
    t.ours()
    t.theirs("RESTORE", ADD, version=1)
    # The first commit of another application replaces nothing, and one that says so is no copy of this table.
    t.theirs("STREAMING UPDATE", ADD, {"txn": {"appId": "a stream", "version": 0}})
    other = application_id("node", 1, 2, 7)
    t.theirs("WRITE", ADD, {"txn": {"appId": other, "version": 9}}, metadata=Commit(other, Lsn(9), Lsn(9), copied=True))
    for log in (t.log, TableLog(t.table.path, JsonTransactions())):
        with pytest.raises(DataCorrupted, match="restored to an earlier version"):
            t.found(log)


def test_a_table_that_is_gone_or_another(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.ours()
    shutil.copytree(t.table.path, tmp_path / "earlier")
    t.ours()
    shutil.rmtree(t.table.path)
    for _ in range(2):
        with pytest.raises(UndefinedTable):
            t.log.refresh()
    shutil.copytree(tmp_path / "earlier", t.table.path)
    for _ in range(2):
        with pytest.raises(DataCorrupted, match="not the one that was written to"):
            t.log.refresh()


def test_a_data_file_that_was_removed(tmp_path: Path) -> None:
    t = Foreign(tmp_path / "t")
    t.ours()
    for path in Path(t.table.path).glob("*.parquet"):
        path.unlink()
    keys = pa.table({"id": pa.array([1], pa.int64())})
    staged = DirectStaged(t.table, t.log, [], keys, None, False, 1)
    with pytest.raises(DataCorrupted, match="does not exist"):
        arrow_writer.commit(staged, Commit("app", Lsn(50), Lsn(60), previous=Lsn(1)))
