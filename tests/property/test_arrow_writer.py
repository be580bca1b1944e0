"""Random histories, batch by batch, written to a real Delta table without a JVM and read by deltalake's own engine.

Files are split, merged and checkpointed after a few rows.  A second writer tries to commit first at every opportunity.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from pubsub.delta import table as delta
from pubsub.delta.files import bounded_rows, data_files, file_rows
from pubsub.delta.housekeeping import choose_files
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation, Request
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Folded, NotAsExpected
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.protocol.lsn import Lsn
from tests.property.test_fold import KEYS, VALUES, History, Row, folded_of, play, steps
from tests.support.json_transactions import JsonTransactions

# Enough rows that a file loses some in one batch, more in the next, and keeps a few.
MANY: dict[str, tuple[list[pa.Field], list[Row]]] = KEYS | {
    "int": ([pa.field("k", pa.int64())], [(key,) for key in range(24)]),
    "text": ([pa.field("k", pa.string())], [(f"key {key}",) for key in range(24)]),
    "composite": (
        [pa.field("k", pa.int64()), pa.field("l", pa.string())],
        [(a, b) for a in range(-3, 3) for b in ("", "a", "b", "ä")],
    ),
}


def rows_of(path: str) -> list[Row]:
    found = QueryBuilder().register("x", DeltaTable(path)).execute("SELECT * FROM x").read_all()
    return sorted((tuple(row.values()) for row in pa.table(found).to_pylist()), key=repr)


def _has_empty(by: Sequence[str], fields: Sequence[pa.Field], keys: Sequence[Row]) -> bool:
    """Return whether a key has an empty text in a partition column: those are refused."""
    return any(field.name in by and any(key[place] == "" for key in keys) for place, field in enumerate(fields))


def no_orphans(path: Path) -> None:
    """Assert that some commit of the log names every data file and deletion vector, and that nothing else is there."""
    named = "".join(each.read_text("utf-8") for each in (path / "_delta_log").glob("*.json"))
    for file in path.rglob("part-*.parquet"):
        assert file.name in named, file.name
    assert not list((path / "_delta_log").glob(".*"))


def partition(path: str, names: Sequence[str]) -> None:
    """Partition a table that was just created, as another engine would have."""
    commit = Path(path) / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["partitionColumns"] = list(names)
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


class Rival(JsonTransactions):
    """Another writer commits just before every other commit."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def commit(self, request: Request) -> str:
        self.turn += 1
        if self.turn % 2:
            super().commit(replace(request, actions=(), operation=Operation.ALTER, user_metadata=None))
        return super().commit(request)


def is_as_expected(folded: Folded, rows: dict[Row, Row]) -> bool:
    """Return whether a table with these rows has those that the batch takes for granted, and no other in their way."""
    if folded.expected is None or folded.truncated:
        return True
    standing, free = (
        {tuple(row.values()) for row in keys.to_pylist()} for keys in (folded.expected.standing, folded.expected.free)
    )
    return standing <= rows.keys() and not free & rows.keys()


