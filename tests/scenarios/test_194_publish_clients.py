"""Clients of replication as they are, each beside PostgreSQL's own walsender: pg_recvlogical, psycopg2, JDBC."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extras
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import java_programs
from tests.support.publish import Publish
from tests.support.replica import PATIENCE, wait_until

_CHANGING = re.compile(
    rb"\b[0-9A-F]+/[0-9A-F]+\b|[0-9A-F]{8}-[0-9A-F]{8}-\d+|(?:BEGIN|COMMIT) \d+|PID \d+|\(at [^)]*\)"
)


class Sides:
    """Two connection strings for one database: by way of our server, and to PostgreSQL itself."""

    def __init__(self, database: Database, publish: Publish) -> None:
        self.database, self.publish = database, publish
        self.ours, self.theirs = publish.conninfo(dbname=database.name), database.conninfo

    def __iter__(self) -> Iterator[str]:
        yield from (self.ours, self.theirs)

    def end(self) -> str:
        """Return the LSN up to which there is WAL."""
        ((lsn,),) = self.database.query("SELECT pg_current_wal_lsn()")
        return str(lsn)


@pytest.fixture
def sides(served: Publish, database: Database) -> Iterator[Sides]:
    """The test's database, with our server before it; both are left without slots."""
    yield Sides(database, served)
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert served.query(slots, dbname=database.name) == []
    assert database.query(slots) == []


# pg_recvlogical


def recvlogical(server: EmbeddedPostgres, conninfo: str, *arguments: str) -> tuple[int, bytes, bytes]:
    program = [str(server.bin("pg_recvlogical")), "--dbname", conninfo, *arguments]
    ran = subprocess.run(program, capture_output=True, check=False, timeout=60)
    return ran.returncode, _CHANGING.sub(b"*", ran.stdout), _CHANGING.sub(b"*", ran.stderr)


def both(sides: Sides, *arguments: str) -> bytes:
    """Run pg_recvlogical on both sides; the answers must be the same.  Return what ours printed."""
    ours, theirs = (recvlogical(sides.database.server, one, *arguments) for one in sides)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2]), f"{arguments}: {ours[2]!r}, not {theirs[2]!r}"
    assert ours[1] == theirs[1], arguments
    return ours[1]


