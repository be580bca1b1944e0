"""The source "pubsub" of Spark's: the changes of a history, in batches and streams, each once (docs/spark-source.md)."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pubsub.protocol.lsn import Lsn
from pubsub.spark_source import PubsubSource
from tests.scenarios import test_085_natural_types as natural
from tests.support.replica import PATIENCE, Replica, wait_until


@pytest.fixture
def session(replica: Replica) -> SparkSession:
    """The test process's Spark, which knows the source."""
    found: SparkSession = replica.node.spark.session
    found.dataSource.register(PubsubSource)
    return found


def rows(frame: DataFrame) -> Counter[Any]:
    return Counter(map(str, frame.collect()))


def read(session: SparkSession, replica: Replica, **options: object) -> DataFrame:
    given = {"home": str(replica.node.home), "subscription": replica.name, **options}
    return session.read.format("pubsub").options(**given).load()


def stream(session: SparkSession, replica: Replica, **options: object) -> DataFrame:
    given = {"home": str(replica.node.home), "subscription": replica.name, **options}
    return session.readStream.format("pubsub").options(**given).load()


def history(session: SparkSession, replica: Replica, table: str = "t") -> DataFrame:
    return session.read.format("delta").load(replica.path(table))


def now(replica: Replica) -> Lsn:
    return Lsn.parse(replica.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])


#: Transactions, one each, after nine rows that are copied; and how many rows they are in the history.
LIFE = {
    "UPDATE t SET id = id + 100 WHERE id < 4; DELETE FROM t WHERE id = 9": 3 + 3 + 1,
    "INSERT INTO t SELECT g, 'x' FROM generate_series(1000, 1020) g": 21,
    "TRUNCATE t": 1,
    "INSERT INTO t VALUES (1, 'last')": 1,
}


