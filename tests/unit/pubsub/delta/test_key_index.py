"""The index of keys: what is found by it is what reading the files finds, whatever becomes of it."""

from __future__ import annotations

import decimal
import errno
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from pubsub.delta import table as delta
from pubsub.delta.files import data_files, sought_rows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.key_index import layout, memory_runs, node_index, table_index
from pubsub.delta.key_index.hashing import Secret, hash_keys
from pubsub.delta.key_index.memory_runs import MemoryRuns
from pubsub.delta.key_index.node_index import KeyIndex
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import DataCorrupted
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions

IDS = pa.schema([pa.field("id", pa.int32(), False)])
Found = dict[str, list[tuple[int, int]]]


class Table:
    def __init__(self, path: Path, key: pa.Schema = IDS) -> None:
        self.transactions = JsonTransactions()
        self.key = key
        columns = pa.schema([*key, pa.field("payload", pa.string())])
        self.target = TargetTable(str(path), columns, tuple(key.names), "public.t")
        assert delta.create_empty(self.transactions, self.target, {})
        self.log = TableLog(self.target.path, self.transactions)
        self.log.refresh()
        self.lsn = 0

    def keys(self, values: Sequence[Any]) -> pa.Table:
        rows = [value if isinstance(value, tuple) else (value,) for value in values]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.key)
        return pa.table(
            [pa.array(column, field.type) for column, field in zip(columns, self.key, strict=True)], self.key
        )

    def commit(self, *, insert: Sequence[Any] = (), delete: Sequence[Any] = ()) -> None:
        rows = self.keys(insert).append_column("payload", pa.array(["x"] * len(insert)))
        keys = self.keys(delete) if len(delete) else None
        staged = DirectStaged(
            self.target, self.log, data_files.write_table(self.target, rows), keys, None, False, len(rows)
        )
        self.lsn += 1
        before = Lsn(self.lsn - 1) or None
        arrow_writer.commit(staged, Commit("app", Lsn(self.lsn), Lsn(self.lsn), previous=before))

    def remove(self, path: str) -> None:
        """Remove a data file from the table, as another engine might."""
        action = arrow_writer.remove_action(self.log.files[path], 0)
        self.log.commit([action], arrow_writer.Operation.WRITE)

    def find(self, keys: Sequence[Any]) -> Found:
        """Return what is found of the keys in each file."""
        found = {}
        for one in sought_rows.find(self.log, KeySet(self.keys(keys)), self.target):
            assert list(one.positions) == sorted(one.positions)
            found[one.file.path] = [(int(a), int(b)) for a, b in zip(one.positions, one.key_rows, strict=True)]
        return found

    def read(self, keys: Sequence[Any]) -> Found:
        """Return what is found without the index."""
        index, self.log.index = self.log.index, None
        try:
            return self.find(keys)
        finally:
            self.log.index = index

    def seek(self, index: KeyIndex) -> None:
        """Use the node's index from now on."""
        self.log.index = index.of(self.target.path)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "t")


