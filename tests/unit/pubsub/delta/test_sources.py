"""A Delta table of several sources: what one of them looks up, changes, replaces or alters is in its own partition."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from apply.schema_changes import attributes, follow
from apply.schema_changes.table_definition import definition_json
from apply.staging.fold import fold
from apply.staging.own_columns import with_source
from pubsub.delta import alter, sources
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.key_index import table_index
from pubsub.delta.key_index.node_index import KeyIndex
from pubsub.delta.key_index.table_index import TableIndex
from pubsub.delta.log import table_log
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.other_commits import ConcurrentCommit
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Operation, transaction
from pubsub.delta.table import Commit, TargetTable, application_id
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import NotAsExpected
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, Overtaken, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.rows import DELETE, INSERT, UPDATE, Changes
from pubsub.sql.source import Source
from tests.support.json_transactions import JsonTransactions

COLUMN = "_pubsub_source"
FIELDS = (pa.field("k", pa.int64(), False), pa.field("v", pa.string()), pa.field(COLUMN, pa.string()))


class Tenant:
    """A subscription that writes its source's rows, and the rows that its publisher has."""

    def __init__(self, directory: Path, value: str, transactions: JsonTransactions, writers: TableWriters) -> None:
        source = Source(COLUMN, value)
        schema = pa.schema(list(FIELDS))
        self.target = TargetTable(
            str(directory / "t"), schema, ("k",), "public.t", source=source, partitioned_by=(COLUMN,)
        )
        self.transactions, self.writers = transactions, writers
        self.app_id = application_id("node", zlib.crc32(value.encode()), 2, 1)
        self.rows: dict[int, str] = {}
        self.lsn = 0

    def stage(self, changes: Sequence[tuple[int, int, str]], replace_all: bool = False) -> DirectStaged:
        """Stage a batch of changes: an operation, a key and a value each."""
        ops = np.array([op for op, _, _ in changes], np.uint8)
        keys, values = (
            pa.array([k for _, k, _ in changes], pa.int64()),
            pa.array([v for _, _, v in changes], pa.string()),
        )
        key = list(self.target.key)
        old = {"k": keys, "v": values if "v" in key else pa.nulls(len(changes), pa.string())}
        kinds = np.where(ops == DELETE, ord("K"), 0).astype(np.uint8)
        sent = Changes(np.arange(len(changes)), ops, {"k": keys, "v": values}, {}, kinds, old)
        folded = fold(with_source(sent, self.target), key, full=False, truncate_before=0 if replace_all else None)
        staged = self.writers.write(self.target, folded, replace_all=replace_all)
        assert isinstance(staged, DirectStaged)
        return staged

    def record(self) -> Commit:
        previous = Lsn(self.lsn) if self.lsn else None
        return Commit(self.app_id, Lsn(self.lsn + 1), Lsn(self.lsn + 1), previous=previous, source=self.value)

    @property
    def value(self) -> str:
        assert self.target.source is not None
        return self.target.source.value

    def commit(self, staged: DirectStaged) -> None:
        try:
            self.writers.look(staged, self.record())
            arrow_writer.commit(staged, self.record())
        finally:
            arrow_writer.discard(staged)
        self.lsn += 1

    def send(self, *changes: tuple[int, int, str], replace_all: bool = False) -> None:
        self.commit(self.stage(changes, replace_all))
        if replace_all:
            self.rows.clear()
        for op, key, value in changes:
            if op == DELETE:
                del self.rows[key]
            else:
                self.rows[key] = value

    def found(self, columns: str = "k, v") -> list[tuple[Any, ...]]:
        value = self.value.replace("'", "''")
        query = f"SELECT {columns} FROM t WHERE \"{COLUMN}\" = '{value}'"
        builder = QueryBuilder().register("t", DeltaTable(self.target.path))
        rows = pa.table(builder.execute(query).read_all()).to_pylist()
        return sorted((tuple(row.values()) for row in rows), key=repr)

    def assert_own(self) -> None:
        assert self.found() == sorted(self.rows.items(), key=repr), self.value


