"""Streams that share a pass have the settings of their own sessions: what texts depend on, and the client's encoding."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench import machine
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until

pytestmark = pytest.mark.full

SESSIONS = {
    "tokyo": ("-c TimeZone=Asia/Tokyo -c DateStyle=German -c IntervalStyle=iso_8601", "UTF8"),
    "york": ("-c TimeZone=America/New_York -c bytea_output=escape -c extra_float_digits=-3", "LATIN1"),
    "plain": ("", "UTF8"),
}
"""`options` and client_encoding of the sessions."""
PLUGINS = {
    "pgoutput": ("-o", "proto_version=1", "-o", "publication_names=p"),
    "test_decoding": ("-o", "skip-empty-xacts=1"),
}
ROW = (
    "'Grüße'",
    "'2024-07-01 12:00Z'::timestamptz",
    "'1 day 2 h'::interval",
    r"'x\377'::bytea",
    "0.1::float8 + 0.2::float8",
)


@contextmanager
def _received(
    server: EmbeddedPostgres, conninfo: str, slot: str, plugin: str, session: str, file: Path
) -> Iterator[Path]:
    command = [str(server.bin("pg_recvlogical")), "--dbname", conninfo, "--slot", slot, "--start", "--file", str(file)]
    command += [*PLUGINS[plugin], "--fsync-interval=0", "--status-interval=1"]
    options, encoding = SESSIONS[session]
    with subprocess.Popen(command, env={**os.environ, "PGOPTIONS": options, "PGCLIENTENCODING": encoding}) as process:
        try:
            yield file
        finally:
            process.terminate()


def test_each_client_has_its_own_settings(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18"))
        server.execute(
            "CREATE TABLE t (id serial, v text, a timestamptz, b interval, c bytea, d float8); CREATE PUBLICATION p FOR TABLE t"
        )
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.kill)
        pairs: dict[str, list[Path]] = {}
        for plugin in PLUGINS:
            for session in SESSIONS:
                slot = f"{session}_{plugin}"
                create = f"SELECT pg_create_logical_replication_slot('{slot}', '{plugin}')"
                server.query(create)
                publish.execute(create)
                pairs[slot] = [
                    stack.enter_context(
                        _received(server, conninfo, slot, plugin, session, tmp_path / f"{slot}.{number}")
                    )
                    for number, conninfo in enumerate((server.conninfo("postgres"), publish.conninfo()))
                ]
        files = [file for pair in pairs.values() for file in pair]
        wait_until(lambda: all(file.exists() for file in files), "all stream")
        for _ in range(3):
            server.execute(f"INSERT INTO t (v, a, b, c, d) VALUES ({', '.join(ROW)})")
        server.execute("INSERT INTO t (v) VALUES ('the end')")
        wait_until(lambda: all(b"the end" in file.read_bytes() for file in files), "all has come")
        for slot, (theirs, ours) in pairs.items():
            # A transaction's end may be in the next write.
            wait_until(lambda ours=ours, theirs=theirs: ours.read_bytes() == theirs.read_bytes(), f"{slot} is the same")
        contents = {slot: theirs.read_bytes() for slot, (theirs, _) in pairs.items()}
        assert "Grüße".encode("latin-1") in contents["york_pgoutput"]
        assert "Grüße".encode() in contents["tokyo_pgoutput"]
        assert b"01.07.2024 21:00:00 JST" in contents["tokyo_pgoutput"]
        assert b"08:00:00-04" in contents["york_pgoutput"]
        assert b"P1DT2H" in contents["tokyo_test_decoding"]


def test_its_processes_tell_where_they_stand(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18"))
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.kill)
        publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        decoding = wait_until(
            lambda: [pid for pid, name in machine.descendants(publish.pid).items() if name == "decoding"], "it decodes"
        )
        for pid in (publish.pid, *machine.descendants(publish.pid)):
            os.kill(pid, signal.SIGUSR1)
        for text in ("where this process stands", "streaming/process.py", "forks/fork_server.py"):
            wait_until(lambda text=text: text in publish.read_log(), text)
        assert publish.query("SELECT count(*) FROM pg_logical_slot_get_changes('s', NULL, NULL)") == [(0,)]
        assert set(decoding) <= machine.descendants(publish.pid).keys()
