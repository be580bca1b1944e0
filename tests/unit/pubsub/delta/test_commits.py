"""What becomes of a commit's files: whatever Delta, another writer or the disk does meanwhile, none is lost or left."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from py4j.protocol import Py4JJavaError
from pyroaring import BitMap64

import pubsub
from pubsub.delta import alter
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files.data_files import write_table
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log import deletion_vectors, durable_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import CommitFailed, Conflict, Operation, Request, UnknownOutcome
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer, copy_chunks
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import DataCorrupted, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tests.support.json_transactions import JsonTransactions
from tests.support.unnamed_files import unnamed_files

COLUMNS = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64())])


@pytest.fixture
def table(tmp_path: Path) -> TargetTable:
    table = TargetTable(str(tmp_path / "t"), COLUMNS, ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    commit(table, INVALID_LSN, 1, added=range(10))
    return table


def staged(
    table: TargetTable, *, added: Any = (), deleted: Any = (), through: JsonTransactions | None = None
) -> DirectStaged:
    found = TableLog(table.path, through or JsonTransactions())
    found.refresh()
    rows = pa.table({"id": pa.array(added, pa.int64()), "n": pa.array(added, pa.int64())}, COLUMNS)
    files: Any = write_table(table, rows)
    keys = pa.table({"id": pa.array(deleted, pa.int64())})
    return DirectStaged(table, found, files, keys if len(keys) else None, None, False, len(rows) + len(keys))


def commit(table: TargetTable, before: int, lsn: int, **changes: Any) -> None:
    """As the pipeline does it: what is not committed is discarded."""
    one = staged(table, **changes)
    try:
        arrow_writer.commit(one, Commit("app", Lsn(lsn), Lsn(lsn), previous=Lsn(before) or None))
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
    found = [Path(table.path, name) for name in unnamed_files(table.path)]
    found += [path for path in Path(table.path).glob("*.bin") if path.name not in with_vectors]
    return found + list(Path(table.path).glob("_delta_log/.*"))


def vector_file(descriptor: Any) -> str:
    import uuid

    return f"deletion_vector_{uuid.UUID(bytes=deletion_vectors._decode_z85(descriptor['pathOrInlineDv'][-20:]))}.bin"


class Work(Protocol):
    def __call__(self, table: TargetTable, transactions: JsonTransactions) -> object: ...


def batch(table: TargetTable, transactions: JsonTransactions) -> None:
    commit(table, 1, 2, added=[20], deleted=[3], through=transactions)


def alteration(table: TargetTable, transactions: JsonTransactions) -> None:
    kind = pa.int64()
    change = Alteration(("id",), "public.t", add=((pa.field("c", kind), pa.scalar(7, kind)),))
    alter.alter(transactions, table, change, {}, Commit("app", Lsn(2), Lsn(2), previous=Lsn(1)))


def merge(table: TargetTable, transactions: JsonTransactions) -> None:
    found = TableLog(table.path, transactions)
    found.refresh()
    rewrite(found, lambda: table, lambda files: files)


def copy(table: TargetTable, transactions: JsonTransactions) -> None:
    one = staged(table, added=[50], through=transactions)
    try:
        arrow_writer.commit_copy(one.log, table, one.added, Commit("copy", Lsn(5), Lsn(5)))
    except UnknownOutcome:
        raise  # as tablesync.copyjob does
    except BaseException:
        arrow_writer.discard(one)
        raise


def chunk(table: TargetTable, transactions: JsonTransactions) -> None:
    found = TableLog(table.path, transactions)
    found.refresh()
    copy_chunks.commit(found, "copy", "attempt", 1, [], Lsn(1))


WORK: list[Work] = [batch, alteration, merge, copy, chunk]


class AnswerLost(JsonTransactions):
    """Delta fails after the commit's file has its name, as when the snapshot after it cannot be read."""

    def commit(self, request: Request) -> str:
        failure = CommitFailed("the disk answers no more")
        failure.txn_id = super().commit(request)
        raise failure


