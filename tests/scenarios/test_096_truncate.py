"""The option truncate: what is truncated at the publisher stays in the Delta table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from apply.staging import stage_batch
from pubsub.errors import PubsubError
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.scenarios.test_042_skip import finish_lsn
from tests.scenarios.test_051_two_phase import enabled
from tests.support.replica import Replica, RunningNode
from tests.support.soft_deletes import assert_soft, watch
from tests.support.truncate import assert_kept, keep

SETUP = (
    "CREATE TABLE t (id {type} PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 40) g;"
    "CREATE TABLE u (v text); ALTER TABLE u REPLICA IDENTITY FULL; INSERT INTO u VALUES ('one'), ('two');"
    "CREATE TABLE emptied (id int PRIMARY KEY, v text); INSERT INTO emptied VALUES (1, 'one');"
    "CREATE PUBLICATION p FOR TABLE t, u, emptied"
)
IGNORED = (
    "UPDATE t SET n = 1 WHERE id = 1; DELETE FROM t WHERE id = 2",
    "TRUNCATE t, u, emptied",
    "INSERT INTO t VALUES (1, 'again', 0), (2, 'again', 0); INSERT INTO u VALUES ('two')",
    # Within a transaction: rows of before it and after it, values that are not sent, other keys.
    (
        "BEGIN; INSERT INTO t VALUES (3, repeat('y', 5000), 0); UPDATE t SET n = 5 WHERE id = 3; TRUNCATE t;"
        "INSERT INTO t VALUES (3, repeat('z', 5000), 1), (60, repeat('z', 5000), 1); UPDATE t SET n = 6 WHERE id = 3;"
        "TRUNCATE t; INSERT INTO t SELECT 3, repeat('w', 5000), 2; UPDATE t SET n = 7 WHERE id = 3; COMMIT"
    ),
    "INSERT INTO t VALUES (61, repeat('z', 5000), 1); UPDATE t SET id = 4 WHERE id = 61",
    (
        "BEGIN; INSERT INTO t SELECT g, repeat('w', 5000) || g, g FROM generate_series(5, 9) g;"
        "UPDATE t SET n = -n WHERE id IN (5, 6); DELETE FROM t WHERE id = 7; UPDATE t SET id = 70 WHERE id = 8; COMMIT"
    ),
    "BEGIN; TRUNCATE u; INSERT INTO u VALUES ('two'), ('three'); DELETE FROM u WHERE v = 'two'; COMMIT",
    "TRUNCATE t",
    "BEGIN; INSERT INTO t VALUES (10, 'gone', 0); TRUNCATE t; ROLLBACK; INSERT INTO t VALUES (11, 'new', 0)",
    "BEGIN; SAVEPOINT s; INSERT INTO t VALUES (12, 'gone', 0); TRUNCATE t; ROLLBACK TO s; INSERT INTO t VALUES (12, 'new', 0); COMMIT",
)


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        ("int", None),
        pytest.param("int", 48 << 20, marks=pytest.mark.full),
        pytest.param("int", 20_000, marks=pytest.mark.full),
        pytest.param("float8", None, marks=pytest.mark.full),  # written by Spark's statement
        pytest.param("float8", 20_000, marks=pytest.mark.full),
    ],
)
def test_truncate_is_ignored(
    replica: Replica, kind: str, together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stay until their keys come again; each transaction by itself, and all in one batch, whole and in parts."""
    replica.execute(SETUP.format(type=kind), keep("t"))
    replica.subscribe(truncate="'public.t (ignore), public.u (ignore)'")
    replica.until_ready()
    if together is not None:
        monkeypatch.setattr(stage_batch, "_WHOLE", together)
        replica.alter("DISABLE")
    for statement in IGNORED:
        replica.execute(statement)
        if together is None:
            assert_kept(replica, "t", "id, v, n")
    if together is not None:
        replica.alter("ENABLE")
    assert len(assert_kept(replica, "t", "id, v, n")) > 35
    assert sorted(row["v"] for row in replica.rows("u")) == ["one", "three", "two", "two"]
    replica.assert_equal("emptied")
    found = replica.node.fetch("SELECT relation, truncate FROM pg_subscription_rel WHERE relation LIKE 'public.%'")
    mine = {row["relation"]: row["truncate"] for row in found}
    assert {name: mine[f"public.{name}"] for name in ("t", "u", "emptied")} == {
        "t": "ignore",
        "u": "ignore",
        "emptied": "follow",
    }
    report = replica.node.run(replica.node._node.verify(replica.name, repair=True))
    tables = {one.relation: one for one in report.tables if one.relation in ("public.t", "public.u", "public.emptied")}
    assert {(one.outcome, one.repaired) for one in tables.values()} == {("equal", 0)}
    assert (tables["public.t"].expected > 30, tables["public.emptied"].expected) == (True, 0)
    assert "what was truncated stays in it" in (tables["public.t"].reason or "")
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    replica.assert_equal("t")


