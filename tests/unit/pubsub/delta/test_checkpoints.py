"""Tables that are altered, or read, after a checkpoint: by this node, deltalake and DuckDB alike."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta import alter
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files.data_files import write_table
from pubsub.delta.log import checkpoints
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import DataCorrupted, UndefinedTable
from pubsub.protocol.lsn import Lsn
from tests.support import duck
from tests.support.json_transactions import JsonTransactions

COLUMNS: Final = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.string())])
#: Made by a release that wrote what a checkpoint's maps are in Arrow: a row in each of three commits, a checkpoint, ALTER TABLE.
DAMAGED: Final = Path(__file__).parents[3] / "data" / "damaged_by_alter"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every second commit."""
    monkeypatch.setattr(JsonTransactions, "checkpoint_interval", 2)


def made(path: Path, rows: int = 3) -> TargetTable:
    """A table with so many commits of a row each, under the application id "app", and the checkpoints that are due."""
    table = TargetTable(str(path), COLUMNS, ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {"pubsub.node": "n"})
    written = TableLog(table.path, JsonTransactions())
    written.refresh()
    for number in range(1, rows + 1):
        (add,) = write_table(table, pa.table({"id": [number], "n": [f"row {number}"]}, COLUMNS))
        transaction = {"txn": {"appId": "app", "version": number}}
        written.commit([add, transaction], Operation.WRITE)
    return table


def read(path: str) -> list[tuple[Any, ...]]:
    """The rows, as each reader has them."""
    result = pa.table(QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t ORDER BY id").read_all())
    rows = [tuple(row.values()) for row in result.to_pylist()]
    with duck.reader() as connection:
        assert connection.sql(f"SELECT * FROM delta_scan('{path}') ORDER BY id").fetchall() == rows
    return rows


def add_column(table: TargetTable, kind: Any = None, value: Any = None) -> TargetTable:
    kind = pa.int64() if kind is None else kind
    change = Alteration(table.key, table.relation, add=((pa.field("c", kind), pa.scalar(value, kind)),))
    return alter.alter(
        JsonTransactions(), table, change, {"pubsub.attributes": "{}"}, Commit("app", Lsn(3), Lsn(3), previous=Lsn(3))
    )


def rename_column(table: TargetTable) -> TargetTable:
    change = Alteration(table.key, table.relation, rename={"n": "m"})
    return alter.alter(JsonTransactions(), table, change, {}, Commit("app", Lsn(3), Lsn(3), previous=Lsn(3)))


def copy_anew(table: TargetTable) -> TargetTable:
    """What a copy's commit says of columns that are others than the table's."""
    written = TableLog(table.path, JsonTransactions())
    written.refresh()
    wanted = replace(table, schema=pa.schema([*COLUMNS, pa.field("c", pa.int64())]))
    wanted, definition = alter.for_copy(written, wanted)
    written.commit(definition, Operation.WRITE)
    return wanted


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        (add_column, ["id", "n", "c"]),
        (lambda table: add_column(table, value=7), ["id", "n", "c"]),
        (rename_column, ["id", "m"]),
        (lambda table: alter.rename(JsonTransactions(), table, "public.u"), ["id", "n"]),
        (copy_anew, ["id", "n", "c"]),
    ],
    ids=["a column", "a column with a value", "a column's name", "the table's name", "a copy"],
)
def test_a_table_that_is_altered_after_a_checkpoint(
    tmp_path: Path, often: None, change: Callable[[TargetTable], TargetTable], columns: list[str]
) -> None:
    table = made(tmp_path / "t")
    assert (tmp_path / "t/_delta_log" / f"{2:020}.checkpoint.parquet").exists()
    TableLog(table.path, JsonTransactions()).refresh()
    change(table)
    assert [row[0] for row in read(table.path)] == [1, 2, 3]
    found = DeltaTable(table.path)
    assert [field.name for field in found.schema().fields] == columns
    assert found.metadata().configuration["pubsub.node"] == "n"
    # And again, from a checkpoint of what was altered.
    written = TableLog(table.path, JsonTransactions())
    for number in range(3):
        written.refresh()
        written.commit([], Operation.ALTER)
        alter.rename(JsonTransactions(), delta.load(table.path, "public.t", None), f"public.v{number}")
    assert [row[0] for row in read(table.path)] == [1, 2, 3]


