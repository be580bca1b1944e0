"""The snapshot of a new slot is exactly what was committed before the slot's start, while many clients write."""

from __future__ import annotations

import itertools
import subprocess
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

_SCRIPT = """
INSERT INTO log SELECT FROM generate_series(1, 1 + (random() * 3)::int);
UPDATE counters SET n = n + 1 WHERE id = 1 + :client_id;
"""
_CLIENTS = 16
_READ = "SELECT (SELECT count(*) FROM log), (SELECT coalesce(sum(id), 0) FROM log), (SELECT sum(n) FROM counters)"


@contextmanager
def _load(database: Database, script: Path) -> Iterator[None]:
    script.write_text(f"BEGIN;{_SCRIPT}COMMIT;")
    pgbench = database.server.bin("pgbench")
    command = [
        pgbench,
        "-n",
        "-c",
        str(_CLIENTS),
        "-j",
        "2",
        "-T",
        "3600",
        "-R",
        "1500",
        "-f",
        script,
        database.conninfo,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            yield
            assert running.poll() is None
        finally:
            running.kill()


@pytest.mark.parametrize("how", ["use", "export"])
@pytest.mark.full
def test_every_snapshot_fits_its_slots_start(database: Database, tmp_path: Path, how: str) -> None:
    """The server's own slot tells afterwards what was committed before each start."""
    database.execute("CREATE TABLE log (id bigserial)")
    database.execute(f"CREATE TABLE counters AS SELECT id, 0 n FROM generate_series(1, {_CLIENTS}) id")
    database.execute("ALTER TABLE counters REPLICA IDENTITY FULL")
    database.execute("SELECT pg_create_logical_replication_slot('truth', 'test_decoding')")
    publish = Publish(tmp_path / "node", database.conninfo)
    found: list[tuple[int, tuple[int, ...]]] = []
    try:
        with _load(database, tmp_path / "script.sql"):
            for number in range(100):
                with psycopg.connect(f"{publish.conninfo()} replication=database", autocommit=True) as replication:
                    create = f"CREATE_REPLICATION_SLOT s{number} TEMPORARY LOGICAL pgoutput (SNAPSHOT '{how}')"
                    if how == "use":
                        replication.execute("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
                    (row,) = replication.execute(create.encode()).fetchall()
                    start = int(Lsn.parse(row[1]))
                    if how == "use":
                        found.append((start, replication.execute(_READ.encode()).fetchall()[0]))
                        replication.execute("COMMIT")
                        continue
                    with psycopg.connect(database.conninfo) as reader:
                        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                        reader.execute(f"SET TRANSACTION SNAPSHOT '{row[2]}'".encode())
                        found.append((start, reader.execute(_READ.encode()).fetchall()[0]))
        ends, states = _states(database)
        wrong = [(Lsn(start), seen) for start, seen in found if states[bisect_right(ends, start)] != seen]
        assert (len(found), wrong) == (100, [])
        assert len({seen for _, seen in found}) > 90
    finally:
        publish.terminate()
        database.execute("SELECT pg_drop_replication_slot('truth')")


def _states(database: Database) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return where each commit ends, and what is to be read before the first one and behind each."""
    changes = database.query(
        "SELECT lsn, data FROM pg_logical_slot_get_changes('truth', NULL, NULL, 'include-xids', '0')"
    )
    ends: list[int] = []
    states = [(0, 0, 0)]
    rows, ids, updates = states[0]
    for lsn, data in changes:
        if data == "COMMIT":
            ends.append(int(Lsn.parse(str(lsn))))
            states.append((rows, ids, updates))
        elif data.startswith("table public.log: INSERT"):
            rows, ids = rows + 1, ids + int(data.rpartition(":")[2])
        elif data.startswith("table public.counters: UPDATE"):
            updates += 1
    assert all(one < other for one, other in itertools.pairwise(ends))
    return ends, states


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[EmbeddedPostgres, Publish]]:
    """A server and ours before it.  Of two committed rows the first waits for a standby; a list of running transactions follows."""
    with EmbeddedPostgres("18") as server:
        server.execute("CREATE TABLE t (id int)")
        publish = Publish(tmp_path / "node", server.conninfo())
        try:
            _alter(server, "SET synchronous_standby_names = 'nobody'", "nobody")
            first = threading.Thread(target=server.execute, args=("INSERT INTO t VALUES (1)",))
            first.start()
            try:
                waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                wait_until(lambda: server.query(waits), "the first one waits")
                server.execute("SET synchronous_commit = local; INSERT INTO t VALUES (2)")
                server.execute("CHECKPOINT")
                # It returns when what is there now was read.
                publish.execute("SELECT pg_create_logical_replication_slot('temporary', 'test_decoding', true)")
                yield server, publish
            finally:
                _alter(server, "RESET synchronous_standby_names", "")
                first.join()
        finally:
            publish.kill()


def _alter(server: EmbeddedPostgres, what: str, value: str) -> None:
    server.execute(f"ALTER SYSTEM {what}")
    server.query("SELECT pg_reload_conf()")
    wait_until(lambda: server.query("SHOW synchronous_standby_names") == [(value,)], "the setting is there")


def _asks(server: EmbeddedPostgres) -> list[tuple[int]]:
    """Return the server's processes whose sessions look for a snapshot that fits."""
    asked = "query LIKE '%pg_current_snapshot%' OR query = 'ROLLBACK'"
    return server.query(f"SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND ({asked})")


@pytest.mark.full
def test_a_commit_behind_one_that_waits_is_not_sent_again(waiting: tuple[EmbeddedPostgres, Publish]) -> None:
    """The list of running transactions was taken to say that no snapshot need be compared with it any more."""
    server, publish = waiting
    copied: list[int] = []

    def copy() -> None:
        with psycopg.connect(publish.conninfo(replication="database"), autocommit=True) as replication:
            (row,) = replication.execute(
                b"CREATE_REPLICATION_SLOT s LOGICAL test_decoding (SNAPSHOT 'export')"
            ).fetchall()
            with server.connect() as reader:
                reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                reader.execute(f"SET TRANSACTION SNAPSHOT '{row[2]}'".encode())
                copied.extend(one for (one,) in reader.execute("SELECT id FROM t").fetchall())
                reader.execute("COMMIT")

    copies = threading.Thread(target=copy)
    copies.start()
    wait_until(lambda: _asks(server) or not copies.is_alive(), "a snapshot was taken")
    _alter(server, "RESET synchronous_standby_names", "")
    copies.join()
    server.execute("INSERT INTO t VALUES (3)")
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: 3 in follower.ids, "the last row has come")
    assert sorted(copied + follower.ids) == [1, 2, 3]


@pytest.mark.full
def test_a_client_that_leaves_while_no_snapshot_fits(waiting: tuple[EmbeddedPostgres, Publish]) -> None:
    """Its session asked the server for snapshots for as long as the commit waited."""
    server, publish = waiting
    replication = psycopg.connect(publish.conninfo(replication="database"), autocommit=True)
    replication.pgconn.send_query(b"CREATE_REPLICATION_SLOT s LOGICAL test_decoding (SNAPSHOT 'export')")
    ((process,),) = wait_until(lambda: _asks(server), "it asks for a snapshot")
    replication.close()
    there = f"SELECT 1 FROM pg_stat_activity WHERE pid = {process}"
    wait_until(lambda: not server.query(there), "its session has ended")
    assert publish.query("SELECT slot_name FROM pg_replication_slots") == []
