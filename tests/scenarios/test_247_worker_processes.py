"""worker_processes: the subscriptions of a node are shared among processes, which use one JVM and one catalog."""

from __future__ import annotations

import os
from pathlib import Path

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, RunningNode, wait_until


def test_two_processes_have_a_subscription_each(tmp_path: Path, spark: Spark, databases: list[Database]) -> None:
    """Copies, changes, commands that wait for a worker, and what is shown."""
    with RunningNode(tmp_path, spark, worker_processes=2) as node:
        replicas = [Replica(node, database) for database in databases]
        for replica in replicas:
            replica.execute(
                "CREATE TABLE t (a int PRIMARY KEY, b text); INSERT INTO t SELECT g, g::text FROM generate_series(1, 500) g",
                "CREATE TABLE more (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t",
            )
            replica.subscribe()
        for replica in replicas:
            replica.until_ready()
            replica.execute("UPDATE t SET b = 'x' WHERE a % 7 = 0; DELETE FROM t WHERE a < 10")
            replica.assert_equal("t")

        def pids() -> dict[str, int]:
            found = node.fetch("SELECT subname, pid FROM pg_stat_subscription WHERE relid IS NULL AND pid IS NOT NULL")
            return {row["subname"]: row["pid"] for row in found}

        apart = wait_until(lambda: len(set(pids().values())) == 2 and pids(), "two workers")
        assert os.getpid() in apart.values()
        own, other = sorted(replicas, key=lambda one: apart[one.name] != os.getpid())
        assert set(node._node.service.figures()) == {  # type: ignore[union-attr]
            row["oid"] for row in node.fetch("SELECT oid FROM pg_subscription")
        }
        # The other process is asked to end workers, to copy a table anew, to take one more, and to keep a version.
        generation = other.relation("t").copy_generation
        other.alter("RESYNC TABLE t")
        other.until_copied("t", generation)
        other.execute("ALTER PUBLICATION p ADD TABLE more; INSERT INTO more VALUES (1)")
        other.alter("REFRESH PUBLICATION")
        other.until_ready()
        other.assert_equal("t", "more")
        other.alter("DISABLE")
        assert set(wait_until(lambda: len(pids()) == 1 and pids(), "its worker to end")) == {own.name}
        other.execute("INSERT INTO t VALUES (1000, 'while it is disabled')")
        other.alter("ENABLE")
        for replica in replicas:
            replica.assert_equal("t")
            replica.drop()
