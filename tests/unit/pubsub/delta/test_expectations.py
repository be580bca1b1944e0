"""Whether a table has the rows that a batch takes for granted: by statistics, by the batch's data files, in parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from apply.staging.fold import fold
from pubsub.delta import table as delta
from pubsub.delta.files import file_rows
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer, expectations
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import NotAsExpected
from pubsub.delta.writers.choose_writer import AnyStaged, TableWriters
from pubsub.delta.writers.present_rows import TablePresent
from pubsub.delta.writers.staged_parts import DirectParts
from pubsub.errors import FeatureNotSupported
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.rows import DELETE, INSERT, OLD_ROW, UPDATE, Changes
from tests.support.json_transactions import JsonTransactions

KEYS: dict[str, Any] = {
    "int": (pa.int64(), lambda n: n),
    "text": (pa.string(), lambda n: f"key {n * 7919 % 100003}"),
    "float": (pa.float64(), float),
}


class Table:
    """A Delta table (k, v), and batches for it."""

    def __init__(self, directory: Path, kind: str = "int") -> None:
        self.type, self._key = KEYS[kind]
        schema = pa.schema([pa.field("k", self.type, False), pa.field("v", pa.string())])
        self.target = TargetTable(str(directory / "t"), schema, ("k",), "public.t")
        self.transactions = JsonTransactions()
        assert delta.create_empty(self.transactions, self.target, {"pubsub.node": "1"})
        self.stage = TableWriters(directory / "stage", self.transactions)
        self.lsn = 0

    def changes(self, op: int, numbers: Sequence[int]) -> Changes:
        keys = pa.array(map(self._key, numbers), self.type)
        nothing = pa.nulls(len(numbers), self.type)
        return Changes(
            np.arange(len(numbers)),
            np.full(len(numbers), op, np.uint8),
            {"k": nothing if op == DELETE else keys, "v": pa.array(["x"] * len(numbers))},
            {},
            np.full(len(numbers), ord("K") if op == DELETE else 0, np.uint8),
            {"k": keys if op == DELETE else nothing, "v": pa.nulls(len(numbers), pa.string())},
        )

    def send(self, *parts: tuple[int, Sequence[int]], before: int | None = None) -> None:
        """Commit a batch that is staged in these parts."""
        sink = self.stage.parts(self.target, rewrites=any(op != INSERT for op, _ in parts), replace_all=False)
        assert isinstance(sink, DirectParts)
        for op, numbers in parts:
            sink.add(fold(self.changes(op, numbers), ["k"], full=False, gives_way=self.target.gives_way))
        staged = sink.finish()
        record = Commit("app", Lsn(self.lsn + 1), Lsn(self.lsn + 1), previous=Lsn(self.lsn) if self.lsn else None)
        try:
            self.stage.look(staged, record)
            arrow_writer.commit(staged, record)
        finally:
            arrow_writer.discard(staged)
        self.lsn += 1

    def refuses(self, *parts: tuple[int, Sequence[int]]) -> None:
        """A batch of these parts is not committed, and leaves no file behind."""
        files = sorted(Path(self.target.path).glob("*.parquet"))
        with pytest.raises(NotAsExpected):
            self.send(*parts)
        assert sorted(Path(self.target.path).glob("*.parquet")) == files

    @property
    def count(self) -> int:
        return delta.row_count(self.target.path)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("at_once", [1 << 22, 40])
def test_keys_of_inserts_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int) -> None:
    """Also if the batch comes in parts, whose keys overlap, and are sought some at a time."""
    monkeypatch.setattr(expectations, "_AT_ONCE", at_once)
    table = Table(tmp_path, kind)
    numbers = list(range(400))
    random.Random(kind).shuffle(numbers)
    table.send((INSERT, numbers[:100]))
    table.send((INSERT, numbers[100:200]), (INSERT, numbers[200:300]))
    table.refuses((INSERT, [*numbers[300:350], numbers[7]]))
    table.refuses((INSERT, numbers[300:350]), (INSERT, [*numbers[350:], numbers[210]]))
    table.refuses((INSERT, numbers[300:350]), (INSERT, [*numbers[350:], numbers[320]]))
    table.send((INSERT, numbers[300:350]), (INSERT, numbers[350:]))
    assert table.count == 400


def test_keys_of_changes_stand(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.send((INSERT, range(100)))
    table.refuses((UPDATE, [5, 100]))
    table.refuses((INSERT, range(200, 300)), (DELETE, [5, 150]))
    table.refuses((INSERT, range(200, 300)), (DELETE, [5]), (INSERT, [7]))
    table.send((INSERT, range(200, 300)), (DELETE, [5]), (UPDATE, [6]), (INSERT, [300]))
    table.refuses((UPDATE, [5]))
    table.send((INSERT, [5]))
    assert table.count == 201


@pytest.mark.parametrize("kind", ["int", "text"])
def test_rows_that_stand_give_way(tmp_path: Path, kind: str) -> None:
    """In parts that only insert, and beside changes; that there is none is as well.  Two inserts of one key meet in the files."""
    table = Table(tmp_path, kind)
    table.target = replace(table.target, truncate="ignore")
    table.send((INSERT, range(100)))
    table.send((INSERT, range(50, 70)), (INSERT, range(90, 120)))
    assert table.count == 120
    table.send((INSERT, range(10)), (DELETE, [10, 11]), (UPDATE, [12]), (INSERT, range(100, 130)))
    assert table.count == 128
    table.send((DELETE, [0]), (INSERT, [10, 20]))
    assert table.count == 128
    table.refuses((UPDATE, [0]))
    table.refuses((INSERT, range(50, 60)), (INSERT, range(55, 65)))


def test_new_keys_past_all_others_are_not_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path)
    table.send((INSERT, range(100)))

    def refuse(*_: object) -> None:
        raise AssertionError("a file is read")

    monkeypatch.setattr(file_rows, "read_columns", refuse)
    table.send((INSERT, range(100, 200)), (INSERT, range(200, 300)))
    table.send((INSERT, range(-50, 0)))
    assert table.count == 350


@pytest.mark.parametrize("sought", [1, 1 << 20], ids=["one by one", "together"])
def test_rows_without_a_key_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sought: int) -> None:
    """As many equal rows as are removed.  Those that were missing were passed over in silence."""
    monkeypatch.setattr(arrow_writer, "_SOUGHT_BYTES", sought)
    target = TargetTable(str(tmp_path / "t"), pa.schema([pa.field("a", pa.int64())]), (), "public.t")
    transactions = JsonTransactions()
    assert delta.create_empty(transactions, target, {})
    writers = TableWriters(tmp_path / "stage", transactions)
    held = 0

    def stage(removed: list[int | None], added: list[int]) -> tuple[AnyStaged, Commit]:
        ops = np.array([DELETE] * len(removed) + [INSERT] * len(added), np.uint8)
        new = pa.array([None] * len(removed) + added, pa.int64())
        old = pa.array(removed + [None] * len(added), pa.int64())
        kinds = np.where(ops == DELETE, OLD_ROW, 0).astype(np.uint8)
        changes = Changes(np.arange(len(ops)), ops, {"a": new}, {}, kinds, {"a": old})
        folded = fold(changes, None, full=True)
        of_parts = pa.Table.from_batches(folded.removed.to_batches(max_chunksize=1), folded.removed.schema)
        staged = writers.write(target, replace(folded, removed=of_parts), replace_all=False)
        return staged, Commit("app", Lsn(held + 1), Lsn(held + 1), previous=Lsn(held) or None)

    def send(removed: list[int | None], added: list[int]) -> None:
        nonlocal held
        staged, record = stage(removed, added)
        assert isinstance(staged, DirectStaged)
        writers.look(staged, record)
        arrow_writer.commit(staged, record)
        held += 1

    send([], [1, 1, 2])
    send([1], [3])
    for gone in ([4], [1, 1], [None], [2, 2, 3]):
        staged, record = stage(gone, [5])
        assert isinstance(staged, DirectStaged)
        with pytest.raises(NotAsExpected):
            writers.look(staged, record)
        with pytest.raises(NotAsExpected):
            arrow_writer.commit(staged, record)
        arrow_writer.discard(staged)
    send([1, 2, 3], [6])
    read = QueryBuilder().register("t", DeltaTable(target.path)).execute("SELECT a FROM t").read_all()
    assert pa.table(read).column("a").to_pylist() == [6]


def test_zeros_are_one_key(tmp_path: Path) -> None:
    table = Table(tmp_path, "float")
    table.send((INSERT, [0]))
    zero = fold(table.changes(INSERT, [0]), ["k"], full=False)
    assert zero.expected is not None
    log = table.stage.log_of(table.target.path)
    negative = pa.table({"k": pa.array([-0.0])})
    with pytest.raises(NotAsExpected):
        expectations.require_free(log, replace(table.target), negative)


def test_a_table_that_only_spark_reads_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path)
    table.send((INSERT, range(10)))
    by_spark = TableWriters(tmp_path / "other", table.transactions, direct=False)
    staged = by_spark.write(table.target, fold(table.changes(INSERT, [5]), ["k"], full=False), replace_all=False)
    record = Commit("app", Lsn(2), Lsn(2), previous=Lsn(1))
    with pytest.raises(NotAsExpected):
        by_spark.look(staged, record)

    def refuse(*_: object) -> None:
        raise FeatureNotSupported("only Spark reads it")

    monkeypatch.setattr(TablePresent, "keys", refuse)
    by_spark.look(staged, record)