class Tenants:
    """Tenants of one table, by one node, or each by one of its own."""

    def __init__(self, directory: Path, *values: str, nodes: bool = False, index: bool = False) -> None:
        self.transactions = JsonTransactions()
        self.index = KeyIndex(directory / "index") if index else None
        self.directory = directory
        one = self._writers("stage")
        self.all = [
            Tenant(directory, value, self.transactions, self._writers(value) if nodes else one) for value in values
        ]
        assert delta.create_empty(self.transactions, self.all[0].target, {"pubsub.node": "node"})

    def _writers(self, name: str) -> TableWriters:
        return TableWriters(self.directory / f"stage {name}", self.transactions, index=self.index)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self.all)

    @property
    def log(self) -> TableLog:
        log = TableLog(self.all[0].target.path, self.transactions)
        log.refresh()
        return log


def a_batch(tenant: Tenant, drawn: random.Random) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    for key in drawn.sample(range(40), drawn.randint(1, 12)):
        value = f"{tenant.value} {drawn.random()}"
        if key not in tenant.rows:
            found.append((INSERT, key, value))
        else:
            found.append((drawn.choice([UPDATE, DELETE]), key, value))
    return found


@pytest.mark.parametrize("index", [False, True], ids=["files", "index"])
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_under_equal_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, index: bool
) -> None:
    """Each finds, changes and replaces its own rows alone, by the index or by its files, of which it reads no other's."""
    drawn = random.Random(seed)
    tenants = Tenants(tmp_path, "a", "b b", "ü/=%'\"", nodes=bool(seed % 2), index=index)
    reading: list[Tenant] = []
    read: Any = file_rows.read_columns

    def watched(log: TableLog, file: AddFile, *rest: Any, **more: Any) -> Any:
        if reading:
            assert file.partition == {COLUMN: reading[-1].value}
        return read(log, file, *rest, **more)

    monkeypatch.setattr(file_rows, "read_columns", watched)
    for _ in range(40):
        tenant = drawn.choice(tenants.all)
        reading.append(tenant)
        if drawn.random() < 0.1:
            tenant.send(*[(INSERT, key, "anew") for key in range(drawn.randint(0, 5))], replace_all=True)
        else:
            tenant.send(*a_batch(tenant, drawn))
        with pytest.raises(NotAsExpected):
            tenant.commit(tenant.stage([(DELETE, 99, "")]))
        if tenant.rows:
            with pytest.raises(NotAsExpected):
                tenant.commit(tenant.stage([(INSERT, next(iter(tenant.rows)), "twice")]))
        reading.pop()
    for tenant in tenants:
        tenant.assert_own()
        assert sources.own_rows(tenants.log, tenant.target) == len(tenant.rows)


def test_sources_that_name_the_key_in_another_order_share_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take the other's runs for those of no key, remove them, and make its own of all files, batch after batch."""
    monkeypatch.setattr(table_index, "_SMALL", 1)
    monkeypatch.setattr(table_index, "_DISK_ROWS", 10)
    tenants = Tenants(tmp_path, "one", "two", index=True)
    assert tenants.index is not None
    one, two = tenants
    one.target, two.target = replace(one.target, key=("k", "v")), replace(two.target, key=("v", "k"))
    index = tenants.index.of(one.target.path)
    made: list[object] = []
    make: Any = TableIndex._make
    monkeypatch.setattr(TableIndex, "_make", lambda *args: (made.append(args[1]), make(*args))[1])
    for tenant in tenants:
        tenant.send(*((INSERT, key, "v") for key in range(20)))
    for number in range(6):
        for tenant in tenants:
            tenant.send((DELETE, number, "v"))
            index._background.submit(lambda: None).result()
    assert len(index.runs) >= 1
    assert len(made) <= 2, "once for the files of each"
    for tenant in tenants:
        tenant.assert_own()
    tenants.index.stop()


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "a node each"])
def test_commits_of_other_sources_are_none_of_others(tmp_path: Path, nodes: bool) -> None:
    """What is staged beside them is committed as it is; what was found before them is not sought again."""
    one, two = Tenants(tmp_path, "one", "two", nodes=nodes)
    one.send((INSERT, 1, "a"), (INSERT, 2, "a"))
    two.send((INSERT, 1, "b"))
    staged = one.stage([(UPDATE, 1, "c"), (DELETE, 2, "")])
    one.writers.look(staged, one.record())
    found = staged.leaving
    two.send((UPDATE, 1, "d"), (INSERT, 2, "d"))
    two.send(replace_all=True)
    log = one.writers.log_of(one.target.path)
    log.refresh()
    assert log.written_by_others(one.app_id, sources.part_of(one.target)) == []
    one.commit(staged)
    assert found is not None
    assert found.version == log.version - 1, "not sought again"
    assert (one.found(), two.found()) == ([(1, "c")], [])


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "a node each"])
def test_commits_of_other_programs_count_where_they_are(tmp_path: Path, nodes: bool) -> None:
    one, two = Tenants(tmp_path, "one", "two", nodes=nodes)
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"))
    staged = [one.stage([(INSERT, 2, "a")]), two.stage([(INSERT, 2, "b")])]
    foreign = pa.table({"k": [7], "v": ["foreign"], COLUMN: ["two"]}, schema=two.target.schema)
    _append(two, foreign)
    one.commit(staged[0])
    with pytest.raises(ConcurrentCommit) as caught:
        two.commit(staged[1])
    assert len(caught.value.commits) == 1
    # Once they are recorded, for the one whom they concern.
    two.writers.forget_others(two.target.path, two.app_id, caught.value.commits[0].version)
    two.commit(two.stage([(INSERT, 2, "b")]))
    assert two.found() == [(1, "b"), (2, "b"), (7, "foreign")]


