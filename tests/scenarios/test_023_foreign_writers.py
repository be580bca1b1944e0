"""Other programs that write the same table while it is replicated to: nothing of theirs and nothing of ours is lost."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from pubsub.delta import table as delta
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Operation, Request
from pubsub.delta.spark.jvm_transactions import DeltaTransactions, SparkTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import TargetTable
from tests.scenarios.test_210_verify import of, verify
from tests.support.foreign_writer import FIRST, KINDS
from tests.support.replica import Replica, wait_until

ROOT = Path(__file__).parent.parent.parent
COLUMNS = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.string())])


def subscribed(replica: Replica) -> str:
    replica.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, n text)",
        "INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 100) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    replica.assert_equal("t")
    return replica.path("t")


@contextmanager
def written_to(replica: Replica) -> Iterator[None]:
    """Meanwhile write some ten transactions a second at the publisher: inserts, updates, deletes, and changes of keys."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for number in itertools.count(1):
                replica.execute(
                    f"INSERT INTO t VALUES ({1000 + number}, 'new'); UPDATE t SET n = n || '+' WHERE id % 10 = {number % 10};"
                    f"DELETE FROM t WHERE id = {number}; UPDATE t SET id = id + 100000 WHERE id = {990 + number}"
                )
                if stop.wait(0.1):
                    break
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed


def assert_nothing_is_lost(replica: Replica, theirs: dict[int, str]) -> None:
    """Compare our rows with the publisher's, and the others' with what they know."""
    replica.caught_up()
    found = sorted((row["id"], row["n"]) for row in replica.rows("t", "id, n"))
    assert [row for row in found if row[0] <= FIRST] == sorted(replica.query("SELECT id, n FROM t"))
    assert [row for row in found if row[0] > FIRST] == sorted(theirs.items())