def lines(path: Path, version: int, *actions: dict[str, Any]) -> None:
    (path / "_delta_log" / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_a_checkpoint_holds_what_the_commits_hold(tmp_path: Path) -> None:
    """Every map, also one with a NULL in it, and fields that only other writers have."""
    path = tmp_path / "t"
    (path / "_delta_log").mkdir(parents=True)
    features = ["deletionVectors", "domainMetadata"]
    protocol = {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": features[:1],
            "writerFeatures": features,
        }
    }
    schema = DeltaTable(made(tmp_path / "schema", 0).path).schema().to_json()
    metadata = {
        "metaData": {
            "id": "5f6ea2a7-4b1c-4d4b-9bd5-7d2b5e2f3a10",
            "name": "t",
            "description": "said by others",
            "format": {"provider": "parquet", "options": {"k": "v"}},
            "schemaString": schema,
            "partitionColumns": ["n"],
            "configuration": {"a": "b", "delta.enableDeletionVectors": "true"},
            "createdTime": 5,
        }
    }
    transaction = {"txn": {"appId": "app", "version": 3, "lastUpdated": 9}}
    vector = {"storageType": "i", "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"}
    add = {
        "add": {
            "path": "n=__HIVE_DEFAULT_PARTITION__/f.parquet",
            "partitionValues": {"n": None},
            "size": 1,
            "modificationTime": 2,
            "dataChange": True,
            "stats": '{"numRecords":4}',
            "tags": {"INSERTION_TIME": "7"},
            "deletionVector": {**vector, "sizeInBytes": 40, "cardinality": 1},
        }
    }
    domain = {"domainMetadata": {"domain": "d", "configuration": "{}", "removed": False}}
    lines(path, 0, {"commitInfo": {"operation": "WRITE"}}, protocol, metadata, transaction, add, domain)
    DeltaTable(str(path)).create_checkpoint()
    found = checkpoints.complete(path / "_delta_log")[0]
    assert found is not None
    have = {kind: what for some in checkpoints.actions(found) for action in some for kind, what in action.items()}
    # A file in a checkpoint changes nothing any more.
    have["add"]["dataChange"] = True
    wanted = protocol | metadata | transaction | add | domain
    assert have == wanted


def test_fields_of_other_writers_on_a_file_are_kept(tmp_path: Path) -> None:
    """Its tags, which come from a checkpoint, when it gets a deletion vector, and when it goes."""
    path = tmp_path / "t"
    table = made(path, 0)
    (add,) = write_table(table, pa.table({"id": [1, 2, 3], "n": ["a", "b", "c"]}, COLUMNS))
    tags = {"INSERTION_TIME": "7", "OTHER": None}
    lines(path, 1, {"add": {**add["add"], "tags": tags}}, {"txn": {"appId": "app", "version": 1}})
    DeltaTable(table.path).create_checkpoint()
    for number, keys in ((2, [2]), (3, [1, 3])):
        written = TableLog(table.path, JsonTransactions())
        staged = DirectStaged(table, written, [], pa.table({"id": keys}), None, False, 1)
        arrow_writer.commit(staged, Commit("app", Lsn(number), Lsn(number), previous=Lsn(number - 1)))
        committed = written.actions(number) or []
        files = [what for action in committed for kind, what in action.items() if kind in ("add", "remove")]
        assert len(files) == 4 - number
        assert all(file["tags"] == tags for file in files)
    assert read(table.path) == []


def state(path: Path) -> tuple[Any, ...]:
    read = TableLog(str(path), JsonTransactions())
    read.refresh()
    files = {name: (file.size, file.rows, file.bounds, file.vector) for name, file in read.files.items()}
    versions = {app_id: read.application_version(app_id) for app_id in read.applications}
    return read.version, read.protocol, read.metadata, files, versions


def in_parts(directory: Path, checkpoint: Path) -> None:
    whole = pq.read_table(checkpoint)
    checkpoint.unlink()
    for part in range(3):
        rows = whole.slice(part * 2, 2 if part < 2 else None)
        pq.write_table(rows, directory / f"{checkpoint.name[:20]}.checkpoint.{part + 1:010}.{3:010}.parquet")