def test_a_commit_of_others_that_is_too_far_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not found after a restart, but the rows that it brought are: no key is there twice, and none is changed unseen."""
    tenants = Tenants(tmp_path, "one", "two")
    one, two = tenants
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"), (INSERT, 2, "b"))
    _append(two, pa.table({"k": [7], "v": ["foreign"], COLUMN: ["two"]}, schema=two.target.schema))
    for key in range(10, 16):
        one.send((INSERT, key, "a"))
    monkeypatch.setattr(table_log, "_FAR_BACK", 3)
    two.writers = tenants._writers("after a restart")
    log = two.writers.log_of(two.target.path)
    log.refresh()
    assert log.written_by_others(two.app_id, sources.part_of(two.target)) == []
    with pytest.raises(NotAsExpected):
        two.send((INSERT, 7, "b"))
    two.send((INSERT, 8, "b"))
    assert two.found() == [(1, "b"), (2, "b"), (7, "foreign"), (8, "b")]


def _append(tenant: Tenant, rows: pa.Table) -> None:
    log = TableLog(tenant.target.path, tenant.transactions)
    log.refresh()
    added = data_files.write_table(file_rows.laid_out(log, replace(tenant.target, schema=rows.schema)), rows)
    log.commit(added, Operation.WRITE)


def test_a_copy_replaces_its_own_rows(tmp_path: Path) -> None:
    one, two = Tenants(tmp_path, "one", "two")
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"))
    log = TableLog(one.target.path, one.transactions)
    log.refresh()
    table, definition = alter.for_copy(log, replace(one.target, partitioned_by=()))
    assert not definition
    rows = pa.table({"k": [5], "v": ["copied"], COLUMN: ["one"]}, schema=one.target.schema)
    added = data_files.write(table, [rows])
    again = one.app_id.rpartition("/")[0] + "/2"
    arrow_writer.commit_copy(log, table, added, Commit(again, Lsn(9), Lsn(9), copied=True, source="one"))
    assert (one.found(), two.found()) == ([(5, "copied")], [(1, "b")])
    two.send((UPDATE, 1, "c"))
    assert two.found() == [(1, "c")]


@pytest.mark.parametrize("value", [None, 7])
def test_a_column_that_one_source_adds(tmp_path: Path, value: int | None) -> None:
    """Its rows get the value that it has in older rows, others' NULL; the others' next batch goes on as before."""
    one, two = Tenants(tmp_path, "one", "two")
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"))
    staged = two.stage([(INSERT, 2, "b")])
    add = Alteration(("k",), "public.t", add=((pa.field("n", pa.int32()), pa.scalar(value, pa.int32())),))
    altered = alter.alter(one.transactions, one.target, add, {}, replace(one.record(), previous=Lsn(one.lsn)))
    assert altered.schema.names == ["k", "v", COLUMN, "n"]
    two.commit(staged)
    assert one.found("k, v, n") == [(1, "a", value)]
    assert two.found("k, v, n") == [(1, "b", None), (2, "b", None)]
    # The other has not read the table since, and adds the same column, with a value of its own.
    add = replace(add, add=((pa.field("n", pa.int32()), pa.scalar(9, pa.int32())),))
    two.target = alter.alter(two.transactions, two.target, add, {}, replace(two.record(), previous=Lsn(two.lsn)))
    assert (one.found("n"), two.found("n")) == ([(value,)], [(9,), (9,)])
    other = replace(add, add=((pa.field("N", pa.int32()), pa.scalar(None, pa.int32())),))
    with pytest.raises(NotInPrerequisiteState, match=r'column "N" of table "public\.t" does not fit'):
        alter.alter(one.transactions, one.target, other, {}, replace(one.record(), previous=Lsn(one.lsn)))
    other = replace(add, add=((pa.field("n", pa.string()), pa.scalar(None, pa.string())),))
    with pytest.raises(NotInPrerequisiteState, match='column "n" of table') as caught:
        alter.alter(one.transactions, one.target, other, {}, replace(one.record(), previous=Lsn(one.lsn)))
    assert "has the column n integer, the source needs n string" in (caught.value.detail or "")


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "a node each"])
def test_files_are_rewritten_beside_a_source_that_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: bool
) -> None:
    """A column with a value takes longer than others need for a commit: what was rewritten before one holds after it."""
    one, two = Tenants(tmp_path, "one", "two", nodes=nodes)
    one.send((INSERT, 1, "a"), (INSERT, 2, "a"))
    two.send((INSERT, 1, "b"))
    rewritten: Any = alter._rewritten
    meanwhile: list[Callable[[], None]] = []

    def slowly(*args: Any) -> Iterator[pa.Table]:
        yield from rewritten(*args)
        for each in meanwhile:
            each()

    monkeypatch.setattr(alter, "_rewritten", slowly)
    meanwhile.append(lambda: two.send((UPDATE, 1, f"b {two.lsn}")))
    add = Alteration(("k",), "public.t", add=((pa.field("n", pa.int32()), pa.scalar(7, pa.int32())),))
    one.target = alter.alter(one.transactions, one.target, add, {}, replace(one.record(), previous=Lsn(one.lsn)))
    assert one.found("k, v, n") == [(1, "a", 7), (2, "a", 7)]
    assert two.found("k, v, n") == [(1, "b 1", None)]
    # Another's column that came meanwhile is none that the commit may take away, and rows of its own are none to lose.
    more = replace(add, add=((pa.field("m", pa.int32()), pa.scalar(8, pa.int32())),))
    theirs = replace(add, add=((pa.field("x", pa.string()), pa.scalar(None, pa.string())),))
    before = replace(two.record(), previous=Lsn(two.lsn))
    meanwhile[:] = [
        lambda: (meanwhile.clear(), alter.alter(two.transactions, two.target, theirs, {}, before))[0],
    ]
    one.target = alter.alter(one.transactions, one.target, more, {}, replace(one.record(), previous=Lsn(one.lsn)))
    assert set(DeltaTable(one.target.path).schema().to_arrow().names) == {"k", "v", COLUMN, "n", "m", "x"}
    assert one.found("k, v, n, m, x") == [(1, "a", 7, 8, None), (2, "a", 7, 8, None)]
    last = replace(add, add=((pa.field("o", pa.int32()), pa.scalar(9, pa.int32())),))
    foreign = pa.table({"k": [9], "v": ["foreign"], COLUMN: ["one"]}, schema=pa.schema(list(FIELDS)))
    meanwhile[:] = [lambda: (meanwhile.clear(), _append(one, foreign))[0]]
    one.target = alter.alter(one.transactions, one.target, last, {}, replace(one.record(), previous=Lsn(one.lsn)))
    assert one.found("k, o") == [(1, 9), (2, 9), (9, 9)]
    assert named_files(one) == set(data_files_there(one)), "none of an attempt that was given up is left"


def named_files(tenant: Tenant) -> set[str]:
    """Return the data files that commits name."""
    log = TableLog(tenant.target.path)
    log.refresh()
    actions = [action for version in range(log.version + 1) for action in log.actions(version) or ()]
    return {unquote(what["path"]) for action in actions for kind, what in action.items() if kind in ("add", "remove")}


def data_files_there(tenant: Tenant) -> Iterator[str]:
    base = Path(tenant.target.path)
    return (str(path.relative_to(base)) for path in base.rglob("*.parquet"))


def test_a_source_keeps_its_order_of_the_key_after_a_crash(tmp_path: Path) -> None:
    """The table's properties, which tell of an alteration that the catalog does not know yet, have the first source's."""
    one, two = Tenants(tmp_path, "one", "two")
    one.target, two.target = replace(one.target, key=("k", "v")), replace(two.target, key=("v", "k"))
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"))
    columns = (attributes.Attribute(1, "k", 20, -1), attributes.Attribute(2, "v", 25, -1))
    known = attributes.Attributes(two.app_id, 2, "1:1", Lsn(1), columns)
    definition = definition_json(two.target, known.as_json())
    add = Alteration(two.target.key, "public.t", add=((pa.field("n", pa.int32()), pa.scalar(None, pa.int32())),))
    after = replace(known, since=Lsn(5), count=3, columns=(*columns, attributes.Attribute(3, "n", 23, -1)))
    property_name = attributes.property_of(two.target)
    record = replace(two.record(), previous=Lsn(two.lsn))
    alter.alter(two.transactions, two.target, add, {property_name: after.as_json()}, record)
    found = asyncio.run(follow.load(2, two.app_id, two.target.path, "public.t", definition))
    assert found.attributes == after
    assert (found.target.key, found.target.source) == (("v", "k"), two.target.source)


def test_a_source_with_other_columns_joins(tmp_path: Path) -> None:
    one, two = Tenants(tmp_path, "one", "two")
    one.send((INSERT, 1, "a"))
    schema = pa.schema([FIELDS[0], pa.field("x", pa.float64()), FIELDS[2]])
    joining = replace(two.target, schema=schema)
    alter.join(two.transactions, joining)
    log = TableLog(joining.path, two.transactions)
    log.refresh()
    laid, definition = alter.for_copy(log, joining)
    assert (laid.schema.names, definition) == (["k", "v", COLUMN, "x"], [])
    before = log.version
    alter.join(two.transactions, joining)
    log.refresh()
    assert log.version == before, "it has them already"
    one.send((UPDATE, 1, "b"))
    assert one.found("k, v, x") == [(1, "b", None)]
    schema = pa.schema([FIELDS[0], pa.field("v", pa.int64()), FIELDS[2]])
    for refused in (
        lambda: alter.join(two.transactions, replace(joining, schema=schema)),
        lambda: sources.refuse_unfit_types(replace(joining, schema=schema)),
    ):
        with pytest.raises(NotInPrerequisiteState, match=r'column "v" of table "public\.t" does not fit'):
            refused()


def test_values_are_completed_beside_a_source_that_never_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node commits to its source again while a commit is worked out: neither waits for a moment without the other."""
    one, two = Tenants(tmp_path, "one", "two", nodes=True)
    one.send((INSERT, 1, "a"), (INSERT, 2, "a"))
    two.send((INSERT, 1, "b"))
    mark: Any = arrow_writer._mark
    busy = [one]

    def slowly(log: TableLog, *rest: Any) -> None:
        mark(log, *rest)
        if busy:
            busy.pop()
            two.send((UPDATE, 1, f"b {two.lsn}"))
            busy.append(one)

    monkeypatch.setattr(arrow_writer, "_mark", slowly)
    one.send((UPDATE, 1, "c"), (DELETE, 2, ""))
    assert (one.found(), two.found()) == ([(1, "c")], [(1, "b 1")])
    # Another daemon of the subscription has made a commit that changes no file: this one is overtaken.
    staged = one.stage([(UPDATE, 1, "d")])

    def overtaken(log: TableLog, *rest: Any) -> None:
        mark(log, *rest)
        other = TableLog(one.target.path, one.transactions)
        other.refresh()
        other.commit([transaction(one.app_id, one.lsn + 5)], Operation.WRITE, part=sources.part_of(one.target))

    monkeypatch.setattr(arrow_writer, "_mark", overtaken)
    with pytest.raises(Overtaken):
        one.commit(staged)
    assert one.found() == [(1, "c")]


