"""pubsub verify on every kind of table and value, and what it says of tables that it cannot compare, or that are meant to differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pubsub.errors import NotInPrerequisiteState, PubsubError, UndefinedTable
from pubsub.testing.fixtures import Database, Servers
from tests.scenarios.test_080_types import TYPES
from tests.scenarios.test_085_natural_types import CHOICES, SETUP, insert
from tests.scenarios.test_210_verify import of, outcomes, spoil, verify
from tests.support import corpus
from tests.support.replica import Faults, Replica, RunningNode, wait_until


@pytest.fixture(params=["18", "15"])
def any_replica(request: pytest.FixtureRequest, node: RunningNode, servers: Servers) -> Iterator[Replica]:
    name = f"verify_{request.param}"
    servers[request.param].create_database(name)
    replica = Replica(node, Database(servers[request.param], name))
    yield replica
    if replica.created:
        replica.drop()
    servers[request.param].drop_database(name)


def test_every_type(any_replica: Replica) -> None:
    """Equal values of every type are equal; of some that were changed, each is named."""
    replica = any_replica
    version = int(replica.query("SHOW server_version_num")[0][0]) // 10000
    wanted = corpus.columns(version)
    replica.execute(corpus.SETUP, corpus.create("v", wanted), "CREATE PUBLICATION p FOR TABLE v")
    replica.execute(corpus.insert("v", wanted, 1))
    replica.subscribe(types=f"'{TYPES}'")
    replica.caught_up()
    report = verify(replica)
    assert report.outcome == "equal", report
    spoil(
        replica, "UPDATE {} SET c_float8 = 0.5, c_timestamptz = NULL, c_jsonb = '1', c_bytea = X'00' WHERE id = 1", "v"
    )
    (one,) = of(verify(replica), "public.v").shown
    assert one.key == {"id": "1"}
    assert one.delta is not None
    assert one.delta.keys() == {"c_float8", "c_timestamptz", "c_jsonb", "c_bytea"}


@pytest.mark.full
def test_arrays_composites_and_variants(replica: Replica) -> None:
    replica.execute(SETUP, insert(0))
    replica.subscribe(types=CHOICES)
    replica.caught_up()
    report = verify(replica)
    assert report.outcome == "equal", report
    spoil(replica, "UPDATE {} SET doubles = array(0.0D), n = NULL WHERE id = 1", "t")
    (one,) = of(verify(replica), "public.t").shown
    assert one.delta == {"doubles": "{0}", "n": None}


@pytest.mark.full
def test_filters_lists_partitions_and_keys(replica: Replica) -> None:
    """Only what is published is compared; keys of any type, collation and number of columns are told apart by their texts."""
    replica.execute(
        """
        CREATE TABLE filtered (id int PRIMARY KEY, v text, secret text);
        INSERT INTO filtered SELECT g, 'v' || g, 's' FROM generate_series(1, 500) g;
        CREATE TABLE parted (id int, at date, v text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
        CREATE TABLE p1 PARTITION OF parted FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
        CREATE TABLE p2 (v text, at date NOT NULL, id int NOT NULL);
        ALTER TABLE parted ATTACH PARTITION p2 FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
        INSERT INTO parted SELECT g, '2024-06-01'::date + g, md5(g::text) FROM generate_series(1, 400) g;
        CREATE TABLE worded (a text COLLATE "de-x-icu", b numeric, c timestamptz, PRIMARY KEY (a, b, c));
        INSERT INTO worded VALUES ('ä', 1.0, 'epoch'), ('z', 1, 'epoch'), ('a', 1, 'epoch'), ('', 1e-20, '2024-01-01 01:00');
        CREATE TABLE halves (f float8 PRIMARY KEY, made int GENERATED ALWAYS AS (3) STORED);
        INSERT INTO halves VALUES (0), (-1.5), ('NaN'), ('Infinity');
        CREATE TABLE parent (id int PRIMARY KEY);
        CREATE TABLE child () INHERITS (parent);
        INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2);
        CREATE TABLE "odd "" name" (" ,;{}()=" int PRIMARY KEY, "x0" text, "Größe" text);
        INSERT INTO "odd "" name" VALUES (1, 'a', 'b');
        CREATE TABLE nothing (id int PRIMARY KEY);
        CREATE PUBLICATION p FOR TABLE filtered (id, v) WHERE (id < 100), parted, worded, halves, parent, "odd "" name", nothing
            WITH (publish_via_partition_root = true)
        """
    )
    replica.subscribe()
    replica.caught_up()
    report = verify(replica)
    assert report.outcome == "equal", report
    assert {one.relation: one.rows for one in report.tables} == {
        "public.filtered": 99, "public.parted": 400, "public.worded": 4, "public.halves": 4, "public.parent": 1,
        "public.child": 1, 'public.odd " name': 1, "public.nothing": 0,
    } or of(report, "public.filtered").rows == 99  # fmt: skip
    spoil(replica, "UPDATE {} SET v = 'x' WHERE id = 300", "parted")
    spoil(replica, "DELETE FROM {} WHERE a = 'ä'", "worded")
    spoil(replica, "INSERT INTO {} VALUES (5)", "nothing")
    found = verify(replica, repair=True)
    assert found.outcome == "equal", found
    assert {one.relation for one in found.tables if one.repaired} == {
        "public.parted",
        "public.worded",
        "public.nothing",
    }
    assert verify(replica).outcome == "equal"


@pytest.mark.full
def test_another_encoding(node: RunningNode, database: Database) -> None:
    """The texts of a LATIN1 database have other bytes than here."""
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    replica = Replica(node, Database(database.server, "latin"))
    try:
        replica.execute(
            "CREATE TABLE t (k text PRIMARY KEY, v varchar(20), j jsonb, c char(5))",
            # The connection's encoding is the database's.
            r"INSERT INTO t VALUES (U&'\00E4', U&'\00F6\00FC\00DF', jsonb_build_object(U&'\00E9', 1), 'x'),"
            r" (repeat(U&'\00E4', 300), '', 'null', U&'\00FF')",
            "CREATE PUBLICATION p FOR TABLE t",
        )
        replica.subscribe()
        replica.caught_up()
        assert verify(replica).outcome == "equal"
        spoil(replica, "UPDATE {} SET v = 'öüs' WHERE k = 'ä'", "t")
        (one,) = of(verify(replica), "public.t").shown
        assert (one.key, one.publisher, one.delta) == ({"k": "ä"}, {"v": "öüß"}, {"v": "öüs"})
    finally:
        if replica.created:
            replica.drop()
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute("DROP DATABASE latin WITH (FORCE)")


@pytest.mark.full
def test_what_cannot_be_compared_or_is_meant_to_differ(replica: Replica, fault: Faults) -> None:
    replica.execute(
        "CREATE TABLE kept (id int PRIMARY KEY, v int)",
        "CREATE TABLE stops (id int PRIMARY KEY, n numeric(4,2))",
        "CREATE TABLE grows (id int PRIMARY KEY)",
        "CREATE TABLE finer (id int PRIMARY KEY, n numeric(8,2)); INSERT INTO finer VALUES (1, 1.5)",
        "INSERT INTO kept SELECT g, g FROM generate_series(1, 50) g",
        "INSERT INTO grows SELECT generate_series(1, 5)",
        "CREATE PUBLICATION p FOR TABLE stops, grows, finer",
        "CREATE PUBLICATION inserts FOR TABLE kept WITH (publish = 'insert, update')",
    )
    replica.subscribe("p, inserts", on_table_error="isolate")
    replica.caught_up()
    replica.execute("DELETE FROM kept WHERE id > 40", "ALTER TABLE grows ADD COLUMN more int DEFAULT 7")
    replica.execute("ALTER TABLE finer ALTER n TYPE numeric(8,4)")
    replica.execute("INSERT INTO stops VALUES (1, 'NaN')")
    wait_until(lambda: replica.relation("stops").stopped, "the table to stop")
    report = verify(replica)
    assert outcomes(report) == {
        "public.kept": "equal",
        "public.stops": "not compared",
        "public.grows": "different",
        "public.finer": "different",
    }
    # Every row has another text there now; a repair could not give the Delta column its digits.
    finer = of(report, "public.finer")
    assert finer.reason == (
        'column "n" has type numeric(8,4) at the publisher, which the Delta table does not have yet'
    )
    assert "REFRESH PUBLICATION" in (finer.hint or "")
    assert "NaN" in (of(report, "public.stops").reason or "")
    assert "lacks the columns more" in (of(report, "public.grows").reason or "")
    kept = of(report, "public.kept")
    assert (kept.extra, kept.expected) == (10, 10)
    assert "do not publish delete, truncate" in (kept.reason or "")
    spoil(replica, "UPDATE {} SET v = 0 WHERE id = 1", "kept")
    report = verify(replica, "kept", repair=True)
    assert outcomes(report) == {"public.kept": "different"}
    assert "it is not repaired" in (of(report, "public.kept").reason or "")
    assert replica.rows("kept", "count(*) AS n") == [{"n": 50}]
    with pytest.raises(NotInPrerequisiteState, match="no table that can be compared"):
        verify(replica, "stops")
    with pytest.raises(UndefinedTable, match=r'table "public\.other" is not part of subscription'):
        verify(replica, "other")
    replica.alter("DISABLE")
    with pytest.raises(NotInPrerequisiteState, match="is disabled"):
        verify(replica)
    with pytest.raises(PubsubError, match='subscription "none" does not exist'):
        replica.node.run(replica.node._node.verify("none"))


def test_a_table_that_fails_leaves_neither_error_nor_lock_to_the_next(replica: Replica, fault: Faults) -> None:
    tables = ("a", "b", "c")
    for name in tables:
        replica.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)", f"INSERT INTO {name} VALUES (1, 1)")
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(tables)}")
    replica.subscribe()
    replica.caught_up()

    def disturb() -> list[tuple[str]]:
        fault.wait("comparing public.a")
        replica.execute("ALTER TABLE a RENAME COLUMN v TO w")
        fault.arm("comparing public.c")
        fault.release("comparing public.a")
        fault.wait("comparing public.c")
        held = replica.query(
            "SELECT relation::regclass::text FROM pg_locks JOIN pg_stat_activity USING (pid)"
            " WHERE application_name = 'pubsub verify' AND relation >= 16384"
        )
        fault.release("comparing public.c")
        return held

    async def watched() -> Any:
        import asyncio

        verifying = asyncio.create_task(replica.node._node.verify(replica.name))
        return await asyncio.to_thread(disturb), await verifying

    fault.arm("comparing public.a")
    held, report = replica.node.run(watched())
    assert outcomes(report) == {"public.a": "failed", "public.b": "equal", "public.c": "equal"}
    assert "was altered while it was read" in (of(report, "public.a").reason or "")
    assert held == [], "b can be altered while c is compared"


@pytest.mark.full
def test_an_lsn_that_is_still_to_come(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe()
    replica.caught_up()
    ((past, later),) = replica.query("SELECT pg_current_wal_lsn(), pg_current_wal_lsn() + 200000")
    report = verify(replica, at=past)
    assert str(report.asked) == past
    assert report.lsn > report.asked  # type: ignore[operator]

    async def both() -> Any:
        import asyncio

        verifying = asyncio.create_task(replica.node._node.verify(replica.name, at=later))
        await asyncio.sleep(1)
        assert not verifying.done()
        await asyncio.to_thread(replica.execute, "INSERT INTO t SELECT generate_series(1, 5000)")
        return await verifying

    report = replica.node.run(both())
    assert report.lsn >= report.asked
    assert (report.outcome, of(report, "public.t").rows) == ("equal", 5000)


@pytest.mark.full
def test_a_long_transaction_is_waited_for_and_the_stream_goes_on(replica: Replica) -> None:
    """The snapshot waits for a transaction on the publisher; others are applied meanwhile, a little later than usual."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe()
    replica.caught_up()

    async def work() -> Any:
        import asyncio

        with psycopg.connect(replica.conninfo) as long:
            long.execute("INSERT INTO t VALUES (-1)")
            verifying = asyncio.create_task(replica.node._node.verify(replica.name))
            for number in range(1, 4):
                await asyncio.to_thread(replica.execute, f"INSERT INTO t VALUES ({number})")
                want = [{"n": number}]
                while await asyncio.to_thread(replica.rows, "t", "count(*) AS n") != want:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert not verifying.done()
            long.commit()
            return await verifying

    report = replica.node.run(work())
    assert (report.outcome, of(report, "public.t").rows) == ("equal", 4)


