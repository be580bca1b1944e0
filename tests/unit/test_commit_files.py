"""What a file system says of a commit, and what is left when it has no room."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64

from apply.conflicts import Conflicts
from apply.pipeline.commit import commit_table
from apply.staging.destination import Destination
from apply.staging.staged_table import StagedTable
from pubsub.delta import alter, arrow_writer, copy_chunks, data_files, deletion_vectors, log, tidying
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.arrow_writer import DirectStaged
from pubsub.delta.commit_files import UnknownOutcome
from pubsub.delta.data_files import write_table
from pubsub.delta.log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tests.support.captured_logs import captured_logs

COLUMNS = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64())])


@pytest.fixture
def table(tmp_path: Path) -> TargetTable:
    table = TargetTable(str(tmp_path / "t"), COLUMNS, ("id",), "public.t")
    assert delta.create_directly(table, {})
    commit(table, INVALID_LSN, 1, added=range(10))
    return table


def staged(table: TargetTable, *, added: Any = (), deleted: Any = (), at: TableLog | None = None) -> DirectStaged:
    found = at or TableLog(table.path)
    found.refresh()
    rows = pa.table({"id": pa.array(added, pa.int64()), "n": pa.array(added, pa.int64())}, COLUMNS)
    files: Any = write_table(table, rows)
    keys = pa.table({"id": pa.array(deleted, pa.int64())})
    return DirectStaged(table, found, files, keys if len(keys) else None, None, False, len(rows) + len(keys))


def commit(table: TargetTable, before: int, lsn: int, **changes: Any) -> None:
    """As the pipeline does it: what is not committed is discarded."""
    one = staged(table, **changes)
    try:
        arrow_writer.commit(one, Commit("app", Lsn(lsn), Lsn(lsn), before=Lsn(before) or None))
    finally:
        arrow_writer.discard(one)


def rows(table: TargetTable) -> list[tuple[int, ...]]:
    result = QueryBuilder().register("t", DeltaTable(table.path)).execute("SELECT id FROM t ORDER BY id").read_all()
    return [row["id"] for row in pa.table(result).to_pylist()]


def orphans(table: TargetTable) -> list[Path]:
    """Files of the table that no commit names."""
    commits = "".join(path.read_text() for path in Path(table.path).glob("_delta_log/*.json"))
    descriptors = [
        action["add"]["deletionVector"]
        for action in map(json.loads, commits.splitlines())
        if "deletionVector" in action.get("add", {})
    ]
    with_vectors = {name for one in descriptors for name in [vector_file(one)]}
    found = [path for path in Path(table.path).glob("*.parquet") if path.name not in commits]
    found += [path for path in Path(table.path).glob("*.bin") if path.name not in with_vectors]
    return found + list(Path(table.path).glob("_delta_log/.*"))


def vector_file(descriptor: Any) -> str:
    import uuid

    return f"deletion_vector_{uuid.UUID(bytes=deletion_vectors._decode_z85(descriptor['pathOrInlineDv'][-20:]))}.bin"


Work = Callable[[TargetTable], object]


def batch(table: TargetTable) -> None:
    commit(table, 1, 2, added=[20], deleted=[3])


def alteration(table: TargetTable) -> None:
    kind = pa.int64()
    change = Alteration(("id",), "public.t", add=((pa.field("c", kind), pa.scalar(7, kind)),))
    alter.alter(table, change, {}, Commit("app", Lsn(2), Lsn(2), before=Lsn(1)))


def merge(table: TargetTable) -> None:
    found = TableLog(table.path)
    found.refresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tidying, "_MERGE", 1)
        tidying.merge_small(found, table)


def copy(table: TargetTable) -> None:
    one = staged(table, added=[50])
    try:
        arrow_writer.commit_copy(one.log, table, one.added, Commit("copy", Lsn(5), Lsn(5)))
    except BaseException:
        arrow_writer.discard(one)
        raise


def chunk(table: TargetTable) -> None:
    found = TableLog(table.path)
    found.refresh()
    copy_chunks.commit(found, "copy", "attempt", 1, [], Lsn(1))


WORK: list[Work] = [batch, alteration, merge, copy, chunk]


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_a_commit_of_which_the_answer_was_lost(
    table: TargetTable, monkeypatch: pytest.MonkeyPatch, work: Work, code: int
) -> None:
    """Over NFS a request that is sent again meets what its first one did."""
    link = os.link

    def link_and_lose(path: Any, name: Any) -> None:
        link(path, name)
        raise OSError(code, os.strerror(code), str(path), None, str(name))

    before = DeltaTable(table.path).version()
    monkeypatch.setattr(os, "link", link_and_lose)
    work(table)
    assert DeltaTable(table.path).version() == before + 1, "once"
    assert rows(table)
    assert orphans(table) == []


@pytest.mark.parametrize("work", [batch, alteration, merge])
def test_a_name_that_another_writer_has_taken(table: TargetTable, monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    """Just before the link: what was made for that version alone goes, and the work is done on the next one, or left."""
    put = TableLog._put

    def taken(found: TableLog, version: int, data: bytes) -> None:
        monkeypatch.setattr(TableLog, "_put", put)
        put(found, version, b'{"commitInfo":{"operation":"SET TBLPROPERTIES"}}\n')
        put(found, version, data)

    monkeypatch.setattr(TableLog, "_put", taken)
    work(table)
    assert orphans(table) == []


@pytest.mark.parametrize("work", WORK)
def test_a_commit_that_nobody_can_ask_about(table: TargetTable, monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    """The server does not answer any more: the commit may be there, so its files stay."""
    link, stat = os.link, Path.stat

    def link_and_go(path: Any, name: Any) -> None:
        link(path, name)
        monkeypatch.setattr(Path, "stat", gone)
        raise OSError(errno.EIO, "I/O error")

    def gone(path: Path, **options: Any) -> os.stat_result:
        if path.suffix == ".tmp":
            raise OSError(errno.EIO, "I/O error")
        return stat(path, **options)

    monkeypatch.setattr(os, "link", link_and_go)
    with pytest.raises(UnknownOutcome):
        work(table)
    monkeypatch.undo()
    assert rows(table), "no file that the commit names was removed"


@pytest.mark.parametrize("work", [batch, alteration, merge])
def test_a_log_without_room(table: TargetTable, monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TableLog, "_put", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            work(table)
        assert orphans(table) == []


@contextmanager
def file_size(most: int) -> Iterator[None]:
    """No file of this process grows past `most` bytes: a write ends in the midst, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_is_cut_short_does_not_stay(table: TargetTable, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(table.path)
    before = sorted(directory.iterdir())
    some = pa.table({"id": list(range(1000)), "n": list(range(1000))}, COLUMNS)
    for _ in range(2):
        with file_size(20), pytest.raises(OSError, match="too large"):
            deletion_vectors.write(directory, [BitMap64(range(0, 9999, 3))])
        with file_size(100), pytest.raises(OSError, match="too large"):
            write_table(table, some)
        assert sorted(directory.iterdir()) == before

    def fails(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(data_files, "sync_directory", fails)
    with pytest.raises(OSError, match="No space"):
        write_table(table, some)
    assert sorted(directory.iterdir()) == before


class Engine:
    async def run_without_spark(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


def test_a_checkpoint_that_fails(table: TargetTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called what it is, hinders no merging, and is not tried again with every commit."""
    monkeypatch.setattr(log, "_CHECKPOINT_INTERVAL", 5)
    monkeypatch.setattr(tidying, "_MERGE", 4)
    blocked = Path(table.path) / "_delta_log" / "_last_checkpoint"
    engine: Any = Engine()
    at = TableLog(table.path)
    at.refresh()
    blocked.mkdir()
    versions = []
    with captured_logs() as logged:
        for number in range(2, 24):
            if number == 16:
                blocked.rmdir()
            one = staged(table, added=[number * 100], at=at)
            destination = Destination(1, table, "app", Lsn(number - 1))
            record = Commit("app", Lsn(number), Lsn(number))
            before = len(logged)
            asyncio.run(
                commit_table(engine, StagedTable(destination, one, record, 1, 0, 0, Conflicts()), Lsn(number - 1))
            )
            versions += [at.version] * (len(logged) - before)
    said = {entry["event"] for entry in logged}
    assert said == {"no checkpoint was written: readers replay a longer log until one is"}
    assert all(entry["relation"] == "public.t" and entry["reason"] for entry in logged)
    assert len(versions) == 3 or len(versions) == 4
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(versions)), versions
    assert "OPTIMIZE" in {entry["operation"] for entry in DeltaTable(table.path).history()}
    assert blocked.is_file(), "it succeeds once it can"
    assert rows(table) == [*range(10), *(number * 100 for number in range(2, 24))]


def test_names_are_durable_before_a_commit_says_them(table: TargetTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector's directory was not fsynced: after a power loss a commit could name a vector that was not there."""
    log_directory = Path(table.path) / "_delta_log"
    synced: list[set[str]] = []
    fsync, link = os.fsync, os.link

    def recorded(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == Path(table.path):
            synced.append({path.name for path in Path(table.path).iterdir() if path.is_file()})
        fsync(descriptor)

    def checked(source: Any, name: Any, **options: Any) -> None:
        if Path(name).parent == log_directory and Path(name).suffix == ".json":
            assert synced[-1] >= {path.name for path in Path(table.path).iterdir() if path.is_file()}
        link(source, name, **options)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "link", checked)
    commit(table, 1, 2, added=[20], deleted=[3])
    assert any(path.suffix == ".bin" for path in Path(table.path).iterdir())
