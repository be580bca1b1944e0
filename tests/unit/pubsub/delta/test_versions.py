"""Tables with mode = scd2: what ends a row, where ended rows lie, who finds them, and what another copy leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pubsub.delta import past, versions
from pubsub.delta import table as delta
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.files.sought_rows import find
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.versions import VALID_TO_LSN
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Expected, Folded, NotAsExpected
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.server.publishing.changes import changes
from tests.support.json_transactions import JsonTransactions

#: A row: its key, its value, where it begins, and where it ends.
Row = tuple[int, str, int, int | None]


def at(lsn: int | None) -> datetime | None:
    return None if lsn is None else datetime(2026, 11, 1, tzinfo=UTC) + timedelta(seconds=lsn)


class Table:
    """A Delta table of versions, and commits to it."""

    def __init__(self, directory: Path) -> None:
        schema = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string()), *versions.FIELDS])
        self.target = TargetTable(str(directory / "t"), schema, ("k",), "public.t", versions=True)
        assert delta.create_empty(JsonTransactions(), self.target, {"pubsub.node": "1"})
        self.stage = TableWriters(directory / "stage", JsonTransactions())
        self.lsn: int | None = None

    @property
    def log(self) -> TableLog:
        log = self.stage.log_of(self.target.path)
        log.refresh()
        return log

    @property
    def rows(self) -> list[Row]:
        found = []
        for row in delta.query(self.target.path, "SELECT * FROM t").read_all().to_pylist():
            *own, begun_at, ended_at, begun, ended = row.values()
            assert ended_at == at(ended)
            assert begun_at in (at(begun), None)
            found.append((*own, begun, ended))
        return sorted(found, key=str)

    def images(self, rows: Sequence[Row]) -> pa.Table:
        columns: list[list[Any]] = [
            [row[0] for row in rows],
            [row[1] for row in rows],
            [at(row[2]) for row in rows],
            [at(row[3]) for row in rows],
            [row[2] for row in rows],
            [row[3] for row in rows],
        ]
        fields = zip(columns, self.target.schema, strict=True)
        return pa.table([pa.array(one, field.type) for one, field in fields], schema=self.target.schema)

    def copy(self, rows: Sequence[tuple[int, str]], lsn: int, generation: int = 1) -> None:
        images = self.images([(k, v, lsn, None) for k, v in rows])
        images = images.set_column(2, versions.VALID_FROM, pa.nulls(len(rows), versions.FIELDS[0].type))
        added = data_files.write(self.target, [images])
        arrow_writer.commit_copy(self.log, self.target, added, Commit(f"app/{generation}", Lsn(lsn), Lsn(lsn)))
        self.lsn = None

    def write(
        self,
        rows: Sequence[Row],
        ends: Mapping[int, int],
        *,
        free: Sequence[int] = (),
        marks: int | None = None,
        looked_up: bool = False,
        lsn: int,
    ) -> None:
        """Commit rows; `ends`: the keys whose rows end, and where.  `looked_up`: what the table has is known, and not expected."""
        none = self.target.schema.empty_table()
        keys = pa.table({"k": pa.array(list(ends), pa.int64())})
        of_ends = {
            versions.VALID_TO: pa.array(map(at, ends.values()), pa.timestamp("us", "UTC")),
            VALID_TO_LSN: pa.array(list(ends.values()), pa.int64()),
        }
        expected = Expected(
            pa.table({"k": keys.column("k"), **of_ends}), pa.table({"k": pa.array(free, pa.int64())}), keys.slice(0, 0)
        )
        marked = None
        if marks is not None:
            marked = {versions.VALID_TO: pa.scalar(at(marks)), VALID_TO_LSN: pa.scalar(marks, pa.int64())}
        folded = Folded(
            self.images(rows), none, keys, none, False, False, len(rows), 0, 0, expected=expected, marks=marked
        )
        if looked_up:
            folded = replace(folded, deleted_keys=expected.standing, expected=None)
        staged = self.stage.write(self.target, folded, replace_all=False)
        assert isinstance(staged, DirectStaged)
        previous = None if self.lsn is None else Lsn(self.lsn)
        try:
            arrow_writer.commit(staged, Commit("app/2", Lsn(lsn), Lsn(lsn), previous=previous))
        finally:
            discard(staged)
        self.lsn = lsn

    def apart(self) -> list[tuple[int, bool]]:
        """Return for each data file how many rows it has, and whether all have ended; none has both kinds."""
        found = []
        for file in self.log.files.values():
            nulls = json.loads(file.stats or "")["nullCount"][VALID_TO_LSN]
            assert nulls in (0, file.rows)
            found.append((file_rows.rows_in(self.log, file) - file.deleted, nulls == 0))
        return sorted(found)


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_row_that_ends_keeps_all_else(table: Table) -> None:
    table.copy([(1, "one"), (2, "two")], 10)
    table.write([(1, "uno", 20, 30), (1, "eins", 30, None), (3, "drei", 30, None)], {1: 20}, free=[3], lsn=30)
    assert table.rows == [
        (1, "eins", 30, None),
        (1, "one", 10, 20),
        (1, "uno", 20, 30),
        (2, "two", 10, None),
        (3, "drei", 30, None),
    ]
    table.write([], {1: 40, 3: 40}, lsn=40)
    assert [row for row in table.rows if row[3] is None] == [(2, "two", 10, None)]
    # The key is free again, and ended rows are none to changes.
    table.write([(1, "again", 50, None)], {}, free=[1], lsn=50)
    with pytest.raises(NotAsExpected, match="a row is in the way"):
        table.write([(1, "twice", 60, None)], {}, free=[1], lsn=60)
    table.lsn = 50
    with pytest.raises(NotAsExpected, match="a row to be changed is missing"):
        table.write([], {3: 60}, lsn=60)
    assert len(table.rows) == 6


def test_ended_rows_lie_apart_and_are_not_sought(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.copy([(k, "copied") for k in range(100)], 10)
    for lsn in range(20, 60, 10):
        rows: list[Row] = [(k, f"at {lsn}", lsn, lsn + 5) for k in range(10)]
        table.write(
            [*rows, *((k, "later", lsn + 5, None) for k in range(10))], dict.fromkeys(range(10), lsn), lsn=lsn + 5
        )
    assert {ended for _, ended in table.apart()} == {True, False}
    before, sought = table.rows, set[str]()
    read_columns = file_rows.read_columns

    def reading(log: Any, file: Any, *rest: Any, **named: Any) -> Any:
        sought.add(file.path)
        return read_columns(log, file, *rest, **named)

    monkeypatch.setattr(file_rows, "read_columns", reading)
    found = list(find(table.log, KeySet(pa.table({"k": pa.array([3, 50])})), table.target))
    assert sum(len(one.positions) for one in found) == 2
    ended = {
        path for path, file in table.log.files.items() if file_rows.known_live(table.log, table.target, file) is False
    }
    assert len(ended) >= 8
    assert not ended & sought
    monkeypatch.undo()
    # Housekeeping leaves them apart.
    while rewrite(table.log, lambda: table.target, lambda files: files if len(files) > 1 else ()):
        pass
    assert table.apart() == [(80, True), (100, False)]
    assert table.rows == before
    table.write([], {3: 70, 50: 70}, lsn=70)
    assert [row[:2] for row in table.rows if row[3] == 70] == [(3, "later"), (50, "copied")]


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("statistics", [True, False])
def test_rows_of_all_kinds_in_one_file(table: Table, looked_up: bool, statistics: bool) -> None:
    """Another engine's OPTIMIZE has put them together: what has ended before does not end again, however the rows are found."""
    table.copy([(1, "one"), (2, "two")], 10)
    for lsn in (20, 30, 40):
        table.write([(1, f"at {lsn}", lsn, None)], {1: lsn}, lsn=lsn)
    optimized_elsewhere(table, statistics)
    before = table.rows
    table.write([(1, "at 50", 50, None)], {1: 50, 2: 50}, looked_up=looked_up, lsn=50)
    current = [(1, "at 40", 40, None), (2, "two", 10, None)]
    left = [row for row in before if row not in current]
    assert len(left) == 3
    assert table.rows == sorted([*left, *((*row[:3], 50) for row in current), (1, "at 50", 50, None)], key=str)