@pytest.mark.parametrize("work", WORK)
def test_a_commit_that_fails_after_it_was_made_is_made_once(table: TargetTable, work: Work) -> None:
    before = DeltaTable(table.path).version()
    work(table, AnswerLost())
    assert DeltaTable(table.path).version() == before + 1, "once"
    assert rows(table)
    assert orphans(table) == []


class OthersFirst(JsonTransactions):
    """Another writer commits just before the first commit."""

    def commit(self, request: Request) -> str:
        if not self.made:
            super().commit(replace(request, actions=(), operation=Operation.ALTER, user_metadata=None))
            raise Conflict("another writer was first")
        return super().commit(request)


@pytest.mark.parametrize("work", WORK)
def test_a_commit_that_others_preceded_is_worked_out_anew_or_left(table: TargetTable, work: Work) -> None:
    work(table, OthersFirst())
    assert rows(table)
    assert orphans(table) == []


class RenamedOver(JsonTransactions):
    """Another program's rename puts its commit in place of ours, between its check for the name and its rename."""

    def commit(self, request: Request) -> str:
        txn_id = super().commit(request)
        if len(self.made) == 1:
            theirs = Path(request.path) / "_delta_log" / f"{request.read_version + 1:020}.json"
            theirs.write_text(json.dumps({"commitInfo": {"operation": "SET TBLPROPERTIES"}}) + "\n")
        return txn_id


@pytest.mark.parametrize("work", WORK)
def test_a_commit_that_another_program_replaced_is_made_again(table: TargetTable, work: Work) -> None:
    before = DeltaTable(table.path).version()
    transactions = RenamedOver()
    work(table, transactions)
    if work is not merge:
        assert DeltaTable(table.path).version() == before + 2, "theirs, and ours after it"
        assert transactions.forgotten == [table.path], "what Delta keeps of the table has the lost commit"
    assert rows(table)
    assert orphans(table) == []


def test_a_checkpoint_of_a_commit_that_was_replaced_is_removed(table: TargetTable) -> None:
    """It has our commit's rows, and lacks what the other program did."""

    class Checkpointed(RenamedOver):
        checkpoint_interval = 2

    batch(table, Checkpointed())
    assert not list(Path(table.path).glob("_delta_log/*checkpoint*"))
    assert 20 in rows(table)


class JvmLost(JsonTransactions):
    def commit(self, request: Request) -> str:
        super().commit(request)
        raise UnknownOutcome("the JVM was lost")


@pytest.mark.parametrize("work", WORK)
def test_the_files_of_a_commit_whose_outcome_is_unknown_stay(table: TargetTable, work: Work) -> None:
    with pytest.raises(UnknownOutcome):
        work(table, JvmLost())
    assert rows(table), "no file that the commit names was removed"


