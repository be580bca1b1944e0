"""[copies]: when initial copies begin, and how fast they read."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, RunningNode, wait_until


def test_copies_wait_for_their_window(tmp_path: Path, spark: Spark, database: Database) -> None:
    """Outside of it no table begins, and status says so; the stream goes on, and the tables are equal once it has opened."""
    opens = datetime.now() + timedelta(hours=12)
    closed = f"{opens:%H:%M}-{opens + timedelta(minutes=1):%H:%M}"
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR ALL TABLES"
    )
    with RunningNode(tmp_path, spark, copies={"window": closed}) as node:
        replica = Replica(node, database)
        replica.subscribe()
        try:
            waiting = wait_until(
                lambda: node.run(node._node.status()).as_json()["subscriptions"][0]["tables"][0]["waiting"],
                "the table's wait",
            )
            assert waiting == {
                "message": "waits for the window of copies",
                "detail": f'Copies begin within "copies.window", {closed}.',
                "hint": None,
            }
            database.execute("INSERT INTO t VALUES (2)")
            assert replica.states() == {"public.t": "i"}
        except BaseException:
            replica.leave()
            raise
    with RunningNode(tmp_path, spark, copies={"window": f"{opens:%H:%M}-{opens:%H:%M}"}) as node:
        replica.node = node
        try:
            replica.assert_equal("t")
        finally:
            replica.drop()


@pytest.mark.full
@pytest.mark.parametrize("rows", [1_000, 20_000], ids=["in a thread", "by a Spark job"])
def test_a_copy_reads_no_faster_than_it_may(tmp_path: Path, spark: Spark, database: Database, rows: int) -> None:
    """However many tasks read at once: 1,500 bytes a row take as long as the bound says, less what one task may hold."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE PLAIN;"
        f"INSERT INTO t SELECT g, (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 46) WHERE g > 0) "
        f"FROM generate_series(1, {rows}) g; ANALYZE t; CREATE PUBLICATION p FOR ALL TABLES"
    )
    megabytes = rows * 1_480 / 2**20
    with RunningNode(tmp_path, spark, copies={"max_rate": f"{int(megabytes * 1024 / 8)}kB"}) as node:
        replica = Replica(node, database)
        began = time.monotonic()
        replica.subscribe()
        try:
            replica.assert_equal("t")
            if rows > 10_000:
                # A task's last four megabytes are not waited for.
                assert time.monotonic() - began > 8 * (1 - 4 * 4 / megabytes)
        finally:
            replica.drop()