@pytest.mark.full
def test_the_command(replica: Replica) -> None:
    """Exit codes, the document, and what people read."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 40) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    replica.caught_up()

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Not in this process, whose node writes its log to where the command writes.
        program = [sys.executable, "-m", "pubsub.cli", "--home", str(replica.node.home)]
        return subprocess.run(
            [*program, "verify", replica.name, *arguments], capture_output=True, text=True, check=False
        )

    ran = command()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[3].split() == [
        "public.t",
        "|",
        "equal",
        "|",
        *["40", "|", "40", "|", "0", "|", "0", "|", "0"],
    ]
    spoil(replica, "UPDATE {} SET v = 'it''s' WHERE id = 3", "t")
    spoil(replica, "DELETE FROM {} WHERE id = 4", "t")
    ran = command("t", "--show", "1")
    assert ran.returncode == 1
    assert "and 1 more" in ran.stdout
    ran = command("public.t")
    assert "  different id='3': v is 'v3' at the publisher, 'it''s' in Delta" in ran.stdout
    assert "  missing id='4': only at the publisher: id='4', v='v4'" in ran.stdout
    ran = command("--json")
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert (found["outcome"], found["tables"]["public.t"]["missing"]) == ("different", 1)
    assert {one["kind"]: one["key"] for one in found["tables"]["public.t"]["differences"]} == {
        "different": {"id": "3"},
        "missing": {"id": "4"},
    }
    (shown,) = replica.node.status_json(replica.name)["tables"]
    assert (shown["verification"]["outcome"], shown["verification"]["missing"]) == ("different", 1)
    ran = command("--repair", "--json")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["tables"]["public.t"]["repaired"] == 2
    ran = command("nope")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith('ERROR:  table "public.nope" is not part of subscription')


@pytest.mark.full
def test_a_sample(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (a int, b text, v text, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g, 'b' || g, md5(g::text) FROM generate_series(1, 60000) g",
        "CREATE TABLE bag (v text)",
        "INSERT INTO bag SELECT 'w' || g % 1000 FROM generate_series(1, 60000) g",
        "CREATE PUBLICATION p FOR TABLE t, bag",
        "ANALYZE",
    )
    replica.subscribe()
    replica.caught_up()
    report = verify(replica, sample=True)
    assert report.outcome == "equal"
    for one in report.tables:
        assert one.sampled
        assert 500 < one.rows < 40_000, one
    # Of rows that are all wrong some are in any sample, of either side.
    spoil(replica, "UPDATE {} SET v = 'x'", "t")
    spoil(replica, "UPDATE {} SET v = 'x'", "bag")
    report = verify(replica, sample=True)
    assert set(outcomes(report).values()) == {"different"}
    assert of(report, "public.t").different > 500
    replica.execute("DELETE FROM t")
    replica.caught_up()
    spoil(replica, "INSERT INTO {} SELECT CAST(id AS INT), 'x', 'y' FROM range(60000)", "t")
    assert of(verify(replica, "t", sample=True), "public.t").extra > 500


@pytest.mark.full
def test_versions_are_pinned_while_they_are_compared(replica: Replica, fault: Faults) -> None:
    """A verification holds its versions, and lets go of them; so does the next one of a pin that a killed one has left."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe()
    replica.caught_up()
    node = replica.node._node

    async def pinned() -> list[str]:
        return [one.name for one in await node.pinned_snapshots()]

    oid = replica.relation("t").subid
    replica.node.run(node.snapshot(replica.name, pin=f"pubsub_verify_{oid}"))
    fault.arm("comparing public.t")

    async def watched() -> Any:
        import asyncio

        verifying = asyncio.create_task(node.verify(replica.name))
        await asyncio.to_thread(fault.wait, "comparing public.t")
        during = await pinned()
        with pytest.raises(PubsubError, match="being verified by another process"):
            await node.verify(replica.name)
        fault.release("comparing public.t")
        return (await verifying).outcome, during, await pinned()

    assert replica.node.run(watched()) == ("equal", [f"pubsub_verify_{oid}"], [])
