"""metadata: columns that say which change made a row, beside what the publisher says of it."""

from __future__ import annotations

from typing import Any

import pytest

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from tests.support.replica import Replica

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 20) g;"
    "CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u VALUES (1);"
    "CREATE PUBLICATION p FOR TABLE t, u"
)
# Each with the operations of the rows that it leaves behind, by id.
CHANGES: tuple[tuple[str, dict[int, str]], ...] = (
    ("INSERT INTO t VALUES (100, 'a', 0)", {100: "I"}),
    ("UPDATE t SET n = -n WHERE id < 3", {1: "U", 2: "U"}),
    ("BEGIN; INSERT INTO t VALUES (101, 'b', 0); UPDATE t SET n = 1 WHERE id = 101; COMMIT", {101: "U"}),
    ("UPDATE t SET id = 200 WHERE id = 5", {200: "U", 5: "D"}),
    ("DELETE FROM t WHERE id = 6", {6: "D"}),
    ("BEGIN; DELETE FROM t WHERE id = 7; INSERT INTO t VALUES (7, 'again', 7); COMMIT", {7: "I"}),
    ("INSERT INTO t VALUES (6, 'back', 6)", {6: "I"}),
)


@pytest.mark.parametrize(
    "options",
    [
        {"deletes": "'public.t (soft)'"},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"streaming": "off", "cluster_by": "'public.t (_pubsub_lsn)'"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_row_says_what_made_it(replica: Replica, options: dict[str, str]) -> None:
    """Its transaction's end LSN, id and time, and what it did; of copied rows the copy's LSN."""
    replica.execute(SETUP)
    before = _position(replica)
    replica.subscribe(metadata="'public.* (lsn), public.t (op, lsn, xid, commit_time \"changed at\")'", **options)
    replica.until_ready()
    copied = {row["id"]: row for row in replica.rows("t")}
    (at,) = {row["_pubsub_lsn"] for row in copied.values()}
    assert before <= at
    assert {(row["_pubsub_op"], row["_pubsub_xid"], row["changed at"]) for row in copied.values()} == {
        ("R", None, None)
    }
    assert [set(row) for row in replica.rows("u")] == [{"id", "_pubsub_lsn"}]
    wanted: dict[int, tuple[Any, ...]] = {}
    for statement, made in CHANGES:
        first = _position(replica)
        replica.execute(statement.replace("COMMIT", "SELECT pg_current_xact_id(); COMMIT"))
        last = _position(replica)
        ((now,),) = replica.query("SELECT clock_timestamp()")
        wanted |= {key: (op, first, last, now) for key, op in made.items()}
    replica.caught_up()
    rows = {row["id"]: row for row in replica.rows("t")}
    if "deletes" not in options:
        wanted = {key: found for key, found in wanted.items() if found[0] != "D"}
    for key, (op, first, last, now) in wanted.items():
        row = rows[key]
        assert row["_pubsub_op"] == op, row
        assert first < row["_pubsub_lsn"] <= last, row
        assert row["changed at"] <= now
        assert row["_pubsub_xid"] > 0
    assert {key: row for key, row in rows.items() if key not in wanted} == {
        key: row for key, row in copied.items() if key in rows and key not in wanted
    }
    live = [row for row in rows.values() if row.get("_pubsub_deleted_at") is None]
    assert {(row["id"], row["v"], row["n"]) for row in live} == set(replica.query("SELECT id, v, n FROM t"))
    found = replica.node.fetch("SELECT relation, metadata FROM pg_subscription_rel WHERE relation LIKE 'public.%'")
    names = {row["relation"]: row["metadata"] for row in found}
    assert names["public.t"] == "_pubsub_lsn, changed at, _pubsub_xid, _pubsub_op"
    assert names["public.u"] == "_pubsub_lsn"
    report = replica.node.run(replica.node._node.verify(replica.name, ()))
    assert {one.outcome for one in report.tables if one.relation in ("public.t", "public.u")} == {"equal"}


@pytest.mark.full
def test_a_table_that_a_statement_of_spark_writes(replica: Replica) -> None:
    """Its key is a float; values that are not sent, other keys, and a batch in parts."""
    replica.execute(
        "CREATE TABLE f (id float8 PRIMARY KEY, v text, n int); ALTER TABLE f ALTER v SET STORAGE EXTERNAL;"
        "INSERT INTO f SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR TABLE f"
    )
    replica.subscribe(metadata="'* (lsn, op)'")
    replica.until_ready()
    first = _position(replica)
    replica.execute(
        "UPDATE f SET n = -1 WHERE id = 1; UPDATE f SET id = 2.5 WHERE id = 2; DELETE FROM f WHERE id = 3;"
        "INSERT INTO f VALUES (10, 'a', 1)"
    )
    replica.caught_up()
    rows = {row["id"]: row for row in replica.rows("f")}
    assert {(row["id"], row["v"], row["n"]) for row in rows.values()} == set(replica.query("SELECT id, v, n FROM f"))
    assert {key: row["_pubsub_op"] for key, row in rows.items() if row["_pubsub_lsn"] > first} == {
        1: "U",
        2.5: "U",
        10: "I",
    }
    assert {row["_pubsub_op"] for row in rows.values() if row["_pubsub_lsn"] <= first} == {"R"}


def _position(replica: Replica) -> int:
    ((text,),) = replica.query("SELECT pg_current_wal_insert_lsn()::text")
    return int(Lsn.parse(text))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "CREATE TABLE k (id int)": (
        {},
        'table "public.k" has no key, without which its rows are found by all their columns',
    ),
    "CREATE TABLE k (id int PRIMARY KEY, _pubsub_lsn int)": ({}, "has a name that metadata needs"),
    'CREATE TABLE k (id int PRIMARY KEY, "_PUBSUB_LSN" int)': ({}, "has a name that metadata needs"),
    "CREATE TABLE k (id int PRIMARY KEY)": ({"mode": "history"}, "cannot have mode = history and metadata"),
    "CREATE TABLE k (id int PRIMARY KEY, v int)": ({"metadata": "'* (when)'"}, "metadata"),
    "CREATE TABLE k (id int PRIMARY KEY, w int)": ({"metadata": "'* (lsn a, xid a)'"}, "metadata"),
}


@pytest.mark.parametrize("table", REFUSED)
def test_refused(replica: Replica, table: str) -> None:
    options, message = REFUSED[table]
    replica.execute(f"{table}; CREATE PUBLICATION p FOR TABLE k")
    with pytest.raises(PubsubError) as caught:
        replica.subscribe(**{"metadata": "'* (lsn)'", **options})
    assert message in caught.value.message
    assert replica.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