class AtOnce(Executor):
    """Does the work when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], KeyIndex]:
    """Make node indexes, one after the other, that write small runs to disk, too, within the call that asks for it."""
    monkeypatch.setattr(table_index, "_SMALL", 1)
    monkeypatch.setattr(table_index, "_DISK_ROWS", 100)
    monkeypatch.setattr(table_index, "_PIECE_ROWS", 700)
    monkeypatch.setattr(node_index, "ThreadPoolExecutor", lambda *_, **__: AtOnce())
    return lambda: KeyIndex(tmp_path / "index")


def runs_of(table: Table) -> tuple[Any, ...]:
    assert table.log.index is not None
    return table.log.index.runs


def without_files(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no key may be sought by reading a file."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a file is read")

    monkeypatch.setattr(sought_rows, "_in_file", refuse)


MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
KEYS: dict[str, tuple[pa.Schema, Callable[[int], Any]]] = {
    "int16": (pa.schema([("k", pa.int16())]), lambda n: n - 20_000),
    "int64": (pa.schema([("k", pa.int64())]), lambda n: (n - 20_000) * 7_000_000_000_001),
    "text": (pa.schema([("k", pa.string())]), lambda n: "ä" * (n % 23) + str(n)),
    "uuid": (pa.schema([("k", pa.string())]), lambda n: f"{n * 77_777_777_777:036x}"),
    "bytes": (pa.schema([("k", pa.binary())]), lambda n: n.to_bytes(3, "big") + b"\0" * (n % 9)),
    "numeric": (pa.schema([("k", pa.decimal128(38, 5))]), lambda n: decimal.Decimal(n * 10**20) / 1000),
    "timestamp": (pa.schema([("k", pa.timestamp("us", "UTC"))]), lambda n: MOMENT + timedelta(microseconds=n)),
    "several": (
        pa.schema([("a", pa.date32()), ("b", pa.bool_()), ("c", pa.string()), ("d", pa.int32())]),
        lambda n: (date(2026, 1, 1) + timedelta(n % 50), n % 2 == 0, "x" * (n % 7), n // 50),
    ),
}


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("kind", KEYS)
def test_the_index_finds_what_reading_finds(
    tmp_path: Path, kind: str, disk: bool, on_disk: Callable[[], KeyIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, of = KEYS[kind]
    table = Table(tmp_path / "t", schema)
    chosen = random.Random(7)
    numbers = list(range(12_000))
    chosen.shuffle(numbers)
    for part in (numbers[:9_000], numbers[9_000:9_150], numbers[9_150:]):
        table.commit(insert=[of(n) for n in part])
    table.commit(delete=[of(n) for n in chosen.sample(numbers, 1_000)])
    sought = [[7], chosen.sample(range(14_000), 900), [13_999], []]
    expected = [table.read([of(n) for n in some]) for some in sought]
    table.seek(on_disk() if disk else KeyIndex())
    assert table.find([of(5)]) == table.read([of(5)]), "while it is made"
    without_files(table, monkeypatch)
    assert [table.find([of(n) for n in some]) for some in sought] == expected
    assert bool(runs_of(table)) == disk
    if disk:
        table.seek(on_disk())
        assert [table.find([of(n) for n in some]) for some in sought] == expected, "in the next process"


def test_a_key_that_occurs_twice_is_found_twice_and_nulls_never(
    tmp_path: Path, on_disk: Callable[[], KeyIndex]
) -> None:
    """Another engine may write such files."""
    for name, index in (("a", KeyIndex()), ("b", on_disk())):
        table = Table(tmp_path / name, pa.schema([("a", pa.int32()), ("b", pa.string())]))
        table.commit(insert=[(1, "x"), (2, "y"), (2, "y"), (None, "y"), (2, None)] * 40)
        table.seek(index)
        for _ in range(2):
            (found,) = table.find([(2, "y")]).values()
            assert found == [(row, 0) for row in range(200) if row % 5 in (1, 2)]


def test_runs_on_disk_follow_their_table(table: Table, on_disk: Callable[[], KeyIndex]) -> None:
    table.seek(on_disk())
    chosen = random.Random(3)
    there: set[int] = set()
    sizes = set()
    for step in range(60):
        new = range(step * 150, step * 150 + chosen.choice([40, 120, 150]))
        old = chosen.sample(sorted(there), min(len(there), 30))
        table.commit(insert=new, delete=old)
        there = there.union(new) - set(old)
        if step % 9 == 8:
            path = chosen.choice(sorted(table.log.files))
            rows = pq.read_table(Path(table.target.path) / path).column("id").to_pylist()
            table.remove(path)
            there -= set(rows)
        sought = chosen.sample(range(step * 150 + 150), min(100, step * 150 + 150))
        assert table.find(sought) == table.read(sought)
        sizes.add(len(runs_of(table)))
    assert max(sizes) <= 10, "they are put together"
    directory = runs_of(table)[0].path.parent
    assert {run.path for run in runs_of(table)} == set(directory.iterdir()), "and old ones removed"
    live = {file for run in runs_of(table) for file in run.header.files}
    assert sum(file.rows for file in live if file.path in table.log.files) * 2 >= sum(file.rows for file in live)


def test_a_run_on_disk_takes_twelve_to_thirteen_bytes_a_row(tmp_path: Path, table: Table) -> None:
    index = KeyIndex(tmp_path / "index")
    rows = 1_100_000
    for begin in range(0, rows, rows // 2):
        table.commit(insert=np.arange(begin, begin + rows // 2).tolist())
    table.seek(index)
    table.find([1])
    index._background.shutdown(wait=True)
    size = sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.run"))
    assert 12 * rows < size < 13 * rows


def test_memory_of_runs_on_disk_is_given_back(table: Table, on_disk: Callable[[], KeyIndex]) -> None:
    table.commit(insert=range(200_000))
    table.seek(on_disk())
    table.find([1])
    (run,) = runs_of(table)

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        (mapped,) = (part for part in text.split("VmFlags:") if str(run.path) in part)
        return int(mapped[mapped.index(str(run.path)) :].split("Rss:")[1].split()[0]) << 10

    run.arrays.rows.sum()
    run.arrays.lows.sum()
    assert resident() > run.arrays.nbytes // 2
    assert table.find(range(0, 200_000, 20)) == table.read(range(0, 200_000, 20))
    assert resident() < run.arrays.nbytes // 4
    assert table.find([7]) == table.read([7])


PLACES = ["starts", "sums", "lows", "rows"]


@pytest.mark.parametrize("place", PLACES)
def test_a_damaged_run_is_noticed_wherever_it_is(table: Table, on_disk: Callable[[], KeyIndex], place: str) -> None:
    table.commit(insert=range(3000))
    chosen = random.Random(place)
    for number in range(30):
        table.seek(on_disk())
        table.find([1])
        (run,) = runs_of(table)
        array = getattr(run.arrays, place)
        at = _begin_of(run, place) + chosen.randrange(array.nbytes)
        with open(run.path, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ (1 << chosen.randrange(8))]))
        assert table.find(range(3000)) == table.read(range(3000)), f"{place}, {number}"
        (found,) = runs_of(table)
        if found is run:
            # The byte lies between buckets without entries, or behind the last one.
            assert table.find(range(3000)) == table.read(range(3000))
            found.path.unlink()
        else:
            assert not run.path.exists(), "and made anew"


def _begin_of(run: Any, place: str) -> int:
    begin = np.frombuffer(run.pages, np.uint8).__array_interface__["data"][0]
    return int(getattr(run.arrays, place).__array_interface__["data"][0] - begin)


@pytest.mark.parametrize("change", ["cut", "empty", "header", "other", "aside"])
def test_a_run_that_is_not_whole_is_made_anew(table: Table, on_disk: Callable[[], KeyIndex], change: str) -> None:
    table.commit(insert=range(3000))
    table.seek(on_disk())
    table.find([1])
    path = runs_of(table)[0].path
    data = path.read_bytes()
    if change == "cut":
        path.write_bytes(data[:-5000])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "header":
        path.write_bytes(data[:40] + b"x" + data[41:])
    elif change == "other":
        path.write_bytes(os.urandom(len(data)))
    else:
        path.rename(path.with_suffix(".tmp"))
    table.seek(on_disk())
    for _ in range(2):
        assert table.find([5, 2999, 3000]) == table.read([5, 2999, 3000])
    (run,) = runs_of(table)
    assert [run.path] == list(path.parent.iterdir())


def test_a_run_that_cannot_be_written_is_said_once_and_tried_again_later(
    table: Table, on_disk: Callable[[], KeyIndex], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table.commit(insert=range(3000))
    table.seek(on_disk())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with structlog.testing.capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for _ in range(3):
            assert table.find([5, 2999]) == table.read([5, 2999])
    assert [(line["log_level"], "No space" in line["reason"]) for line in logs] == [("warning", True)]
    assert not list((tmp_path / "index").rglob("*.tmp"))
    monkeypatch.setattr(table.log.index, "_retry_at", 0.0)
    table.find([5])
    assert len(runs_of(table)) == 1


def test_runs_of_another_secret_are_not_used(table: Table, on_disk: Callable[[], KeyIndex], tmp_path: Path) -> None:
    table.commit(insert=range(3000))
    table.seek(on_disk())
    table.find([1])
    secret = tmp_path / "index" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.write_bytes(b"short")
    table.seek(on_disk())
    for _ in range(2):
        assert table.find([5, 2999]) == table.read([5, 2999])


def test_another_key_has_other_runs(tmp_path: Path, on_disk: Callable[[], KeyIndex]) -> None:
    table = Table(tmp_path / "t", pa.schema([("a", pa.int32()), ("b", pa.int32())]))
    table.commit(insert=[(n, n % 10) for n in range(3000)])
    table.seek(on_disk())
    assert table.find([(5, 5)]) == table.read([(5, 5)])
    table.key = pa.schema([("b", pa.int32())])
    table.target = TargetTable(table.target.path, table.target.schema, ("b",), "public.t")
    for _ in range(2):
        assert table.find([5]) == table.read([5])
        assert sum(map(len, table.find([5]).values())) == 300


def test_hashes_differ_where_keys_do() -> None:
    secret = Secret.of(b"secret")
    texts = ["", "a", "a\0", "\0", "\0\0", "aaaaaaaa", "aaaaaaaa\0", "aaaaaaab", "b" * 100, "b" * 101]
    pairs = pa.array(["a", "ab", ""]), pa.array(["bc", "c", "abc"])
    assert len(set(hash_keys([pa.array(texts)], secret).low.tolist())) == len(texts)
    assert len(set(hash_keys(pairs, secret).low.tolist())) == 3
    one, other = (hash_keys([pa.array(texts)], Secret.of(key)).low for key in (b"a", b"b"))
    assert not set(one.tolist()) & set(other.tolist())
    widened = (hash_keys([pa.array([-1, 0, 7], kind)], secret).low for kind in (pa.int8(), pa.int64()))
    assert np.array_equal(*widened)


def test_hashes_with_equal_low_bits_differ_in_the_high_ones() -> None:
    """In memory, where there are fewer buckets than high bits."""
    secret = Secret.of(b"secret")
    hashes = hash_keys([pa.array(range(50))], secret)
    same = layout.Hashes(hashes.high, np.full(50, 7, np.uint64), hashes.which)
    _, arrays = layout.arrange(same, np.arange(50, dtype=np.uint32), 0)
    rows, keys = layout.seek(arrays, same)
    distinct = {
        (int(row), int(key)) for row, key in zip(rows, keys, strict=True) if hashes.high[row] == hashes.high[key]
    }
    assert (
        distinct == {(int(row), int(key)) for row, key in zip(rows, keys, strict=True)} >= {(n, n) for n in range(50)}
    )


def test_a_file_that_is_gone_is_missed(table: Table) -> None:
    table.commit(insert=range(100))
    table.seek(KeyIndex())
    assert table.find([5])
    for path in Path(table.target.path).glob("*.parquet"):
        path.unlink()
    with pytest.raises(DataCorrupted, match="does not exist"):
        table.find([5])


def test_memory_is_bounded_and_a_run_in_use_stays(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 1000, 2000):
        table.commit(insert=range(start, start + 1000))
    index = KeyIndex()
    runs = index.memory = MemoryRuns(most_bytes=36_000)
    table.seek(index)
    for _ in range(2):
        assert len(table.find([5, 1005, 2005])) == 3, "what has no run is read"
    assert 24_000 <= runs.nbytes <= 36_000
    first = set(runs._held)
    monkeypatch.setattr(memory_runs, "_IN_USE", -1.0)
    assert len(table.find([5, 1005, 2005])) == 3
    assert runs.nbytes <= 36_000
    assert set(runs._held) != first


def test_many_keys_are_sought_by_reading(table: Table) -> None:
    table.commit(insert=range(1000))
    index = KeyIndex()
    table.seek(index)
    assert sum(map(len, table.find(range(6_000)).values())) == 1000
    assert index.memory.nbytes == 0


def test_the_number_of_runs_is_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a few rows is mostly overhead, which its bytes do not show."""
    for start in range(5):
        table.commit(insert=[start])
    index = KeyIndex()
    table.seek(index)
    monkeypatch.setattr(memory_runs, "_MOST_RUNS", 3)
    for _ in range(2):
        assert len(table.find(range(5))) == 5
        assert len(index.memory._held) == 3
    monkeypatch.setattr(memory_runs, "_IN_USE", -1.0)
    assert len(table.find(range(5))) == 5
    assert len(index.memory._held) == 3