def write(stage: TableWriters, table: TargetTable, folded: Folded, record: Commit) -> DirectStaged:
    staged = stage.write(table, folded, replace_all=folded.truncated)
    assert isinstance(staged, DirectStaged)
    try:
        arrow_writer.commit(staged, record)
    finally:
        discard(staged)
    return staged


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(MANY)), st.booleans(), st.booleans())
def test_batches(data: st.DataObject, kind: str, full: bool, rival: bool) -> None:
    key_fields, keys = MANY[kind]
    fields = [pa.field(f.name, f.type, False) for f in key_fields] + VALUES
    names = tuple(f.name for f in key_fields)
    home = Path(tempfile.mkdtemp(prefix="pubsub-direct-"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choose_files, "_MERGE", data.draw(st.sampled_from([3, 8])))
            patch.setattr(choose_files, "_WORN_ROWS", data.draw(st.sampled_from([1, 8192])))
            patch.setattr(data_files, "_SPLIT_ROWS", 9)
            patch.setattr(data_files, "_ROW_GROUP_ROWS", 2)
            patch.setattr(data_files, "_FILE_ROWS", 9)
            patch.setattr(bounded_rows, "PIECE_BYTES", data.draw(st.sampled_from([1, 64, bounded_rows.PIECE_BYTES])))
            patch.setattr(JsonTransactions, "checkpoint_interval", 4)
            transactions = Rival() if rival else JsonTransactions()
            table = TargetTable(str(home / "t"), pa.schema(fields), names, "public.t")
            assert delta.create_empty(JsonTransactions(), table, {"pubsub.node": "1"})
            exact = [one.name for one in fields if not pa.types.is_binary(one.type) and one.name != "v"]
            by = data.draw(st.lists(st.sampled_from(exact), unique=True, max_size=2))
            by = [] if _has_empty(by, key_fields, keys) else by
            partition(table.path, by)
            stage = TableWriters(home / "stage", transactions)
            held: Lsn | None = None
            rows: dict[Row, Row] = {}
            first = History(key_fields + VALUES, len(key_fields), full, {})
            for key in keys:
                first.insert((*key, "first", 0))
            for number in range(data.draw(st.integers(2, 7))):
                if number == 0:
                    history = first
                else:
                    history = History(key_fields + VALUES, len(key_fields), full, dict(rows))
                    play(history, keys, data.draw(steps), truncates=number == 3)
                folded = folded_of(history, list(names))
                record = Commit("app", Lsn(100 * number + 1), Lsn(100 * number + 50), previous=held)
                if not is_as_expected(folded, rows):
                    with pytest.raises(NotAsExpected):
                        write(stage, table, folded, record)
                    no_orphans(home / "t")
                    assert delta.committed_lsn(table.path, "app") == held
                    folded = folded_of(history, list(names), stage.present(table, "app"))
                    assert folded.missing is not None or folded.collisions is not None
                rows = history.table
                for _ in range(2):  # the second time the table holds it already
                    staged = write(stage, table, folded, record)
                held = record.last
                choose = partial(choose_files.choose_files, rows_in=partial(file_rows.rows_in, staged.log))
                rewrite(staged.log, lambda: table, choose)
                assert rows_of(table.path) == sorted(rows.values(), key=repr)
                files = list(staged.log.files.values())
                read = pa.concat_tables(file_rows.live_rows(staged.log, files, table)) if files else None
                found = [tuple(row.values()) for row in read.to_pylist()] if read else []
                assert sorted(found, key=repr) == sorted(rows.values(), key=repr)
                assert delta.committed_lsn(table.path, "app") == record.last
                no_orphans(home / "t")
                if data.draw(st.booleans()):
                    # A new process knows only what the log says.
                    stage = TableWriters(home / "stage", transactions)
            assert len(DeltaTable(table.path).file_uris()) < 12 or by
    finally:
        shutil.rmtree(home)


def test_a_batch_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    table = TargetTable(str(tmp_path / "t"), pa.schema([pa.field("id", pa.int64(), False)]), ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    files: Any = data_files.write_table(table, pa.table({"id": pa.array([1, 2], pa.int64())}))
    log_of = arrow_writer.writable_log(table.path, JsonTransactions())
    assert log_of is not None
    discard(DirectStaged(table, log_of, files, None, None, False, 2))
    assert list((tmp_path / "t").glob("*.parquet")) == []


def test_staging_the_next_batch_leaves_the_log_to_the_commit_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: staging reads the new version during the commit, and records it only after the commit did."""
    table = TargetTable(str(tmp_path / "t"), pa.schema([pa.field("id", pa.int64(), False)]), ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    following: list[DirectStaged] = []
    read = TableLog.actions
    has_read, committed = threading.Event(), threading.Event()

    def write(number: int) -> None:
        history = History(list(table.schema), 1, False, {})
        history.insert((number,))
        staged = stage.write(table, folded_of(history, ["id"]), replace_all=False)
        assert isinstance(staged, DirectStaged)
        following.append(staged)

    staging = threading.Thread(target=write, args=(2,))

    def read_slowly(log: TableLog, version: int) -> Any:
        actions = read(log, version)
        if threading.current_thread() is staging and actions is not None:
            has_read.set()
            assert committed.wait(60)
        return actions

    class WhileStaging(JsonTransactions):
        def commit(self, request: Request) -> str:
            txn_id = super().commit(request)
            if not staging.ident:
                staging.start()
                while staging.is_alive() and not has_read.wait(0.01):
                    pass
            return txn_id

    stage = TableWriters(tmp_path / "stage", WhileStaging())
    write(1)
    with monkeypatch.context() as patch:
        patch.setattr(TableLog, "actions", read_slowly)
        arrow_writer.commit(following[0], Commit("app", Lsn(1), Lsn(1)))
        committed.set()
        staging.join()
    arrow_writer.commit(following[1], Commit("app", Lsn(2), Lsn(2), previous=Lsn(1)))
    assert DeltaTable(table.path).version() == 2
    assert rows_of(table.path) == [(1,), (2,)]
