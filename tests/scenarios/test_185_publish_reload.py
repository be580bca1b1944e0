"""A stream's values follow the settings that texts depend on when the upstream server's configuration is reloaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until


@contextmanager
def _received(server: EmbeddedPostgres, conninfo: str, slot: str, file: Path) -> Iterator[Path]:
    """Have pg_recvlogical write what a slot sends into a file; its session has an IntervalStyle of its own."""
    command = [str(server.bin("pg_recvlogical")), "--dbname", conninfo, "--slot", slot, "--start", "--file", str(file)]
    command += ["-o", "include-xids=0", "-o", "skip-empty-xacts=1", "--fsync-interval=0", "--status-interval=1"]
    environment = {**os.environ, "PGOPTIONS": "-c IntervalStyle=iso_8601"}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield file
        finally:
            process.terminate()


@pytest.mark.parametrize("version", ["18", pytest.param("15", marks=pytest.mark.full)])
def test_settings_are_reloaded(version: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(version))
        server.execute(
            "CREATE TABLE t (id serial, a timestamptz DEFAULT '2024-07-01 12:00Z', b interval DEFAULT '1 day 2 h',"
            " c bytea DEFAULT 'x')"
        )
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.terminate)
        create = "SELECT pg_create_logical_replication_slot('s', 'test_decoding')"
        server.query(create)
        publish.execute(create)
        files = [
            stack.enter_context(_received(server, conninfo, "s", tmp_path / name))
            for name, conninfo in (("theirs", server.conninfo("postgres")), ("ours", publish.conninfo()))
        ]

        def lines(text: str) -> list[str]:
            """Insert a row, and return its line of each stream once it has come and contains the text; else nothing."""
            ((number,),) = server.query("INSERT INTO t DEFAULT VALUES RETURNING id")
            row = f"id[integer]:{number} "
            wait_until(lambda: all(row in one.read_text() for one in files if one.exists()), "the row has come")
            found = [next(line for line in one.read_text().splitlines() if row in line) for one in files]
            return found if all(text in line for line in found) else []

        def same(text: str) -> None:
            ours, theirs = wait_until(lambda: lines(text), f"both say {text}")
            assert ours == theirs

        wait_until(lambda: all(one.exists() for one in files), "both stream")
        same("'2024-07-01 12:00:00+00'")
        for name, value in (("datestyle", "SQL, DMY"), ("bytea_output", "escape"), ("intervalstyle", "sql_standard")):
            server.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        server.query("SELECT pg_reload_conf()")
        same("'01/07/2024 12:00:00 UTC' b[interval]:'P1DT2H' c[bytea]:'x'")
        server.execute("ALTER SYSTEM RESET ALL")
        server.query("SELECT pg_reload_conf()")
        same(r"'2024-07-01 12:00:00+00' b[interval]:'P1DT2H' c[bytea]:'\x78'")
        slots = "SELECT slot_name, active FROM pg_replication_slots"
        assert publish.query(slots) == [("s", True)], "its stream was not cut"


_REPORTED = (b"TimeZone", b"DateStyle", b"IntervalStyle", b"search_path", b"default_transaction_read_only")
_SETTINGS = {
    "timezone": "Asia/Kolkata",
    "datestyle": "SQL, DMY",
    "intervalstyle": "iso_8601",
    "search_path": '"its", "a B", public',
    "log_line_prefix": '%m "\u00e9" \\\\ ',
    "pubsub.text": " two  spaces\t",
}


def test_a_client_is_told_of_settings_that_were_reloaded_meanwhile(tmp_path: Path) -> None:
    """What a walsender reports behind its stream, and what SHOW and pg_settings say then, byte for byte."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18"))
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.terminate)
        sessions = [
            pq.PGconn.connect(f"{conninfo} replication=database".encode())
            for conninfo in (server.conninfo("postgres"), publish.conninfo())
        ]
        before = [sessions[0].parameter_status(name) for name in _REPORTED]
        for one in sessions:
            stack.callback(one.finish)
            one.exec_(b"CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL test_decoding (SNAPSHOT 'nothing')")
            assert one.exec_(b"START_REPLICATION SLOT s LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        with psycopg.connect(server.conninfo("postgres"), autocommit=True) as administrator:
            for name, value in _SETTINGS.items():
                administrator.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        server.query("SELECT pg_reload_conf()")
        pid = sessions[1].backend_pid
        wait_until(
            lambda: server.query(
                f"SELECT FROM pg_stat_activity WHERE pid = {pid} AND query_start > pg_conf_load_time() AND state = 'idle'"
            ),
            "our server has looked at the settings",
        )
        found = []
        for one in sessions:
            one.put_copy_end()
            while one.get_copy_data(0)[0] > 0:
                pass
            while one.get_result() is not None:
                pass
            shown = [one.exec_(f"SHOW {name}".encode()).get_value(0, 0) for name in _SETTINGS]
            listed = one.exec_(
                b"SELECT name, setting, source, sourceline, pending_restart FROM pg_settings WHERE source = 'configuration file'"
            )
            rows = [[listed.get_value(row, column) for column in range(5)] for row in range(listed.ntuples)]
            found.append(([one.parameter_status(name) for name in _REPORTED], shown, rows))
        assert found[1] == found[0]
        assert found[0][0] != before
        server.execute("ALTER SYSTEM RESET ALL")


@pytest.mark.full
def test_wal_sender_timeout_is_reloaded(tmp_path: Path) -> None:
    """A stream whose client never says anything ends once there is a timeout."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18"))
        server.execute("ALTER SYSTEM SET wal_sender_timeout = 0")
        server.query("SELECT pg_reload_conf()")
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.terminate)
        publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        silent = pq.PGconn.connect(publish.conninfo(replication="database").encode())
        stack.callback(silent.finish)
        assert silent.exec_(b"START_REPLICATION SLOT s LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        server.execute("ALTER SYSTEM SET wal_sender_timeout = '1s'")
        server.query("SELECT pg_reload_conf()")
        active = "SELECT active FROM pg_replication_slots"
        wait_until(lambda: publish.query(active) == [(False,)], "the silent client is given up")