def _v2(directory: Path, checkpoint: Path) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The rows but `add`s, and what names the sidecars that have those."""
    whole = pq.read_table(checkpoint)
    checkpoint.unlink()
    (directory / "_sidecars").mkdir()
    adds = whole.filter(whole["add"].is_valid())
    named = []
    for number, rows in enumerate((adds.slice(0, 1), adds.slice(1))):
        path = directory / "_sidecars" / f"{number}b7f5a1c-1111-4222-8333-444455556666.parquet"
        pq.write_table(rows.select(["add"]), path)
        named.append({"path": path.name, "sizeInBytes": path.stat().st_size, "modificationTime": 0, "tags": None})
    return whole.filter(whole["add"].is_null()), named


def v2_parquet(directory: Path, checkpoint: Path) -> None:
    rest, named = _v2(directory, checkpoint)
    sidecars = pa.array([None] * rest.num_rows + named)
    rows = rest.to_pylist() + [{} for _ in named]
    table = pa.Table.from_pylist(rows, rest.schema).append_column("sidecar", sidecars)
    pq.write_table(table, directory / f"{checkpoint.name[:20]}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet")


def v2_json(directory: Path, checkpoint: Path) -> None:
    version = int(checkpoint.name[:20])
    old = checkpoints.Checkpoint(version, (checkpoint,))
    actions = [action for some in checkpoints.actions(old) for action in some if "add" not in action]
    _, named = _v2(directory, checkpoint)
    actions += [{"checkpointMetadata": {"version": version}}, *({"sidecar": one} for one in named)]
    name = directory / f"{version:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
    name.write_text("".join(json.dumps(action) + "\n" for action in actions))


@pytest.mark.parametrize("form", [in_parts, v2_parquet, v2_json])
@pytest.mark.parametrize("hint", ["stale hint", "no hint"])
def test_every_form_of_a_checkpoint(tmp_path: Path, often: None, form: Callable[[Path, Path], None], hint: str) -> None:
    path = tmp_path / "t"
    table = made(path, 7)
    directory = path / "_delta_log"
    expected = state(path)
    checkpoint = directory / f"{6:020}.checkpoint.parquet"
    form(directory, checkpoint)
    for other in directory.glob("*.checkpoint.parquet"):
        other.unlink()
    for version in range(7):
        (directory / f"{version:020}.json").unlink()
    if hint == "no hint":
        (directory / "_last_checkpoint").unlink()
    assert state(path) == expected
    # One of which a part is missing is none; what is then lacking is said.
    for part in [*directory.glob("*.checkpoint.0000000002.*"), *directory.glob("_sidecars/1*")]:
        part.unlink()
    with pytest.raises(DataCorrupted):
        TableLog(table.path, JsonTransactions()).refresh()


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path, often: None) -> None:
    path = tmp_path / "t"
    made(path, 5)
    expected = state(path)
    newest = path / "_delta_log" / f"{4:020}.checkpoint.parquet"
    in_parts(path / "_delta_log", newest)
    (path / "_delta_log" / f"{4:020}.checkpoint.{2:010}.{3:010}.parquet").unlink()
    assert state(path) == expected


@pytest.mark.parametrize("left", [0, 3, 500, -200])
def test_a_checkpoint_that_is_cut_short(tmp_path: Path, often: None, left: int) -> None:
    """A power cut may leave it so, while the commits are whole: they, or an earlier checkpoint, are the table."""
    path = tmp_path / "t"
    table = made(path, 5)
    expected = state(path)
    log = path / "_delta_log"
    for look in (
        lambda: TableLog(table.path, JsonTransactions()).refresh(),
        lambda: delta.committed_lsn(table.path, "app"),
        lambda: delta.properties(table.path),
        lambda: delta.load(table.path, "public.t", None),
    ):
        newest = checkpoints.complete(log)[0].files[0]
        whole = newest.read_bytes()
        newest.write_bytes(whole[:left])
        look()
        assert state(path) == expected
        assert not newest.exists(), "readers that need it would fail"
        newest.write_bytes(whole)
    for checkpoint in checkpoints.complete(log):
        checkpoint.files[0].write_bytes(checkpoint.files[0].read_bytes()[:left])
    assert state(path) == expected
    assert delta.committed_lsn(table.path, "app") == Lsn(5)
    assert not checkpoints.complete(log)


def test_a_checkpoint_that_is_cut_short_and_needed(tmp_path: Path, often: None) -> None:
    path = tmp_path / "t"
    table = made(path)
    log = path / "_delta_log"
    (checkpoint,) = log.glob("*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    (log / f"{1:020}.json").unlink()
    for _ in range(2):
        with pytest.raises(DataCorrupted, match=r"checkpoint\.parquet.* is damaged") as raised:
            TableLog(table.path, JsonTransactions()).refresh()
        assert "RESYNC" in (raised.value.hint or "")
        assert checkpoint.exists()


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowMemoryError("malloc of size 1048576 failed"),
        MemoryError(),
        OSError("ZSTD decompression failed: Allocation error : not enough memory"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        pa.ArrowCancelled("Operation cancelled"),
        pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("whole", [True, False], ids=["commits there", "commits gone"])
def test_a_checkpoint_for_which_memory_lacks_is_not_damaged(
    tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch, error: Exception, whole: bool
) -> None:
    """It stays, and with memory it is read; not as an error that stops the table, whose remedy would be to copy it anew."""
    path = tmp_path / "t"
    table = made(path, 4)
    expected = state(path)
    if not whole:
        (path / "_delta_log" / f"{1:020}.json").unlink()
    before = checkpoints.complete(path / "_delta_log")

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "iter_batches", fails)
        with pytest.raises(type(error)):
            TableLog(table.path, JsonTransactions()).refresh()
    assert checkpoints.complete(path / "_delta_log") == before
    assert state(path) == expected


@pytest.mark.parametrize("text", ["", "\0" * 100, '{"version":', '{"version":77,"size":9}'])
def test_a_hint_that_is_cut_short(tmp_path: Path, often: None, text: str) -> None:
    path = tmp_path / "t"
    table = made(path, 5)
    expected = state(path)
    (path / "_delta_log/_last_checkpoint").write_text(text)
    assert state(path) == expected
    assert delta.committed_lsn(table.path, "app") == Lsn(5)
    assert delta.load(table.path, "public.t", None).schema.names == ["id", "n"]


def test_a_log_without_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = made(path)
    (path / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(DataCorrupted, match="beginning"):
        TableLog(table.path, JsonTransactions()).refresh()
    shutil.rmtree(path)
    with pytest.raises(UndefinedTable):
        TableLog(table.path, JsonTransactions()).refresh()


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    path = tmp_path / "damaged"
    shutil.copytree(DAMAGED, path)
    os.utime(path / "_delta_log" / f"{4:020}.json", (1_000_000_000, 1_000_000_000))
    return str(path)


LOOKS: Final[Sequence[Callable[[str], object]]] = (
    lambda path: delta.committed_lsn(path, "app"),
    lambda path: delta.properties(path),
    lambda path: delta.load(path, "public.t", None),
    lambda path: delta.row_count(path),
    lambda path: delta.has_files(path),
    lambda path: TableLog(path, JsonTransactions()).refresh(),
    lambda path: alter.rename(JsonTransactions(), TargetTable(path, COLUMNS, ("id",), "public.t"), "public.u"),
)


@pytest.mark.parametrize("look", LOOKS)
def test_a_table_that_an_earlier_release_damaged(damaged: str, look: Callable[[str], object]) -> None:
    with pytest.raises(Exception, match="options"):
        DeltaTable(damaged)
    look(damaged)
    # Every reader can read it now, at every version.
    assert read(damaged) == [(number, "x", None) for number in (1, 2, 3)]
    for version in range(5):
        assert DeltaTable(damaged, version=version).version() == version
    assert [entry["operation"] for entry in DeltaTable(damaged).history()][-1] == "CREATE TABLE"
    commit = Path(damaged) / "_delta_log" / f"{4:020}.json"
    assert commit.stat().st_mtime == 1_000_000_000, "readers find versions by the time of their files"
    assert commit.read_text() == (DAMAGED / "_delta_log" / commit.name).read_text().replace(
        '"options":[]', '"options":{}'
    )
    assert not list(commit.parent.glob(".*")), "nothing is left beside it"
    DeltaTable(damaged).create_checkpoint()
    assert read(damaged) == [(number, "x", None) for number in (1, 2, 3)]


def test_a_log_of_others_is_left_as_it_is(damaged: str) -> None:
    commit = Path(damaged) / "_delta_log" / f"{4:020}.json"
    theirs = commit.read_text().replace('"engineInfo":"pubsub"', '"engineInfo":"E"')
    commit.write_text(theirs)
    TableLog(damaged, JsonTransactions()).refresh()
    assert commit.read_text() == theirs
