"""mode = 'mirror + history': further Delta tables stand beside a table's mirror, by one stream."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from apply.staging import stage_batch
from pubsub.errors import DuplicateObject
from pubsub.masks import VARIABLE
from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.scenarios.test_051_two_phase import enabled
from tests.scenarios.test_097_scd2 import CHANGES, SETUP
from tests.support.history import as_of
from tests.support.masks import KEY
from tests.support.replica import Faults, Replica, RunningNode, wait_until
from tests.support.versions import Snapshots, current


def _assert_history(replica: Replica, snapshots: Snapshots) -> None:
    """Check that the history tells what the publisher's table was at each moment that was asked for."""
    history = replica.rows(f"{snapshots.table}_history")
    for one in snapshots.taken:
        assert as_of(history, one.lsn, one.names, ("id",)) == one.rows, Lsn(one.lsn)


def _assert_told(replica: Replica, snapshots: Snapshots) -> None:
    """Check that mirror, history and versions of the table are the publisher's, at each moment that was asked for."""
    replica.assert_equal("t")
    _assert_history(replica, snapshots)
    versions = replica.rows("t_scd2")
    snapshots.assert_held(versions)
    assert len(current(versions)) == len(replica.rows("t"))


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({}, None),
        pytest.param({}, 48 << 20, marks=pytest.mark.full),
        pytest.param({}, 200_000, marks=pytest.mark.full),
        pytest.param({"streaming": "parallel", "binary": "true"}, None, marks=pytest.mark.full),
        pytest.param({"on_table_error": "isolate", "deletes": "soft"}, 300_000, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_all_are_the_publishers(
    replica: Replica, options: dict[str, Any], together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction by itself or streamed, and all in one batch, whole and in parts."""
    replica.execute(SETUP)
    if "streaming" in options:
        replica.execute(f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'")
    replica.subscribe(mode="'mirror + history + scd2'", **options)
    replica.until_ready()
    assert replica.states() == dict.fromkeys(("public.t", "public.t_history", "public.t_scd2"), "r")
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    snapshots.take()
    if together is not None:
        monkeypatch.setattr(stage_batch, "_WHOLE", together)
        replica.alter("DISABLE")
    for statement in CHANGES:
        replica.execute(statement)
        snapshots.take()
    if together is not None:
        replica.alter("ENABLE")
    replica.caught_up()
    if "deletes" in options:
        mirror = Counter((r["id"], r["v"], r["n"]) for r in replica.rows("t") if r["_pubsub_deleted_at"] is None)
        assert mirror == Counter(replica.query("SELECT id, v, n FROM t"))
        return
    _assert_told(replica, snapshots)
    modes = replica.node.fetch("SELECT relation, mode FROM pg_subscription_rel ORDER BY relation")
    assert [(row["relation"], row["mode"]) for row in modes] == [
        ("public.t", "mirror"),
        ("public.t_history", "history"),
        ("public.t_scd2", "scd2"),
    ]
    found = replica.node.run(replica.node._node.verify(replica.name)).tables
    assert {one.relation: one.outcome for one in found} == {
        "public.t": "equal",
        "public.t_history": "not compared",
        "public.t_scd2": "equal",
    }
    assert Counter(row["id"] for row in replica.node.fetch("SELECT id FROM t")) == Counter(
        key for (key,) in replica.query("SELECT id FROM t")
    )
    counted = replica.node.fetch("SELECT count(*) AS n FROM t_history")[0]["n"]
    assert counted == len(replica.rows("t_history"))


def _begin(replica: Replica, mode: str, identity: str = "DEFAULT", **options: object) -> Snapshots:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int); INSERT INTO t SELECT g, 'v' || g, g FROM generate_series(1, 9) g;"
        "CREATE TABLE other (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t, other",
        f"ALTER TABLE t REPLICA IDENTITY {identity}",
    )
    replica.subscribe(mode=f"'public.t ({mode})'", **options)
    replica.until_ready()
    return Snapshots(replica.query, "t", "id, v, n")


def test_they_come_and_go(replica: Replica) -> None:
    """REFRESH adds what mode names by then, while the mirror stays as it is, and takes out what it does not name any more."""
    snapshots = _begin(replica, "mirror")
    generation = replica.relation("t").copy_generation
    replica.alter("SET (mode = 'public.t (scd2 + mirror + history)')")
    assert len(replica.states()) == 2
    replica.execute("UPDATE t SET n = 10 WHERE id = 1")
    replica.alter("REFRESH PUBLICATION")
    replica.alter("REFRESH PUBLICATION")
    replica.until_ready()
    assert sorted(replica.states()) == ["public.other", "public.t", "public.t_history", "public.t_scd2"]
    assert replica.relation("t").copy_generation == generation
    snapshots.take()
    replica.execute("UPDATE t SET n = 11 WHERE id = 1", "DELETE FROM t WHERE id = 2", "TRUNCATE t")
    replica.execute("INSERT INTO t VALUES (1, 'new', 1)")
    snapshots.take()
    replica.caught_up()
    _assert_told(replica, snapshots)
    history = replica.path("t_history")
    replica.alter("SET (mode = 'public.t (mirror + scd2)')")
    replica.alter("REFRESH PUBLICATION")
    assert sorted(replica.states()) == ["public.other", "public.t", "public.t_scd2"]
    replica.execute("UPDATE t SET n = 12")
    replica.assert_equal("t")
    assert DeltaTable(history).version() > 0


def test_followed_by_name_and_columns(replica: Replica) -> None:
    """What the publisher renames, alters, drops and makes anew is followed by all of them."""
    snapshots = _begin(replica, "mirror + history + scd2")
    replica.execute(
        "UPDATE t SET n = 0 WHERE id = 1", "ALTER TABLE t ADD w int DEFAULT 7", "UPDATE t SET w = 8 WHERE id = 2"
    )
    replica.execute(
        "ALTER TABLE t RENAME TO u",
        "INSERT INTO u VALUES (20, 'u', 1, 2)",
        "ALTER TABLE other RENAME TO t",
        "INSERT INTO t VALUES (4)",
    )
    replica.caught_up()
    assert sorted(replica.states()) == ["public.t", "public.u", "public.u_history", "public.u_scd2"]
    replica.execute("ALTER TABLE u RENAME v TO x; UPDATE u SET x = 'renamed' WHERE id = 3", "INSERT INTO t VALUES (5)")
    snapshots = Snapshots(replica.query, "u", "id, x, n, w")
    snapshots.take()
    replica.execute("DELETE FROM u WHERE id = 4")
    snapshots.take()
    replica.assert_equal("t", "u")
    _assert_history(replica, snapshots)
    snapshots.assert_held(replica.rows("u_scd2"))
    replica.alter("RESYNC TABLE u_history")
    before = replica.relation("u").copy_generation
    replica.until_ready()
    assert replica.relation("u").copy_generation == before
    replica.execute("UPDATE u SET n = 100")
    snapshots.take()
    replica.caught_up()
    assert (
        as_of(replica.rows("u_history"), snapshots.taken[-1].lsn, ("id", "x", "n", "w"), ("id",))
        == snapshots.taken[-1].rows
    )
    assert {row["_pubsub_op"] for row in replica.rows("u_history")} == {"R", "I", "U", "D", "T"}


@pytest.mark.full
def test_made_anew_on_the_publisher(replica: Replica) -> None:
    """A table that was dropped and created again is the same one, as in PostgreSQL, and RESYNC knows it by its new oid."""
    _begin(replica, "mirror + history")
    replica.execute(
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        "INSERT INTO t VALUES (1, 'anew', 1)",
        "ALTER PUBLICATION p ADD TABLE t",
    )
    replica.alter("REFRESH PUBLICATION")
    replica.alter("RESYNC TABLE t, t_history")
    replica.until_ready()
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    snapshots.take()
    replica.execute("INSERT INTO t VALUES (2, 'more', 2)")
    snapshots.take()
    replica.assert_equal("t")
    _assert_history(replica, snapshots)
    assert replica.relation("t").oid == replica.relation("t_history").oid == replica.relation("t").relid


@pytest.mark.full
def test_one_stops_alone(replica: Replica) -> None:
    """What others have damaged stops, and the rest of the table goes on."""
    _begin(replica, "mirror + history", on_table_error="isolate")
    shutil.rmtree(Path(replica.path("t_history").removeprefix("file://")) / "_delta_log")
    replica.execute("UPDATE t SET n = 50 WHERE id = 1")
    wait_until(lambda: replica.relation("t_history").stopped, "the history to stop")
    replica.execute("UPDATE t SET n = 51 WHERE id = 2")
    replica.assert_equal("t")
    assert not replica.relation("t").stopped


@pytest.mark.full
@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_prepared_and_streamed(node: RunningNode, streaming: str) -> None:
    with EmbeddedPostgres(
        "18", settings={"max_prepared_transactions": 5, "logical_decoding_work_mem": "64kB"}
    ) as server:
        server.create_database(f"prepared_{streaming}")
        replica = Replica(node, Database(server, f"prepared_{streaming}"))
        try:
            snapshots = _begin(replica, "mirror + history", two_phase="true", streaming=streaming)
            enabled(replica)
            for first, last in ((10, 20), (1000, 20_000)):
                change = f"INSERT INTO t SELECT g, repeat('v', 100), g FROM generate_series({first}, {last}) g"
                for outcome in ("ROLLBACK", "COMMIT"):
                    replica.execute(f"BEGIN; UPDATE t SET n = n + 1; {change}; PREPARE TRANSACTION 'one'")
                    snapshots.take()
                    replica.caught_up()
                    replica.execute(f"{outcome} PREPARED 'one'")
                    snapshots.take()
                replica.execute(
                    f"BEGIN; DELETE FROM t WHERE id >= {first}; SAVEPOINT s; {change}; ROLLBACK TO s; COMMIT"
                )
                snapshots.take()
            replica.assert_equal("t")
            _assert_history(replica, snapshots)
        finally:
            replica.leave()


@pytest.mark.full
def test_streamed_while_one_is_copied(replica: Replica, fault: Faults) -> None:
    """What was staged for the mirror alone, before the history was copied, is for both of them when it commits."""
    replica.execute(
        f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int); CREATE TABLE other (LIKE t INCLUDING ALL)",
        "CREATE PUBLICATION p FOR TABLE t, other",
    )
    fault.arm("copy planned public.t_history")
    replica.subscribe(mode="'public.t (mirror + history)'", streaming="parallel")
    wait_until(lambda: replica.states()["public.t"] == "r", "the mirror to be ready")
    fault.wait("copy planned public.t_history")
    snapshots = Snapshots(replica.query, "t", "id, v, n")
    with psycopg.connect(replica.conninfo) as connection:
        # What is staged last, when the history is there, has rows of another table alone.
        for table in ("t", "other"):
            connection.execute(f"INSERT INTO {table} SELECT g, repeat('v', 500), g FROM generate_series(1, 60000) g")
        wait_until(
            lambda: replica.node.statistics(replica.name)["stream_bytes"] > 60 << 20, "parts of both to be there"
        )
        fault.release("copy planned public.t_history")
        replica.until_ready()
        replica.execute("INSERT INTO t VALUES (-1, 'meanwhile', 1)")
        wait_until(lambda: any(row["id"] == -1 for row in replica.rows("t_history")), "the history to follow")
        connection.execute("INSERT INTO other VALUES (0, 'last', 1)")
    snapshots.take()
    replica.assert_equal("t", "other")
    assert (
        as_of(replica.rows("t_history"), snapshots.taken[0].lsn, ("id", "v", "n"), ("id",)) == snapshots.taken[0].rows
    )


@pytest.mark.full
def test_new_tables_have_them(replica: Replica) -> None:
    replica.execute("CREATE TABLE a (id int PRIMARY KEY, v text); CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(mode="'public.* (mirror + history)'", new_tables="follow")
    replica.until_ready()
    replica.execute(
        "CREATE TABLE b (id int PRIMARY KEY, v text); INSERT INTO b VALUES (1, 'b')", "UPDATE b SET v = 'c'"
    )
    wait_until(
        lambda: replica.states().get("public.b_history") == "r" == replica.states()["public.b"], "b to be followed"
    )
    replica.assert_equal("a", "b")
    assert replica.rows("b_history")


def test_refused(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE t_history (id int PRIMARY KEY); CREATE TABLE f (v text);"
        "ALTER TABLE f REPLICA IDENTITY FULL; CREATE PUBLICATION p FOR TABLE t, t_history, f"
    )
    for mode, sqlstate, message in (
        (
            "'mirror + history'",
            "42710",
            'the Delta table for relation "public.t_history" is that of relation "public.t_history", too',
        ),
        ("'public.f (mirror + scd2)'", "0A000", '"public.f"'),
        ("'history + scd2'", "22023", 'invalid value for parameter "mode"'),
        ("'mirror + mirror'", "22023", 'invalid value for parameter "mode"'),
        ("'mirror +'", "22023", 'invalid value for parameter "mode"'),
        (
            "'mirror + history', source = 'one'",
            "42601",
            "source = … and mode = mirror + history are mutually exclusive options",
        ),
    ):
        replica.assert_refused(f"mode = {mode}", sqlstate, message)
    assert not replica.slots()


@pytest.mark.full
def test_begun_without_a_copy_and_with_all_anew(replica: Replica) -> None:
    """A history has what changes from then on; a slot that is lost costs a copy of each."""
    snapshots = _begin(replica, "mirror")
    replica.alter("SET (mode = '* (mirror + history)')")
    replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
    replica.until_ready()
    replica.execute("UPDATE t SET n = 50 WHERE id = 1", "INSERT INTO other VALUES (1)")
    replica.assert_equal("t", "other")
    assert [(row["_pubsub_op"], row["id"], row["n"]) for row in replica.rows("t_history")] == [("U", 1, 50)]
    assert [(row["_pubsub_op"], row["id"]) for row in replica.rows("other_history")] == [("I", 1)]
    replica.alter("DISABLE")
    replica.execute("UPDATE t SET n = 51 WHERE id = 1")
    wait_until(lambda: not replica.query("SELECT 1 FROM pg_replication_slots WHERE active"), "the worker to end")
    replica.execute(f"SELECT pg_drop_replication_slot('{replica.name}')")
    replica.alter("ENABLE")
    replica.alter("RESYNC TABLE t, other, t_history, other_history")
    replica.until_ready()
    snapshots.take()
    replica.execute("DELETE FROM t WHERE id = 1")
    snapshots.take()
    replica.assert_equal("t", "other")
    _assert_history(replica, snapshots)


@pytest.mark.full
def test_conditions_and_masks_hold_for_all(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    _begin(replica, "mirror + history", "FULL", where="'public.t (n > 3)'", mask="'public.t (v hash)'")
    replica.execute(
        "UPDATE t SET n = n + 1 WHERE id IN (3, 8)", "UPDATE t SET n = 0 WHERE id = 9", "DELETE FROM t WHERE id = 8"
    )
    replica.caught_up()
    rows = replica.rows("t")
    assert Counter((row["id"], row["n"]) for row in rows) == Counter(replica.query("SELECT id, n FROM t WHERE n > 3"))
    history = replica.rows("t_history")
    held = Counter(replica.query("SELECT id, n FROM t WHERE n > 3"))
    assert as_of(history, (1 << 63) - 1, ("id", "n"), ("id",)) == held
    assert all(len(row["v"]) > 20 for row in [*rows, *history] if row["v"] is not None)


@pytest.mark.full
def test_a_table_of_that_name_comes_later(replica: Replica) -> None:
    """It is refused, also where tables join by themselves, and what is there goes on."""
    snapshots = _begin(replica, "mirror + history")
    before = replica.states()
    replica.execute(
        "CREATE TABLE t_history (LIKE t INCLUDING ALL)",
        "INSERT INTO t_history VALUES (1, 'a', 1)",
        "ALTER PUBLICATION p ADD TABLE t_history",
    )
    for _ in range(2):
        with pytest.raises(DuplicateObject, match=r'is that of relation "public\.t_history", too'):
            replica.alter("REFRESH PUBLICATION")
        replica.alter("SET (new_tables = follow)")
    replica.execute("UPDATE t SET n = 5 WHERE id = 5", "UPDATE t_history SET n = 2", "DELETE FROM t WHERE id = 6")
    snapshots.take()
    replica.assert_equal("t")
    _assert_history(replica, snapshots)
    assert replica.states() == before


@pytest.mark.full
def test_dropped_while_one_is_copied(replica: Replica, fault: Faults) -> None:
    """Its sync slot goes with the subscription, or with the option."""
    fault.arm("copy planned public.t_history")
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe(mode="'mirror + history'")
    fault.wait("copy planned public.t_history")
    wait_until(lambda: replica.states()["public.t"] == "r", "the mirror to be ready")
    assert len(replica.slots()) == 2
    replica.alter("SET (mode = mirror)")
    replica.alter("REFRESH PUBLICATION")
    wait_until(lambda: replica.slots() == [replica.name], "its slot to be dropped")
    replica.alter("SET (mode = 'mirror + scd2')")
    fault.arm("copy planned public.t_scd2")
    replica.alter("REFRESH PUBLICATION")
    fault.wait("copy planned public.t_scd2")
    replica.drop()
    assert replica.slots() == []