def test_files_are_merged_within_a_source(tmp_path: Path) -> None:
    """Beside commits of the others, which may be another node's."""
    tenants = Tenants(tmp_path, "one", "two")
    one, two = tenants
    for key in range(5):
        one.send((INSERT, key, "a"))
        two.send((INSERT, key, "b"))
    log = one.writers.log_of(one.target.path)
    loaded = delta.load(one.target.path, "public.t", None)
    assert rewrite(log, lambda: loaded, lambda files: files if len(files) > 1 else ())
    assert one.transactions.made[-1].part == (COLUMN, "one")
    assert len(sources.own_files(tenants.log, one.target)) == 1
    assert len(sources.own_files(tenants.log, two.target)) == 5
    for tenant in tenants:
        tenant.send((DELETE, 3, ""))
        tenant.assert_own()


def test_whose_a_source_is(tmp_path: Path) -> None:
    one, two = Tenants(tmp_path, "one", "two")
    source = one.target.source
    assert source is not None
    name, mine = sources.owner_property(source), sources.owner("node", 1, "7/db")
    assert not sources.refuse_owned(one.target, {}, "node", 1)
    assert sources.refuse_owned(one.target, {name: mine}, "node", 1)
    assert not sources.refuse_owned(one.target, {name: mine}, "node", 2), "its subscription is gone"
    assert not sources.refuse_owned(one.target, {name: mine}, "node", None)
    with pytest.raises(DuplicateObject, match="belongs to a subscription of another node"):
        sources.refuse_owned(one.target, {name: mine}, "other", 1)
    assert not sources.is_shared_with_others({name: mine, delta.SOURCE: COLUMN}, "node")
    assert sources.is_shared_with_others({name: mine, f"{name}2": sources.owner("other", 1, "")}, "node")
    sources.refuse_rows(two.target)
    two.send((INSERT, 1, "b"))
    sources.refuse_rows(one.target)
    with pytest.raises(NotInPrerequisiteState, match='holds rows of source "two" already'):
        sources.refuse_rows(two.target)
    two.send((DELETE, 1, ""))
    sources.refuse_rows(two.target)


