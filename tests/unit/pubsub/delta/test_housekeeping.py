"""What is merged and rewritten, what may be deleted, and which settings a table follows."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64

from pubsub.delta import pins
from pubsub.delta import table as delta
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.housekeeping import inventory, row_order, upkeep
from pubsub.delta.housekeeping.choose_files import choose_files
from pubsub.delta.housekeeping.delta_optimize import is_due
from pubsub.delta.housekeeping.retention import FILES, LOG, changed, follow_settings, retention_properties
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.housekeeping.upkeep import Upkeep
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Listed, Operation, Retention
from pubsub.delta.sources import owner, owner_property
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.protocol.lsn import Lsn
from pubsub.sql.source import Source
from tests.support.json_transactions import JsonTransactions

COLUMNS = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64())])


# which files


def test_a_file_gets_another_name_where_vacuum_would_not_know_it() -> None:
    """An earlier release escaped more of its path than Java does."""
    lost, well = file("p=o%27brien/a.parquet", 1 << 20), [file(f"p=100%2525%2521/{n}.parquet", 9) for n in range(2)]
    for resting in (False, True):
        assert choose_files([*well, lost], lambda one: one.rows or 0, worn=False, resting=resting) == [lost]
    assert choose_files(well, lambda one: one.rows or 0) == []


def file(name: str, rows: int, deleted: int = 0, size: int | None = None) -> AddFile:
    vector = {"cardinality": deleted} if deleted else None
    return AddFile(name, rows * 10 if size is None else size, 0, rows, {}, None, vector, inside=True)


def chosen(*files: AddFile, worn: bool = True, resting: bool = False) -> list[str]:
    found = choose_files(files, lambda one: one.rows or 0, worn=worn, resting=resting)
    return [one.path for one in found]


def test_four_files_of_about_one_size_are_merged() -> None:
    three = [file(f"s{number}", 1000) for number in range(3)]
    big = [file("b", 1 << 20), file("m", 300_000)]
    assert chosen(*three, *big) == []
    assert chosen(*three, file("t", 1100), *big) == [one.path for one in three] + ["t"]


def test_smaller_classes_go_along_and_larger_ones_do_not() -> None:
    eight = [file(f"s{number}", 4000) for number in range(8)]
    assert chosen(*eight, file("tiny", 3), file("m", 100_000)) == ["tiny", *(one.path for one in eight)]


def test_large_files_are_no_small_ones_whatever_makes_them_large() -> None:
    assert chosen(*(file(f"r{number}", 1 << 19) for number in range(9))) == []
    assert chosen(*(file(f"b{number}", 10, size=64 << 20) for number in range(9))) == []


def test_a_rewriting_is_bounded() -> None:
    assert len(chosen(*(file(f"m{number:02}", 200_000) for number in range(20)))) == 5
    assert len(chosen(*(file(f"m{number:02}", 1000, size=60 << 20) for number in range(20)))) == 4


def test_the_files_of_a_large_copy_are_left() -> None:
    """Rewriting them would only make pairs of them."""
    assert chosen(*(file(f"m{number:02}", 500_000) for number in range(20))) == []


def test_a_file_that_has_lost_a_tenth_of_its_rows_is_rewritten_and_takes_smaller_ones_with_it() -> None:
    big, worn = file("big", 900_000, 90_001), file("also worn", 20_000, 1_500)
    files = [big, file("whole", 2_000_000), worn, file("s", 1000), file("m", 100_000)]
    assert chosen(*files) == ["big", "also worn", "s", "m"]
    assert chosen(*files, worn=False) == []
    assert chosen(file("big", 900_000, 90_000), file("s", 1000)) == []


def test_a_small_worn_file_waits_until_it_is_merged() -> None:
    assert chosen(file("s", 8191, 8000), file("big", 10**6)) == []


def test_a_table_that_rests_is_made_as_tight_as_a_fresh_one() -> None:
    assert chosen(file("a", 100), file("b", 400_000), resting=True) == ["a", "b"]
    assert chosen(file("a", 100), file("b", 600_000), resting=True) == []
    assert chosen(file("b", 600_000, 6001), file("a", 100), resting=True) == ["b", "a"]
    assert chosen(file("b", 600_000, 6000), resting=True) == []


# rewriting them


class Table:
    def __init__(self, path: Path, transactions: JsonTransactions | None = None) -> None:
        self.target = TargetTable(str(path), COLUMNS, ("id",), "public.t")
        self.transactions = transactions or JsonTransactions()
        assert delta.create_empty(self.transactions, self.target, {})
        self.log = TableLog(self.target.path, self.transactions)
        self.lsn = 0

    def commit(self, added: Sequence[int] = (), deleted: Sequence[int] = ()) -> None:
        """As another worker would, with a log of its own."""
        log = TableLog(self.target.path, self.transactions)
        log.refresh()
        rows = pa.table({"id": pa.array(added, pa.int64()), "n": pa.array(added, pa.int64())}, COLUMNS)
        files: list[Action] = data_files.write_table(self.target, rows)
        keys = pa.table({"id": pa.array(deleted, pa.int64())})
        staged = DirectStaged(self.target, log, files, keys if len(keys) else None, None, False, 1)
        self.lsn += 1
        arrow_writer.commit(staged, Commit("app", Lsn(self.lsn), Lsn(self.lsn), previous=Lsn(self.lsn - 1) or None))

    def rewrite(
        self, choose: Callable[[Sequence[AddFile]], Sequence[AddFile]] = list, between: Callable[[], object] = int
    ) -> bool:
        def load() -> TargetTable:
            between()
            return self.target

        return rewrite(self.log, load, choose)

    def ids(self) -> list[int]:
        found = QueryBuilder().register("t", DeltaTable(self.target.path)).execute("SELECT id FROM t ORDER BY id")
        return [row["id"] for row in pa.table(found.read_all()).to_pylist()]

    @property
    def files(self) -> set[str]:
        return {path.name for path in Path(self.target.path).iterdir() if path.is_file()}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "t")


def test_rewriting_changes_no_rows(table: Table) -> None:
    table.commit(added=range(10))
    table.commit(added=range(10, 20), deleted=[3, 4])
    assert table.rewrite()
    assert table.ids() == [*range(3), *range(5, 20)]
    assert [found.rows for found in table.log.files.values()] == [18]
    actions = table.log.actions(table.log.version) or []
    assert {what["dataChange"] for one in actions for kind, what in one.items() if kind in ("add", "remove")} == {False}
    assert actions[0]["commitInfo"]["operation"] == Operation.MERGE_FILES.value


def test_rows_that_are_deleted_meanwhile_are_deleted_from_the_new_file(table: Table) -> None:
    table.commit(added=range(10))
    table.commit(added=range(10, 20), deleted=[2, 5])
    assert table.rewrite(between=lambda: table.commit(added=[30], deleted=[7, 10, 19]))
    assert table.ids() == [0, 1, 3, 4, 6, 8, 9, *range(11, 19), 30]
    merged = next(found for found in table.log.files.values() if found.rows == 18)
    assert merged.deleted == 3
    assert json.loads(merged.stats or "")["tightBounds"] is False
    # And the next batch finds its rows in the new file.
    table.commit(added=[], deleted=[0, 8, 30])
    assert table.ids() == [1, 3, 4, 6, 9, *range(11, 19)]


def test_a_file_that_loses_its_last_rows_meanwhile(table: Table) -> None:
    table.commit(added=[1, 2])
    table.commit(added=[3, 4])
    assert table.rewrite(between=lambda: table.commit(deleted=[1, 2, 4]))
    assert table.ids() == [3]


def test_files_that_all_go_meanwhile_leave_nothing(table: Table) -> None:
    table.commit(added=[1, 2])
    table.commit(added=[3])
    assert not table.rewrite(between=lambda: table.commit(added=[9], deleted=[1, 2, 3]))
    assert table.ids() == [9]
    assert len(table.files) == 3  # the two of before, and that of row 9


def test_rows_that_come_back_meanwhile_stop_the_rewriting(table: Table) -> None:
    """As RESTORE does: the file gets its earlier, smaller vector again."""
    table.commit(added=range(10))
    table.commit(added=[20], deleted=[1, 2])

    def restore() -> None:
        log = TableLog(table.target.path, table.transactions)
        log.refresh()
        held = next(found for found in log.files.values() if found.deleted)
        _, (vector,) = deletion_vectors.write(log.table, [BitMap64([1])])
        lines = Path(table.target.path, "_delta_log", f"{1:020}.json").read_text().splitlines()
        add = next(json.loads(line)["add"] for line in lines if '"add"' in line)
        log.commit([arrow_writer.remove_action(held, 0), {"add": add | {"deletionVector": vector}}], Operation.WRITE)

    assert not table.rewrite(between=restore)
    assert table.ids() == [0, *range(2, 10), 20]


def test_columns_that_change_meanwhile_stop_the_rewriting(table: Table) -> None:
    table.commit(added=[1])
    table.commit(added=[2])
    files = table.files

    def alter() -> None:
        other = TableLog(table.target.path, table.transactions)
        other.refresh()
        configuration = {**other.properties, "x": "y"}
        other.commit([{"metaData": {**other.metadata, "configuration": configuration}}], Operation.ALTER)

    assert not table.rewrite(between=alter)
    assert table.files == files


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_between_the_choice_and_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every other time the rows are sorted in several slices."""
    chance = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(row_order, "_SLICE_BYTES", 300)
    table = Table(tmp_path / "t")
    rows: set[int] = set()
    new = iter(chance.sample(range(10_000), 1000))

    def batch() -> None:
        gone = set(chance.sample(sorted(rows), min(len(rows), chance.randrange(12))))
        more = [next(new) for _ in range(chance.randrange(15))]
        table.commit(added=more, deleted=sorted(gone))
        rows.difference_update(gone)
        rows.update(more)

    for _ in range(12):
        batch()
        if chance.random() < 0.6:
            pick = chance.randrange(1, 6)
            table.rewrite(lambda files, pick=pick: chance.sample(files, min(pick, len(files))), batch)
        assert table.ids() == sorted(rows)