def test_another_file_of_the_same_name_has_another_run(tmp_path: Path, on_disk: Callable[[], KeyIndex]) -> None:
    """No writer of Delta does that; somebody who restores files by hand may."""
    for name, index in (("a", KeyIndex()), ("b", on_disk())):
        table = Table(tmp_path / name)
        table.commit(insert=range(300))
        table.seek(index)
        (path,) = Path(table.target.path).glob("*.parquet")
        for _ in range(2):
            assert list(table.find([1, 3]).values()) == [[(1, 0), (3, 1)]]
        aside = path.with_suffix(".aside")
        rows = pa.table({"id": pa.array(range(299, -1, -1), pa.int32()), "payload": ["x"] * 300}, table.target.schema)
        pq.write_table(rows, aside)
        aside.replace(path)
        for _ in range(2):
            assert list(table.find([1, 3]).values()) == [[(296, 1), (298, 0)]]


def test_runs_of_tables_that_are_gone_are_removed(tmp_path: Path, on_disk: Callable[[], KeyIndex]) -> None:
    index = on_disk()
    tables = [Table(tmp_path / name) for name in "abc"]
    for table in tables:
        table.commit(insert=range(300))
        table.seek(index)
        table.find([1])
    places = [runs_of(table)[0].path for table in tables]
    index.forget(tables[0].target.path)
    on_disk().keep_only(frozenset([tables[1].target.path]))
    assert [place.exists() for place in places] == [False, True, False]
