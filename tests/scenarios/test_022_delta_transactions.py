"""Each call of Delta's internal classes that jvm_transactions.py makes, on a real Delta: what it does, and what it refuses."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from py4j.protocol import Py4JJavaError

from pubsub.delta import alter
from pubsub.delta import schema_json as schema
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files import data_files
from pubsub.delta.history import readable_versions
from pubsub.delta.housekeeping.inventory import list_log
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import CommitFailed, Conflict, Listed, Operation, Request, Retention
from pubsub.delta.spark.jvm_transactions import DeltaTransactions, SparkTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.errors import UndefinedTable
from pubsub.protocol.lsn import Lsn

COLUMNS = pa.schema([pa.field("id", pa.int64(), False), pa.field("at", pa.timestamp("us"))])


class Table:
    """A table that Delta's transactions created, and its log as it is read without a JVM."""

    def __init__(self, spark: Spark, path: Path) -> None:
        self.transactions = DeltaTransactions(spark.session)
        self.target = TargetTable(str(path), COLUMNS, ("id",), "public.t")
        assert delta.create_empty(self.transactions, self.target, {"pubsub.node": "1"})
        self.log = TableLog(self.target.path, self.transactions)
        self.log.refresh()

    def rows_file(self, *ids: int) -> list[dict[str, Any]]:
        return data_files.write_table(self.target, pa.table({"id": list(ids), "at": [None] * len(ids)}, COLUMNS))

    def request(
        self, *actions: dict[str, Any], operation: Operation = Operation.WRITE, at: int | None = None
    ) -> Request:
        version = self.log.version if at is None else at
        return Request(self.target.path, version, self.log.metadata["id"], actions, operation, None)

    def commit(self, before: int, lsn: int, **changes: list[int]) -> None:
        added: Any = self.rows_file(*changes["added"]) if changes.get("added") else []
        keys = pa.table({"id": pa.array(changes.get("deleted", []), pa.int64())})
        staged = arrow_writer.DirectStaged(self.target, self.log, added, keys if len(keys) else None, None, False, 1)
        arrow_writer.commit(staged, Commit("app", Lsn(lsn), Lsn(lsn), previous=Lsn(before) or None))

    def actions(self, version: int | None = None) -> dict[str, Any]:
        """Return a commit's actions by kind; the last of each."""
        number = self.log.version if version is None else version
        return {kind: what for line in self.log.actions(number) or () for kind, what in line.items()}

    def ids(self) -> list[int]:
        result = QueryBuilder().register("t", DeltaTable(self.target.path)).execute("SELECT id FROM t ORDER BY id")
        return [row["id"] for row in pa.table(result.read_all()).to_pylist()]


@pytest.fixture
def table(spark: Spark, tmp_path: Path) -> Table:
    return Table(spark, tmp_path / "a table [of] {odd} *name% ä+b")


def test_delta_makes_every_commit(table: Table) -> None:
    """engineInfo says who committed; the transaction, the LSNs and the vector are what the writer gave."""
    table.commit(0, 1, added=[1, 2, 3])
    table.commit(1, 2, added=[4], deleted=[2])
    table.commit(2, 3, deleted=[1, 3])
    assert table.ids() == [4]
    for version in range(table.log.version + 1):
        assert "Delta-Lake/" in table.actions(version)["commitInfo"]["engineInfo"], version
    last = table.actions()
    assert last["txn"]["appId"] == "app"
    assert last["txn"]["version"] == 3
    assert json.loads(last["commitInfo"]["userMetadata"]) == {"first": "0/3", "last": "0/3"}
    history = DeltaTable(table.target.path).history()
    assert [entry["operation"] for entry in history] == ["WRITE", "WRITE", "WRITE", "CREATE TABLE"]


def test_the_protocol_is_what_the_columns_need(table: Table) -> None:
    protocol = DeltaTable(table.target.path).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert set(protocol.reader_features or ()) == {"deletionVectors", "timestampNtz"}
    assert not [name for name in table.log.properties if name.startswith("delta.feature.")]


