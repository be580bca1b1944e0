"""Whether executors share the warehouse with the daemon: tried before a copy has a slot, and looked at before its commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pubsub.delta import table as delta
from pubsub.delta.files.data_files import paths, write_table
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import TargetTable
from pubsub.delta.writers import copy_chunks
from pubsub.errors import NotInPrerequisiteState
from tablesync import executor_check
from tests.support.json_transactions import JsonTransactions


class Cluster:
    """A session and its context, whose three tasks are done by `run`."""

    def __init__(self, run: Callable[[Callable[[int], Any]], Sequence[Any]]) -> None:
        self.sparkContext = self
        self.defaultParallelism = 3
        self._run = run
        self._numbers: Sequence[int] = ()

    def parallelize(self, numbers: Sequence[int], slices: int) -> Cluster:
        assert len(numbers) == slices == self.defaultParallelism
        self._numbers = numbers
        return self

    def map(self, task: Callable[[int], Any]) -> Cluster:
        self._task = task
        return self

    def collect(self) -> list[Any]:
        return list(self._run(self._task))


def require_shared(warehouse: str, run: Callable[[Callable[[int], Any]], Sequence[Any]]) -> None:
    session: Any = Cluster(run)
    executor_check.require_shared(session, warehouse)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_that_all_see(tmp_path: Path, scheme: str) -> None:
    warehouse = tmp_path / "lake"
    require_shared(f"{scheme}{warehouse}", lambda task: [task(number) for number in range(3)])
    assert list(warehouse.iterdir()) == []


def test_a_directory_of_the_daemon_s_own(tmp_path: Path) -> None:
    """The executors have none there, or one of their own: once copies committed the names of files that nobody had."""

    def elsewhere(task: Callable[[int], Any]) -> Sequence[Any]:
        tmp_path.rename(tmp_path.with_name("away"))
        try:
            tmp_path.mkdir()
            found = [task(number) for number in range(3)]
            assert list(tmp_path.iterdir()) == []
            tmp_path.rmdir()
        finally:
            tmp_path.with_name("away").rename(tmp_path)
        return found

    with pytest.raises(NotInPrerequisiteState, match="executors do not share the warehouse") as caught:
        require_shared(str(tmp_path), elsewhere)
    assert caught.value.detail is not None
    assert "No such file or directory" in caught.value.detail
    assert "S3 or HDFS" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_files_that_only_an_executor_sees(tmp_path: Path) -> None:
    def hidden(task: Callable[[int], Any]) -> Sequence[Any]:
        found = [task(number) for number in range(3)]
        next(tmp_path.glob("*-1")).unlink()
        return found

    with pytest.raises(NotInPrerequisiteState, match="executors do not share the warehouse"):
        require_shared(str(tmp_path), hidden)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_shared() -> None:
    require_shared("s3a://lake", lambda task: pytest.fail("nothing is tried"))


def test_a_chunk_whose_file_is_not_there(tmp_path: Path) -> None:
    table = TargetTable(str(tmp_path / "t"), pa.schema([pa.field("id", pa.int64())]), (), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    added = write_table(table, pa.table({"id": pa.array([1], pa.int64())}))
    copy_chunks.require_whole(log, added)
    (path,) = paths(table.path, added)
    assert isinstance(path, Path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NotInPrerequisiteState, match="is not in the warehouse"):
        copy_chunks.require_whole(log, added)
    path.unlink()
    with pytest.raises(NotInPrerequisiteState, match="is not in the warehouse") as caught:
        copy_chunks.require_whole(log, added)
    assert path.name in caught.value.message
