"""The snapshot of a new slot is exactly what was committed before the slot's start, while many clients write."""

from __future__ import annotations

import itertools
import subprocess
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from tests.support.publish import Publish

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
