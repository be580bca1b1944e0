"""A table that is altered, renamed or rewritten between a snapshot and the reading of its rows: they are never mixed up."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pubsub.delta.writers import copy_chunks
from pubsub.errors import SerializationFailure
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.read_table import ReadTable, hold_as_described
from pubsub.testing.fixtures import Database
from tablesync import choose_copier, chunk_reader, window
from tests.support.captured_logs import captured_logs
from tests.support.replica import Faults, Replica, wait_until

TABLE = (
    "CREATE TABLE a (id int PRIMARY KEY, n int, t text); INSERT INTO a SELECT g, g, 't' FROM generate_series(1, 90) g"
)
PARTITIONED = (
    "CREATE TABLE a (id int PRIMARY KEY, n int, t text) PARTITION BY RANGE (id);"
    "CREATE TABLE a_1 PARTITION OF a FOR VALUES FROM (0) TO (50); CREATE TABLE a_2 PARTITION OF a DEFAULT;"
    "INSERT INTO a SELECT g, g, 't' FROM generate_series(1, 90) g"
)
OTHER = "CREATE TABLE other (id int PRIMARY KEY, n int, t text); INSERT INTO other VALUES (1000, 7, 'of the other')"


@pytest.mark.parametrize(
    ("table", "alter"),
    [
        (TABLE, "ALTER TABLE a RENAME TO x; ALTER TABLE other RENAME TO a; ALTER TABLE x RENAME TO other"),
        (TABLE, "ALTER TABLE a RENAME n TO m; ALTER TABLE a ADD n int"),
        # The rows' new copies are younger than the snapshot, which sees none of them.
        (PARTITIONED, "ALTER TABLE a ALTER n TYPE bigint"),
    ],
    ids=["names of tables", "names of columns", "type of partitions"],
)
def test_altered_between_the_snapshot_and_the_copy(replica: Replica, fault: Faults, table: str, alter: str) -> None:
    publication = "CREATE PUBLICATION p FOR TABLE a WITH (publish_via_partition_root)"
    replica.execute(f"{table}; {OTHER}; {publication}")
    fault.arm("copy planned public.a")
    # Which such a copy, that has to begin anew, does not disable.
    replica.subscribe(disable_on_error=True)
    fault.wait("copy planned public.a")
    replica.execute(alter)
    fault.release("copy planned public.a")
    replica.alter("REFRESH PUBLICATION")
    name = "other" if "TO other" in alter else "a"
    replica.execute(f"INSERT INTO {name} (id, n, t) VALUES (2000, 1, 'streamed')")
    replica.caught_up()
    (relation,) = replica.node.relations(replica.name)
    assert (relation.name, relation.error) == (name, None)
    replica.assert_equal(name)


@pytest.mark.full
@pytest.mark.parametrize(
    "alter",
    [
        "ALTER TABLE a RENAME TO x; ALTER TABLE other RENAME TO a; ALTER TABLE x RENAME TO other",
        "ALTER TABLE a RENAME n TO m; ALTER TABLE a ADD n int",
    ],
    ids=["names of tables", "names of columns"],
)
def test_altered_between_the_chunks_of_a_copy(replica: Replica, monkeypatch: pytest.MonkeyPatch, alter: str) -> None:
    """Some chunks are read, others are still to be: with the new names these came from elsewhere, under the old snapshot."""
    monkeypatch.setattr(choose_copier, "_LEAST_CHUNK_BYTES", 65536)
    monkeypatch.setattr(choose_copier, "_MOST_CHUNK_BYTES", 65536)
    rows = "INSERT INTO a SELECT g, g, repeat('t', 1000) FROM generate_series(1, 4000) g"
    replica.execute(f"{TABLE.partition(';')[0]}; {rows}; {OTHER}; CREATE PUBLICATION p FOR TABLE a")
    commit, kept = copy_chunks.commit, list[int]()

    def altering(log: Any, copy: str, attempt: str, chunk: int, *args: Any, **named: Any) -> None:
        commit(log, copy, attempt, chunk, *args, **named)
        kept.append(chunk)
        if len(kept) == 5:
            replica.execute(alter)

    monkeypatch.setattr(copy_chunks, "commit", altering)
    with captured_logs() as logs:
        replica.subscribe(disable_on_error=True)
        wait_until(
            lambda: any("while it was read" in (entry.get("reason") or "") for entry in logs), "the copy to notice it"
        )
    name = "other" if "TO other" in alter else "a"
    replica.alter("REFRESH PUBLICATION")
    replica.execute(f"INSERT INTO {name} (id, n, t) VALUES (5000, 1, 'streamed')")
    replica.caught_up()
    replica.assert_equal(name)


def test_a_name_that_another_table_takes_during_the_copy(replica: Replica, fault: Faults) -> None:
    """The other one's rows came into the copied table, until apply took it over."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'copied')",
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA public",
    )
    fault.arm("copy finished public.a")
    replica.subscribe()
    fault.wait("copy finished public.a")
    replica.execute(
        "ALTER TABLE a RENAME TO old; CREATE TABLE a (id int PRIMARY KEY, t text)",
        "INSERT INTO a VALUES (2, 'of the other')",
        "INSERT INTO old VALUES (3, 'caught up')",
    )
    ((written,),) = replica.query("SELECT pg_current_wal_lsn()::text")
    wait_until(lambda: replica.received_lsn() >= Lsn.parse(written), "apply to leave them to the sync worker")
    fault.release("copy finished public.a")
    replica.until_ready()
    replica.execute("INSERT INTO old VALUES (4, 'applied')")
    replica.caught_up()
    assert {row["id"]: row["t"] for row in replica.rows("old")} == {1: "copied", 3: "caught up", 4: "applied"}