def test_what_does_not_fit(tmp_path: Path) -> None:
    (one,) = Tenants(tmp_path, "one")
    properties = delta.properties(one.target.path)
    sources.refuse_unfit(one.target, properties)
    plain = replace(one.target, source=None)
    with pytest.raises(NotInPrerequisiteState, match="has the rows of several sources"):
        sources.refuse_unfit(plain, properties)
    without = {key: value for key, value in properties.items() if key != delta.SOURCE}
    sources.refuse_unfit(plain, without)
    with pytest.raises(NotInPrerequisiteState, match="has no column of sources"):
        sources.refuse_unfit(one.target, without)
    renamed = replace(one.target, source=Source("tenant", "one"))
    with pytest.raises(NotInPrerequisiteState, match=f'has its sources in column "{COLUMN}", not "tenant"'):
        sources.refuse_unfit(renamed, properties)
    with pytest.raises(NotInPrerequisiteState, match=r"has the key \(v\), its Delta table \(k\)"):
        sources.refuse_unfit(replace(one.target, key=("v",)), properties)
    for other in (
        replace(one.target, soft_deletes=True),
        replace(one.target, truncate="ignore"),
        replace(one.target, metadata=(("lsn", "l"),)),
    ):
        with pytest.raises(PubsubError, match="is another than that of its Delta table's other sources"):
            sources.refuse_unfit(other, properties)


