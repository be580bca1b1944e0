"""deletes = soft: a deleted row stays in the Delta table, with the values that it had and the time of the deletion."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from apply.staging import stage_batch
from pubsub.delta.table import DELETES, METADATA, properties
from pubsub.errors import PubsubError
from tablesync import choose_copier
from tests.support.replica import Replica
from tests.support.soft_deletes import assert_soft, watch

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 40) g;"
    "CREATE TABLE hard (id int PRIMARY KEY, v text); INSERT INTO hard VALUES (1, 'one'), (2, 'two');"
    "CREATE PUBLICATION p FOR TABLE t, hard"
)
CHANGES = (
    "DELETE FROM t WHERE id IN (1, 2); DELETE FROM hard WHERE id = 1",
    "INSERT INTO t VALUES (1, 'again', 0)",
    "DELETE FROM t WHERE id = 1",
    # Deleted with what the transaction itself made of it; there and gone; gone and there.
    "BEGIN; UPDATE t SET n = 100 WHERE id = 3; DELETE FROM t WHERE id = 3; COMMIT",
    "BEGIN; INSERT INTO t VALUES (50, 'short', 1); UPDATE t SET n = 2 WHERE id = 50; DELETE FROM t WHERE id = 50; COMMIT",
    "BEGIN; DELETE FROM t WHERE id = 4; INSERT INTO t VALUES (4, 'new', 4); COMMIT",
    "BEGIN; DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (5, 'new', 5); DELETE FROM t WHERE id = 5; COMMIT",
    # Other keys: with values that are not sent, of a row that the transaction made, in a circle, onto a key that was deleted.
    "UPDATE t SET id = 106 WHERE id = 6",
    "BEGIN; UPDATE t SET n = -7 WHERE id = 7; UPDATE t SET id = 107 WHERE id = 7; UPDATE t SET id = 207 WHERE id = 107; COMMIT",
    "BEGIN; UPDATE t SET id = -1 WHERE id = 8; UPDATE t SET id = 8 WHERE id = 9; UPDATE t SET id = 9 WHERE id = -1; COMMIT",
    "UPDATE t SET id = 2 WHERE id = 10",
    "UPDATE t SET id = id + 1000 WHERE id BETWEEN 11 AND 20; DELETE FROM t WHERE id > 1015",
    "UPDATE t SET id = id - 1000 WHERE id > 1000",
    "DELETE FROM t WHERE id > 30; INSERT INTO t SELECT g, 'back', g FROM generate_series(31, 34) g",
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"identity": "FULL"}, marks=pytest.mark.full),
        pytest.param({"partition_by": "'public.t (_pubsub_deleted_at)'"}, marks=pytest.mark.full),
        pytest.param({"binary": "true", "cluster_by": "'public.t (n)'"}, marks=pytest.mark.full),
        pytest.param({"table_properties": "'* (delta.columnMapping.mode = name)'"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_deleted_rows_stay(replica: Replica, options: dict[str, str]) -> None:
    """Deleted, inserted again, moved to other keys; each transaction by itself, and all in one batch."""
    identity = options.pop("identity", "DEFAULT")
    replica.execute(SETUP, watch("t"), f"ALTER TABLE t REPLICA IDENTITY {identity}")
    replica.subscribe(deletes="'public.t (soft)'", **options)
    replica.until_ready()
    assert_soft(replica, "t", "id, v, n")
    for statement in CHANGES:
        replica.execute(statement)
        assert_soft(replica, "t", "id, v, n")
    replica.assert_equal("hard")
    found = replica.node.fetch("SELECT relation, mode, deletes FROM pg_subscription_rel WHERE relation LIKE 'public.%'")
    mine = {row["relation"]: (row["mode"], row["deletes"]) for row in found}
    assert mine["public.t"] == ("mirror", "soft")
    assert mine["public.hard"] == ("mirror", "hard")
    report = replica.node.run(replica.node._node.verify(replica.name, ()))
    assert {one.outcome for one in report.tables if one.relation in ("public.t", "public.hard")} == {"equal"}


@pytest.mark.full
def test_in_one_batch(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same changes committed together, whole and in parts; then the rows come back."""
    replica.execute(SETUP, watch("t"))
    replica.subscribe(deletes="soft")
    replica.until_ready()
    for whole in (48 << 20, 1000):
        monkeypatch.setattr(stage_batch, "_WHOLE", whole)
        replica.alter("DISABLE")
        replica.execute(*CHANGES)
        replica.alter("ENABLE")
        assert len(assert_soft(replica, "t", "id, v, n")) > 10
        replica.execute("INSERT INTO t SELECT g, 'x', g FROM generate_series(1, 40) g ON CONFLICT DO NOTHING")
        replica.execute("DELETE FROM t WHERE id > 40; DELETE FROM hard; INSERT INTO hard VALUES (1, 'one')")
        assert_soft(replica, "t", "id, v, n")
    rows = replica.rows("hard")
    assert {row["id"]: row["_pubsub_deleted_at"] is None for row in rows} == {1: True, 2: False}