class Delta:
    """What deltalake and DuckDB write, and the rows that they have in the table."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: dict[int, str] = {}
        self.made: dict[str, int] = {}
        self.refused = 0
        self._numbers = itertools.count(FIRST + 1)
        (extension,) = Path(duckdb_extension_delta.__file__).parent.glob("extensions/*/delta.duckdb_extension")
        self._duck = duckdb.connect()
        self._duck.execute(f"LOAD '{extension}'")

    def work(self, what: Callable[[], dict[int, str]]) -> None:
        """Do one thing, which returns their rows after it; a conflict has done nothing."""
        try:
            self.rows = what()
        except CommitFailedError:
            self.refused += 1
        except duckdb.Error as error:
            if "onflict" not in str(error) and "already exists" not in str(error):
                raise
            self.refused += 1
        else:
            self.made[what.__name__] = self.made.get(what.__name__, 0) + 1

    def append(self) -> dict[int, str]:
        new = next(self._numbers)
        write_deltalake(DeltaTable(self.path), self._table({new: "deltalake"}), mode="append")
        return self.rows | {new: "deltalake"}

    def insert(self) -> dict[int, str]:
        """DuckDB's."""
        new = next(self._numbers)
        self._duck.execute(f"ATTACH '{self.path}' AS d (TYPE delta)")
        try:
            self._duck.execute(f"INSERT INTO d VALUES ({new}, 'DuckDB')")
        finally:
            self._duck.execute("DETACH d")
        return self.rows | {new: "DuckDB"}

    def delete(self) -> dict[int, str]:
        gone = min(self.rows, default=0)
        DeltaTable(self.path).delete(f"id = {gone}")
        return {one: n for one, n in self.rows.items() if one != gone}

    def update(self) -> dict[int, str]:
        DeltaTable(self.path).update(predicate=f"id > {FIRST} AND n = 'deltalake'", updates={"n": "'updated'"})
        return {one: "updated" if n == "deltalake" else n for one, n in self.rows.items()}

    def merge(self) -> dict[int, str]:
        new = next(self._numbers)
        source = {**dict.fromkeys(list(self.rows)[:1], "merged"), new: "merged"}
        merger = DeltaTable(self.path).merge(
            self._table(source), predicate="t.id = s.id", source_alias="s", target_alias="t"
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()
        return self.rows | source

    def optimize(self) -> dict[int, str]:
        DeltaTable(self.path).optimize.compact()
        return self.rows

    def vacuum(self) -> dict[int, str]:
        DeltaTable(self.path).vacuum(dry_run=False)
        return self.rows

    def checkpoint(self) -> dict[int, str]:
        DeltaTable(self.path).create_checkpoint()
        return self.rows

    def _table(self, rows: dict[int, str]) -> pa.Table:
        return pa.table({"id": list(rows), "n": list(rows.values())}, COLUMNS)


@pytest.mark.soak
@pytest.mark.parametrize("rounds", [1, 3])
def test_deltalake_and_duckdb_write_at_the_same_time(replica: Replica, rounds: int) -> None:
    """In more rounds than one they do not wait for us."""
    theirs = Delta(subscribed(replica))
    kinds = [
        *(theirs.append, theirs.insert, theirs.merge, theirs.append, theirs.update),
        *(theirs.optimize, theirs.insert, theirs.delete, theirs.vacuum, theirs.checkpoint),
    ]
    with written_to(replica):
        for kind in kinds * rounds:
            at = replica.version("t")
            if rounds == 1:
                wait_until(lambda at=at: replica.version("t") > at, "a commit of ours")  # type: ignore[misc]
            theirs.work(kind)
    assert_nothing_is_lost(replica, theirs.rows)
    assert theirs.made.keys() >= {"append", "insert"}, theirs.made


def test_a_thread_of_its_own_reads_a_checkpoint_of_others(spark: Spark, tmp_path: Path) -> None:
    """Delta reads it in threads that ask for the session of the caller's; a commit's checkpoint failed without one."""
    path = str(tmp_path / "t")
    target = TargetTable(path, COLUMNS, ("id",), "public.t")
    assert delta.create_empty(DeltaTransactions(spark.session), target, {"pubsub.node": "1"})
    log = TableLog(path)
    log.refresh()
    with ThreadPoolExecutor(1) as thread:
        for number in range(3):
            write_deltalake(DeltaTable(path), pa.table({"id": [number], "n": ["theirs"]}, COLUMNS), mode="append")
            DeltaTable(path).create_checkpoint()
            log.refresh()
            transaction = {"txn": {"appId": "app", "version": number}}
            request = Request(path, log.version, log.metadata["id"], [transaction], Operation.WRITE)
            with suppress(Conflict):  # Delta knew an earlier version
                thread.submit(SparkTransactions(spark).commit, request).result()
                continue
            thread.submit(SparkTransactions(spark).commit, request).result()


def test_timestamps_of_a_spark_with_its_default_settings(replica: Replica) -> None:
    """It writes INT96, which Arrow reads as nanoseconds and without a time zone if it is not told otherwise."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, l timestamptz[], n int)",
        "INSERT INTO t VALUES (1, '9999-12-31 12:00:00.000001+00', '{0001-01-01 00:00+00,NULL}', 0), (2, 'epoch', NULL, 0)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe(types="'public.t.l natural'", on_table_error="isolate")
    replica.caught_up()
    spark = replica.node.spark.session
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        spark.sql(f"UPDATE delta.`{replica.path('t')}` SET n = n + 1")
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    report = verify(replica)
    assert {one.key["id"]: one.delta for one in of(report, "public.t").shown} == {"1": {"n": "1"}, "2": {"n": "1"}}
    replica.execute("UPDATE t SET n = 1 WHERE id = 1", "UPDATE t SET n = 1, id = 3 WHERE id = 2")
    replica.assert_equal("t")


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings", [[], ["spark.delta.logStore.file.impl=pubsub.LinkLogStore"]], ids=["their store", "our store"]
)
def test_another_spark_writes_at_the_same_time(replica: Replica, settings: list[str]) -> None:
    """Its store renames where ours links: a commit of ours that it replaces is made again.  With our store none is.

    Against ten commits a second few of its statements win, as Delta decides; all do after the load, while our node goes
    on with what it has still to apply.
    """
    path = subscribed(replica)
    command = [sys.executable, "-m", "tests.support.foreign_writer", path, *settings]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"

        def round_of_all(attempts: int) -> dict[str, Any]:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(f"{attempts}\n")
            other.stdin.flush()
            # VACUUM prints a line of its own.
            said = next((line for line in other.stdout if line.startswith("{")), "")
            assert said, "the other Spark has failed"
            return dict(json.loads(said))

        with written_to(replica):
            loaded = round_of_all(0)
        calm = round_of_all(20)
        other.stdin.close()
    assert len(loaded["made"]) + len(loaded["refused"]) == len(loaded["made"]) + len(calm["made"]) == len(KINDS)
    replica.execute("INSERT INTO t VALUES (999999, 'after it')")
    assert_nothing_is_lost(replica, {int(one): n for one, n in calm["rows"].items()})