def optimized_elsewhere(table: Table, statistics: bool) -> None:
    """Put all rows into one file, as an engine does that knows nothing of what they mean, and perhaps keeps no statistics."""
    log = table.log
    files = list(log.files.values())
    rows = pa.concat_tables(file_rows.live_rows(log, files, table.target))
    (action,) = data_files.write(table.target, [rows], merging=True)
    add = action["add"] | {"dataChange": False}
    if not statistics:
        add["stats"] = json.dumps({"numRecords": rows.num_rows})
    removed = [arrow_writer.remove_action(file, 0, data_change=False) for file in files]
    with log.writing:
        log.commit([*removed, {"add": add}], Operation.MERGE_FILES)


def test_versions_of_one_key_in_a_batch_of_parts(table: Table) -> None:
    """As many rows as keys arrive, and yet two have one key: not what a part that only inserts has."""
    table.copy([(9, "nine")], 10)
    sink = table.stage.parts(table.target, rewrites=True, replace_all=False)
    none, keys = table.target.schema.empty_table(), pa.table({"k": pa.array([1, 2], pa.int64())})
    images = table.images([(1, "one", 20, 30), (1, "uno", 30, None)])
    expected = Expected(keys.slice(0, 0), keys, keys.slice(0, 0))
    sink.add(Folded(images, none, keys.slice(0, 0), none, False, False, 2, 1, 1, expected=expected))
    staged = sink.finish()
    assert isinstance(staged, DirectStaged)
    arrow_writer.commit(staged, Commit("app/2", Lsn(30), Lsn(30)))
    assert table.rows == [(1, "one", 20, 30), (1, "uno", 30, None), (9, "nine", 10, None)]