def test_what_a_deleted_row_is_to_changes(replica: Replica) -> None:
    """To conflicts it is not there; TRUNCATE and another copy take it away; columns come and go with it."""
    replica.execute(SETUP, watch("t"))
    # From the beginning: ALTER's SET holds once the worker has started again, which no test can wait for.
    replica.subscribe(deletes="soft", origin="none")
    replica.until_ready()
    replica.execute(
        "DELETE FROM t WHERE id < 10", "ALTER TABLE t ADD w int DEFAULT 7", "UPDATE t SET w = 8 WHERE id = 10"
    )
    replica.caught_up()
    marked = [row for row in replica.rows("t") if row["_pubsub_deleted_at"] is not None]
    assert {row["w"] for row in marked} == {7}, "as every row that was there"
    replica.execute(
        "ALTER TABLE gone_t ADD w int", "DELETE FROM t WHERE id = 10", "INSERT INTO t VALUES (1, 'a', 1, 1)"
    )
    assert_soft(replica, "t", "id, v, n")
    # Rows that the node was never told to have: an UPDATE and a DELETE of a row that is marked as deleted.
    replica.execute(
        f"SELECT pg_replication_origin_create('{replica.name}')",  # a server's origins are not a database's own
        f"SELECT pg_replication_origin_session_setup('{replica.name}'); INSERT INTO t VALUES (2, 'unseen', 2, 2)",
        "UPDATE t SET n = 3 WHERE id = 2",
        "DELETE FROM t WHERE id = 2",
    )
    replica.caught_up()
    (row,) = [row for row in replica.rows("t") if row["id"] == 2]
    assert row["v"] == "x" * 5000 + "2"
    assert row["_pubsub_deleted_at"] is not None
    statistics = replica.node.statistics(replica.name)
    assert statistics["confl_update_missing"] == 1
    assert statistics["confl_delete_missing"] == 1
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    assert {row["_pubsub_deleted_at"] for row in replica.rows("t")} == {None}
    replica.execute("DELETE FROM t WHERE id = 11; TRUNCATE t; INSERT INTO t VALUES (12, 'new', 1, 1)")
    replica.caught_up()
    assert [row["id"] for row in replica.rows("t")] == [12]
    replica.alter("SET (deletes = hard, metadata = 'public.t (op)')")
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    replica.execute("DELETE FROM t; INSERT INTO t VALUES (13, 'new', 1, 1)")
    replica.caught_up()
    assert replica.rows("t") == [{"id": 13, "v": "new", "n": 1, "w": 1, "_pubsub_op": "I"}]
    ((path,),) = [
        row.values() for row in replica.node.fetch("SELECT path FROM pg_subscription_rel WHERE relation = 'public.t'")
    ]
    assert properties(path).keys() & {DELETES, METADATA} == {METADATA}