@pytest.mark.parametrize("work", WORK)
def test_the_files_stay_if_the_log_cannot_be_read_after_the_commit(
    table: TargetTable, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a store stops answering: the commit was made, and nobody can tell."""
    actions = TableLog.actions

    class Cut(JsonTransactions):
        def commit(self, request: Request) -> str:
            def fails(log: TableLog, version: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            name = super().commit(request)
            monkeypatch.setattr(TableLog, "actions", fails)
            return name

    with pytest.raises(UnknownOutcome):
        work(table, Cut())
    monkeypatch.setattr(TableLog, "actions", actions)
    assert rows(table), "no file that the commit names was removed"


class Failing(JsonTransactions):
    """A call of the interpreter into C fails after the commit was made: the `number`th of those that `concerns` chooses."""

    PLACES = (str(Path(pubsub.__file__).parent), "/pathlib.py")

    def __init__(self, number: int, error: Callable[[], Exception], concerns: Callable[[Any], bool]) -> None:
        super().__init__()
        self.number, self.error, self.concerns = number, error, concerns
        self.failed = False
        self.synced: set[str] = set()

    def commit(self, request: Request) -> str:
        name = super().commit(request)
        sys.setprofile(self.watch)
        return name

    def watch(self, frame: FrameType, event: str, function: Any) -> None:
        # Closing does not count: what is open must be closed by somebody.
        if event != "c_call" or self.failed or not any(name in frame.f_code.co_filename for name in self.PLACES):
            return
        if function is os.fsync:
            self.synced.add(Path(os.readlink(f"/proc/self/fd/{frame.f_locals['descriptor']}")).name)
        if self.concerns(function) and function is not os.close:
            self.number -= 1
            if self.number < 0:
                self.failed = True
                raise self.error()


def of_the_system(function: Any) -> bool:
    return getattr(function, "__module__", None) in ("posix", "io", "_io")


FAILURES = [
    pytest.param(lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)), of_the_system, id="EMFILE"),
    pytest.param(lambda: OSError(errno.EIO, os.strerror(errno.EIO)), of_the_system, id="EIO"),
    pytest.param(lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), of_the_system, id="ENOMEM"),
    pytest.param(MemoryError, lambda _: True, id="no memory"),
]


@pytest.mark.parametrize(("error", "concerns"), FAILURES)
@pytest.mark.parametrize("work", [batch, alteration, merge, copy])
def test_no_failure_after_a_commit_takes_its_files(
    tmp_path: Path, work: Work, error: Callable[[], Exception], concerns: Callable[[Any], bool]
) -> None:
    """Whichever call it is: what the commit may have named stays, and nobody says that it is durable before it is."""
    failed = True
    number = 0
    while failed:
        table = TargetTable(str(tmp_path / str(number)), COLUMNS, ("id",), "public.t")
        assert delta.create_empty(JsonTransactions(), table, {})
        commit(table, INVALID_LSN, 1, added=range(10))
        transactions = Failing(number, error, concerns)
        try:
            work(table, transactions)
            returned = True
        except (PubsubError, OSError, MemoryError):
            returned = False
        finally:
            sys.setprofile(None)
        version = DeltaTable(table.path).version()
        assert version == 2, "a JSON commit is made, and made once"
        assert_whole(table)
        if returned:
            assert transactions.synced >= {f"{version:020}.json", "_delta_log"}, "what is said to be done is durable"
        failed = transactions.failed
        number += 1 if concerns is of_the_system else 3
    assert number > 3


def assert_whole(table: TargetTable) -> None:
    """Each data file and each deletion vector of the table's newest version is there."""
    found = TableLog(table.path)
    found.refresh()
    for file in found.files.values():
        assert Path(table.path, file.path).exists(), file.path
        if file.vector is not None:
            assert deletion_vectors.read(Path(table.path), file.vector)


def test_a_failure_of_which_the_jvm_cannot_be_asked_is_an_unknown_outcome(table: TargetTable) -> None:
    """The JVM said that it failed, and was gone, or no socket was left, before it said why and whether it had committed."""

    class Silent:
        def getMessage(self) -> str:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def fails(*_: object) -> None:
        error = Py4JJavaError.__new__(Py4JJavaError)
        error.java_exception = Silent()
        raise error

    delta_s = DeltaTransactions.__new__(DeltaTransactions)
    calls = SimpleNamespace(begin=lambda *_: SimpleNamespace(txnId=lambda: "id"), write=fails)
    java: Any = SimpleNamespace(calls=calls)
    session: Any = SimpleNamespace(_jsparkSession=None)
    delta_s._java, delta_s.session = java, session
    with pytest.raises(UnknownOutcome, match="Too many open files"):
        delta_s.commit(Request(table.path, 1, None, [], Operation.WRITE))


class Full(JsonTransactions):
    def commit(self, request: Request) -> str:
        raise CommitFailed("No space left on device")


@pytest.mark.parametrize("work", [batch, alteration, merge])
def test_a_commit_that_was_not_made_leaves_no_files(table: TargetTable, work: Work) -> None:
    for _ in range(2):
        with pytest.raises(CommitFailed, match="No space left"):
            work(table, Full())
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

    monkeypatch.setattr(durable_files, "sync_directory", fails)
    with pytest.raises(OSError, match="No space"):
        write_table(table, some)
    assert sorted(directory.iterdir()) == before


def test_everything_is_durable_before_it_is_relied_on(table: TargetTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and the names of files before the commit that names them; the commit's file and its name before it returns."""
    directory = Path(table.path)
    durable: dict[Path, set[str]] = {}
    synced: set[Path] = set()
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.add(path)
        if path.is_dir():
            durable[path] = {entry.name for entry in path.iterdir()}
        fsync(descriptor)

    class Checked(JsonTransactions):
        def commit(self, request: Request) -> str:
            added = [action["add"] for action in request.actions if "add" in action]
            names = {one["path"] for one in added} | {
                vector_file(one["deletionVector"]) for one in added if "deletionVector" in one
            }
            assert len(names) >= 2
            assert durable[directory] >= names
            return super().commit(request)

    monkeypatch.setattr(os, "fsync", recorded)
    commit(table, 1, 2, added=[20], deleted=[3], through=Checked())
    last = directory / "_delta_log" / f"{DeltaTable(table.path).version():020}.json"
    assert last in synced
    assert last.name in durable[last.parent]


def rename_over(table: str, version: int) -> None:
    theirs = Path(table) / "_delta_log" / ".theirs"
    theirs.write_text(json.dumps({"commitInfo": {"operation": "SET TBLPROPERTIES"}}) + "\n")
    theirs.rename(theirs.parent / f"{version:020}.json")


def test_a_merge_does_not_hide_that_the_last_commit_was_replaced(table: TargetTable) -> None:
    """Its own commit would name rows of one that is in no log."""
    found = TableLog(table.path, JsonTransactions())
    found.refresh()
    rename_over(table.path, found.version)
    with pytest.raises(DataCorrupted, match="not the one that was written to"):
        rewrite(found, lambda: table, lambda files: files)
    assert DeltaTable(table.path).version() == found.version
    assert not list(Path(table.path).glob("_delta_log/.*"))
    with pytest.raises(DataCorrupted, match="not the one that was written to"):
        found.refresh()


class LastRenamedOver(JsonTransactions):
    def commit(self, request: Request) -> str:
        rename_over(request.path, request.read_version)
        return super().commit(request)


@pytest.mark.parametrize("work", [batch, alteration, merge])
def test_a_commit_that_was_replaced_during_the_next_one_is_told(table: TargetTable, work: Work) -> None:
    with pytest.raises(DataCorrupted, match="not the one that was written to"):
        work(table, LastRenamedOver())


def test_the_bounds_of_a_file_stay_as_they_are_written(table: TargetTable) -> None:
    """Spark writes decimals as numbers: one that is rounded would make it leave out a file that has the row."""
    bounds = (
        '"minValues":{"id":0,"price":12345678901234567.89,"small":1E-30,"float":-1.0E+10,"text":"Ärger \\"x\\"\\n",'
        '"inner":{"long":123456789012345678901234567890,"none":null,"yes":true}},'
        '"maxValues":{"id":9,"price":12345678901234567.90,"list":[1.10,-0.0,{}],"text":"日本"}'
    )
    path = Path(table.path, "_delta_log", f"{1:020}.json")
    actions = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    (add,) = (action["add"] for action in actions if "add" in action)
    add["stats"] = '{"numRecords":10,' + bounds + ',"nullCount":{"id":0,"price":0},"tightBounds":true}'
    path.write_text("".join(json.dumps(action) + "\n" for action in actions), "utf-8")
    commit(table, 1, 2, deleted=[3])
    last = Path(table.path, "_delta_log", f"{2:020}.json").read_text("utf-8")
    (stats,) = (action["add"]["stats"] for action in map(json.loads, last.splitlines()) if "add" in action)
    assert stats == '{"numRecords":10,' + bounds + ',"nullCount":{"id":0,"price":0},"tightBounds":false}'
    assert rows(table) == [0, 1, 2, *range(4, 10)]