def test_another_copy_ends_what_is_current(table: Table) -> None:
    table.copy([(1, "one"), (2, "two"), (3, "three")], 10)
    table.write([(1, "uno", 20, None), (4, "vier", 30, None)], {1: 20, 2: 20}, free=[4], lsn=30)
    before = [row for row in table.rows if row[3] is not None]
    # The transaction that ends at 30 is in the copy: what it made held for nobody.
    copied_at = Lsn(30)
    arrow = data_files.write(table.target, [table.images([(1, "uno", 30, None), (4, "vier", 30, None)])])
    arrow_writer.commit_copy(table.log, table.target, arrow, Commit("app/3", copied_at, copied_at))
    rows = delta.query(table.target.path, "SELECT * FROM t").read_all().to_pylist()
    found = {(row["k"], row["v"], row[versions.VALID_FROM_LSN], row[VALID_TO_LSN]) for row in rows}
    assert found == {*before, (1, "uno", 20, 30), (3, "three", 10, 30), (1, "uno", 30, None), (4, "vier", 30, None)}
    assert {row[versions.VALID_TO] for row in rows if row[VALID_TO_LSN] == 30} == {None}
    assert len(rows) == len(found)


def test_a_truncate_ends_all_others(table: Table) -> None:
    table.copy([(1, "one"), (2, "two"), (3, "three")], 10)
    table.write([(1, "uno", 20, 30), (5, "fünf", 30, None)], {1: 20}, marks=30, lsn=30)
    assert table.rows == [
        (1, "one", 10, 20),
        (1, "uno", 20, 30),
        (2, "two", 10, 30),
        (3, "three", 10, 30),
        (5, "fünf", 30, None),
    ]


def test_a_subscriber_of_the_table_is_sent_the_end_of_a_row(table: Table) -> None:
    """As an UPDATE of that row, and the next version as an INSERT."""
    table.copy([(1, "one"), (2, "two")], 10)
    table.write([(1, "uno", 20, None)], {1: 20}, lsn=20)
    found = list(changes(table.target.path, table.target, table.log.version))
    assert {(one.old is None, one.new is None) for one in found} == {(False, False), (True, False)}
    of = {one.old is None: (one.old, one.new) for one in found}
    assert len(found) == len(of) == 2
    (old, ended), (_, begun) = of[False], of[True]
    assert old is not None
    assert ended is not None
    assert begun is not None
    assert (old[:2], old[-2:], ended[:2], ended[-2:]) == ((1, "one"), (10, None), (1, "one"), (10, 20))
    assert (begun[:2], begun[-2:]) == ((1, "uno"), (20, None))


def test_what_a_table_of_versions_cannot_become(table: Table) -> None:
    """A mirror and a history would replace what it keeps."""
    found = delta.properties(table.target.path)
    mirror = TargetTable(table.target.path, table.target.schema, ("k",), "public.t")
    history = TargetTable(table.target.path, table.target.schema, (), "public.t", history=("k",))
    past.refuse_to_replace(table.target, found)
    for other, kind in ((mirror, "a mirror"), (history, "a history")):
        with pytest.raises(
            NotInPrerequisiteState, match=f"keeps every version of its rows, which {kind} would replace"
        ):
            past.refuse_to_replace(other, found)
    assert delta.load(table.target.path, "public.t", None).versions
    assert (delta.mark_of(found), table.target.row_key) == (VALID_TO_LSN, ("k", versions.VALID_FROM_LSN))