@pytest.mark.full
@pytest.mark.parametrize("streaming", ["parallel", "off"])
def test_random_changes_while_copied(replica: Replica, streaming: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many writers, small and large transactions, some rolled back in part, while the table is copied, interrupted and followed."""
    monkeypatch.setattr(choose_copier, "LEAST_JOB_BYTES", 1)
    replica.execute(
        SETUP, watch("t"), "INSERT INTO t SELECT g, repeat('y', 2000) || g, g FROM generate_series(100, 3000) g"
    )
    end = threading.Event()
    writers = [threading.Thread(target=_write, args=(replica, seed, end), daemon=True) for seed in range(3)]
    for writer in writers:
        writer.start()
    replica.subscribe(deletes="'public.t (soft)'", streaming=streaming)
    for _ in range(3):
        replica.alter("DISABLE")
        replica.alter("ENABLE")
    replica.until_ready()
    ((ready,),) = replica.query("SELECT clock_timestamp()")
    replica.execute(
        "INSERT INTO t SELECT g, repeat('z', 3000) || g, g FROM generate_series(5000, 6500) g ON CONFLICT DO NOTHING"
    )
    for _ in range(3):
        replica.alter("DISABLE")
        replica.execute(f"{_ALONE}; UPDATE t SET n = n + 1 WHERE id % 7 = 0; DELETE FROM t WHERE id % 11 = 3")
        replica.alter("ENABLE")
    end.set()
    for writer in writers:
        writer.join()
    assert_soft(replica, "t", "id, v, n", since=ready)


# Waits until no transaction of the writers is in progress, and lets none begin to write.
_ALONE = "LOCK TABLE t IN SHARE ROW EXCLUSIVE MODE"


def _write(replica: Replica, seed: int, end: threading.Event) -> None:
    chosen = random.Random(seed)
    with psycopg.connect(replica.conninfo) as connection:
        while not end.is_set():
            with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected), connection.transaction():
                for _ in range(chosen.choice((1, 1, 2, 40))):
                    with suppress(_RolledBack), connection.transaction():
                        one, other = chosen.randrange(3200), chosen.randrange(3200)
                        connection.execute(chosen.choice(_STATEMENTS).format(one=one, other=other))
                        if chosen.random() < 0.1:
                            raise _RolledBack


class _RolledBack(Exception):
    pass


_STATEMENTS = (
    "DELETE FROM t WHERE id = {one}",
    "DELETE FROM t WHERE id BETWEEN {one} AND {one} + 9",
    "INSERT INTO t SELECT {one}, repeat('n', 2500), {other} ON CONFLICT DO NOTHING",
    "UPDATE t SET n = {other} WHERE id = {one}",
    "UPDATE t SET v = '{other}' WHERE id = {one}",
    "UPDATE t SET id = {other} WHERE id = {one}",
)


@pytest.mark.full
def test_beside_other_writers_and_a_repair(replica: Replica, spark: Any) -> None:
    """OPTIMIZE joins live and deleted rows in one file; what a job changes by hand is a conflict, and is repaired."""
    replica.execute(SETUP, watch("t"))
    replica.subscribe(deletes="'public.t (soft)'", metadata="'public.t (op, lsn)'")
    replica.until_ready()
    replica.execute("DELETE FROM t WHERE id < 10", "UPDATE t SET n = 0 WHERE id = 12")
    assert_soft(replica, "t", "id, v, n")
    path = replica.path("t")
    spark.session.sql(f"OPTIMIZE delta.`{path}`")
    replica.execute(
        "DELETE FROM t WHERE id = 11", "INSERT INTO t VALUES (1, 'back', 1)", "UPDATE t SET n = 1 WHERE id = 13"
    )
    assert_soft(replica, "t", "id, v, n")
    spark.session.sql(f"UPDATE delta.`{path}` SET n = -1 WHERE id IN (2, 14)")
    spark.session.sql(f"DELETE FROM delta.`{path}` WHERE id = 15")
    spark.session.sql(f"INSERT INTO delta.`{path}` (id, v, n) VALUES (99, 'theirs', 0)")
    replica.execute("DELETE FROM t WHERE id = 16")
    replica.caught_up()
    verify = replica.node._node.verify
    (found,) = [one for one in replica.node.run(verify(replica.name, repair=True)).tables if one.relation == "public.t"]
    assert found.repaired == 3
    (found,) = [one for one in replica.node.run(verify(replica.name)).tables if one.relation == "public.t"]
    assert found.outcome == "equal"
    live = {row["id"]: row for row in replica.rows("t") if row["_pubsub_deleted_at"] is None}
    assert set(live) == {key for (key,) in replica.query("SELECT id FROM t")}
    assert (live[14]["n"], live[14]["_pubsub_op"], live[15]["v"]) == (14, "R", "x" * 5000 + "15")
    replica.execute("DELETE FROM t WHERE id IN (14, 15)")
    replica.caught_up()
    marked = {row["id"]: row["n"] for row in replica.rows("t") if row["_pubsub_deleted_at"] is not None}
    assert (marked[14], marked[15], marked[2]) == (14, 15, -1), "a job's change of a deleted row is its own"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "CREATE TABLE k (id int)": ({}, 'table "public.k" has no key, by which a deleted row could be told from others'),
    "CREATE TABLE k (id float8 PRIMARY KEY)": ({}, "has a key that only Spark's statement finds rows by"),
    "CREATE TABLE k (id int PRIMARY KEY, _pubsub_deleted_at int)": ({}, "has a name that deletes = soft needs"),
    "CREATE TABLE k (id int PRIMARY KEY)": ({"mode": "history"}, "cannot have mode = history and deletes = soft"),
    "CREATE TABLE k (id int PRIMARY KEY, v int)": ({"deletes": "never"}, "deletes"),
}


@pytest.mark.parametrize("table", REFUSED)
def test_refused(replica: Replica, table: str) -> None:
    options, message = REFUSED[table]
    replica.execute(f"{table}; CREATE PUBLICATION p FOR TABLE k")
    with pytest.raises(PubsubError) as caught:
        replica.subscribe(**{"deletes": "soft", **options})
    assert message in caught.value.message
    assert replica.query(f"SELECT count(*) FROM pg_replication_slots WHERE database = '{replica.database.name}'") == [
        (0,)
    ]