SOFT = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 40) g;"
    "CREATE TABLE a (id int PRIMARY KEY, v text); INSERT INTO a VALUES (1, 'one'), (2, 'two');"
    "CREATE TABLE c (id int PRIMARY KEY, v text, a int REFERENCES a); INSERT INTO c VALUES (1, 'one', 1), (2, 'two', 2);"
    "CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
    "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (100); CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (100) TO (200);"
    "INSERT INTO r SELECT g, 'first ' || g FROM generate_series(95, 104) g"
)
MARKED = (
    "DELETE FROM t WHERE id IN (1, 2)",
    "TRUNCATE t",
    "INSERT INTO t SELECT g, repeat('y', 5000) || g, g FROM generate_series(3, 12) g",
    # Rows of the table and of the transaction, values that are not sent, other keys, and keys that come again.
    (
        "BEGIN; UPDATE t SET n = -n WHERE id IN (3, 7); DELETE FROM t WHERE id = 4; UPDATE t SET id = 105 WHERE id = 5;"
        "UPDATE t SET id = 5 WHERE id = 6; INSERT INTO t VALUES (50, 'a', 1), (1, 'again', 1); TRUNCATE t;"
        "INSERT INTO t VALUES (4, repeat('z', 5000), 1), (50, 'c', 2), (6, 'd', 1); UPDATE t SET n = 9 WHERE id = 4; TRUNCATE t;"
        "INSERT INTO t VALUES (6, 'e', 1), (8, 'f', 1), (51, 'g', 1); UPDATE t SET n = 9 WHERE id = 6;"
        "DELETE FROM t WHERE id = 8; UPDATE t SET id = 9 WHERE id = 51; COMMIT"
    ),
    "TRUNCATE t",
    "TRUNCATE t",
    "BEGIN; INSERT INTO t SELECT g, repeat('u', 5000) || g, g FROM generate_series(20, 50) g; TRUNCATE t; ROLLBACK",
    (
        "BEGIN; INSERT INTO t SELECT g, repeat('w', 5000) || g, g FROM generate_series(20, 50) g; SAVEPOINT s; TRUNCATE t;"
        "INSERT INTO t SELECT g, repeat('u', 5000) || g, g FROM generate_series(20, 50) g; ROLLBACK TO s;"
        "UPDATE t SET n = 0 WHERE id = 20; COMMIT"
    ),
    (
        "BEGIN; INSERT INTO t SELECT g, repeat('v', 5000) || g, g FROM generate_series(51, 80) g; SAVEPOINT s; TRUNCATE t;"
        "INSERT INTO t SELECT g, repeat('w', 5000) || g, g FROM generate_series(60, 90) g; RELEASE s; TRUNCATE t; COMMIT"
    ),
    "BEGIN; TRUNCATE t; INSERT INTO t VALUES (60, 'last', 1); COMMIT",
    "TRUNCATE a CASCADE",
    "INSERT INTO a VALUES (2, 'again'), (3, 'new'); INSERT INTO c VALUES (3, 'new', 3)",
    "TRUNCATE c, a, t",
    "INSERT INTO a VALUES (3, 'back')",
    "UPDATE r SET id = 150 WHERE id = 95",
    "TRUNCATE r",
    "INSERT INTO r SELECT g, 'second ' || g FROM generate_series(97, 102) g; UPDATE r SET v = 'third' WHERE id = 97",
)


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({}, None),
        pytest.param({"streaming": "parallel"}, None, marks=pytest.mark.full),
        pytest.param({"via_root": True, "identity": "FULL", "streaming": "on"}, None, marks=pytest.mark.full),
        pytest.param({"partition_by": "'public.t (_pubsub_deleted_at)'"}, None, marks=pytest.mark.full),
        pytest.param(
            {"table_properties": "'* (delta.columnMapping.mode = name)'", "binary": "true"},
            None,
            marks=pytest.mark.full,
        ),
        pytest.param({"via_root": True}, 48 << 20, marks=pytest.mark.full),
        pytest.param({}, 300_000, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_truncated_rows_are_marked(
    replica: Replica, options: dict[str, Any], together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the values that it had last, until its key comes again; transactions by themselves, streamed, and in one batch."""
    options = dict(options)
    root = bool(options.pop("via_root", False))
    identity = options.pop("identity", "DEFAULT")
    tables = {"t": "id, v, n", "a": "id, v", "c": "id, v, a"} | dict.fromkeys(["r"] if root else ["r1", "r2"], "id, v")
    replica.execute(
        SOFT,
        *(watch(table, truncate=True) for table in tables),
        *(f"ALTER TABLE {table} REPLICA IDENTITY {identity}" for table in tables),
        f"CREATE PUBLICATION p FOR TABLE t, a, c, r WITH (publish_via_partition_root = {root})",
    )
    if "streaming" in options:
        replica.execute(f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'")
    replica.subscribe(deletes="soft", truncate="soft", metadata="'* (op, lsn)'", **options)
    replica.until_ready()
    changes = (
        *MARKED,
        "INSERT INTO t VALUES (1, 'short', 1)",
        *([] if root else ["TRUNCATE r1", "INSERT INTO r1 VALUES (98, 'x')"]),
    )
    if together is not None:
        monkeypatch.setattr(stage_batch, "_WHOLE", together)
        replica.alter("DISABLE")
    for statement in changes:
        replica.execute(statement)
        if together is None:
            for table, columns in tables.items():
                if re.search(rf"\b({table}|{table[0]})\b", statement):
                    assert_soft(replica, table, columns)
    if together is not None:
        replica.alter("ENABLE")
    for table, columns in tables.items():
        marked = assert_soft(replica, table, columns)
        assert {row["_pubsub_op"] for row in marked} == {"D"}, table
        assert {row["_pubsub_op"] for row in replica.rows(table) if row not in marked} <= {"I", "U", "R"}
    report = replica.node.run(replica.node._node.verify(replica.name))
    assert {one.outcome for one in report.tables if one.relation.removeprefix("public.") in tables} == {"equal"}
    found = replica.node.fetch("SELECT relation, truncate FROM pg_subscription_rel WHERE relation LIKE 'public.%'")
    assert {"public.t": "soft", "public.a": "soft"}.items() <= {
        row["relation"]: row["truncate"] for row in found
    }.items()
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    assert {row["_pubsub_deleted_at"] for row in replica.rows("t")} <= {None}


@pytest.mark.full
def test_changes_of_rows_that_were_truncated(replica: Replica) -> None:
    """A marked row is none: what changes it is a conflict, in the batch of the TRUNCATE and later."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g;"
        "CREATE PUBLICATION p FOR TABLE t WITH (publish = 'update, delete, truncate')"
    )
    replica.subscribe(deletes="soft", truncate="soft")
    replica.until_ready()
    replica.execute(
        "BEGIN; TRUNCATE t; INSERT INTO t VALUES (2, 'unseen'), (3, 'unseen'); UPDATE t SET v = 'changed'; DELETE FROM t WHERE id = 3;"
        "UPDATE t SET id = 4 WHERE id = 2; COMMIT",
        "UPDATE t SET v = 'changed again' WHERE id = 4; DELETE FROM t",
    )
    replica.caught_up()
    rows = replica.rows("t")
    assert {(row["id"], row["v"]) for row in rows} == {(number, f"v{number}") for number in range(1, 10)}
    assert len({row["_pubsub_deleted_at"] for row in rows} - {None}) == 1
    assert None not in {row["_pubsub_deleted_at"] for row in rows}
    statistics = replica.node.statistics(replica.name)
    assert (statistics["confl_update_missing"], statistics["confl_delete_missing"]) == (4, 2)


@pytest.mark.full
def test_a_truncate_that_is_skipped(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE s (id int PRIMARY KEY, at timestamptz); INSERT INTO s VALUES (1, '2024-01-01'), (2, '2024-01-02');"
        "CREATE PUBLICATION p FOR TABLE s"
    )
    replica.subscribe(deletes="soft", truncate="soft")
    replica.until_ready()
    replica.execute("BEGIN; TRUNCATE s; INSERT INTO s VALUES (3, 'infinity'); COMMIT")
    replica.alter(f"SKIP (lsn = '{finish_lsn(replica)}')")
    replica.caught_up()
    assert {(row["id"], row["_pubsub_deleted_at"]) for row in replica.rows("s")} == {(1, None), (2, None)}
    replica.execute("INSERT INTO s VALUES (4, '2024-01-04')", "TRUNCATE s")
    replica.caught_up()
    marked = [row for row in replica.rows("s") if row["_pubsub_deleted_at"] is not None]
    assert {row["id"] for row in marked} == {1, 2, 4}


@pytest.mark.full
def test_a_truncate_that_is_prepared(spark: Any, tmp_path: Path) -> None:
    """Its rows are marked once it commits, with that time; not if it is rolled back."""
    with (
        EmbeddedPostgres("18", settings={"max_prepared_transactions": 5}) as server,
        RunningNode(tmp_path, spark) as node,
    ):
        server.create_database("prepared")
        replica = Replica(node, Database(server, "prepared"))
        replica.execute(
            "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 9) g",
            watch("t", truncate=True),
            "CREATE PUBLICATION p FOR TABLE t",
        )
        replica.subscribe(deletes="soft", truncate="soft", two_phase="true")
        replica.until_ready()
        enabled(replica)
        for outcome in ("ROLLBACK", "COMMIT"):
            replica.execute(
                "BEGIN; UPDATE t SET v = v || '!' WHERE id < 4; TRUNCATE t; INSERT INTO t VALUES (1, 'new'); PREPARE TRANSACTION 'one'"
            )
            replica.caught_up()
            assert {row["_pubsub_deleted_at"] for row in replica.rows("t")} == {None}
            replica.execute(f"{outcome} PREPARED 'one'", "INSERT INTO t VALUES (20, 'x') ON CONFLICT DO NOTHING")
            assert_soft(replica, "t")
        assert len(replica.rows("t")) == 10
        replica.drop()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "history": ({"mode": "history", "truncate": "ignore"}, "cannot have mode = history and truncate = ignore"),
    "soft alone": ({"truncate": "soft"}, 'table "public.k" cannot have truncate = soft without deletes = soft'),
    "soft in a history": ({"mode": "history", "truncate": "soft"}, "cannot have mode = history and truncate = soft"),
    "no word": ({"truncate": "never"}, 'invalid value for parameter "truncate": "never"'),
    "no table": ({"truncate": "'public.nothing (ignore)'"}, 'names tables that are not published: "public.nothing"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(replica: Replica, case: str) -> None:
    options, message = REFUSED[case]
    replica.execute("CREATE TABLE k (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE k")
    with pytest.raises(PubsubError) as caught:
        replica.subscribe(**options)
    assert message in caught.value.message
