"""A daemon's log, on a terminal and as JSON lines: commands, signals and connections that fail."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from catalog.home_lock import running_daemon
from launcher.failures import traced, typed
from pubsub.delta.spark.spark_session import Spark
from pubsub.publisher.read_table import ReadTable
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, wait_until

SECRET = "s3cr3t-Wort"
TOML = 'wal_retrieve_retry_interval = "300ms"\ncatalog_poll_interval = "50ms"\n'


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedPostgres]:
    """A server that asks for a password."""
    with EmbeddedPostgres("18", auth="scram-sha-256", password=SECRET) as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute("CREATE TABLE a (id int PRIMARY KEY)")
            connection.execute("INSERT INTO a VALUES (1)")
            connection.execute("CREATE PUBLICATION p FOR TABLE a")
        yield server


class Daemon:
    """`pubsub daemon`, and what it writes to standard error, which is a terminal or a pipe."""

    def __init__(self, home: Path, *arguments: str, terminal: bool) -> None:
        self.home = home
        self.text = ""
        read, write = pty.openpty() if terminal else os.pipe()
        command = [sys.executable, "-m", "pubsub.cli", *arguments, "--home", str(home), "daemon"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=write)
        os.close(write)
        self._reader = threading.Thread(target=self._read, args=(read,))
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        try:
            while data := os.read(descriptor, 65536):
                self.text += data.decode(errors="replace")
        except OSError:
            return  # the terminal's other side is closed
        finally:
            os.close(descriptor)

    def says(self, *texts: str) -> None:
        try:
            wait_until(lambda: all(text in self.text for text in texts), "the log")
        except AssertionError:
            pytest.fail(f"the log says nothing of {texts}:\n{self.text}")

    def sql(self, statement: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "pubsub.cli", "--home", str(self.home), "sql", "-f", "-"],
            input=statement,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return ran.stdout + ran.stderr

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)
        self._reader.join()


@contextmanager
def daemon(home: Path, *arguments: str, terminal: bool) -> Iterator[Daemon]:
    home.mkdir(exist_ok=True)
    (home / "pubsub.toml").write_text(TOML)
    one = Daemon(home, *arguments, terminal=terminal)
    try:
        wait_until(lambda: running_daemon(home) == one.process.pid, "the daemon to have the node")
        yield one
    finally:
        one.end()


@pytest.mark.full
@pytest.mark.parametrize("renderer", ["terminal", pytest.param("verbose terminal", marks=pytest.mark.soak), "JSON"])
def test_commands_signals_and_failures(guarded: EmbeddedPostgres, tmp_path: Path, renderer: str) -> None:
    home = tmp_path / "node"
    arguments = ["--verbose"] if "verbose" in renderer else []
    right = guarded.conninfo()
    wrong = right.replace(SECRET, SECRET + "-wrong")
    away = f"postgresql://postgres:{SECRET}@127.0.0.1:1/postgres"
    shown = []
    with daemon(home, *arguments, terminal=renderer != "JSON") as one:
        for failing in (wrong, away, right.replace("dbname=postgres", "dbname=nope")):
            shown.append(one.sql(f"CREATE SUBSCRIPTION x CONNECTION '{failing}' PUBLICATION p"))
            assert "ERROR:" in shown[-1]
        shown.append(one.sql(f"CREATE SUBSCRIPTION s CONNECTION '{right}' PUBLICATION p"))
        one.says("CREATE SUBSCRIPTION", "table is ready")
        one.sql("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        one.says("REFRESH PUBLICATION")
        one.sql(f"ALTER SUBSCRIPTION s CONNECTION '{wrong}'")
        one.says("worker failed", "password authentication failed")
        one.sql(f"ALTER SUBSCRIPTION s CONNECTION '{away}'")
        one.says("Connection refused")
        one.sql("ALTER SUBSCRIPTION s DISABLE")
        one.says("DISABLE", "subscription has stopped")
        one.sql(
            f"ALTER SUBSCRIPTION s CONNECTION '{right}'; ALTER SUBSCRIPTION s ENABLE; ALTER SUBSCRIPTION s SET (batch_rows = 7)"
        )
        one.says("ENABLE", "batch_rows = '7'")
        (home / "pubsub.toml").write_text(TOML + 'wal_receiver_timeout = "30s"\n')
        one.process.send_signal(signal.SIGHUP)
        one.says("received SIGHUP", "parameter was changed", "wal_receiver_timeout", "30s")
        (home / "pubsub.toml").write_text(TOML + "nope = 1\n")
        one.process.send_signal(signal.SIGHUP)
        one.says("settings were not taken", "nope")
        (home / "pubsub.toml").write_text(TOML)
        shown.append(one.sql("DROP SUBSCRIPTION s"))
        one.says("DROP SUBSCRIPTION s")
        shown.append(one.sql("SELECT * FROM pg_subscription; SELECT * FROM pg_stat_subscription"))
    for text in (one.text, *shown):
        assert SECRET not in text
        assert "Traceback" not in text
    if renderer == "JSON":
        events = [json.loads(line) for line in one.text.splitlines()]
        assert all("event" in event and "level" in event for event in events)


def test_a_copy_task_that_fails_to_connect_shows_no_password(
    guarded: EmbeddedPostgres, spark: Spark, tmp_path: Path
) -> None:
    """It fails in Spark's own process; its traceback comes back as a text, and goes into the log of the JVM."""
    import pyarrow as pa

    from tablesync.chunk_reader import CopySource, read_range

    spark.running()
    log = spark._home / "spark.log"
    for conninfo in (
        guarded.conninfo().replace(SECRET, SECRET + "-wrong"),
        f"postgresql://postgres:{SECRET}@127.0.0.1:1/postgres",
        f"postgresql://postgres:{SECRET}%zz@127.0.0.1:1/postgres",
    ):
        source = CopySource(conninfo, "copy", ReadTable("public", "a", ("id",), True), "1", None)

        def read(_: int, source: Any = source) -> None:
            list(read_range(source, None, pa.schema([("id", pa.int32())])))

        with pytest.raises(Exception, match="connect") as caught:
            spark.session.sparkContext.parallelize([0], 1).foreach(read)
        known = typed(caught.value)
        for text in (
            traced(caught.value),
            str(caught.value),
            known.report(verbose=True),
            log.read_text(errors="replace"),
        ):
            assert SECRET not in text
        assert known.message.startswith(("could not connect to the publisher", "invalid connection string"))
