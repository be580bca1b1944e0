"""[copies]: when initial copies begin, and how fast they read."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from apply.schema_changes.diff import CopyAgain
from pubsub.delta.spark.spark_session import Spark
from pubsub.setting_tables import DailyWindow
from pubsub.testing.fixtures import Database
from tablesync.catch_up import CatchUp
from tests.support.replica import Faults, Replica, RunningNode, wait_until


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
def test_a_table_that_is_copied_again_outside_the_window(
    replica: Replica, fault: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no slot until the window opens, and no other table's commits wait for it, though apply was promised it."""
    closed = False
    monkeypatch.setattr(DailyWindow, "wait", lambda *_: 0.5 if closed else 0.0)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t, u",
    )
    fault.arm("copy finished public.t")
    replica.subscribe()
    fault.wait("copy finished public.t")
    replica.execute("INSERT INTO t VALUES (1); INSERT INTO u VALUES (1)")
    wait_until(lambda: len(replica.rows("u")) == 1, "apply to be past the copy")

    async def follow(*_: object) -> bool:
        raise CopyAgain(1, "public.t", "a test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(CatchUp, "_follow", follow)
        fault.arm("catchup public.t")
        fault.release("copy finished public.t")
        fault.wait("catchup public.t")
        closed = True
        replica.execute("INSERT INTO t VALUES (2); INSERT INTO u VALUES (2)")
        fault.release("catchup public.t")
        wait_until(lambda: replica.slots() == [replica.name], "the table's slot to be given up")
    assert replica.states()["public.t"] == "i"
    wait_until(lambda: len(replica.rows("u")) == 2, "the other table's commit")
    assert replica.relation("t").copy_generation == 1
    closed = False
    replica.assert_equal("t", "u")
    assert replica.relation("t").copy_generation == 2


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
