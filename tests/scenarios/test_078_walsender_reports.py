"""What `walsender decode` and `pubsub publish` report to the server: no more than is kept, and in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psycopg
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.bad_network import BadNetwork
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until
from tests.support.walsender_decodings import Decoding

pytestmark = pytest.mark.full

RESTART = "SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = 'hold'"


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres("18", settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        yield server


WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@contextmanager
def waiting_commit(server: EmbeddedPostgres) -> Iterator[None]:
    """Have a commit wait for a standby that has only written the WAL, for as long as the context lasts."""

    def commit() -> None:
        with psycopg.connect(server.conninfo("postgres"), autocommit=True) as waiting:
            waiting.execute("SET synchronous_commit = remote_write; INSERT INTO t VALUES (2)")

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    wait_until(lambda: server.query(WAITS) == [(1,)], "the commit waits")
    yield
    assert server.query("SELECT id FROM t WHERE id = 2") == []
    assert server.query(WAITS) == [(1,)]
    server.execute("ALTER SYSTEM RESET synchronous_standby_names")
    server.query("SELECT pg_reload_conf()")
    thread.join()


def wait_for_anyone(server: EmbeddedPostgres) -> None:
    server.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    server.query("SELECT pg_reload_conf()")


@contextmanager
def piped(server: EmbeddedPostgres, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """Decode into a pipe; yield the process that has begun, its output and its messages."""
    command = [sys.executable, "-m", "walsender", "decode", "--conninfo", server.conninfo("postgres")]
    with subprocess.Popen(
        [*command, "--publication", "p", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith(b"consistent point")
            yield process, process.stdout, process.stderr
        finally:
            process.kill()


def flushed(server: EmbeddedPostgres) -> int:
    """Return where the WAL ends, without a commit."""
    ((end,),) = server.query("SELECT pg_current_wal_flush_lsn()")
    return Lsn.parse(str(end))


def test_no_commit_is_confirmed_by_what_keeps_nothing(server: EmbeddedPostgres) -> None:
    """A physical slot moves, and synchronous_standby_names = '*' waits on: even for a standby that has only written."""
    with Decoding(server, "postgres", more=["--slot", "hold"]) as decoding:
        decoding.wait_consistent()
        with server.connect() as early:
            early.execute("SET synchronous_commit = local; BEGIN; INSERT INTO t VALUES (1)")
            wait_for_anyone(server)
            # Decoding can begin again here once the transaction has ended.
            server.execute("CHECKPOINT")
            early.execute("COMMIT")
        ((before,),) = server.query(RESTART)
        with waiting_commit(server):

            def moved() -> bool:
                server.execute("CHECKPOINT")
                return server.query(RESTART) != [(before,)]

            wait_until(moved, "the slot moves")
            decoding.wait_for(flushed(server))


def test_no_commit_is_confirmed_by_the_server(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """What it receives without a slot is not reported as kept, though it is in the spool."""
    publish = Publish(tmp_path / "node", server.conninfo("postgres"))
    try:
        wait_for_anyone(server)
        with waiting_commit(server):
            sent = "SELECT sent_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication"
            wait_until(lambda: server.query(sent) == [(True,)], "the WAL is sent")
            assert publish.terminate() == 0
    finally:
        publish.kill()


def test_a_slot_moves_as_far_as_the_reader_has_confirmed(server: EmbeddedPostgres) -> None:
    """A reader that dies with all that it has not kept begins again at its last position: the WAL for that is there."""
    with Decoding(server, "postgres", more=["--slot", "hold", "--confirm"]) as decoding:
        decoding.wait_consistent()
        server.execute("INSERT INTO t VALUES (1)")
        kept = flushed(server)
        decoding.wait_for(kept)
        ((before,),) = server.query(RESTART)
        for number in range(2, 6):
            server.execute(f"INSERT INTO t VALUES ({number})")
            server.execute("CHECKPOINT")
            decoding.wait_for(flushed(server))
        assert server.query(RESTART) == [(before,)]
        assert decoding.process.stdin is not None
        decoding.process.stdin.write(f"{Lsn(kept)}\n")
        decoding.process.stdin.flush()
        server.execute("CHECKPOINT")
        decoding.wait_for(flushed(server))
        assert server.query(f"SELECT ({RESTART})::pg_lsn <= '{Lsn(kept)}'") == [(True,)]
        decoding.process.stdin.write(f"{Lsn(flushed(server))}\n")
        decoding.process.stdin.flush()

        def moved() -> bool:
            server.execute("CHECKPOINT")
            return server.query(f"SELECT ({RESTART})::pg_lsn > '{Lsn(kept)}'") == [(True,)]

        wait_until(moved, "the slot follows")
        decoding.process.stdin.write("nonsense\n")
        decoding.process.stdin.flush()

        def ended() -> bool:
            server.execute("CHECKPOINT")
            return decoding.process.poll() is not None

        wait_until(ended, "what is no position ends it")
        wait_until(lambda: "CONTEXT:" in "".join(decoding.errors), "it says why")
        assert 'invalid input syntax for type pg_lsn: "nonsense"' in "".join(decoding.errors)


def test_a_server_that_falls_silent_is_asked_anew(server: EmbeddedPostgres) -> None:
    """Connections that are half open, of SQL and of the stream, are given up after wal_receiver_timeout."""
    with BadNetwork(server.port) as network:
        conninfo = f"host=127.0.0.1 port={network.port} dbname=postgres user=postgres"
        network.silence_after(1 << 20)  # in the midst of the catalogs
        more = ["--wal-receiver-timeout", "2s"]
        with Decoding(server, "postgres", conninfo=conninfo, more=more) as decoding:
            decoding.wait_consistent()
            assert network.connections > 3
            before = network.connections
            network.silence()
            server.execute("INSERT INTO t VALUES (1)")
            decoding.wait_for(flushed(server))
            assert network.connections > before
            assert [one.data[:1] for one in decoding.stop()] == [b"B", b"R", b"I", b"C"]


def test_the_server_asks_a_silent_upstream_server_anew(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """The stream of WAL, and the functions that read catalogs there, are not held up by half-open connections."""
    home = tmp_path / "node"
    home.mkdir()
    (home / "pubsub.toml").write_text('wal_receiver_timeout = "2s"\n')
    with BadNetwork(server.port) as network:
        publish = Publish(home, f"host=127.0.0.1 port={network.port} dbname=postgres user=postgres")
        try:
            publish.query("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
            network.silence()
            server.execute("INSERT INTO t VALUES (1)")
            changes = "SELECT count(*) FROM pg_logical_slot_get_changes('s', NULL, NULL)"
            assert publish.query(changes) == [(3,)]
        finally:
            publish.kill()


def test_a_reader_that_pauses_loses_nothing(server: EmbeddedPostgres) -> None:
    """The server ends the walsender of a command whose output is not read; it goes on where it was when it is read again."""
    server.execute("ALTER SYSTEM SET wal_sender_timeout = '1s'")
    server.query("SELECT pg_reload_conf()")
    with piped(server, "--slot", "hold") as (_, output, _):
        server.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 2000) g")
        ended = "terminating walsender process due to replication timeout"
        wait_until(lambda: ended in server.log.read_text(), "the server ends the walsender")
        server.execute("INSERT INTO t VALUES (0, 'the last one')")
        received = b""
        while b"the last one" not in received:
            received += os.read(output.fileno(), 1 << 20)
        assert received.count(b"x" * 500) == 2000


def test_a_position_is_told_when_all_before_it_is_written(server: EmbeddedPostgres) -> None:
    """In the midst of a large transaction its end is not reached, though its WAL is decoded."""
    with piped(server) as (process, output, messages):
        server.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 100000) g")
        end = flushed(server)
        os.set_blocking(messages.fileno(), False)
        told, rows = b"", 0
        while rows < 99_000:
            rows += output.read(1 << 20).count(b"x" * 500)
            process.send_signal(signal.SIGUSR1)
            told += messages.read() or b""
        positions = [Lsn.parse(line.split()[1].decode()) for line in told.splitlines()]
        assert positions
        assert max(positions) < end
