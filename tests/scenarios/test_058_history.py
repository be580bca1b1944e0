"""mode = history: every change of a table is a row, from which the publisher's rows as of any commit can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from apply.staging import stage_batch
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import copyjob
from tests.support.history import as_of
from tests.support.replica import Replica, RunningNode, wait_until


@dataclass
class Told:
    """What the publisher's tables had at moments between transactions."""

    replica: Replica
    tables: dict[str, tuple[str, ...]]
    moments: list[tuple[Lsn, dict[str, Counter[Any]]]] = field(default_factory=list)

    def now(self, columns: str = "id, v") -> None:
        """Remember the tables' rows, while no transaction is in progress."""
        at = Lsn.parse(self.replica.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        self.moments.append(
            (at, {name: Counter(self.replica.query(f"SELECT {columns} FROM {name}")) for name in self.tables})
        )

    def assert_told(self, columns: Iterable[str] = ("id", "v")) -> None:
        """Check that the histories tell all of it."""
        self.replica.node.wait_for_catchup(self.replica.name)
        for table, key in self.tables.items():
            rows = self.replica.rows(table)
            places = [(row["_pubsub_lsn"], row["_pubsub_seq"]) for row in rows if row["_pubsub_op"] != "R"]
            assert len(set(places)) == len(places), "two changes at one place"
            for at, state in self.moments:
                assert as_of(rows, at, list(columns), key) == state[table], (table, at)


def test_every_moment_can_be_read(replica: Replica) -> None:
    """Copied, inserted, updated, moved to other keys, left unchanged out of line, deleted, truncated; with and without a key."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE f (id int, v text); ALTER TABLE f REPLICA IDENTITY FULL;"
        "CREATE TABLE m (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
        "INSERT INTO t SELECT g, repeat('x', 5000) || g FROM generate_series(1, 20) g; INSERT INTO m VALUES (1, 'one');"
        "INSERT INTO f SELECT g % 5, 'v' FROM generate_series(1, 20) g; CREATE PUBLICATION p FOR ALL TABLES"
    )
    told = Told(replica, {"t": ("id",), "f": ()})
    replica.subscribe(mode="'* (history), public.m (mirror)'")
    replica.until_ready()
    told.now()
    for statement in (
        "INSERT INTO t VALUES (100, 'a'), (101, NULL); INSERT INTO f VALUES (1, 'v'), (9, NULL)",
        "UPDATE t SET v = 'b' WHERE id = 100; UPDATE t SET id = id + 1000 WHERE id < 5; UPDATE f SET v = 'w' WHERE id = 3",
        "UPDATE t SET id = id",
        "BEGIN; DELETE FROM t WHERE id = 100; INSERT INTO t VALUES (100, 'again'); UPDATE t SET v = v || '!' WHERE id = 100; COMMIT",
        "BEGIN; UPDATE t SET id = -1 WHERE id = 6; UPDATE t SET id = 6 WHERE id = 7; UPDATE t SET id = 7 WHERE id = -1; COMMIT",
        "DELETE FROM f WHERE id IN (1, 2); DELETE FROM t WHERE id > 1002; UPDATE m SET v = 'two'",
        "BEGIN; INSERT INTO t VALUES (500, 'gone'); TRUNCATE t, f; INSERT INTO t VALUES (1, 'new'); COMMIT",
        "TRUNCATE t",
        "INSERT INTO t SELECT g, g FROM generate_series(1, 3000) g; INSERT INTO f SELECT g % 9, 'v' FROM generate_series(1, 99) g",
    ):
        replica.execute(statement)
        told.now()
    told.assert_told()
    replica.assert_equal("m")
    rows = replica.rows("t")
    assert Counter(row["_pubsub_op"] for row in rows if row["_pubsub_lsn"] > told.moments[0][0]) == Counter(
        I=2 + 1 + 2 + 3000, U=1 + 4 + 22 + 1 + 3, O=4 + 3, D=1 + 2, T=2
    )
    copied = [row for row in rows if row["_pubsub_op"] == "R"]
    assert len(copied) == 20
    assert {(row["_pubsub_xid"], row["_pubsub_commit_time"]) for row in copied} == {(None, None)}
    unchanged = [row for row in rows if row["_pubsub_unchanged"] is not None]
    assert {(row["_pubsub_op"], row["v"], tuple(row["_pubsub_unchanged"])) for row in unchanged} == {
        ("U", None, ("v",))
    }
    told_by_view = replica.node.fetch("SELECT relation, mode FROM pg_subscription_rel ORDER BY relation")
    assert [(row["relation"], row["mode"]) for row in told_by_view] == [
        ("public.f", "history"),
        ("public.m", "mirror"),
        ("public.t", "history"),
    ]


def test_a_history_is_read_by_sql(replica: Replica) -> None:
    """The query of docs/history.md gives the publisher's rows."""
    text = (Path(__file__).parents[2] / "docs/history.md").read_text("utf-8")
    statement = text[text.index("    WITH known") :].partition("\n\n")[0]
    replica.execute(
        "CREATE TABLE payments (id int PRIMARY KEY, amount text); INSERT INTO payments SELECT g, 'v' FROM generate_series(1, 9) g;"
        "CREATE PUBLICATION p FOR TABLE payments"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    replica.execute("UPDATE payments SET id = id + 100, amount = 'w' WHERE id < 4; DELETE FROM payments WHERE id = 9")
    at = Lsn.parse(replica.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
    before = Counter(replica.query("SELECT id, amount FROM payments"))
    replica.execute("DELETE FROM payments", "TRUNCATE payments", "INSERT INTO payments VALUES (1, 'last')")
    replica.node.wait_for_catchup(replica.name)
    for lsn, rows in ((int(at), before), ((1 << 63) - 1, Counter([(1, "last")]))):
        found = replica.node.fetch(statement.replace(":lsn", str(lsn)))
        assert Counter((row["id"], row["amount"]) for row in found) == rows


@pytest.mark.full
def test_the_publishers_alterations(replica: Replica) -> None:
    """A column's values stay when it is dropped; what is added has its default in all rows; names and keys follow."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, gone int, n numeric(4,1));"
        "INSERT INTO t SELECT g, 'v', g, g FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR TABLE t"
    )
    told = Told(replica, {"t": ("id",)})
    replica.subscribe(mode="'public.t (history)'")
    replica.until_ready()
    told.now("id, n")
    for statement in (
        "ALTER TABLE t ADD COLUMN more int DEFAULT 7; UPDATE t SET v = 'w' WHERE id = 1",
        "ALTER TABLE t ALTER n TYPE numeric(8,1); INSERT INTO t VALUES (10, 'x', 1, 123456.5, 8)",
        "ALTER TABLE t DROP COLUMN gone; DELETE FROM t WHERE id = 2; UPDATE t SET v = 'y' WHERE id = 3",
        "ALTER TABLE t RENAME v TO value; UPDATE t SET id = 200 WHERE id = 4",
        "BEGIN; UPDATE t SET value = 'z' WHERE id = 5; ALTER TABLE t ADD last text; UPDATE t SET last = value; COMMIT",
    ):
        replica.execute(statement)
        told.now("id, n")
    told.assert_told(["id", "n"])
    rows = replica.rows("t")
    assert {row["gone"] for row in rows if row["_pubsub_op"] == "R"} == set(range(1, 10))
    last = as_of(rows, 1 << 62, ["id", "value", "n", "more", "last"], ["id"])
    assert last == Counter(replica.query("SELECT id, value, n, more, last FROM t"))
    # The same name again: old and new values are in one column, and the new rows are a new copy's.
    replica.execute("ALTER TABLE t ADD COLUMN gone int DEFAULT 5; UPDATE t SET gone = 6 WHERE id = 1")
    told.now("id, n")
    told.assert_told(["id", "n"])
    replica.until_ready()
    assert replica.relation("t").copy_generation == 2
    last = as_of(replica.rows("t"), 1 << 62, ["id", "gone"], ["id"])
    assert last == Counter(replica.query("SELECT id, gone FROM t"))
    # Other columns identify its rows, or a type is wider: what is copied then stands after a T.
    replica.execute("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (n)")
    replica.execute("UPDATE t SET n = n + 1000; DELETE FROM t WHERE id = 1; ALTER TABLE t ALTER id TYPE bigint")
    replica.execute("INSERT INTO t (id, n) VALUES (1 << 40, 0)")
    replica.node.wait_for_catchup(replica.name)
    replica.until_ready()
    replica.node.wait_for_catchup(replica.name)
    assert as_of(replica.rows("t"), 1 << 62, ["id", "n"], ["n"]) == Counter(replica.query("SELECT id, n FROM t"))
    assert replica.relation("t").copy_generation > 2
    before = len(replica.rows("t"))
    replica.execute("ALTER TABLE t ALTER id TYPE text; INSERT INTO t (id, n) VALUES ('text', -1)")
    assert 'column "id" of table "public.t" has another type than in its history' in replica.error()
    assert len(replica.rows("t")) == before


@pytest.mark.full
def test_the_identity_moves(replica: Replica) -> None:
    """With schema_changes = refuse the table stops, as a mirror does: its rows could not be told apart."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE NOT NULL); INSERT INTO t VALUES (1, 10); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mode="history", schema_changes="refuse")
    replica.until_ready()
    replica.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX t_u_key", "DELETE FROM t")
    assert "publisher did not send replica identity column" in replica.error()


@pytest.mark.full
def test_names_that_differ_in_case(replica: Replica) -> None:
    replica.execute(
        'CREATE TABLE t (id int PRIMARY KEY, "Gone" int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION p FOR TABLE t'
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    replica.execute('ALTER TABLE t DROP COLUMN "Gone"; INSERT INTO t VALUES (2)')
    replica.node.wait_for_catchup(replica.name)
    replica.execute("ALTER TABLE t ADD COLUMN gone int; INSERT INTO t VALUES (3, 3)")
    wait_until(lambda: 'differs only in case from "Gone" in its history' in replica.error(), "the copy's error")


@pytest.mark.full
def test_what_the_executors_of_a_cluster_left(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are cleared after a copy; those of the copy stay, the T among them."""
    monkeypatch.setattr(copyjob, "_is_local", lambda context: False)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 3000) g;"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mode="history")
    replica.until_ready()
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", 1)
    replica.execute("DELETE FROM t WHERE id < 3000")
    replica.node.wait_for_catchup(replica.name)
    assert Counter(row["_pubsub_op"] for row in replica.rows("t")) == Counter(R=6000, T=1, D=2999)
    assert as_of(replica.rows("t"), 1 << 62, ["id"], ["id"]) == Counter([(3000,)])


@pytest.mark.full
def test_a_history_that_spark_writes(replica: Replica) -> None:
    """A table with a change data feed takes none of our files: Spark's statement appends the same rows."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text[], j jsonb, n numeric); INSERT INTO t VALUES (1, '{a}', '{\"a\": 1}', 1.5);"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    told = Told(replica, {"t": ("id",)})
    replica.subscribe(
        mode="history",
        table_properties="'* (delta.enableChangeDataFeed = true)'",
        types="'arrays natural, jsonb variant'",
    )
    replica.until_ready()
    told.now("id, n::text")
    replica.execute(
        "UPDATE t SET id = 2, v = '{b,c}'; INSERT INTO t VALUES (3, NULL, NULL, 2)", "DELETE FROM t WHERE id = 2"
    )
    told.now("id, n::text")
    replica.execute("TRUNCATE t", "INSERT INTO t VALUES (4, '{}', '[]', 0)")
    told.now("id, n::text")
    replica.node.wait_for_catchup(replica.name)
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", 1)
    told.now("id, n::text")
    replica.node.wait_for_catchup(replica.name)
    rows = replica.rows("t", "_pubsub_op, _pubsub_lsn, _pubsub_seq, _pubsub_unchanged, id, n")
    assert Counter(row["_pubsub_op"] for row in rows) == Counter(R=2, O=1, U=1, I=2, D=1, T=2)
    for at, state in told.moments:
        assert as_of(rows, at, ["id", "n"], ["id"]) == state["t"], at


@pytest.mark.full
def test_a_copy_begins_anew_and_the_history_stays(replica: Replica) -> None:
    """RESYNC TABLE, leaving and joining again: the rows of before stay, and what is copied stands after a T."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text);"
        "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR TABLE t, u"
    )
    told = Told(replica, {"t": ("id",), "u": ("id",)})
    replica.subscribe(mode="history")
    replica.until_ready()
    told.now()
    replica.execute("DELETE FROM t WHERE id < 4; UPDATE t SET v = 'w'")
    told.now()
    replica.node.wait_for_catchup(replica.name)
    replica.alter("RESYNC TABLE public.t, public.u")
    replica.until_copied("u", 1)
    replica.until_ready()
    told.now()
    replica.execute("INSERT INTO t VALUES (1, 'again'); INSERT INTO u VALUES (1, 'first')")
    told.now()
    told.assert_told()
    assert Counter(row["_pubsub_op"] for row in replica.rows("t")) == Counter(R=9 + 6, D=3, U=6, T=1, I=1)
    assert Counter(row["_pubsub_op"] for row in replica.rows("u")) == Counter(I=1), "an empty history has no T"
    # The table leaves and joins again.
    replica.execute("ALTER PUBLICATION p DROP TABLE t; DELETE FROM t WHERE id = 1")
    replica.alter("REFRESH PUBLICATION")
    replica.execute("ALTER PUBLICATION p ADD TABLE t")
    replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
    replica.alter("RESYNC TABLE public.t")
    replica.until_ready()
    told.now()
    replica.execute("UPDATE t SET v = 'x' WHERE id = 9")
    told.now()
    told.assert_told()
    # A mirror would lose it all.
    replica.alter("SET (mode = 'public.u (history)')")
    replica.alter("RESYNC TABLE public.t")
    assert "keeps the history, which a mirror would replace" in replica.error()
    replica.alter("SET (mode = 'history')")
    replica.until_ready()
    told.now()
    told.assert_told()
    # Nor does another subscription make a mirror of it; it goes on with it as a history.
    paths = replica.path("t"), replica.path("u")
    replica.drop()
    with pytest.raises(PubsubError, match="keeps the history, which a mirror would replace"):
        replica.subscribe(copy_data="false")
    replica.subscribe(copy_data="false", mode="history")
    replica.execute("UPDATE t SET v = 'another' WHERE id = 9")
    told.now()
    told.assert_told()
    assert (replica.path("t"), replica.path("u")) == paths


@pytest.mark.full
def test_a_mirror_becomes_a_history(replica: Replica) -> None:
    """What RESYNC TABLE copies replaces the mirror's rows, as always; from then on nothing is lost."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe()
    replica.assert_equal("t")
    replica.alter("SET (mode = 'history')")
    replica.execute("INSERT INTO t VALUES (2, 'b')")
    replica.assert_equal("t")
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", 1)
    told = Told(replica, {"t": ("id",)})
    told.now()
    replica.execute("DELETE FROM t WHERE id = 1")
    told.now()
    told.assert_told()
    assert [row["_pubsub_op"] for row in replica.rows("t", "* FROM delta_t ORDER BY _pubsub_lsn, id")] == [
        "R",
        "R",
        "D",
    ]


@pytest.mark.full
@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_streamed_and_prepared_transactions(node: RunningNode, streaming: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtransactions that are rolled back are not in the history; a batch larger than what is decoded at once is."""
    monkeypatch.setattr(stage_batch, "_WHOLE", 1 << 20)
    with EmbeddedPostgres(
        "18", settings={"max_prepared_transactions": 5, "logical_decoding_work_mem": "64kB"}
    ) as server:
        server.create_database(f"history_{streaming}")
        replica = Replica(node, Database(server, f"history_{streaming}"))
        try:
            follow_transactions(replica, streaming)
        finally:
            replica.leave()


def follow_transactions(replica: Replica, streaming: str) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE f (id int, v text); CREATE TABLE m (id int PRIMARY KEY, v text);"
        "ALTER TABLE f REPLICA IDENTITY FULL; CREATE PUBLICATION p FOR ALL TABLES",
        f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'",
    )
    told = Told(replica, {"t": ("id",), "f": ()})
    replica.subscribe(mode="'* (history), public.m (mirror)'", streaming=streaming, two_phase="true")
    replica.until_ready()
    told.now()
    rows = "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({}, {}) g"
    for transaction in (
        [
            rows.format(1, 9000),
            "INSERT INTO m SELECT g, 'm' FROM generate_series(1, 2000) g",
            "SAVEPOINT a",
            rows.format(10_000, 15_000),
            "UPDATE t SET v = 'gone'",
            "ROLLBACK TO a",
            "UPDATE t SET v = 'y' WHERE id % 2 = 0",
            "DELETE FROM t WHERE id % 5 = 0",
        ],
        [
            "UPDATE t SET id = -id",
            "INSERT INTO f SELECT g % 50, repeat('f', 300) FROM generate_series(1, 5000) g",
            "UPDATE f SET id = id + 1 WHERE id < 7",
        ],
        ["TRUNCATE t", rows.format(1, 2000), "TRUNCATE t, m", rows.format(1, 2000), "DELETE FROM f WHERE id < 4"],
    ):
        replica.execute(f"BEGIN; {'; '.join(transaction)}; COMMIT")
        told.now()
        replica.execute(f"BEGIN; UPDATE t SET v = v || '!'; {rows.format(20_000, 22_000)}; PREPARE TRANSACTION 'p'")
        replica.execute("ROLLBACK PREPARED 'p'")
        told.now()
    replica.execute("BEGIN; UPDATE t SET v = 'prepared'; PREPARE TRANSACTION 'q'", "COMMIT PREPARED 'q'")
    told.now()
    told.assert_told()
    replica.assert_equal("m")


@pytest.mark.full
def test_what_a_history_cannot_be(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE odd (id int PRIMARY KEY, _pubsub_OP text);"
        "CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q FOR TABLE odd"
    )
    for publication, mode, sqlstate, message in (
        ("p", "versions", "22023", 'invalid value for parameter "mode"'),
        ("p", "public.u (history)", "42P01", 'mode names tables that are not published: "public.u"'),
        ("p", "public.t", "22023", 'invalid value for parameter "mode"'),
        ("q", "history", "0A000", "has a name that mode = history needs"),
    ):
        error = replica.refused(f"mode = '{mode}'", publication)
        assert error.sqlstate == sqlstate, error
        assert message in error.message
    assert replica.slots() == []