def test_conflicts_of_sources_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node's commit to another source comes between: nothing is staged or sought again."""
    one, two = Tenants(tmp_path, "one", "two", nodes=True)
    one.send((INSERT, 1, "a"))
    two.send((INSERT, 1, "b"))
    staged = one.stage([(UPDATE, 1, "c")])
    one.writers.look(staged, one.record())
    sought: list[object] = []
    find: Any = arrow_writer.find
    monkeypatch.setattr(arrow_writer, "find", lambda *args: (sought.append(args[1]), find(*args))[1])
    commit: Any = one.transactions.commit
    times = iter(range(3))

    def late(request: Any) -> str:
        if request.part == (COLUMN, "one") and next(times, None) is not None:
            two.send((UPDATE, 1, f"b {two.lsn}"))
        return str(commit(request))

    monkeypatch.setattr(one.transactions, "commit", late)
    conflicts: list[object] = []
    monkeypatch.setattr(arrow_writer, "_changes", _counting(arrow_writer._changes, conflicts))
    one.commit(staged)
    ours = [wanted for wanted in sought if wanted is staged]
    assert (one.found(), two.found(), ours) == ([(1, "c")], [(1, "b 3")], [])
    assert len([change for change in conflicts if change is staged]) == 4


def _counting(work: Any, calls: list[object]) -> Any:
    def counted(staged: DirectStaged, record: Commit) -> Any:
        calls.append(staged)
        return work(staged, record)

    return counted


def test_a_conflict_within_a_source_is_one(tmp_path: Path) -> None:
    (one,) = Tenants(tmp_path, "one")
    one.send((INSERT, 1, "a"))
    log = TableLog(one.target.path, one.transactions)
    log.refresh()
    one.send((UPDATE, 1, "b"))
    with pytest.raises(Conflict):
        log.commit([], Operation.WRITE, part=sources.part_of(one.target))
