"""Which tables the housekeeper looks at and visits, and which it leaves alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from catalog.figures import TableStorage
from catalog.records import SubscriptionRel, SubscriptionSequence
from catalog.states import RelState
from launcher import housekeeper
from launcher.housekeeper import Housekeeper
from pubsub.delta import table as delta
from pubsub.delta.files import data_files
from pubsub.delta.housekeeping.retention import FILES
from pubsub.delta.housekeeping.upkeep import Upkeep, Visit
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Listed, Retention
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.setting_tables import DailyWindow, HousekeepingSettings
from tablesync.sequence_table import sequence_table
from tests.support.json_transactions import JsonTransactions

COLUMNS = pa.schema([pa.field("id", pa.int64(), False)])


class Catalog:
    def __init__(self) -> None:
        self.relations: list[SubscriptionRel] = []
        self.sequences: list[Any] = []
        self.storage: dict[int, TableStorage] = {}
        self.counter = 1
        self.taken_over = False
        self.refused = 0

    async def prove(self) -> None:
        if self.taken_over:
            self.refused += 1
            raise ObjectInUse("another daemon has taken over the catalog")

    async def change_counter(self) -> int:
        return self.counter

    async def state(self) -> Any:
        return SimpleNamespace(
            relations=tuple(self.relations),
            storage=tuple(self.storage.values()),
            sequences=tuple(self.sequences),
            node=SimpleNamespace(node_id="node"),
            subscriptions=(),
        )

    async def put_statistics(self, storage: list[TableStorage]) -> None:
        self.storage |= {one.relid: one for one in storage}


class Transactions(JsonTransactions):
    """Commits without a JVM, and records what is to be cleaned."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.fails = False

    def retention(self, path: str) -> Retention:
        self.asked.append(Path(path).name)
        if self.fails:
            raise PubsubError("no Spark")
        return Retention(3600, 3600, cleans_log=True)

    def vacuum(self, path: str, listed: list[Listed] | None) -> None:
        raise AssertionError("nothing has expired")

    def vacuum_elsewhere(self, path: str, older_than: int) -> None:
        self.older_than = older_than

    def clean_log(self, path: str, until: int) -> None:
        self.until = until