@pytest.mark.full
@pytest.mark.parametrize("version", [1, 2])
def test_a_table_that_lists_no_features_of_readers_gets_what_an_alteration_needs(
    spark: Spark, tmp_path: Path, version: int
) -> None:
    """Reader version 1, or 2 (which is column mapping), beside writer version 7, as another engine may write them."""
    columns = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("n", "string"))
    ]
    if version == 2:
        schema.map_columns(columns, 0)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema.schema_string(columns),
        "partitionColumns": [],
        "configuration": {schema.MODE: "name", schema.MAX_ID: "2"} if version == 2 else {},
    }
    features = ["appendOnly", "invariants", *(["columnMapping"] if version == 2 else [])]
    protocol = {"minReaderVersion": version, "minWriterVersion": 7, "writerFeatures": features}
    path = tmp_path / "t"
    (path / "_delta_log").mkdir(parents=True)
    lines = [{"protocol": protocol}, {"metaData": metadata}]
    (path / "_delta_log" / f"{0:020}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = TableLog(str(path))
    log.refresh()
    assert log.unsupported() is None
    assert not log.vectors_enabled()
    transactions = DeltaTransactions(spark.session)
    record = Commit("app", Lsn(1), Lsn(1))
    table = delta.load(str(path), "public.t", '{"key": ["id"]}')
    alter.rename(transactions, table, "public.u")
    assert DeltaTable(str(path)).protocol().min_reader_version == version, "nothing new is needed"
    ntz = pa.field("c", pa.timestamp("us"))
    change = Alteration(("id",), "public.t", add=((ntz, pa.scalar(None, ntz.type)),))
    altered = alter.alter(transactions, table, change, {}, record)
    found = DeltaTable(str(path)).protocol()
    assert (found.min_reader_version, found.min_writer_version) == (3, 7)
    assert set(found.reader_features or ()) == {*features[2:], "timestampNtz"}
    assert set(found.writer_features or ()) == {*features, "timestampNtz"}
    alter.alter(transactions, altered, Alteration(("id",), "public.t", rename={"n": "m"}), {}, record)
    assert set(DeltaTable(str(path)).protocol().reader_features or ()) == {"columnMapping", "timestampNtz"}
    assert [field.name for field in DeltaTable(str(path)).schema().fields] == ["id", "m", "c"]


def test_an_alteration_carries_its_lsn(table: Table) -> None:
    table.commit(0, 1, added=[1])
    kind = pa.int64()
    change = Alteration(("id",), "public.t", add=((pa.field("c", kind), pa.scalar(7, kind)),))
    record = Commit("app", Lsn(2), Lsn(2), previous=Lsn(1))
    alter.alter(table.transactions, table.target, change, {"pubsub.attributes": "{}"}, record)
    table.log.refresh()
    info = table.actions()["commitInfo"]
    assert json.loads(info["userMetadata"]) == {"first": "0/2", "last": "0/2"}
    assert info["operation"] == "UPDATE SCHEMA"
    # The setting that carried it is gone: another commit has none of it.
    table.transactions.commit(table.request({"txn": {"appId": "x", "version": 1}}))
    table.log.refresh()
    assert "userMetadata" not in table.actions()["commitInfo"]


def test_a_commit_worked_out_for_another_version_is_refused(table: Table) -> None:
    table.commit(0, 1, added=[1])
    stale = table.request(*table.rows_file(2), at=table.log.version - 1)
    with pytest.raises(Conflict):
        table.transactions.commit(stale)
    assert table.ids() == [1]


def begun(table: Table, monkeypatch: pytest.MonkeyPatch, other: Callable[[], None]) -> None:
    """Let `other` commit after our transaction has begun, and before it commits."""
    commit = DeltaTransactions._commit

    def late(self: DeltaTransactions, transaction: Any, request: Request) -> None:
        monkeypatch.setattr(DeltaTransactions, "_commit", commit)
        other()
        commit(self, transaction, request)

    monkeypatch.setattr(DeltaTransactions, "_commit", late)


@pytest.mark.parametrize(
    "what",
    [
        "rows",
        "the application's version",
        "the schema",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("files merged", "rows deleted")),
    ],
)
def test_a_commit_that_came_between_is_found_by_delta(
    table: Table, spark: Spark, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    table.commit(0, 1, added=[1, 2])
    table.commit(1, 2, added=[3])
    quoted = f"delta.`{table.target.path}`"

    def other() -> None:
        match what:
            case "rows":
                table.transactions.commit(table.request(*table.rows_file(7)))
            case "the application's version":
                table.transactions.commit(table.request({"txn": {"appId": "app", "version": 3}}))
            case "the schema":
                spark.session.sql(f"ALTER TABLE {quoted} ADD COLUMN c INT")
            case "files merged":
                spark.session.sql(f"OPTIMIZE {quoted}")
            case "rows deleted":
                spark.session.sql(f"DELETE FROM {quoted} WHERE id = 1")

    begun(table, monkeypatch, other)
    request = table.request(*table.rows_file(9), {"txn": {"appId": "app", "version": 3}})
    with pytest.raises(Conflict):
        table.transactions.commit(request)
    assert 9 not in table.ids()


def test_a_commit_that_does_not_matter_is_passed_over(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a copy of another application changes nothing: ours is made after it, in the same attempt."""
    table.commit(0, 1, added=[1])
    begun(
        table,
        monkeypatch,
        lambda: table.transactions.commit(table.request({"txn": {"appId": "x", "version": 1}})) and None,
    )
    before = table.log.version
    table.commit(1, 2, added=[2])
    assert table.log.version == before + 2
    assert table.ids() == [1, 2]


def test_properties_are_changed_in_a_commit_of_their_own(table: Table) -> None:
    def change(properties: Mapping[str, str]) -> dict[str, str]:
        assert properties["pubsub.node"] == "1"
        return {name: value for name, value in properties.items() if name != "pubsub.node"} | {"n": "ö", "m": '"'}

    table.commit(0, 1, added=[1])
    table.transactions.change_properties(table.target.path, change)
    # A batch that was worked out before is worked out again, as after any commit of others; it is no change of rows.
    table.commit(1, 2, added=[2])
    assert table.ids() == [1, 2]
    assert {"n": "ö", "m": '"'}.items() <= table.log.properties.items()
    assert "pubsub.node" not in table.log.properties
    info = table.actions(table.log.version - 1)["commitInfo"]
    assert info["operation"] == "SET TBLPROPERTIES"
    assert table.log.written_by_others("app") == []
    table.transactions.change_properties(table.target.path, dict)
    table.log.refresh()
    assert table.actions()["commitInfo"]["operation"] == "WRITE", "nothing to change, no commit"
    with pytest.raises(UndefinedTable):
        table.transactions.change_properties(f"{table.target.path}/nowhere", dict)


def test_a_commit_of_rows_does_not_hinder_a_change_of_properties(table: Table) -> None:
    table.commit(0, 1, added=[1])

    def late(properties: Mapping[str, str]) -> dict[str, str]:
        table.commit(1, 2, added=[2])
        return {**properties, "n": "1"}

    table.transactions.change_properties(table.target.path, late)
    assert delta.properties(table.target.path)["n"] == "1"
    assert table.ids() == [1, 2]

    def beside(properties: Mapping[str, str]) -> dict[str, str]:
        table.transactions.change_properties(table.target.path, lambda now: {**now, "n": "2"})
        return {**properties, "n": "3"}

    with pytest.raises(Conflict):
        table.transactions.change_properties(table.target.path, beside)
    assert delta.properties(table.target.path)["n"] == "2"


def test_what_delta_refuses_leaves_nothing(table: Table) -> None:
    files = {path.name for path in Path(table.target.path).glob("*.parquet")}
    wrong = table.rows_file(1)
    wrong[0]["add"]["partitionValues"] = {"p": "1"}
    with pytest.raises(CommitFailed) as raised:
        table.log.commit(wrong, Operation.WRITE, made=[Path(table.target.path) / wrong[0]["add"]["path"]])
    assert "PARTITION" in raised.value.message
    assert {path.name for path in Path(table.target.path).glob("*.parquet")} == files


def test_a_commit_that_names_a_file_that_is_not_there_is_refused(table: Table, spark: Spark) -> None:
    """LinkLogStore fsyncs each file that a commit names before the commit has its name, a vector's file, too."""
    table.commit(0, 1, added=[1, 2])
    lost: Any = table.rows_file(7)
    (Path(table.target.path) / lost[0]["add"]["path"]).unlink()
    with pytest.raises(CommitFailed, match="part-"):
        table.log.commit(lost, Operation.WRITE)
    write = deletion_vectors.write
    with pytest.MonkeyPatch.context() as patch:

        def lose(*arguments: Any) -> Any:
            path, descriptors = write(*arguments)
            path.unlink()
            return path, descriptors

        patch.setattr(deletion_vectors, "write", lose)
        with pytest.raises(CommitFailed, match="deletion_vector_"):
            table.commit(1, 2, deleted=[1])
    assert table.ids() == [1, 2]
    table.commit(1, 2, deleted=[1])
    spark.session.sql(f"DELETE FROM delta.`{table.target.path}` WHERE id = 2")
    assert table.ids() == []


def test_a_table_that_was_made_anew_at_its_place(table: Table, spark: Spark) -> None:
    """Delta keeps the snapshot of a table it knows; one of another table must not be committed to."""
    import shutil

    table.commit(0, 1, added=[1])
    known = table.log.version
    shutil.rmtree(table.target.path)
    again = Table(spark, Path(table.target.path))
    while again.log.version < known:
        again.commit(0 if again.log.version == 0 else again.log.version, again.log.version + 1, added=[5])
    with pytest.raises(Conflict):
        table.transactions.commit(table.request(*table.rows_file(2)))
    assert 2 not in again.ids()
    again.commit(again.log.version, 99, added=[6])
    assert 6 in again.ids()


@pytest.mark.full
def test_checkpoints_come_at_the_tables_interval(table: Table, spark: Spark) -> None:
    spark.session.sql(f"ALTER TABLE delta.`{table.target.path}` SET TBLPROPERTIES ('delta.checkpointInterval' = '3')")
    for number in range(1, 8):
        table.commit(number - 1, number, added=[number])
    names = [path.name for path in (Path(table.target.path) / "_delta_log").glob("*.checkpoint*.parquet")]
    assert len(names) >= 2
    fresh = TableLog(table.target.path)
    fresh.refresh()
    assert fresh.files.keys() == table.log.files.keys()
    assert fresh.application_version("app") == 7


def jobs(spark: Spark) -> set[int]:
    return set(spark.session.sparkContext.statusTracker().getJobIdsForGroup(None))


def test_no_commit_needs_a_spark_job(table: Table, spark: Spark) -> None:
    """Neither when a table comes down to few files again, nor after a checkpoint, which itself is made by jobs."""
    table.commit(0, 1, added=[1])
    before = jobs(spark)
    for lsn in range(2, 60):
        table.commit(lsn - 1, lsn, added=[lsn])
    table.commit(59, 60, deleted=list(range(10, 60)))
    table.commit(60, 61, added=[61])
    assert jobs(spark) == before
    table.transactions.checkpoint(table.target.path)
    made = jobs(spark)
    assert made > before
    table.commit(61, 62, added=[62], deleted=[61])
    table.commit(62, 63, added=[63])
    assert jobs(spark) == made
    assert table.ids() == [*range(1, 10), 62, 63]


@pytest.mark.full
def test_commits_during_a_checkpoint_need_no_spark_job_after_it(
    table: Table, spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is written between the snapshot that the checkpoint is of and the next look at the log."""
    table.commit(0, 1, added=[1])
    table.commit(1, 2, added=[2])
    newest = DeltaTransactions._snapshot
    found: list[Any] = []

    def snapshot(self: DeltaTransactions, log: Any) -> Any:
        found.append(newest(self, log))
        if len(found) == 1:
            table.commit(2, 3, added=[3])
        return found[-1]

    monkeypatch.setattr(DeltaTransactions, "_snapshot", snapshot)
    table.transactions.checkpoint(table.target.path)
    assert not found[-1].checksumOpt().isEmpty(), "it says what the jobs would find"
    made = jobs(spark)
    table.commit(3, 4, added=[4], deleted=[1])
    assert jobs(spark) == made
    table.commit(4, 5, added=[5])
    assert not list((Path(table.target.path) / "_delta_log").glob("*5.crc")), "only meanwhile"
    assert table.ids() == [2, 3, 4, 5]


@pytest.mark.full
def test_a_checkpoint_has_a_log_of_its_own(table: Table, spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit on the same snapshot would wait for the lock under which Delta finds out the snapshot's state."""
    table.commit(0, 1, added=[1])
    newest = DeltaTransactions._snapshot
    logs: list[Any] = []

    def snapshot(self: DeltaTransactions, log: Any) -> Any:
        logs.append(log)
        return newest(self, log)

    monkeypatch.setattr(DeltaTransactions, "_snapshot", snapshot)
    table.transactions.checkpoint(table.target.path)
    jvm: Any = spark.session._jvm
    of_checkpoint, of_commits = map(jvm.java.lang.System.identityHashCode, logs)
    assert of_checkpoint != of_commits


@pytest.mark.full
def test_a_users_setting_of_checksum_files_survives_a_checkpoint(
    table: Table, spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[spark]` of pubsub.toml wins over what this program sets."""
    written = "spark.databricks.delta.writeChecksumFile.enabled"
    table.commit(0, 1, added=[1])
    settings = spark.session.sparkContext.getConf().set(written, "true")
    with monkeypatch.context() as patched:
        patched.setattr(spark.session.sparkContext, "getConf", lambda: settings)
        table.transactions.checkpoint(table.target.path)
    assert spark.session.conf.get(written) == "true"
    table.transactions.checkpoint(table.target.path)
    assert spark.session.conf.get(written) == "false"


@pytest.mark.full
def test_any_thread_commits_to_a_table_that_has_a_checkpoint(table: Table, spark: Spark) -> None:
    table.commit(0, 1, added=[1])
    table.transactions.checkpoint(table.target.path)
    table.transactions.forget(table.target.path)
    failures: list[BaseException] = []

    def commit() -> None:
        try:
            DeltaTransactions(spark.session).commit(table.request({"txn": {"appId": "x", "version": 1}}))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join()
    assert failures == []


def test_the_retention_is_what_delta_says(table: Table, spark: Spark) -> None:
    week = Retention(files=7 * 86400, log=30 * 86400, cleans_log=True)
    assert table.transactions.retention(table.target.path) == week
    spark.session.sql(
        f"ALTER TABLE delta.`{table.target.path}` SET TBLPROPERTIES ('delta.deletedFileRetentionDuration' = '2 hours', "
        "'delta.logRetentionDuration' = 'interval 90 minutes 1800 seconds', 'delta.enableExpiredLogCleanup' = 'false')"
    )
    assert table.transactions.retention(table.target.path) == Retention(7200, 7200, cleans_log=False)


def short_retention(table: Table, spark: Spark) -> None:
    spark.session.sql(
        f"ALTER TABLE delta.`{table.target.path}` SET TBLPROPERTIES ('delta.deletedFileRetentionDuration' = '0 seconds', "
        "'delta.logRetentionDuration' = '0 seconds', 'delta.checkpointInterval' = '3')"
    )


def files(table: Table) -> set[str]:
    return {path.name for path in Path(table.target.path).iterdir() if path.is_file()}


@pytest.mark.full
def test_vacuum_lite_deletes_what_commits_have_removed_and_makes_no_commit(table: Table, spark: Spark) -> None:
    short_retention(table, spark)
    table.commit(0, 1, added=[1, 2, 3])
    table.commit(1, 2, added=[4], deleted=[2])
    (vector,) = (name for name in files(table) if name.startswith("deletion_vector"))
    table.commit(2, 3, deleted=[3])
    table.commit(3, 4, deleted=[4])
    staged: Any = table.rows_file(9)
    newest = table.log.version
    table.transactions.vacuum(table.target.path, None)
    names = {Path(file.path).name for file in table.log.files.values()}
    assert {name for name in files(table) if name.endswith(".parquet")} == {*names, staged[0]["add"]["path"]}
    assert vector not in files(table)
    assert table.ids() == [1]
    table.log.refresh()
    assert table.log.version == newest
    assert list_log(Path(table.target.path)).vacuumed == newest


@pytest.mark.full
def test_vacuum_of_a_list_deletes_only_what_no_version_needs(table: Table, spark: Spark) -> None:
    table.commit(0, 1, added=[1, 2, 3])
    (needed,) = files(table)
    table.commit(1, 2, added=[4], deleted=[1, 2, 3])
    stray: Any = table.rows_file(9)
    listed = [Listed(name, 1, 1) for name in files(table)]
    table.transactions.vacuum(table.target.path, listed)
    assert needed in files(table), "it was removed within the retention"
    assert stray[0]["add"]["path"] not in files(table)
    assert table.ids() == [4]
    short_retention(table, spark)
    table.transactions.vacuum(table.target.path, listed)
    assert needed not in files(table)
    # Delta knows up to where it has cleaned, so LITE goes on from there.
    table.transactions.vacuum(table.target.path, None)
    assert table.ids() == [4]


@pytest.mark.full
def test_the_log_is_cleaned_to_the_minute(table: Table, spark: Spark) -> None:
    short_retention(table, spark)
    log = Path(table.target.path) / "_delta_log"
    for number in range(1, 9):
        table.commit(number - 1, number, added=[number])
    made = time.time() - 3600
    for version in range(table.log.version + 1):
        for path in log.glob(f"{version:020}.*"):
            os.utime(path, (made + 60 * version, made + 60 * version))
    table.transactions.clean_log(table.target.path, int((made + 60 * 5) * 1000))
    left = list_log(Path(table.target.path))
    assert left.oldest == 3
    assert readable_versions(os.listdir(log), lambda name: (log / name).exists()) == (3, table.log.version)
    assert table.ids() == list(range(1, 9))
    table.log.refresh()
    table.commit(8, 9, added=[9])


def test_no_name_is_taken_twice(table: Table, spark: Spark) -> None:
    """LinkLogStore: the name of a commit is free or it is not, for every caller, and nothing is left beside the log."""
    jvm: Any = spark.session._jvm
    log = Path(table.target.path) / "_delta_log"
    store = jvm.pubsub.LinkLogStore(spark.session._jsc.hadoopConfiguration())
    path = jvm.org.apache.hadoop.fs.Path(str(log / f"{1:020}.json"))
    configuration = spark.session._jsc.hadoopConfiguration()
    outcomes: list[str] = []

    def write(number: int) -> None:
        lines = jvm.java.util.ArrayList()
        lines.add(json.dumps({"commitInfo": {"operation": str(number)}}))
        try:
            store.write(path, lines.iterator(), False, configuration)
        except Py4JJavaError as error:
            outcomes.append(error.java_exception.getClass().getName())
        else:
            outcomes.append(str(number))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = {*outcomes} - {"java.nio.file.FileAlreadyExistsException"}
    assert outcomes.count(winner) == 1
    assert json.loads((log / f"{1:020}.json").read_text())["commitInfo"]["operation"] == winner
    assert not list(log.glob(".*.tmp"))


def test_a_log_of_weeks_is_not_listed_for_each_commit(spark: Spark, tmp_path: Path) -> None:
    """LinkLogStore asks for the next commits by name.  Whatever else is new, and can be done without, is seen later."""
    jvm: Any = spark.session._jvm
    configuration = spark.session._jsc.hadoopConfiguration()
    store = jvm.pubsub.LinkLogStore(configuration)
    log = tmp_path / "t" / "_delta_log"
    log.mkdir(parents=True)

    def listed(version: int) -> list[str]:
        prefix = jvm.org.apache.hadoop.fs.Path(str(log / f"{version:020}."))
        found = store.listFrom(prefix, configuration)
        names = []
        while found.hasNext():
            names.append(found.next().getPath().getName())
        assert names == sorted(names)
        return [name.lstrip("0") for name in names]

    def touch(*names: str) -> None:
        for name in names:
            (log / f"{'0' * (20 - len(name.partition('.')[0]))}{name}").touch()

    touch("9.json", "10.json", "11.json")
    assert listed(10) == ["10.json", "11.json"]
    touch("12.json", "12.crc", "13.json", "15.json", "10.checkpoint.parquet")
    assert listed(10) == ["10.json", "11.json", "12.crc", "12.json", "13.json"], "the directory was not listed"
    assert listed(12) == ["12.crc", "12.json", "13.json"]
    touch("14.json")
    assert listed(13)[-2:] == ["14.json", "15.json"]
    assert listed(9)[0] == "9.json", "a name before those that are remembered"
    (log / "_last_checkpoint").write_text('{"version":11}')
    touch("11.checkpoint.parquet")
    assert "11.checkpoint.parquet" in listed(10), "it was announced"
    (log / f"{10:020}.json").unlink()
    assert "10.json" not in listed(9)
    # The log of another table, or of a time when the JVM's view had expired.
    for path in log.iterdir():
        path.unlink()
    touch("0.json", "1.json", "20.json")
    assert listed(0) == [".json", "1.json", "20.json"]
    (log / f"{20:020}.json").unlink()
    assert listed(1) == ["1.json"]
    touch("2.json")
    assert listed(1) == ["1.json", "2.json"]
    for path in log.iterdir():
        path.unlink()
    log.rmdir()
    with pytest.raises(Py4JJavaError, match="FileNotFoundException"):
        listed(1)


def test_a_node_starts_its_jvm_at_the_first_commit(spark: Spark, tmp_path: Path) -> None:
    transactions = SparkTransactions(spark)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}',
        "partitionColumns": [],
        "configuration": {},
        "createdTime": int(time.time() * 1000),
    }
    (tmp_path / "t").mkdir()
    request = Request(str(tmp_path / "t"), -1, None, [{"metaData": metadata}], Operation.CREATE)
    assert transactions.commit(request)
    with pytest.raises(Conflict):
        transactions.commit(request)