def ids_as_they_lie(table: Table) -> list[int]:
    table.log.refresh()
    rows = file_rows.live_rows(table.log, list(table.log.files.values()), table.target)
    return [number for part in rows for number in part["id"].to_pylist()]


@pytest.mark.parametrize("slice_bytes", [1 << 20, 600])
def test_rows_lie_in_the_order_of_their_key(table: Table, monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(row_order, "_SLICE_BYTES", slice_bytes)
    table.commit(added=range(0, 100, 3))
    table.commit(added=range(1, 100, 3))
    table.commit(added=range(2, 100, 3), deleted=[0, 49, 97])
    assert table.rewrite(between=lambda: table.commit(deleted=[1, 60]))
    assert ids_as_they_lie(table) == [number for number in range(100) if number not in (0, 1, 49, 60, 97)]


def test_large_files_keep_their_order(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice would read all of them."""
    monkeypatch.setattr(row_order, "_SLICE_BYTES", 100)
    table.commit(added=range(100, 200))
    table.commit(added=range(100))
    assert table.rewrite()
    assert ids_as_they_lie(table) == [*range(100, 200), *range(100)]


def test_rows_lie_in_the_order_of_the_cluster_columns(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    domain = {"domain": "delta.clustering", "configuration": '{"clusteringColumns":[["n"],["id"]]}', "removed": False}
    log = TableLog(table.target.path, table.transactions)
    log.refresh()
    log.commit([{"domainMetadata": domain}], Operation.ALTER)
    rows = pa.table({"id": [1, 2, 3, 4], "n": [7, None, 5, 7]}, COLUMNS)
    for part in rows.slice(2), rows.slice(0, 2):
        log.refresh()
        log.commit(data_files.write_table(table.target, part), Operation.WRITE)
    assert table.rewrite()
    assert ids_as_they_lie(table) == [3, 1, 4, 2]


# Delta's OPTIMIZE


@pytest.mark.parametrize(
    ("clustered", "loose", "due"), [(90, 10, False), (89, 11, True), (0, 1, True), (10, 0, False), (0, 0, False)]
)
def test_a_clustered_table_is_optimized_once_a_tenth_of_it_is_not_clustered(
    clustered: int, loose: int, due: bool
) -> None:
    files = [replace(file("c", 1, size=clustered), kept={"clusteringProvider": "liquid"})] if clustered else []
    files += [file(f"{number}", 1, size=1) for number in range(loose)]
    log: Any = SimpleNamespace(cluster_columns=("n",), files={one.path: one for one in files})
    for rewritten_here in (True, False):
        assert is_due(log, rewritten_here=rewritten_here, resting=True) is due
        assert not is_due(log, rewritten_here=rewritten_here, resting=False), "while it is written, 64 MB are worth it"
    log.files["large"] = file("large", 1, size=64 << 20)
    assert is_due(log, rewritten_here=True, resting=False)


def test_a_table_that_is_not_rewritten_here_is_optimized_for_enough_small_files() -> None:
    def due(small: int, *, resting: bool, rewritten_here: bool = False) -> bool:
        files = [file("large", 1, size=64 << 20), *(file(f"{number}", 1) for number in range(small))]
        log: Any = SimpleNamespace(cluster_columns=(), files={one.path: one for one in files})
        return is_due(log, rewritten_here=rewritten_here, resting=resting)

    assert due(16, resting=False)
    assert not due(15, resting=False)
    assert due(2, resting=True)
    assert not due(1, resting=True)
    assert not due(99, resting=True, rewritten_here=True)


def test_files_of_different_partitions_are_no_reason_to_optimize() -> None:
    """OPTIMIZE merges those of one partition, so it did nothing, again and again."""

    def due(*partitions: str, resting: bool) -> bool:
        files = {str(number): replace(file(str(number), 1), partition={"p": p}) for number, p in enumerate(partitions)}
        log: Any = SimpleNamespace(cluster_columns=(), files=files)
        return is_due(log, rewritten_here=False, resting=resting)

    assert not due(*(str(number) for number in range(99)), resting=True)
    assert not due(*(str(number % 9) for number in range(99)), resting=False)
    assert due("a", "b", "a", resting=True)
    assert due(*(str(number % 6) for number in range(99)), resting=False)


# retention


def test_a_table_follows_the_settings_until_someone_alters_it(table: Table) -> None:
    hour, ten = retention_properties(3600, 3600), retention_properties(600, 1200)
    assert ten[FILES] == "interval 600 seconds"
    assert ten[LOG] == "interval 1200 seconds"
    table.log.refresh()
    assert follow_settings(table.log, hour), "a table of an earlier release"
    assert not follow_settings(table.log, hour)
    assert follow_settings(table.log, ten)
    assert table.log.properties[FILES] == "interval 600 seconds"
    for name, value in ((FILES, "interval 7 days"), (LOG, "interval 30 days")):
        altered = {**table.log.properties, name: value}
        assert not changed(altered, hour), name
    removed = {name: value for name, value in table.log.properties.items() if name != LOG}
    assert not changed(removed, hour)
    assert not changed({}, hour), "a table that this program did not create"


# what is deleted


class Cleaning:
    """Records what is asked of Delta; removes what `vacuum` is given, as Delta would."""

    def __init__(self, table: Path, retention: Retention) -> None:
        self.table, self.kept = table, retention
        self.vacuums: list[list[str] | None] = []
        self.until: list[int] = []
        self.checkpoints = 0

    def checkpoint(self, path: str) -> None:
        self.checkpoints += 1
        DeltaTable(path).create_checkpoint()

    def retention(self, path: str) -> Retention:
        return self.kept

    def vacuum(self, path: str, listed: Sequence[Listed] | None) -> None:
        self.vacuums.append(None if listed is None else sorted(one.path for one in listed))

    def clean_log(self, path: str, until: int) -> None:
        self.until.append(until)


def age(table: Table, seconds: float, *names: str) -> None:
    """Make the commits, or the named files, so much older."""
    log = Path(table.target.path, "_delta_log")
    paths = [Path(table.target.path, name) for name in names] or [*log.glob("*.json"), *log.glob("*.parquet")]
    for path in paths:
        stat = path.stat()
        os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def kept(table: Table, cleaning: Cleaning, started: float | None = None) -> Upkeep:
    return Upkeep(table.log, cleaning, time.time() if started is None else started)


@pytest.fixture
def cleaning(table: Table) -> Cleaning:
    return Cleaning(Path(table.target.path), Retention(600, 600, cleans_log=True))


def test_nothing_is_deleted_within_the_retention(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1, 2])
    table.commit(added=[3], deleted=[1])
    visit = kept(table, cleaning).visit(clean=True)
    assert (cleaning.vacuums, cleaning.until, visit.vacuumed) == ([], [], False)
    assert visit.due is not None
    assert 600 < visit.due - time.time() < 900
    assert visit.usage.live > 0
    assert visit.usage.retained == 0
    assert visit.usage.log > 0


def test_what_the_retention_costs(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1, 2])
    old = table.files
    table.commit(added=[3], deleted=[1, 2])
    usage = kept(table, cleaning).visit(clean=True).usage
    assert usage.retained == sum(Path(table.target.path, name).stat().st_size for name in old)
    assert usage.live == sum(Path(table.target.path, name).stat().st_size for name in table.files - old)
    assert (usage.files, usage.version) == (1, 2)


def test_the_first_visit_lists_files_of_earlier_processes_and_later_ones_leave_it_to_the_log(
    table: Table, cleaning: Cleaning
) -> None:
    table.commit(added=[1, 2])
    (first,) = table.files
    table.commit(added=[3], deleted=[1])
    table.commit(added=[4], deleted=[2])
    age(table, 10_000)
    stray, fresh = Path(table.target.path, "part-stray.parquet"), Path(table.target.path, "part-new.parquet")
    for path in (stray, fresh):
        path.touch()
    age(table, 10_000, stray.name, *(table.files - {fresh.name, stray.name}))
    upkeep = kept(table, cleaning, started=time.time() - 5000)
    assert upkeep.visit(clean=True).vacuumed
    (listed,) = cleaning.vacuums
    assert listed is not None
    assert {"part-stray.parquet", first} < set(listed)
    vectors = [name for name in listed if name.startswith("deletion_vector")]
    assert len(vectors) == 1, "the vector that the last deletion replaced"
    assert "part-new.parquet" not in listed
    table.commit(added=[5], deleted=[3])
    age(table, 10_000)
    upkeep.visit(clean=True)
    assert cleaning.vacuums[1:] == [None]


def test_a_list_has_what_expires_before_delta_comes_to_it(table: Table, cleaning: Cleaning) -> None:
    """A file that was made and removed between this program's bound and Delta's, which notes its commit as seen to."""
    table.commit(added=[1])
    (old,) = table.files
    table.commit(deleted=[1])
    age(table, 10_000)
    age(table, 10_000, old)
    table.commit(added=[2])
    (between,) = table.files - {old}
    table.commit(deleted=[2])
    kept(table, cleaning).visit(clean=True)
    assert cleaning.vacuums == [sorted([old, between])]


def test_a_list_of_files_that_are_all_too_young_is_no_reason_for_a_vacuum(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1])
    age(table, 10_000)
    table.commit(deleted=[1])
    assert not kept(table, cleaning).visit(clean=True).vacuumed
    assert cleaning.vacuums == []


def test_a_file_that_no_commit_names_may_be_of_another_node_that_writes_the_table(
    table: Table, cleaning: Cleaning
) -> None:
    """It may belong to a copy that is older than this process; what commits have removed goes all the same."""
    source = Source("_pubsub_source", "one")
    table.commit(added=[1, 2])
    (removed,) = table.files
    table.commit(added=[3], deleted=[1, 2])
    table.log.refresh()
    configuration = {**table.log.properties, owner_property(source): owner("other", 1, "7/db")}
    table.log.commit([{"metaData": {**table.log.metadata, "configuration": configuration}}], Operation.ALTER)
    age(table, 10_000)
    stray = Path(table.target.path, "part-stray.parquet")
    stray.touch()
    age(table, 10_000, stray.name, removed, *table.files)
    for node, names in (("node", {removed}), ("other", {removed, stray.name})):
        upkeep = Upkeep(table.log, cleaning, time.time(), node)
        upkeep.visit(clean=True)
        listed = cleaning.vacuums.pop()
        assert listed is not None
        assert {name for name in listed if name.startswith("part-")} == names


@pytest.mark.parametrize("written", [True, False], ids=["written", "resting"])
def test_a_file_that_a_process_left_within_the_retention_goes_when_that_has_passed(
    table: Table, cleaning: Cleaning, written: bool
) -> None:
    """It was too young for the first list, and stayed for ever, since LITE does not find it."""
    table.commit(added=[1, 2])
    table.commit(deleted=[1])
    age(table, 10_000)
    age(table, 10_000, *table.files)
    stray, young = Path(table.target.path, "part-stray.parquet"), Path(table.target.path, "part-young.parquet")
    for path, seconds in ((stray, 10_000), (young, 100)):
        path.touch()
        age(table, seconds, path.name)
    upkeep = kept(table, cleaning, started=time.time() - 50)
    due = upkeep.visit(clean=True).due
    assert due is not None
    assert 500 < due - time.time() < 600, "when it has come to the retention's age"
    if written:
        table.commit(added=[3])
    upkeep.visit(clean=True)
    age(table, 600)
    age(table, 600, young.name)
    assert upkeep._list_at is not None
    upkeep._list_at -= 600
    upkeep._started -= 600
    assert upkeep.visit(clean=True).due is None
    first, second = cleaning.vacuums
    assert first is not None
    assert second is not None
    assert (stray.name in first, young.name in first, young.name in second) == (True, False, True)


def test_a_file_of_this_process_that_no_commit_names_is_left_however_old_it_is(
    table: Table, cleaning: Cleaning
) -> None:
    """Such as a part of a streamed transaction that has not ended."""
    table.commit(added=[1, 2])
    table.commit(deleted=[1, 2])
    staged = data_files.write_table(table.target, pa.table({"id": [7], "n": [7]}, COLUMNS))
    age(table, 10_000)
    age(table, 10_000, *table.files)
    kept(table, cleaning, started=time.time() - 20_000).visit(clean=True)
    (listed,) = cleaning.vacuums
    assert listed is not None
    assert len(listed) == 1
    assert staged[0]["add"]["path"] not in listed


def test_a_table_that_only_grows_is_not_vacuumed(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1, 2])
    table.commit(added=[3])
    age(table, 10_000)
    visit = kept(table, cleaning).visit(clean=True)
    assert (cleaning.vacuums, visit.due) == ([], None)


def test_a_checkpoint_is_written_for_enough_commits(
    table: Table, cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "CHECKPOINT", 3)
    visits = kept(table, cleaning)
    for commits, written in ((2, 0), (1, 1), (2, 1), (1, 2)):
        for _ in range(commits):
            table.commit(added=[table.lsn])
        visits.visit(clean=False)
        assert cleaning.checkpoints == written
    assert list_log(table) == {3, 6}
    assert table.ids() == [0, 1, 2, 3, 4, 5]


def test_a_table_that_rests_gets_a_checkpoint_sooner(
    table: Table, cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_CHECKPOINT_AT_REST", 2)
    for number in range(2):
        table.commit(added=[number])
    visits = kept(table, cleaning)
    visits.visit(clean=True)
    assert cleaning.checkpoints == 0
    for _ in range(2):
        visits.visit(clean=True, resting=True)
        assert cleaning.checkpoints == 1


def list_log(table: Table) -> frozenset[int]:
    return inventory.list_log(Path(table.target.path)).checkpoints


def test_what_a_killed_process_has_not_committed_goes(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1])
    log = Path(table.target.path, "_delta_log")
    old, new, mended = (log / f".{name}{uuid.uuid4()}.tmp" for name in (f"{2:020}.json.", f"{2:020}.json.", ""))
    for path, age in (old, 3700), (new, 3500), (mended, 3700):
        path.touch()
        os.utime(path, (time.time() - age, time.time() - age))
    visits = kept(table, cleaning)
    visits.visit(clean=False)
    assert old.exists()
    visits.visit(clean=True)
    assert [old.exists(), new.exists(), mended.exists()] == [False, True, False]


def test_outside_the_window_nothing_is_deleted(table: Table, cleaning: Cleaning) -> None:
    table.commit(added=[1, 2])
    table.commit(deleted=[1, 2])
    age(table, 10_000)
    visit = kept(table, cleaning).visit(clean=False)
    assert (cleaning.vacuums, visit.vacuumed) == ([], False)
    assert visit.due is not None


def test_a_pin_waits_for_what_is_being_deleted(
    table: Table, cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retention was read before the pin was committed; only afterwards can be said what is left."""
    table.commit(added=[1, 2])
    table.commit(deleted=[1, 2])
    age(table, 10_000)
    order: list[str] = []
    committed = threading.Event()

    def vacuum(path: str, listed: Sequence[Listed] | None) -> None:
        threads.submit(pin)
        assert committed.wait(60)
        order.append("deleted")

    class Properties:
        def change_properties(self, path: str, change: pins.Change) -> None:
            committed.set()

    def pin() -> None:
        pins.pin_all(Properties(), [table.target.path], "p")
        order.append("pinned")

    monkeypatch.setattr(cleaning, "vacuum", vacuum)
    with ThreadPoolExecutor() as threads:
        kept(table, cleaning).visit(clean=True)
    assert order == ["deleted", "pinned"]


def log_of(table: Table, commits: dict[int, float], checkpoints: Sequence[int]) -> None:
    """Give the log's commits these ages, and add empty files in place of checkpoints."""
    log = Path(table.target.path, "_delta_log")
    now = time.time()
    for version, old in commits.items():
        os.utime(log / f"{version:020}.json", (now - old, now - old))
    table.log.refresh()
    for version in checkpoints:
        (log / f"{version:020}.checkpoint.parquet").touch()


@pytest.mark.parametrize(
    ("ages", "checkpoints", "keeps"),
    [
        ([9000, 8000, 7000, 6000, 5000], [2], 4),
        ([9000, 8000, 7000, 100, 50], [2], 2),  # version 2 was the table's until 100 s ago
        ([9000, 8000, 7000, 100, 50], [3], None),  # so the checkpoint after it does not make it superfluous
        ([500, 400, 300, 200, 100], [2], None),
        ([9000, 8000, 7000, 6000, 5000], [], None),
    ],
)
def test_the_log_keeps_every_version_of_the_retention(
    table: Table, cleaning: Cleaning, ages: list[float], checkpoints: list[int], keeps: int | None
) -> None:
    for number in range(4):
        table.commit(added=[number])
    log_of(table, dict(enumerate(ages)), checkpoints)
    kept(table, cleaning).visit(clean=True)
    if keeps is None:
        assert cleaning.until == []
    else:
        (until,) = cleaning.until
        made = Path(table.target.path, "_delta_log", f"{keeps:020}.json").stat().st_mtime
        assert until < made * 1000


def test_commits_that_vacuum_has_not_read_stay(table: Table, cleaning: Cleaning) -> None:
    for number in range(4):
        table.commit(added=[number])
    log_of(table, dict.fromkeys(range(5), 650.0), [2])
    cleaning.kept = Retention(700, 700, cleans_log=True)
    kept(table, cleaning).visit(clean=True)
    assert cleaning.until == []


def test_the_log_of_a_table_that_keeps_it_is_left(table: Table, cleaning: Cleaning) -> None:
    for number in range(4):
        table.commit(added=[number])
    log_of(table, dict.fromkeys(range(5), 9000.0), [2])
    cleaning.kept = Retention(600, 600, cleans_log=False)
    assert kept(table, cleaning).visit(clean=True).due is None
    assert cleaning.until == []


def test_the_listing_of_a_partitioned_table(tmp_path: Path) -> None:
    for name in ("a.parquet", "p=1/b.parquet", "_q=2/c.parquet", "_delta_log/d.parquet", ".tmp/e.parquet", "f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert {one.path for one in inventory.list_files(tmp_path)} == {"a.parquet", "p=1/b.parquet", "_q=2/c.parquet"}
