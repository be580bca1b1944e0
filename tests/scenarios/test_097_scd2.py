"""mode = scd2: every version of a row stays, with the span in which it held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from apply.staging import stage_batch
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.versions import VALID_TO_LSN
from pubsub.errors import PubsubError
from pubsub.masks import VARIABLE
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.scenarios.test_042_skip import finish_lsn
from tests.scenarios.test_051_two_phase import enabled
from tests.support.masks import KEY
from tests.support.replica import Replica, RunningNode, wait_until
from tests.support.versions import Snapshots, assert_spans, current

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, repeat('x', 5000) || g, g FROM generate_series(1, 20) g;"
    "CREATE PUBLICATION p FOR TABLE t"
)
CHANGES = (
    "INSERT INTO t VALUES (30, 'thirty', 1)",
    "UPDATE t SET n = n + 1 WHERE id <= 3",
    "UPDATE t SET n = n + 1 WHERE id <= 2",
    "UPDATE t SET n = n WHERE id = 1",
    "DELETE FROM t WHERE id IN (3, 4)",
    "INSERT INTO t VALUES (3, repeat('again', 1000), 1)",
    "UPDATE t SET n = 8 WHERE id = 3",
    "UPDATE t SET id = 31 WHERE id = 5",
    "BEGIN; UPDATE t SET id = 0 WHERE id = 6; UPDATE t SET id = 6 WHERE id = 7; UPDATE t SET id = 7 WHERE id = 0; COMMIT",
    "BEGIN; INSERT INTO t VALUES (40, 'never seen', 1); DELETE FROM t WHERE id = 40; COMMIT",
    (
        "BEGIN; UPDATE t SET v = repeat('y', 5000) WHERE id = 8; UPDATE t SET n = 80 WHERE id = 8; DELETE FROM t WHERE id = 9;"
        "INSERT INTO t VALUES (9, repeat('z', 5000), 1); UPDATE t SET n = 90 WHERE id = 9; UPDATE t SET id = 32 WHERE id = 10;"
        "DELETE FROM t WHERE id = 32; COMMIT"
    ),
    "UPDATE t SET n = 81 WHERE id = 8; UPDATE t SET n = 91 WHERE id = 9",
    "BEGIN; UPDATE t SET n = 0; SAVEPOINT s; DELETE FROM t; ROLLBACK TO s; UPDATE t SET n = 5 WHERE id = 8; COMMIT",
    "BEGIN; DELETE FROM t; ROLLBACK",
    "TRUNCATE t",
    "INSERT INTO t SELECT g, repeat('w', 5000) || g, g FROM generate_series(1, 9) g",
    (
        "BEGIN; UPDATE t SET n = 7 WHERE id = 1; TRUNCATE t; INSERT INTO t VALUES (2, repeat('u', 5000), 2), (50, 'new', 1);"
        "UPDATE t SET n = 3 WHERE id = 2; COMMIT"
    ),
    "UPDATE t SET id = 2 + id WHERE id > 2; UPDATE t SET n = 9 WHERE id = 2",
    "BEGIN; INSERT INTO t VALUES (60, 'gone', 1); TRUNCATE t; COMMIT",
    "INSERT INTO t SELECT g, repeat('t', 5000) || g, g FROM generate_series(1, 40) g",
    "UPDATE t SET n = -n WHERE id > 20",
)


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({}, None),
        pytest.param({}, 48 << 20, marks=pytest.mark.full),
        pytest.param({}, 200_000, marks=pytest.mark.full),
        pytest.param({"streaming": "parallel", "metadata": "'* (op, xid)'"}, None, marks=pytest.mark.full),
        pytest.param({"streaming": "on", "partition_by": "'public.t (n)'"}, 300_000, marks=pytest.mark.full),
        pytest.param(
            {"table_properties": "'* (delta.columnMapping.mode = name)'", "binary": "true"},
            None,
            marks=pytest.mark.full,
        ),
        pytest.param({"identity": "FULL", "mask": "'public.t (id hash)'"}, 48 << 20, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_version_stays(
    replica: Replica, options: dict[str, Any], together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction by itself or streamed, and all in one batch, whole and in parts."""
    options = dict(options)
    monkeypatch.setenv(VARIABLE, KEY)  # of masks
    replica.execute(SETUP, f"ALTER TABLE t REPLICA IDENTITY {options.pop('identity', 'DEFAULT')}")
    if "streaming" in options:
        replica.execute(f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'")
    replica.subscribe(mode="'public.t (scd2)'", **options)
    replica.until_ready()
    snapshots = Snapshots(replica.query, "t", "v, n" if "mask" in options else "id, v, n")
    snapshots.take()
    if together is not None:
        monkeypatch.setattr(stage_batch, "_WHOLE", together)
        replica.alter("DISABLE")
    for statement in CHANGES:
        replica.execute(statement)
        snapshots.take()
        if together is None:
            replica.caught_up()
    if together is not None:
        replica.alter("ENABLE")
    replica.caught_up()
    rows = replica.rows("t")
    snapshots.assert_held(rows)
    assert len(current(rows)) == 40
    assert len(rows) == 128
    assert (replica.relation("t").mode, replica.relation("t").truncate) == ("scd2", "follow")
    assert_apart(replica.path("t"))
    (found,) = replica.node.run(replica.node._node.verify(replica.name)).tables
    assert found.outcome == ("not compared" if "mask" in options else "equal"), found
    if "metadata" in options:
        assert {row["_pubsub_op"] for row in rows} == {"R", "I", "U"}


def assert_apart(path: str) -> None:
    """Check that no data file has both rows that have ended and others, as its statistics say."""
    log = TableLog(path)
    log.refresh()
    stored = {
        one["name"]: one["metadata"].get("delta.columnMapping.physicalName", one["name"])
        for one in json.loads(log.metadata["schemaString"])["fields"]
    }
    nulls = [
        (json.loads(file.stats or "{}")["nullCount"][stored[VALID_TO_LSN]], file.rows) for file in log.files.values()
    ]
    assert all(count in (0, rows) for count, rows in nulls), nulls
    assert {count == 0 for count, _ in nulls} == {True, False}


@pytest.mark.full
def test_altered(replica: Replica) -> None:
    """A dropped column stays with what it had; an added one is in every version; another key, or type, is copied again."""
    replica.execute(SETUP)
    replica.subscribe(mode="scd2")
    replica.until_ready()
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    snapshots.take()
    replica.execute("UPDATE t SET n = n + 1 WHERE id < 5", "DELETE FROM t WHERE id = 5")
    snapshots.take()
    replica.execute("ALTER TABLE t ADD w int DEFAULT 7", "UPDATE t SET w = 8 WHERE id = 1")
    snapshots.columns = "id, v, n, w"
    snapshots.take()
    replica.execute("ALTER TABLE t RENAME n TO m", "UPDATE t SET m = 0 WHERE id = 2")
    snapshots.columns = "id, v, m, w"
    snapshots.take()
    replica.execute("ALTER TABLE t DROP v", "UPDATE t SET m = 1 WHERE id IN (2, 3)", "INSERT INTO t VALUES (5, 5, 5)")
    snapshots.columns = "id, m, w"
    snapshots.take()
    replica.caught_up()
    rows = replica.rows("t")
    assert {row["w"] for row in rows} == {7, 8, 5}
    assert {row["v"] for row in current(rows) if row["id"] in (2, 3, 5)} == {None}
    snapshots.assert_held(rows, renamed={"n": "m"})
    generation = replica.relation("t").copy_generation
    replica.execute(
        "ALTER TABLE t ADD k int; UPDATE t SET k = id + 100; ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (k)",
        "INSERT INTO t VALUES (50, 50, 50, 150)",
    )
    replica.until_copied("t", generation)
    snapshots.columns = "id, m, w, k"
    snapshots.take()
    replica.execute("UPDATE t SET id = 1, m = 100 WHERE k IN (101, 102)", "DELETE FROM t WHERE k = 103")
    snapshots.take()
    replica.caught_up()
    copied = min(row["_pubsub_valid_from_lsn"] for row in current(replica.rows("t")))
    snapshots.assert_held(
        replica.rows("t"), key="id, k", renamed={"n": "m"}, unknown=[(snapshots.taken[-3].lsn + 1, copied)]
    )
    generation = replica.relation("t").copy_generation
    replica.execute("ALTER TABLE t ALTER m TYPE bigint", "UPDATE t SET m = 1::bigint << 40 WHERE k = 104")
    replica.until_copied("t", generation)
    replica.execute("UPDATE t SET m = m + 1 WHERE k = 104")
    snapshots.columns = "id, m, w, k"
    snapshots.take()
    replica.caught_up()
    assert [row["m"] for row in current(replica.rows("t")) if row["k"] == 104] == [(1 << 40) + 1]
    replica.execute("ALTER TABLE t ALTER m TYPE text", "UPDATE t SET m = 'a' WHERE k = 104")
    wait_until(lambda: 'column "m" of table "public.t" has another type' in replica.error(), "the copy's error")


@pytest.mark.full
def test_copied_again(replica: Replica, spark: Any) -> None:
    """A copy ends the rows that are current, and what was there stays; a mirror is replaced, and replaces nothing."""
    replica.execute(SETUP)
    replica.subscribe()
    replica.until_ready()
    replica.execute("UPDATE t SET n = 0")
    replica.alter("SET (mode = scd2)")
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    snapshots.take()
    assert {row["_pubsub_valid_from"] for row in replica.rows("t")} == {None}
    replica.execute("UPDATE t SET n = n + 1 WHERE id < 5", "DELETE FROM t WHERE id = 5")
    snapshots.take()
    replica.caught_up()
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    snapshots.take()
    rows = replica.rows("t")
    snapshots.assert_held(rows)
    assert len(rows) == 20 + 4 + 19
    ends = {row["_pubsub_valid_to_lsn"] for row in rows} - {None}
    assert len([row for row in rows if row["_pubsub_valid_to_lsn"] == max(ends)]) == 19
    assert {row["_pubsub_valid_from_lsn"] for row in current(rows)} == {max(ends)}
    # Of a table that the publisher has emptied, nothing is current.
    replica.alter("DISABLE")
    replica.execute("DELETE FROM t WHERE id > 6")
    replica.alter("ENABLE")
    replica.caught_up()
    snapshots.take()
    # What another writer has done to it is ended, and repaired.
    path = replica.path("t")
    spark.session.sql(f"UPDATE delta.`{path}` SET n = -1 WHERE id = 2 AND {VALID_TO_LSN} IS NULL")
    spark.session.sql(f"DELETE FROM delta.`{path}` WHERE id = 3 AND {VALID_TO_LSN} IS NULL")
    replica.execute("INSERT INTO t VALUES (70, 'seventy', 1)", "UPDATE t SET n = 4 WHERE id = 4")
    replica.caught_up()
    verify = replica.node._node.verify
    (found,) = replica.node.run(verify(replica.name, repair=True)).tables
    assert (found.repaired, found.outcome) == (2, "equal")
    replica.execute("UPDATE t SET n = 5 WHERE id IN (2, 3)")
    snapshots.taken.clear()
    snapshots.take()
    replica.caught_up()
    rows = replica.rows("t")
    snapshots.assert_held(rows)
    spark.session.sql(f"OPTIMIZE delta.`{path}`")
    replica.execute(
        "UPDATE t SET n = 6 WHERE id IN (2, 4)", "INSERT INTO t VALUES (5, 'back', 1)", "DELETE FROM t WHERE id = 3"
    )
    snapshots.take()
    replica.execute("TRUNCATE t")
    snapshots.take()
    replica.caught_up()
    snapshots.assert_held(replica.rows("t"))
    kept = len(replica.rows("t"))
    for mode in ("mirror", "history"):
        replica.alter(f"SET (mode = {mode})")
        replica.alter("RESYNC TABLE public.t")
        wait_until(lambda: "keeps every version of its rows, which" in replica.error(), "the copy's error")
    assert len(replica.rows("t")) == kept
    replica.alter("SET (mode = scd2)")
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    snapshots.assert_held(replica.rows("t"))


@pytest.mark.full
def test_changes_of_rows_that_have_ended(replica: Replica) -> None:
    """An ended row is none to changes; a transaction that is skipped leaves no version."""
    replica.execute(SETUP)
    replica.subscribe(mode="scd2", origin="none")
    replica.until_ready()
    replica.execute("DELETE FROM t WHERE id < 10")
    replica.execute(
        f"SELECT pg_replication_origin_create('{replica.name}')",  # a server's origins are not a database's own
        f"SELECT pg_replication_origin_session_setup('{replica.name}'); INSERT INTO t VALUES (2, 'unseen', 2), (11, 'unseen', 2)"
        " ON CONFLICT DO NOTHING",
        "UPDATE t SET n = 3 WHERE id = 2",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO t VALUES (3, 'back', 1)",
    )
    replica.caught_up()
    rows = replica.rows("t")
    assert_spans(rows)
    assert [row["v"] for row in rows if row["id"] == 2] == ["x" * 5000 + "2"]
    assert sorted(row["v"][:4] for row in rows if row["id"] == 3) == ["back", "xxxx"]
    statistics = replica.node.statistics(replica.name)
    assert (statistics["confl_update_missing"], statistics["confl_delete_missing"]) == (1, 1)


@pytest.mark.full
def test_skipped_and_prepared(spark: Any, tmp_path: Path) -> None:
    with (
        EmbeddedPostgres("18", settings={"max_prepared_transactions": 5}) as server,
        RunningNode(tmp_path, spark) as node,
    ):
        server.create_database("prepared")
        replica = Replica(node, Database(server, "prepared"))
        replica.execute(SETUP, "CREATE TABLE s (id int PRIMARY KEY, at timestamptz); ALTER PUBLICATION p ADD TABLE s")
        replica.execute("INSERT INTO s VALUES (1, '2024-01-01')")
        replica.subscribe(mode="scd2", two_phase="true")
        replica.until_ready()
        enabled(replica)
        snapshots = Snapshots(replica.query, "t", "id, v, n")
        snapshots.take()
        for outcome in ("ROLLBACK", "COMMIT"):
            replica.execute(
                "BEGIN; UPDATE t SET n = n + 1 WHERE id < 4; DELETE FROM t WHERE id = 4; PREPARE TRANSACTION 'one'"
            )
            replica.caught_up()
            snapshots.take()
            replica.execute(f"{outcome} PREPARED 'one'")
            snapshots.take()
            replica.execute("UPDATE t SET n = n + 1 WHERE id IN (1, 5)")
            snapshots.take()
            replica.caught_up()
            snapshots.assert_held(replica.rows("t"))
        replica.execute("BEGIN; UPDATE s SET at = '2024-01-02'; INSERT INTO s VALUES (2, 'infinity'); COMMIT")
        replica.execute("UPDATE t SET n = 10 WHERE id = 1")
        snapshots.take()
        replica.alter(f"SKIP (lsn = '{finish_lsn(replica)}')")
        replica.execute("UPDATE s SET at = '2024-01-03' WHERE id = 1")
        replica.caught_up()
        snapshots.assert_held(replica.rows("t"))
        assert sorted(row["at"].day for row in replica.rows("s")) == [1, 3]
        replica.drop()


@pytest.mark.full
def test_a_table_that_stops_alone(replica: Replica) -> None:
    """It has what came before; the copy that brings it back ends that, and another table of the same transaction goes on."""
    replica.execute(SETUP, "CREATE TABLE s (id int PRIMARY KEY, at timestamptz); ALTER PUBLICATION p ADD TABLE s")
    replica.execute("INSERT INTO s VALUES (1, '2024-01-01'), (2, '2024-01-02')")
    replica.subscribe(mode="scd2", on_table_error="isolate")
    replica.until_ready()
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    for statement in (
        "UPDATE s SET at = '2024-01-03' WHERE id = 1; UPDATE t SET n = 0 WHERE id = 1",
        "BEGIN; UPDATE s SET at = 'infinity' WHERE id = 2; UPDATE t SET n = n + 1 WHERE id < 3; DELETE FROM t WHERE id = 4; COMMIT",
        "BEGIN; DELETE FROM s WHERE id = 1; INSERT INTO t VALUES (4, 'again', 1); COMMIT",
        "UPDATE s SET at = '2024-01-05' WHERE id = 2; UPDATE t SET n = n + 1 WHERE id < 5",
    ):
        replica.execute(statement)
        snapshots.take()
    wait_until(lambda: replica.relation("s").stopped, "the table to stop")
    replica.caught_up()
    snapshots.assert_held(replica.rows("t"))

    def of_s(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, bool]]:
        return sorted((row["id"], row["at"].day, row[VALID_TO_LSN] is None) for row in rows)

    assert of_s(replica.rows("s")) == [(1, 1, False), (1, 3, True), (2, 2, True)]
    generation = replica.relation("s").copy_generation
    replica.alter("RESYNC TABLE public.s")
    replica.until_copied("s", generation)
    replica.execute("INSERT INTO s VALUES (1, '2024-01-06')", "UPDATE s SET at = '2024-01-07' WHERE id = 2")
    replica.caught_up()
    rows = replica.rows("s")
    assert of_s(rows) == [(1, 1, False), (1, 3, False), (1, 6, True), (2, 2, False), (2, 5, False), (2, 7, True)]
    assert_spans(rows)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "CREATE TABLE k (id int)": (
        {},
        'table "public.k" has no key, by which the versions of a row could be told from others',
    ),
    "CREATE TABLE k (id float8 PRIMARY KEY)": (
        {},
        "has a key that only Spark's statement finds rows by, which mode = scd2",
    ),
    "CREATE TABLE k (id int PRIMARY KEY, _pubsub_valid_to int)": ({}, "has a name that mode = scd2 needs"),
    "CREATE TABLE k (id int PRIMARY KEY)": ({"deletes": "soft"}, "cannot have mode = scd2 and deletes = soft"),
    "CREATE TABLE k (id int PRIMARY KEY, u int)": (
        {"truncate": "ignore"},
        "cannot have mode = scd2 and truncate = ignore",
    ),
    "CREATE TABLE k (id int PRIMARY KEY, v int)": ({"mode": "scd3"}, 'invalid value for parameter "mode": "scd3"'),
}


@pytest.mark.parametrize("table", REFUSED)
def test_refused(replica: Replica, table: str) -> None:
    options, message = REFUSED[table]
    replica.execute(f"{table}; CREATE PUBLICATION p FOR TABLE k")
    with pytest.raises(PubsubError) as caught:
        replica.subscribe(**{"mode": "scd2", **options})
    assert message in caught.value.message
    assert replica.query(f"SELECT count(*) FROM pg_replication_slots WHERE database = '{replica.database.name}'") == [
        (0,)
    ]