class Engine:
    def __init__(self) -> None:
        self.transactions = Transactions()
        self.lingering = 0

    async def fence(self) -> None:
        if self.lingering:
            self.lingering -= 1
            raise ObjectInUse("another Spark of this node is still running")

    async def run_without_spark(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(None, *args)


class Node:
    """A housekeeper and its tables; `turn` is one of its rounds."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.home = home
        self.catalog, self.engine = Catalog(), Engine()
        self.stage = TableWriters(home / "stage", self.engine.transactions)
        kept: Any = (self.catalog, self.engine, self.stage)
        self.keeper = Housekeeper(HousekeepingSettings(**settings), *kept)

    def table(self, relid: int, state: RelState = RelState.READY) -> TargetTable:
        path = str(self.home / f"t{relid}")
        target = TargetTable(path, COLUMNS, ("id",), f"public.t{relid}")
        assert delta.create_empty(self.engine.transactions, target, {})
        definition = '{"key": ["id"]}'
        relation = SubscriptionRel(
            1, relid, "public", f"t{relid}", state, Lsn(1), 1, None, path, None, None, definition, None
        )
        self.catalog.relations.append(relation)
        self.catalog.counter += 1
        return target

    def write(self, target: TargetTable, count: int = 1) -> None:
        log = TableLog(target.path, self.engine.transactions)
        log.refresh()
        for _ in range(count):
            lsn = (log.application_version("app") or 0) + 1
            added: Any = data_files.write_table(target, pa.table({"id": [lsn]}, COLUMNS))
            staged = DirectStaged(target, log, added, None, None, False, 1)
            arrow_writer.commit(staged, Commit("app", Lsn(lsn), Lsn(lsn), previous=Lsn(lsn - 1) or None))
            self.stage.staged[target.path] += 1

    def turn(self, *, later: float = 0.0) -> list[str]:
        """Work as if `later` seconds had passed; return which tables were visited."""
        for table in self.keeper._tables.values():
            table.changed_at -= later
            table.look_at = None if table.look_at is None else table.look_at - later
            table.visit_at = None if table.visit_at is None else table.visit_at - later
        before = len(self.engine.transactions.asked)
        asyncio.run(self._turn())
        for table in self.keeper._tables.values():
            if table.upkeep is not None:
                table.upkeep._retention = None  # so that a visit can be seen
        return self.engine.transactions.asked[before:]

    async def _turn(self) -> None:
        await self.keeper._read_tables()
        self.keeper._notice(time.time())
        await self.keeper._work(visits=False)
        await self.keeper._work(visits=True)

    def files(self, target: TargetTable) -> int:
        log = TableLog(target.path)
        log.refresh()
        return len(log.files)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeper, "_PAUSE", 0.0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_only_tables_that_are_ready_are_touched(node: Node) -> None:
    for relid, state in enumerate("idfsr"):
        node.table(relid, RelState(state))
    assert node.turn() == ["t4"]
    node.catalog.relations[4] = replace(node.catalog.relations[4], state=RelState.DATASYNC)
    node.catalog.counter += 1
    assert node.turn(later=10_000) == []


def test_a_table_that_is_still_to_be_made_is_not_looked_at(node: Node) -> None:
    """It joined without a copy: it is in r from the start, and its Delta table comes later."""
    node.table(1)
    made = node.catalog.relations[0]
    node.catalog.relations[0] = replace(made, definition=None)
    assert node.turn() == []
    node.catalog.relations[0] = made
    node.catalog.counter += 1
    assert node.turn() == ["t1"]


def test_the_table_of_a_subscription_s_sequences_is_kept_small_too(node: Node) -> None:
    path = str(node.home / "sequences")
    assert delta.create_empty(node.engine.transactions, sequence_table(path), {})
    one = SubscriptionSequence(1, 5, "public", "s", RelState.INIT, 1, False, path, "{}", None, None, None)
    node.catalog.sequences = [one]
    assert node.turn() == [], "it may not be there yet"
    node.catalog.sequences = [replace(one, last_value=1, is_called=True, lsn=Lsn(9))]
    node.catalog.counter += 1
    assert node.turn() == ["sequences"]


def test_a_table_that_rests_is_left_alone(node: Node) -> None:
    node.table(1)
    busy = node.table(2)
    assert sorted(node.turn()) == ["t1", "t2"]
    assert node.turn(later=10_000) == ["t1", "t2"], "what the copy replaced may be due"
    age(node, 10_000)
    node.turn(later=10_000)
    assert node.turn(later=10_000) == []
    node.write(busy)
    assert node.turn() == []
    assert node.turn(later=70) == ["t2"]
    assert {relid: one.due is None for relid, one in node.catalog.storage.items()} == {1: True, 2: False}


def age(node: Node, seconds: float) -> None:
    import os

    for path in node.home.glob("t*/_delta_log/*.json"):
        stat = path.stat()
        os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_files_are_merged_after_some_batches(node: Node) -> None:
    target = node.table(1)
    node.turn()
    node.write(target, 3)
    node.turn()
    assert node.files(target) == 3
    node.write(target, 5)
    node.turn()
    assert node.files(target) == 1
    node.write(target, 2)
    node.turn(later=100)
    assert node.files(target) == 3
    node.turn(later=1000)
    assert node.files(target) == 1, "it rests"


def test_merging_can_be_turned_off(tmp_path: Path) -> None:
    node = Node(tmp_path, merge_files=False)
    target = node.table(1)
    node.turn()
    node.write(target, 20)
    node.turn(later=1000)
    assert node.files(target) == 20


def test_a_started_daemon_visits_tables_that_were_written_since_the_last_visit(node: Node) -> None:
    resting, written = node.table(1), node.table(2)
    node.turn()
    age(node, 10_000)
    node.turn(later=10_000)
    assert {one.due for one in node.catalog.storage.values()} == {None}
    node.write(written)
    again = Node(node.home)
    again.catalog, again.keeper._catalog = node.catalog, node.catalog  # type: ignore[assignment]
    assert again.turn() == ["t2"]
    assert resting.path != written.path


def test_a_table_gets_the_retention_of_the_settings(tmp_path: Path) -> None:
    node = Node(tmp_path, deleted_file_retention="10min", log_retention="1d")
    target = node.table(1)
    node.turn()
    log = TableLog(target.path)
    log.refresh()
    assert log.properties[FILES] == "interval 600 seconds"


def test_a_failure_leaves_the_others_and_is_tried_again_later(node: Node) -> None:
    node.table(1)
    node.table(2)
    node.engine.transactions.fails = True
    assert node.turn() == ["t1", "t2"]
    assert node.turn(later=60) == []
    node.engine.transactions.fails = False
    assert node.turn(later=300) == ["t1", "t2"]


def test_outside_the_window_a_visit_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DailyWindow, "wait", lambda *_: 5000.0)
    node = Node(tmp_path)
    node.table(1)
    node.turn()
    due = node.catalog.storage[1].due
    assert due is not None
    assert due.timestamp() > time.time() + 4900


def test_nothing_of_a_table_is_deleted_while_one_of_its_sources_is_copied(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks of its copy are in no version yet, and may be older than any retention.  Files are merged meanwhile."""
    cleaned: list[bool] = []
    visit = Upkeep.visit

    def watched(upkeep: Upkeep, *, clean: bool, resting: bool = False) -> Visit:
        cleaned.append(clean)
        return visit(upkeep, clean=clean, resting=resting)

    monkeypatch.setattr(Upkeep, "visit", watched)
    target = node.table(1)
    (ready,) = node.catalog.relations
    node.catalog.relations.append(replace(ready, subid=2, state=RelState.DATASYNC))
    node.catalog.counter += 1
    node.turn()
    node.write(target, 6)
    node.turn(later=100)
    assert cleaned
    assert not any(cleaned)
    assert node.files(target) == 1
    node.catalog.relations[1] = replace(ready, subid=2)
    node.catalog.counter += 1
    node.write(target, 6)
    node.turn(later=1000)
    assert cleaned[-1]


async def run_until(node: Node, condition: Callable[[], bool]) -> None:
    """Let the housekeeper run until the condition holds; it must not end before that."""
    node.keeper.nap = 0.0
    running = asyncio.create_task(node.keeper.run())
    async with asyncio.timeout(10):
        while not condition() and not running.done():  # noqa: ASYNC110 - the housekeeper tells nobody
            await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_another_daemon_s_catalog_is_not_worked_for(node: Node) -> None:
    node.table(1)
    node.catalog.taken_over = True
    asyncio.run(run_until(node, lambda: node.catalog.refused > 3))
    assert node.engine.transactions.asked == []


def test_housekeeping_goes_on_once_an_earlier_jvm_has_ended(node: Node) -> None:
    """The error of the wait for it is of the class that tells of another daemon's catalog, too."""
    node.table(1)
    node.engine.lingering = 3
    asyncio.run(run_until(node, lambda: node.catalog.storage != {}))
    assert node.engine.transactions.asked == ["t1"]


@pytest.mark.parametrize(
    ("files", "log", "up", "listed", "keeps"),
    [
        pytest.param(3600, 7200, 100, 100, 7200, id="a daemon that has just started"),
        pytest.param(7200, 3600, 100, 100, 7200, id="a log that is kept for less than the files"),
        pytest.param(3600, 3600, 1_000_000, 86_400, 3600, id="a daemon that has run for days"),
    ],
)
def test_what_may_go_from_a_table_that_only_spark_reaches(
    node: Node, monkeypatch: pytest.MonkeyPatch, files: float, log: float, up: float, listed: float, keeps: float
) -> None:
    """No commit that VACUUM LITE has yet to read, without which Delta refuses it; no file that a statement may be writing."""
    transactions: Any = node.engine.transactions
    monkeypatch.setattr(transactions, "retention", lambda _: Retention(files, log, cleans_log=True))
    now = time.time()
    none: Any = None
    assert housekeeper._clean_elsewhere(none, "abfss://c@a/t", transactions, 0.0, now - up) is None
    assert abs(now - listed - transactions.older_than / 1000) < 60
    assert abs(now - keeps - transactions.until / 1000) < 60


@pytest.mark.parametrize("feature", ["catalogManaged", "catalogOwned-preview"])
def test_a_table_that_a_catalog_manages_is_left_to_it(node: Node, feature: str) -> None:
    target = node.table(1)
    node.write(target, 9)
    log = TableLog(target.path)
    log.refresh()
    protocol = {**log.protocol, "writerFeatures": [*log.protocol["writerFeatures"], feature]}
    commit = Path(target.path, "_delta_log", f"{log.version + 1:020}.json")
    commit.write_text(json.dumps({"protocol": protocol}) + "\n")
    assert node.turn() == []
    assert node.turn(later=10_000) == []
    assert node.files(target) == 9
    transactions: Any = SimpleNamespace(retention=lambda _: Retention(1, 1, cleans_log=True, managed=True))
    none: Any = None
    assert housekeeper._clean_elsewhere(none, "abfss://c@a/t", transactions, 0.0, time.time()) is None


def test_files_are_not_merged_while_a_backlog_is_worked_off(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    table = node.table(1)
    node.turn()
    node.write(table, 4)
    node.stage.large_at = time.monotonic()
    node.turn()
    assert node.files(table) == 4
    node.stage.large_at -= housekeeper._BACKLOG
    node.turn()
    assert node.files(table) == 1
    node.write(table, 4)
    node.stage.large_at = time.monotonic()
    node.turn()
    assert node.files(table) == 5
    node.write(table)
    node.turn(later=61)
    assert node.files(table) < 5, "a backlog may last for hours"


@pytest.mark.parametrize(
    ("outcomes", "runs"),
    [
        pytest.param([True, True, False], 3, id="it goes on as long as files are merged"),
        pytest.param([False], 1, id="nothing was to be done"),
        pytest.param([None], 1, id="a batch was in its way"),
    ],
)
def test_optimize_is_run_again_only_after_it_has_merged_files(
    node: Node, monkeypatch: pytest.MonkeyPatch, outcomes: list[bool | None], runs: int
) -> None:
    """It was run every few seconds, for ever, where Delta found nothing to merge."""
    asked: list[str] = []

    def optimize(_: object, path: str) -> bool | None:
        asked.append(path)
        return outcomes[min(len(asked), len(outcomes)) - 1]

    monkeypatch.setattr(housekeeper, "optimize", optimize)
    monkeypatch.setattr(housekeeper, "is_due", lambda *_, **__: True)
    node.write(node.table(1), 4)
    for _ in range(6):
        node.turn()
    assert len(asked) == runs


def test_a_table_where_optimize_finds_nothing_is_optimized_less_often(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(housekeeper, "optimize", lambda _, path: bool(asked.append(path)))
    monkeypatch.setattr(housekeeper, "is_due", lambda *_, **__: True)
    table = node.table(1)
    node.turn()
    for _ in range(3):
        node.write(table, 4)
        node.turn()
    assert len(asked) == 1
    node.write(table, 4)
    node.turn()
    assert len(asked) == 2
    node.write(table, 2)
    node.turn()
    node.turn(later=1000)
    assert len(asked) == 3, "it rests"