def lived(replica: Replica) -> list[Lsn]:
    """Let a table live in a history; return the LSNs of moments between its transactions."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' FROM generate_series(1, 9) g;"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    moments = [now(replica)]
    for statement in LIFE:
        replica.execute(statement)
        moments.append(now(replica))
    replica.caught_up()
    return moments


@pytest.mark.full
def test_between_two_lsns(replica: Replica, session: SparkSession) -> None:
    moments = lived(replica)
    whole = history(session, replica)
    assert read(session, replica).schema == whole.schema
    assert rows(read(session, replica)) == rows(whole)
    for first, last in itertools.pairwise(moments):
        between = read(session, replica, table="public.t", startingLSN=str(first), endingLSN=str(last))
        assert rows(between) == rows(whole.where(f"_pubsub_lsn > {int(first)} AND _pubsub_lsn <= {int(last)}"))
    assert read(session, replica, startingLSN="latest").count() == 0


@pytest.mark.full
def test_a_stream(replica: Replica, session: SparkSession, tmp_path: Path) -> None:
    """In whole transactions into a Delta table; it goes on where it was."""
    lived(replica)
    target = str(tmp_path / "target")

    def start() -> StreamingQuery:
        changes = stream(session, replica, maxTransactionsPerTrigger=2)
        writer = changes.writeStream.format("delta").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(availableNow=True).start(target)

    def taken(query: StreamingQuery) -> list[int]:
        return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]

    first, second, *others = LIFE.values()
    assert taken(ran(start)) == [9 + first, second + others[0], others[1]]
    assert rows(session.read.format("delta").load(target)) == rows(history(session, replica))
    replica.execute("INSERT INTO t VALUES (2, 'more')")
    replica.caught_up()
    assert taken(ran(start)) == [1]
    assert rows(session.read.format("delta").load(target)) == rows(history(session, replica))


@pytest.mark.full
def test_the_page(replica: Replica, session: SparkSession, tmp_path: Path) -> None:
    """The examples of docs/spark-source.md, but for the pipeline's; only names and directories are replaced."""
    replica.execute(
        "CREATE TABLE payments (id int PRIMARY KEY, customer text, amount numeric(10,2));"
        "INSERT INTO payments SELECT g, 'c' || g % 3, g FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR TABLE payments"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    replica.execute("INSERT INTO payments VALUES (10, 'c1', 5.50)", "UPDATE payments SET amount = 1 WHERE id = 1")
    replica.caught_up()
    examples = [here(text, replica, tmp_path) for text in blocks("python") if "pipelines" not in text]
    assert len(examples) == 4
    found: dict[str, Any] = {"spark": session}
    for example in examples:
        tried(lambda: exec(compile(example, "docs/spark-source.md", "exec"), found))  # noqa: B023
    whole = history(session, replica, "payments")
    assert rows(session.read.format("delta").load(f"{tmp_path}/lake/payment_changes")) == rows(whole)
    totals = session.read.format("delta").load(f"{tmp_path}/lake/payment_totals")
    assert (
        totals.selectExpr("sum(amount)").collect()[0][0]
        == whole.where("_pubsub_op <> 'U'").selectExpr("sum(amount)").collect()[0][0]
    )
    assert dict(map(tuple, found["counts"].collect())) == {"R": 9, "I": 1, "U": 1}


@pytest.mark.full
def test_the_pages_pipeline(replica: Replica, session: SparkSession, tmp_path: Path) -> None:
    """By Spark's own command, which needs packages that PySpark alone does not bring (pyspark[pipelines])."""
    for name in ("grpc", "grpc_status", "yaml", "zstandard"):
        pytest.importorskip(name)
    replica.execute(
        "CREATE TABLE payments (id int PRIMARY KEY, amount int); INSERT INTO payments VALUES (1, 1);"
        "CREATE PUBLICATION p FOR TABLE payments"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "payments.py").write_text(
        here(next(text for text in blocks("python") if "pipelines" in text), replica, tmp_path)
    )
    spec = here(blocks("yaml")[0], replica, tmp_path)
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    for statement, expected in (
        ("INSERT INTO payments VALUES (2, 2)", {"R": 1, "I": 1}),
        ("UPDATE payments SET amount = 3", {"R": 1, "I": 1, "U": 2}),
    ):
        replica.execute(statement)
        replica.caught_up()
        ran = subprocess.run(
            [Path(pyspark.__file__).parent / "bin" / "spark-pipelines", "run", "--spec", "spark-pipeline.yml"],
            cwd=tmp_path,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(Path(pyspark.__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        (operations,) = (tmp_path / "spark-warehouse").glob("**/payment_operations")
        (changes,) = (tmp_path / "spark-warehouse").glob("**/payment_changes")
        assert dict(map(tuple, session.read.parquet(str(operations)).collect())) == expected
        assert rows(session.read.parquet(str(changes))) == rows(history(session, replica, "payments"))


def test_every_type(replica: Replica, session: SparkSession) -> None:
    """Columns and values are those that Spark reads from the history itself."""
    replica.execute(
        natural.SETUP.replace("j jsonb\n);", "j jsonb, b bool, s smallint, l bigint, r real, d float8,\n"
                              "n2 numeric(38,10), day date, at timestamp, atz timestamptz, raw bytea, loose2 numeric, u uuid);"),
        *(f"INSERT INTO t VALUES ({row})" for row in natural.ROWS),
        "UPDATE t SET b = true, s = -1, l = 1 << 40, r = 'NaN', d = '-Infinity', n2 = 1234567890123456789012345678.0123456789,"
        "day = '0001-01-01', at = '9999-12-31 23:59:59.999999', atz = '1900-01-01 00:00:00+01', raw = '\\x00ff',"
        "loose2 = 1e50, u = gen_random_uuid() WHERE id <> 2",
    )  # fmt: skip
    replica.subscribe(mode="history", types=natural.CHOICES)
    replica.until_ready()
    replica.execute("UPDATE t SET s = 7", "DELETE FROM t WHERE id = 3")
    replica.caught_up()
    whole = history(session, replica)
    found = read(session, replica)
    assert found.schema == whole.schema
    assert {"variant", "decimal(38,10)", "timestamp_ntz"} <= {field.dataType.simpleString() for field in found.schema}
    assert rows(found) == rows(whole)
    assert rows(found.selectExpr("id", "to_json(j)", "try_variant_get(j, '$.b[1]', 'decimal(9,2)')")) == rows(
        whole.selectExpr("id", "to_json(j)", "try_variant_get(j, '$.b[1]', 'decimal(9,2)')")
    )


@pytest.mark.full
def test_the_wrong_table_is_told(replica: Replica, session: SparkSession) -> None:
    """What Spark shows of an error has its hint."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY); CREATE TABLE m (id int PRIMARY KEY);"
        "CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(mode="'* (history), public.m (mirror)'")
    replica.until_ready()
    for options, words in (
        ({}, f'subscription "{replica.name}" has 2 histories, and a stream reads one'),
        ({"table": "m"}, "Subscribe to it with mode = history"),
        ({"table": "x"}, f'subscription "{replica.name}" has no table "public.x"'),
        ({"subscription": "none"}, 'subscription "none" does not exist'),
        ({"table": "t", "endingLSN": "FFFFFFFF/0"}, "has not reached endingLSN FFFFFFFF/0"),
    ):
        with pytest.raises(PySparkException) as refused:
            read(session, replica, **options).count()
        assert words in str(refused.value)
    replica.execute("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    replica.caught_up()
    # The table's own last transaction is before it, but the catalog knows that nothing is missing.
    replica.execute("INSERT INTO u VALUES (2)")
    replica.caught_up()
    last = session.read.format("delta").load(replica.path("u")).selectExpr("max(_pubsub_lsn)").collect()[0][0]
    assert read(session, replica, table="t", endingLSN=str(Lsn(last))).count() == 1


@pytest.mark.full
def test_columns_and_copies_change(replica: Replica, session: SparkSession, tmp_path: Path) -> None:
    """A running query fails at an ALTER TABLE, and goes on when it is started again; another copy is a part of the stream."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    target = str(tmp_path / "target")

    def started(**trigger: Any) -> StreamingQuery:
        writer = stream(session, replica).writeStream.format("delta").option("mergeSchema", "true")
        return writer.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(**trigger).start(target)

    def places() -> Counter[Any]:
        named = "_pubsub_lsn", "_pubsub_seq", "_pubsub_op", "id"
        wanted = rows(history(session, replica).select(*named))
        assert rows(session.read.format("delta").load(target).select(*named)) == wanted
        return wanted

    query = going(lambda: started(processingTime="0 seconds"))
    replica.execute("INSERT INTO t VALUES (2, 'b')")
    wait_until(lambda: sum(one["numInputRows"] for one in query.recentProgress) >= 2, "both rows")
    replica.execute("ALTER TABLE t ADD n int DEFAULT 7; INSERT INTO t VALUES (3, 'c', 8)")
    wait_until(lambda: not query.isActive, "the query's end")
    assert "They differ in n." in str(query.exception())
    replica.execute("ALTER TABLE t RENAME v TO w; UPDATE t SET w = 'd' WHERE id = 1")
    replica.caught_up()
    ran(lambda: started(availableNow=True))
    places()
    generation = replica.relation("t").copy_generation
    replica.alter("RESYNC TABLE t")
    replica.until_copied("t", generation)
    replica.execute("DELETE FROM t WHERE id = 1")
    replica.caught_up()
    ran(lambda: started(availableNow=True))
    assert len(places()) == 1 + 1 + 1 + 1 + (1 + 3) + 1
    # Whatever becomes of the files: another query reads the same.
    session.sql(f"OPTIMIZE delta.`{replica.path('t')}`").collect()
    assert rows(read(session, replica)) == rows(history(session, replica))


@pytest.mark.full
def test_stopped_at_random_moments(replica: Replica, session: SparkSession, tmp_path: Path) -> None:
    """Two queries beside a load of transactions, stopped and failing anywhere: each change is once in both targets."""
    chosen = random.Random(93)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 500) g;"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    over = threading.Event()

    def load() -> None:
        number = 0
        while not over.wait(0.05):  # a fast machine would write more than the queries read
            number += 1
            replica.execute(
                f"UPDATE t SET v = v + 1 WHERE id % 50 = {number % 50}; INSERT INTO t VALUES ({1000 + number}, 0)",
                f"DELETE FROM t WHERE id = {1000 + number - 20}; UPDATE t SET id = -id WHERE id = {number % 500 + 1}",
            )

    def keep(batch: DataFrame, number: int) -> None:
        fails = chosen.random() < 0.3 and not over.is_set()
        if fails and chosen.random() < 0.5:
            raise RuntimeError("before the write")
        writer = batch.write.format("delta").mode("append").option("txnAppId", "kept").option("txnVersion", number)
        writer.save(f"{tmp_path}/by_batch")
        if fails:
            raise RuntimeError("after the write")

    def plain(**trigger: Any) -> StreamingQuery:
        limit = 10_000 if over.is_set() else 15
        writer = stream(session, replica, maxTransactionsPerTrigger=limit).writeStream.format("delta")
        return writer.option("checkpointLocation", f"{tmp_path}/c1").trigger(**trigger).start(f"{tmp_path}/plain")

    def by_batch(**trigger: Any) -> StreamingQuery:
        limit = 1_000_000 if over.is_set() else 200
        writer = stream(session, replica, maxRowsPerTrigger=limit).writeStream.foreachBatch(keep)
        return writer.option("checkpointLocation", f"{tmp_path}/c2").trigger(**trigger).start()

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for round_ in range(6):
            queries = [start(processingTime="0 seconds") for start in (plain, by_batch)]
            batches = chosen.randrange(1, 5)
            wait_until(lambda: len(queries[0].recentProgress) >= batches or not queries[0].isActive, "some batches")  # noqa: B023
            time.sleep(chosen.random())
            for query in queries:
                query.stop()
                failed = query.exception()
                assert failed is None or "the write" in str(failed) or "failed to connect back" in str(failed), str(
                    failed
                )
            if round_ == 3:
                # Housekeeping may merge the same files at this moment, and then Spark gives up.
                tried(lambda: session.sql(f"OPTIMIZE delta.`{replica.path('t')}`").collect(), "DELTA_CONCURRENT")
    finally:
        over.set()
        loading.join()
    replica.caught_up()
    for start in (plain, by_batch):
        ran(lambda: start(availableNow=True), "the write")  # noqa: B023
    whole = rows(history(session, replica))
    for name in ("plain", "by_batch"):
        assert rows(session.read.format("delta").load(f"{tmp_path}/{name}")) == whole


def tried(work: Callable[[], object], *others: str) -> None:
    """Do the work again as long as Spark's ten seconds do not suffice for the start of a process, or one of `others` is said."""

    def done() -> bool:
        try:
            work()
        except PySparkException as error:
            if not any(words in str(error) for words in ("Python worker failed to connect back", *others)):
                raise
            return False
        return True

    wait_until(done, "the queries' end")


def ran(start: Callable[[], StreamingQuery], *others: str) -> StreamingQuery:
    """Start a query that ends by itself, until it ends as it should; return it."""
    queries: list[StreamingQuery] = []

    def run() -> None:
        queries.append(start())
        assert queries[-1].awaitTermination(PATIENCE)

    tried(run, *others)
    return queries[-1]


def going(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query that goes on, and return it when it has made a micro-batch."""
    queries: list[StreamingQuery] = []

    def run() -> None:
        queries.append(start())
        wait_until(lambda: queries[-1].recentProgress or not queries[-1].isActive, "the first micro-batch")
        if not queries[-1].isActive:
            queries[-1].awaitTermination()  # raises what it failed with

    tried(run)
    return queries[-1]


def blocks(kind: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text("utf-8")
    return re.findall(rf"(?ms)^```{kind}\n(.*?)^```$", text)


def here(text: str, replica: Replica, directory: Path) -> str:
    """Replace the examples' node, subscription and directories by those of the test."""
    for theirs, ours in (
        ('"pubsub-node"', f'"{replica.node.home}"'),
        ('"audit"', f'"{replica.name}"'),
        ('"lake/', f'"{directory}/lake/'),
        ("file:///lake", f"file://{directory}/lake"),
    ):
        text = text.replace(theirs, ours)
    return text