class Reader:
    """Reads the row of a key anew, as a copy's window does."""

    def __init__(self, database: Database) -> None:
        self.conninfo = database.conninfo
        self.read = asyncio.run(self._describe())

    async def _describe(self) -> ReadTable:
        async with await Connection.connect(self.conninfo) as connection:
            await connection.execute(snapshots.BEGIN)
            oids = await connection.query("SELECT 'public.a'::regclass::oid")
            return ReadTable.of(await definitions.table_definition(connection, int(oids[0][0] or 0)), ("id", "n", "t"))

    def rows(self) -> list[dict[str, Any]]:
        schema = pa.schema([("id", pa.int32()), ("n", pa.int32()), ("t", pa.string())])
        source = chunk_reader.CopySource(self.conninfo, "read again", self.read, "", None)
        target: Any = type("Target", (), {"schema": schema, "source": None})
        keys = pa.table({"id": pa.array([3], pa.int32())})
        return window.read_again(source, target, keys, {"id": "integer"}, Cut())[0].to_pylist()


@pytest.mark.parametrize(
    ("alter", "how"),
    [
        ("ALTER TABLE a RENAME TO a_old; ALTER TABLE other RENAME TO a", "renamed"),
        ("ALTER TABLE a RENAME TO a_old", "renamed or dropped"),
        ("ALTER TABLE a RENAME n TO m; ALTER TABLE a ADD n int", "altered"),
        ("ALTER TABLE a RENAME n TO m", "altered"),
        ("ALTER TABLE a DROP n", "altered"),
        ("ALTER TABLE a ALTER n TYPE oid", "altered"),
        # One that only a row filter reads.
        ("ALTER TABLE a RENAME f TO g", "altered"),
        # Of another session, while this one waits for its lock, and has its snapshot.
        ("ALTER TABLE a ALTER f TYPE bigint", "rewritten or truncated"),
        ("TRUNCATE a", "rewritten or truncated"),
    ],
)
def test_altered_before_rows_are_read_again(database: Database, alter: str, how: str) -> None:
    database.execute(f"{TABLE}; {OTHER}; ALTER TABLE a ADD f int")
    reader = Reader(database)
    assert reader.rows() == [{"id": 3, "n": 3, "t": "t"}]
    database.execute("ALTER TABLE a ADD more int; CREATE INDEX ON a (n)")
    assert reader.rows() == [{"id": 3, "n": 3, "t": "t"}], "nothing that it reads was altered"
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(reader.rows())
        except SerializationFailure as error:
            found.append(error)

    with psycopg.connect(database.conninfo, autocommit=True) as other:
        other.execute(f"BEGIN; LOCK TABLE a; {alter}")
        thread = threading.Thread(target=read)
        thread.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'read again' AND wait_event_type = 'Lock'"
        wait_until(lambda: database.query(waits), "the reader waits for the lock")
        other.execute("COMMIT")
        thread.join()
    (error,) = found
    assert isinstance(error, SerializationFailure), found
    assert f"was {how} while it was read" in error.message


def test_a_table_of_which_no_column_is_read(database: Database) -> None:
    """As if all are masked: then there is no column whose table the server tells, and another's rows were copied."""
    database.execute(f"{TABLE}; {OTHER}")
    read = replace(Reader(database).read, columns=())
    with psycopg.connect(database.conninfo) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        hold_as_described(connection, read)
    # Without any column's name that could be another's.
    alone = replace(read, attributes={})
    with psycopg.connect(database.conninfo) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        database.execute("ALTER TABLE a RENAME TO x; ALTER TABLE other RENAME TO a")
        for one in (read, alone):
            with pytest.raises(SerializationFailure, match="was renamed while it was read"):
                hold_as_described(connection, one)


@pytest.mark.full
@pytest.mark.parametrize(
    "alter", ["ALTER TABLE a RENAME n TO x; ALTER TABLE a RENAME t TO n; ALTER TABLE a RENAME x TO t", "TRUNCATE a"]
)
def test_altered_while_it_is_verified(replica: Replica, fault: Faults, alter: str) -> None:
    """The comparison says that it could not be made; it finds no difference where there is none, and repairs none."""
    replica.execute(f"{TABLE}; ALTER TABLE a ALTER n TYPE text", "CREATE PUBLICATION p FOR TABLE a")
    replica.subscribe()
    replica.caught_up()
    fault.arm("comparing public.a")

    async def verify() -> Any:
        task = asyncio.create_task(replica.node._node.verify(replica.name, repair=True))
        await asyncio.to_thread(fault.wait, "comparing public.a")
        await asyncio.to_thread(replica.execute, alter)
        fault.release("comparing public.a")
        return await task

    (report,) = replica.node.run(verify()).tables
    assert report.outcome == "failed", report
    assert "while it was read" in str(report.reason)
    replica.execute("INSERT INTO a (id) VALUES (2000)")
    replica.assert_equal("a")
