"""Embedded PostgreSQL servers: real ones, each in its own directory, for tests, benchmarks and the demo.

    with EmbeddedPostgres("17") as server:
        server.execute("CREATE TABLE t (a int)")
        server.conninfo()        # 'user=postgres dbname=postgres host=127.0.0.1 port=20117'

A server can publish (wal_level = logical) and gives up durability for speed (fsync = off), unless `settings` say
otherwise.  It ends when the process that started it ends, in whatever way (watcher.py), and its directory is removed
unless it was given.  Started by root, it runs as another user (binaries.account).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psycopg
from psycopg import conninfo as libpq_conninfo
from psycopg import sql

from pubsub.errors import PubsubError
from pubsub.testing import binaries
from pubsub.testing.ports import Port

StopMode = Literal["smart", "fast", "immediate"]

_SIGNALS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

SETTINGS: Final[Mapping[str, str | int]] = {
    "wal_level": "logical",
    "max_wal_senders": 40,
    "max_replication_slots": 40,
    "max_connections": 120,
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "fsync": "off",
    "timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%a %d ",
    "lc_messages": "C",
}
"""The settings of an embedded server; its `settings` argument overrides them."""

# How many ports are tried: a program that knows nothing of reservations may take one in the last moment.
_TRIES: Final = 20

_running: weakref.WeakSet[EmbeddedPostgres] = weakref.WeakSet()


class EmbeddedPostgres:
    """A PostgreSQL server of major `version`, on 127.0.0.1 and a Unix socket.

    `wheel` uses the wheel's program (18.4, 16.14) instead of the fetched one.  `settings` are postgresql.conf
    parameters.  A given `data_dir` is kept, and an existing cluster in it is started as it is; by default the data is
    in a temporary directory.  `auth` is pg_hba.conf's method for every connection; `password` is the superuser's
    (required for "scram-sha-256").  `initdb` has further options of initdb, such as "--encoding=SQL_ASCII".  `port_of` is
    a stopped server whose port this one takes.

    `start` makes the cluster and starts the server; a `with` statement calls `start` and `close`.
    """

    user: Final = "postgres"
    host: Final = "127.0.0.1"

    def __init__(
        self,
        version: str = "18",
        *,
        wheel: bool = False,
        settings: Mapping[str, str | int] | None = None,
        data_dir: Path | None = None,
        auth: str = "trust",
        password: str | None = None,
        initdb: Sequence[str] = (),
        port_of: EmbeddedPostgres | None = None,
    ) -> None:
        self.version = version
        self.password = password
        self._port: Port | None = port_of._port if port_of is not None else None
        self._account = binaries.account()
        self._root = binaries.server(version, wheel=wheel)
        self._settings = {**SETTINGS, **(settings or {})}
        self._auth = auth
        self._initdb = tuple(initdb)
        self._watcher: subprocess.Popen[str] | None = None
        self._pid = 0
        self._base = Path(tempfile.mkdtemp(prefix="pubsub-pg-", dir=binaries.readable_directory()))
        self._give(self._base)
        self.data_dir = data_dir.absolute() if data_dir is not None else self._base / "data"
        self.socket_dir = self._base
        self.log = self._base / "server.log"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EmbeddedPostgres {self.version} port={self.port} {'running' if self.running else 'stopped'}>"

    # Start and stop

    @property
    def running(self) -> bool:
        """Whether the server's process is running."""
        return self._watcher is not None and self._watcher.poll() is None

    @property
    def port(self) -> int:
        """The port, from the first start on; 0 before it."""
        return self._port.number if self._port is not None else 0

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return self._pid

    def start(self) -> Self:
        """Make the cluster if needed, start the server, wait until it accepts connections; do nothing if it is running.

        After `stop` or `kill` it starts on the same port, with the same data.  Raises PubsubError with the server's
        log.
        """
        if self.running:
            return self
        _running.add(self)
        try:
            if not (self.data_dir / "PG_VERSION").is_file():
                self._make_cluster()
            for _ in range(_TRIES):
                if self._port is None:
                    self._port = Port.reserve()
                if self._try_start():
                    return self
        except BaseException:
            self.close()
            raise
        log = self.read_log()
        self.close()
        raise PubsubError("the embedded server found no free port", sqlstate="53000", detail=log[-2000:] or None)

    def stop(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop the server like `pg_ctl stop -m mode` and wait; kill it after `timeout` seconds."""
        if not self.running:
            return
        assert self._watcher is not None
        _signal(self._pid, _SIGNALS[mode])
        try:
            self._watcher.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._release()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server and start it on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill the server and all its processes with kill -9, as if the machine had crashed."""
        if not self.running:
            return
        assert self._watcher is not None
        # Suspended first, so that it neither starts new children nor notices the old ones' end.
        _signal(self._pid, signal.SIGSTOP)
        children = _children(self._pid)
        for pid in (self._pid, *children):
            _signal(pid, signal.SIGKILL)
        self._watcher.wait()
        for pid in children:
            _await_end(pid)
        self._release()

    def close(self) -> None:
        """Stop the server at once and remove its files; a given data directory is shut down cleanly and kept."""
        owned = self.data_dir.parent == self._base
        self.stop("immediate" if owned else "fast", timeout=30.0)
        _running.discard(self)
        shutil.rmtree(self._base, ignore_errors=True)

    def read_log(self) -> str:
        """Return the server's log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # Connections and queries

    def conninfo(self, dbname: str = "postgres", **more: str | int) -> str:
        """Return a libpq connection string; `more` overrides parts, as host=str(server.socket_dir) for the socket."""
        words: dict[str, Any] = {"user": self.user, "dbname": dbname, "host": self.host, "port": self.port}
        if self.password is not None:
            words["password"] = self.password
        return libpq_conninfo.make_conninfo(**(words | more))

    def connect(self, dbname: str = "postgres") -> psycopg.Connection:
        """Open a connection in autocommit mode."""
        return psycopg.connect(self.conninfo(dbname), autocommit=True)

    def execute(self, statements: str, dbname: str = "postgres") -> None:
        """Run statements as a simple query; several run as one transaction."""
        with self.connect(dbname) as connection:
            connection.execute(statements.encode())

    def query(self, statement: str, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.connect(dbname) as connection:
            return connection.execute(statement.encode()).fetchall()

    def create_database(self, name: str, options: str = "") -> str:
        """Create a database; return its connection string.  `options` as in "TEMPLATE template0 ENCODING 'LATIN1'"."""
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {sql.Identifier(name).as_string(connection)} {options}".encode())
        return self.conninfo(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and its replication slots, even while they are in use."""
        with self.connect() as connection:
            for (slot,) in connection.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE database = %s", [name]
            ).fetchall():
                self.drop_slot(slot)
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def drop_slot(self, name: str, *, timeout: float = 30.0) -> None:
        """Drop a replication slot and end the walsender that uses it; do nothing if there is no such slot.

        Raises psycopg.errors.ObjectInUse if the slot is still in use after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self.connect() as connection:
            while True:
                rows = connection.execute(
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [name]
                ).fetchall()
                if not rows:
                    return
                try:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
                    return
                except psycopg.errors.UndefinedObject:
                    return
                except psycopg.errors.ObjectInUse:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)

    def make_standby(self, slot: str, *, settings: Mapping[str, str | int] | None = None) -> EmbeddedPostgres:
        """Start and return a hot standby that streams from this server by the physical slot `slot`, created if needed.

        From version 17 on it synchronizes the logical slots that have failover enabled.  Close it before this server.
        """
        if not self.query(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}'"):
            self.query(f"SELECT pg_create_physical_replication_slot('{slot}', true)")
        given: dict[str, str | int] = {
            **self._settings,
            "primary_conninfo": self.conninfo(application_name=slot),
            "primary_slot_name": slot,
            "hot_standby_feedback": "on",
            "wal_receiver_status_interval": "1s",
        }
        if int(self.version) >= 17:
            given["sync_replication_slots"] = "on"
            # After a promotion it has no standby to wait for.
            given["synchronized_standby_slots"] = ""
        standby = EmbeddedPostgres(self.version, settings={**given, **(settings or {})}, password=self.password)
        try:
            ran = subprocess.run(
                [
                    str(self.bin("pg_basebackup")),
                    "-d",
                    self.conninfo(),
                    "-D",
                    str(standby.data_dir),
                    "-c",
                    "fast",
                    "--no-sync",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode != 0:
                raise PubsubError("pg_basebackup failed", sqlstate="58000", detail=ran.stderr.strip()[-2000:] or None)
            (standby.data_dir / "standby.signal").touch()
            for path in (standby.data_dir, *standby.data_dir.rglob("*")):
                standby._give(path)
            return standby.start()
        except BaseException:
            standby.close()
            raise

    def promote(self) -> None:
        """Promote a standby to primary, and wait until it is one."""
        self.query("SELECT pg_promote()")

    def bin(self, name: str) -> Path:
        """Return a program: the installation's own if it has one, else the wheel's (psql, pgbench, pg_recvlogical)."""
        own = self._root / "bin" / name
        return own if own.is_file() else binaries.program(name)

    @property
    def psql_path(self) -> Path:
        """psql."""
        return self.bin("psql")

    # Implementation

    def _make_cluster(self) -> None:
        if self.data_dir.parent != self._base:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._give(self.data_dir)
        options = ["--no-sync", "--encoding=UTF8", "--locale=C", f"--username={self.user}", f"--auth={self._auth}"]
        secret = self._base / "password"
        if self.password is not None:
            secret.write_text(self.password)
            self._give(secret)
            options.append(f"--pwfile={secret}")
        command = [str(self._root / "bin" / "initdb"), f"--pgdata={self.data_dir}", *options, *self._initdb]
        ran = subprocess.run(
            command,
            cwd=self._base,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            user=self._account.uid,
            group=self._account.gid,
            extra_groups=[] if self._account.uid is not None else None,
        )
        secret.unlink(missing_ok=True)
        if ran.returncode != 0:
            raise PubsubError(
                "initdb failed", sqlstate="58000", detail=(ran.stderr or ran.stdout).strip()[-2000:] or None
            )

    def _try_start(self) -> bool:
        """Start the server on its port; forget that, and return False, if it is taken.  Raises PubsubError with the log."""
        settings = {
            **self._settings,
            "port": self.port,
            "listen_addresses": self.host,
            "unix_socket_directories": str(self.socket_dir),
        }
        command = [str(self._root / "bin" / "postgres"), "-D", str(self.data_dir)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        owned = self.data_dir.parent == self._base
        config = {
            "command": command,
            "cwd": str(self._base),
            "environment": self._environment(),
            "log": str(self.log),
            "uid": self._account.uid,
            "gid": self._account.gid,
            "remove": str(self._base) if owned else None,
        }
        offset = self.log.stat().st_size if self.log.exists() else 0
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watcher.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._watcher.stdout is not None
        self._pid = int(self._watcher.stdout.readline() or 0)
        deadline = time.monotonic() + 60.0
        while self.running and time.monotonic() < deadline:
            if self._is_ready():
                return True
            time.sleep(0.01)
        with self.log.open(errors="replace") as file:
            file.seek(offset)
            said = file.read()
        self.stop("immediate")
        self._release()
        if "could not create any TCP/IP sockets" in said or "could not create any Unix-domain sockets" in said:
            self._port = None
            return False
        raise PubsubError("the embedded server did not start", sqlstate="57P03", detail=said.strip()[-2000:] or None)

    def _is_ready(self) -> bool:
        """Whether the server accepts connections, by the eighth line of postmaster.pid (miscinit.c)."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self._pid) and lines[7].strip() == "ready"

    def _release(self) -> None:
        """Close the pipes of a watcher that has ended, and forget it."""
        if self._watcher is not None and self._watcher.poll() is not None:
            for pipe in (self._watcher.stdin, self._watcher.stdout):
                if pipe is not None:
                    pipe.close()
            self._watcher = None

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC", "HOME": str(self._base)}

    def _give(self, path: Path) -> None:
        """Make the servers' account the owner of `path`."""
        if self._account.uid is not None and self._account.gid is not None:
            os.chown(path, self._account.uid, self._account.gid)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # proc(5): the name is in parentheses and may contain anything; the parent is the second field after it.
        if int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(entry.name))
    return found


def _await_end(pid: int, timeout: float = 10.0) -> None:
    """Wait until a killed process is gone or a zombie, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if status.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.005)


@atexit.register
def _close_all() -> None:
    for server in list(_running):
        server.close()
