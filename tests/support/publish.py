"""`pubsub publish` as a process of its own, in front of a server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench import machine
from pubsub.faults import VARIABLE
from pubsub.testing.fixtures import Database
from pubsub.testing.ports import Port
from tests.running import logs
from tests.support.replica import PATIENCE, Replica, RunningNode, wait_until

#: How long is waited for it to tell where it stands, in seconds.
_STANDS = 20.0


class Publish:
    """The command, in front of the server at `upstream`, with its directory in `home`; started when it is made.

    `faults`: a directory of fault points (pubsub/faults.py); `host`: the address that it listens on.
    """

    def __init__(
        self, home: Path, upstream: str, *options: str, faults: Path | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._port = Port.reserve()
        self.port = self._port.number
        self.home = home
        self.upstream = upstream
        self._options = options
        self._host = host
        self._log = home.with_suffix(".log")
        self._environment = {**os.environ, VARIABLE: str(faults)} if faults is not None else None
        self._process: subprocess.Popen[bytes]
        logs.show(self)
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "pubsub.cli", "--home", str(self.home), "publish"]
        command += ["--upstream", self.upstream, "--listen", f"{self._host}:{self.port}", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, env=self._environment)
        wait_until(self._listens, "pubsub publish listens")

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.tail()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """Kill it, as kill -9 does; its decoding processes end by themselves."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """End it in good order, and return the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(PATIENCE)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until it has ended; return the exit code."""
        return self._process.wait(timeout)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_log(self) -> str:
        """Return what it has written to standard error."""
        return self._log.read_text()

    def tail(self) -> str:
        """Return the end of its log, and how far its streams and slots are."""
        return f"{self.read_log()[-3000:]}\n{self._positions()}"

    def stands(self) -> str:
        """Return the same, and where its processes stand at this moment, which they are asked for."""
        tail = self.tail()
        begin = len(self.read_log())
        ours = [pid for pid, name in machine.descendants(self.pid).items() if name.startswith(("python", "decoding"))]
        with suppress(AssertionError, ProcessLookupError):
            for pid in (*ours, self.pid):
                before = len(self.read_log())
                os.kill(pid, signal.SIGUSR1)
                wait_until(lambda before=before: len(self.read_log()) > before, "a process tells", _STANDS)
            wait_until(lambda: "where this process stands" in self.read_log()[begin:], "it to be told", _STANDS)
        return f"{tail}\n{self.read_log()[begin:]}"

    def _positions(self) -> str:
        if self._process.poll() is not None:
            return "It has ended."
        questions = (
            "SELECT application_name, state, sent_lsn, write_lsn, flush_lsn, pg_current_wal_flush_lsn() FROM pg_stat_replication",
            "SELECT slot_name, active, restart_lsn, confirmed_flush_lsn FROM pg_replication_slots",
        )
        try:
            with self.connect(connect_timeout=10, options="-c statement_timeout=10s") as connection:
                return "\n".join(str(row) for one in questions for row in connection.execute(one.encode()))
        except psycopg.Error as error:
            return f"It does not tell of its streams: {error}"

    def conninfo(self, **more: Any) -> str:
        """Return the connection string of the upstream database by way of it."""
        given = conninfo_to_dict(self.upstream)
        return make_conninfo(**{**given, "host": "127.0.0.1", "port": self.port, **more})

    def connect(self, **more: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.conninfo(**more), autocommit=True)

    def query(self, statement: str, **more: Any) -> list[tuple[Any, ...]]:
        with self.connect(**more) as connection:
            return connection.execute(statement).fetchall()

    def execute(self, statement: str, **more: Any) -> None:
        with self.connect(**more) as connection:
            connection.execute(statement)


class ServedReplica(Replica):
    """A replica whose node subscribes by way of our own server."""

    def __init__(self, node: RunningNode, database: Database, publish: Publish) -> None:
        super().__init__(node, database)
        self.publish = publish

    @property
    def conninfo(self) -> str:
        return self.publish.conninfo(dbname=self.database.name)

    def drop_slot(self) -> None:
        def dropped() -> bool:
            self.query(
                f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{self.name}'"
            )
            with suppress(psycopg.errors.ObjectInUse):
                self.publish.execute(f"SELECT pg_drop_replication_slot('{self.name}')", dbname=self.database.name)
                return True
            return False

        wait_until(dropped, "the slot is dropped")

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.publish.query(statement, dbname=self.database.name)
