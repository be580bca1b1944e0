"""What a copy's tasks need and nothing else may hold: the connection string, and the keys of stores."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import serializers
from pyspark.errors.exceptions.captured import CapturedException

from pubsub import object_stores
from pubsub.delta.spark.spark_session import Spark
from tablesync import task_secrets
from tests.support import stores
from tests.support.replica import Replica

SECRET = "recognised-wherever-it-is"


@pytest.fixture
def closures(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What this process sends to tasks, as it is sent."""
    found: list[bytes] = []
    dumps = serializers.CloudPickleSerializer.dumps

    def recorded(self: Any, given: Any) -> bytes:
        found.append(dumps(self, given))
        return found[-1]

    monkeypatch.setattr(serializers.CloudPickleSerializer, "dumps", recorded)
    return found


def test_they_come_with_a_job_s_own_tasks(spark: Spark, closures: list[bytes]) -> None:
    context = spark.running().sparkContext
    with task_secrets.sent(context, {"conninfo": SECRET}) as given, task_secrets.sent(context, {"other": "x"}):
        read = context.parallelize([1, 2], 2).map(lambda _: given.read()["conninfo"])
        assert read.collect() == [SECRET] * 2
    assert closures
    assert not [one for one in closures if SECRET.encode() in one]
    with pytest.raises((Py4JJavaError, CapturedException), match="the job's secrets are for its own tasks"):
        read.collect()


def test_the_half_in_a_closure_says_nothing(spark: Spark) -> None:
    context = spark.running().sparkContext
    halves = set()
    for _ in range(2):
        with task_secrets.sent(context, {"conninfo": SECRET}) as given:
            halves |= {given.half, bytes.fromhex(context.getLocalProperty(given.name) or "")}
        assert context.getLocalProperty(given.name) is None
    assert len(halves) == 4, "each job has its own"
    assert not [one for one in halves if SECRET.encode() in one]


@pytest.mark.parametrize("writes", ["our files", pytest.param("Spark", marks=pytest.mark.full)])
def test_no_task_of_a_copy_holds_the_connection_string(
    replica: Replica, spark: Spark, closures: list[bytes], monkeypatch: pytest.MonkeyPatch, writes: str
) -> None:
    if writes == "Spark":
        path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
        feed = "TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"
        spark.session.sql(f"CREATE TABLE delta.`{path}` (id BIGINT, v STRING) USING delta {feed}")
    replica.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 4000) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    monkeypatch.setattr(object_stores, "configured", lambda: {"spark.hadoop.fs.s3a.secret.key": SECRET})
    made = f"create_tables = {str(writes != 'Spark').lower()}"
    conninfo = f"{replica.conninfo} password={SECRET}"
    replica.node.execute(f"CREATE SUBSCRIPTION {replica.name} CONNECTION '{conninfo}' PUBLICATION p WITH ({made})")
    replica.created = True
    replica.assert_equal("t")
    assert any(b"CopySource" in one for one in closures), "a job has copied the table"
    assert not [one for one in closures if SECRET.encode() in one]
