"""A stream's values follow the settings that texts depend on when the upstream server's configuration is reloaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

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