def test_pg_recvlogical(sides: Sides) -> None:
    """Slots made and dropped, twice, with two_phase; changes up to --endpos with options of both plugins; each error."""
    a, b = f"{sides.database.name}_a", f"{sides.database.name}_b"
    both(sides, "--slot", a, "--create-slot", "-P", "test_decoding")
    both(sides, "--slot", a, "--create-slot", "-P", "test_decoding")
    both(sides, "--slot", a, "--create-slot", "-P", "test_decoding", "--if-not-exists")
    both(sides, "--slot", b, "--create-slot", "-P", "pgoutput", "--two-phase")
    sides.database.execute("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
    for statement in (
        "INSERT INTO t SELECT g, repeat('x', g) FROM generate_series(1, 100) g",
        "UPDATE t SET a = a + 1000 WHERE a < 5; DELETE FROM t WHERE a = 7",
        "SELECT pg_logical_emit_message(true, 'prefix', 'content')",
        "BEGIN; INSERT INTO t VALUES (-1, NULL); SAVEPOINT s; INSERT INTO t VALUES (-2); ROLLBACK TO s; COMMIT; TRUNCATE t",
    ):
        if "TRUNCATE" in statement:
            # After which PostgreSQL repeats the Relation message.
            before = ["--start", "--file", "-", "--no-loop", "--endpos", sides.end()]
        sides.database.execute(statement)
    until = [*before[:-1], sides.end()]
    printed = both(sides, "--slot", a, *until, "-o", "include-xids=0", "-o", "skip-empty-xacts=1")
    assert printed.count(b"INSERT") == 101
    assert both(sides, "--slot", a, *until, "-o", "include-xids=0", "-o", "skip-empty-xacts=1") == b"", (
        "it was confirmed"
    )
    everything = ("proto_version=4", "publication_names=p", "messages=on", "binary=on", "origin=none")
    assert both(sides, "--slot", b, *before, *(f"--option={one}" for one in everything))
    for wrong in (
        ("-o", "proto_version=1"),
        ("-o", "proto_version=99", "-o", "publication_names=p"),
        ("-o", "proto_version=1", "-o", "publication_names=p", "-o", "nope=1"),
        ("-o", "proto_version=1", "-o", "publication_names=p", "-o", "binary=maybe"),
        ("-o", "proto_version=1", "-o", "publication_names=p", "-o", "proto_version=2"),
    ):
        both(sides, "--slot", b, *until, *wrong)
    for wrong in (("-o", "nope=1"), ("-o", "include-xids=maybe")):
        both(sides, "--slot", a, *until, *wrong)
    both(sides, "--slot", "nope", *until)
    for slot in (a, b, a):
        both(sides, "--slot", slot, "--drop-slot")


@pytest.mark.full
def test_pg_recvlogical_with_prepared_transactions(tmp_path: Path) -> None:
    with EmbeddedPostgres("18", settings={"max_prepared_transactions": 5}) as server:
        server.create_database("p")
        sides = Sides(Database(server, "p"), Publish(tmp_path / "node", server.conninfo("p")))
        server.execute("CREATE TABLE t (a int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t", "p")
        for slot, more in (("one", ["--enable-two-phase"]), ("two", [])):
            both(sides, "--slot", slot, "--create-slot", "-P", "test_decoding", *more)
        for statement in (
            "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'g'",
            "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'h'",
            "COMMIT PREPARED 'g'",
            "ROLLBACK PREPARED 'h'",
        ):
            server.execute(statement, "p")
        until = ["--start", "--file", "-", "--no-loop", "--endpos", sides.end(), "-o", "include-xids=0"]
        assert b"PREPARE TRANSACTION 'h'" in both(sides, "--slot", "one", *until)
        assert b"PREPARED" not in both(sides, "--slot", "two", *until)
        for slot in ("one", "two"):
            both(sides, "--slot", slot, "--drop-slot")
        assert sides.publish.terminate() == 0


def test_pg_recvlogical_goes_on_after_a_kill(sides: Sides, tmp_path: Path) -> None:
    """It runs, our server is killed and started, it connects again: each change is in its file, from its slot."""
    slot, file, server = f"{sides.database.name}_r", tmp_path / "changes", sides.database.server
    assert recvlogical(server, sides.ours, "--slot", slot, "--create-slot", "-P", "test_decoding")[0] == 0
    sides.database.execute("CREATE TABLE t (a int PRIMARY KEY)")
    program = [
        str(server.bin("pg_recvlogical")),
        "--dbname",
        sides.ours,
        "--slot",
        slot,
        "--start",
        "--file",
        str(file),
    ]
    program += ["--fsync-interval=1", "--status-interval=1"]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as running:
        try:

            def received(number: int) -> None:
                wait_until(
                    lambda: f"a[integer]:{number}\n" in (file.read_text() if file.exists() else ""), f"row {number}"
                )

            sides.database.execute("INSERT INTO t VALUES (1)")
            received(1)
            sides.publish.kill()
            sides.database.execute("INSERT INTO t VALUES (2)")
            sides.publish.start()
            received(2)
            sides.database.execute("INSERT INTO t VALUES (3)")
            received(3)
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 0
    free = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
    wait_until(lambda: sides.publish.query(free) == [(False,)], "the slot is free")
    assert recvlogical(server, sides.ours, "--slot", slot, "--drop-slot")[0] == 0


# psycopg2


def psycopg2_session(conninfo: str, database: Database, slot: str, plugin: str, options: dict[str, Any]) -> list[Any]:
    """Go through what psycopg2's replication support has, and return what was seen, without positions."""
    seen: list[Any] = []
    connection = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    cursor = connection.cursor()
    cursor.execute("IDENTIFY_SYSTEM")
    identity = cursor.fetchone()
    seen.append((identity[0], identity[1], identity[3]))
    cursor.create_replication_slot(slot, output_plugin=plugin)
    try:
        cursor.create_replication_slot(slot, output_plugin=plugin)
    except psycopg2.errors.DuplicateObject as error:
        seen.append((error.pgcode, str(error).strip()))
    database.execute(
        "TRUNCATE t; INSERT INTO t SELECT g, 'psycopg2' FROM generate_series(1, 50) g; DELETE FROM t WHERE a < 10"
    )
    decode = plugin == "test_decoding"
    # consume_stream, with feedback for each message, until a message says so.
    cursor.start_replication(slot_name=slot, decode=decode, options=options, status_interval=1)

    def take(message: Any) -> None:
        payload = message.payload if decode else message.payload[:1]
        seen.append(payload)
        message.cursor.send_feedback(flush_lsn=message.data_start)
        if payload == b"C" or (decode and payload.startswith("COMMIT")):
            raise psycopg2.extras.StopReplication

    for _ in range(2 if decode else 1):
        with pytest.raises(psycopg2.extras.StopReplication):
            cursor.consume_stream(take)
        if seen[-1] in ("BEGIN", "COMMIT") and len(seen) > 50:
            break
    connection.close()
    # Again from the slot, with read_message and select.
    connection = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    cursor = connection.cursor()
    wait_until(lambda: started(cursor, slot, options, decode=decode), "the slot is free")
    database.execute("UPDATE t SET b = 'x' WHERE a = 20; INSERT INTO t VALUES (1000, 'end')")
    deadline = time.monotonic() + 60
    while not any("end" in str(one) for one in seen):
        message = cursor.read_message()
        if message is not None:
            seen.append(
                message.payload
                if decode
                else message.payload.replace(b"\0", b"")[-10:]
                if message.payload[:1] == b"I"
                else message.payload[:1]
            )
            cursor.send_feedback(write_lsn=message.data_start, flush_lsn=message.data_start, reply=True)
        else:
            assert time.monotonic() < deadline, seen[-3:]
            select.select([cursor], [], [], 1)
    connection.close()
    connection = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    wait_until(lambda: dropped(connection.cursor(), slot), "the slot is free")
    connection.close()
    return seen


def started(cursor: Any, slot: str, options: dict[str, Any], *, decode: bool) -> bool:
    try:
        cursor.start_replication(slot_name=slot, decode=decode, options=options)
    except psycopg2.errors.ObjectInUse:
        return False
    return True


def dropped(cursor: Any, slot: str) -> bool:
    try:
        cursor.drop_replication_slot(slot)
    except psycopg2.errors.ObjectInUse:
        return False
    return True


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("test_decoding", {"include-xids": "0", "skip-empty-xacts": "1"}),
        ("pgoutput", {"proto_version": "1", "publication_names": "p"}),
    ],
)
def test_psycopg2(sides: Sides, plugin: str, options: dict[str, str]) -> None:
    """LogicalReplicationConnection: slots, consume_stream, read_message, feedback; the same is seen on both sides."""
    sides.database.execute("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
    ours, theirs = (
        psycopg2_session(one, sides.database, f"{sides.database.name}_psycopg2", plugin, options) for one in sides
    )
    assert len(ours) > 50
    # PostgreSQL repeats Relation messages at moments that differ between its own walsenders.
    assert [one for one in ours if one != b"R"] == [one for one in theirs if one != b"R"]


# JDBC


@pytest.mark.full
@pytest.mark.skipif(not java_programs.has_compiler(), reason="a JDK is needed")
@pytest.mark.parametrize(
    ("plugin", "messages", "options"),
    [
        ("test_decoding", 22, ["include-xids", "false", "skip-empty-xacts", "true"]),
        ("pgoutput", 23, ["proto_version", "1", "publication_names", "p"]),
    ],
)
def test_jdbc(sides: Sides, plugin: str, messages: int, options: Sequence[str]) -> None:
    """PGReplicationStream of PostgreSQL's JDBC driver; the same is seen on both sides."""
    seen = []
    for conninfo in sides:
        sides.database.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (a int PRIMARY KEY, b text)")
        sides.database.execute("DROP PUBLICATION IF EXISTS p; CREATE PUBLICATION p FOR TABLE t")
        given = dict(part.split("=", 1) for part in conninfo.split())
        url = f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}"
        arguments = (url, "postgres", f"{sides.database.name}_jdbc", plugin, str(messages), *options)
        seen.append(java_programs.run("ReplicationStreams", java_programs.POSTGRESQL, *arguments))
    assert seen[0] == seen[1]
    assert seen[0][-1] == "dropped"
