"""What the rounds of a sitting share: servers by version, a node of each kind, another program's Spark."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from pubsub.testing import s3_server
from pubsub.testing.s3_server import S3Server
from pubsub.testing.servers import EmbeddedPostgres
from tests.crash.plan import OURS, PROCESSES, SHARED, SMALL_DISK, STATEMENTS, STORE
from tests.fault import daemon
from tests.fault.daemon import SETTINGS
from tests.support.replica import wait_until

#: Half-open connections are noticed within a round.
_TIMEOUT: Final = 'wal_receiver_timeout = "6s"\nwal_receiver_status_interval = "1s"\ndrain_timeout = "5s"\n'
_SERVER: Final[dict[str, str | int]] = {
    "wal_sender_timeout": "6s",
    "max_prepared_transactions": 50,
    "deadlock_timeout": "100ms",
    # A machine's death is another command's: make power.
    "fsync": "off",
    "max_wal_size": "1GB",
}
_SMALL: Final = "192m"
_BUCKET: Final = "lake"
_WORKERS: Final = {PROCESSES: 2, SHARED: 1}
"""Worker processes beside a daemon's own; the subscriptions of the rounds take turns in all of them."""


class Daemon(daemon.Daemon):
    """One daemon of a node.  Whoever ends, stops or starts it holds `lock`.  What it prints is in `log`."""

    def __init__(self, home: Path, settings: str, log: Path, *options: str) -> None:
        super().__init__(home)
        self.settings = settings
        self.restore()
        # A daemon that cannot say what happens cannot be judged: its log is on a disk that has room.
        self.log = log
        self.lock = threading.Lock()
        self._options = options

    def restore(self) -> None:
        """Write the settings as they were at first."""
        (self.home / "pubsub.toml").write_text(self.settings)

    def start(self, *options: str) -> None:
        super().start(*self._options, *options)

    def expelled(self) -> bool:
        """Return whether it has ended because another daemon took it for dead."""
        return not self.running and self.said("another daemon has taken over the catalog")

    def family(self) -> list[psutil.Process]:
        """Return its process and all that it has started; none if it does not run."""
        return [self.process, *self.process.children(recursive=True)] if self.running else []


class Node:
    """A home and its daemon; of the kind SHARED two, whose catalog is a database of a server.

    `catalog` and `store`: the servers of the kinds that have one.
    """

    def __init__(
        self, directory: Path, kind: str, *, catalog: EmbeddedPostgres | None = None, store: S3Server | None = None
    ) -> None:
        self.kind = kind
        self.directory = directory
        self.catalog = catalog
        self.store = store
        self.workers = _WORKERS.get(kind, 0)
        self._mounted = False
        home = directory / "home"
        home.mkdir(parents=True)
        if kind == SMALL_DISK:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL}", "tmpfs", home], check=True)
            self._mounted = True
        # The directory of the tables' files, and how Delta's paths begin there.
        self.warehouse = home / "warehouse"
        self._root = str(self.warehouse)
        settings = _TIMEOUT + SETTINGS
        if kind == STATEMENTS:
            settings = settings.replace("[spark.conf]", "[spark]\nstatement_rows = 1\n[spark.conf]", 1)
        if self.workers:
            settings = f"worker_processes = {1 + self.workers}\n{settings}"
        options: tuple[str, ...] = ()
        if store is not None:
            self.warehouse, self._root = store.bucket(_BUCKET) / directory.name, f"s3a://{_BUCKET}/{directory.name}"
            conf = "".join(f'"{name}" = "{value}"\n' for name, value in store.conf().items())
            settings = f'warehouse = "{self._root}"\n{settings}{conf}'
        homes = [home]
        if catalog is not None:
            self.warehouse = directory / "warehouse"
            self._root = str(self.warehouse)
            self.warehouse.mkdir()
            catalog.create_database(self._database)
            url = f"postgresql://{catalog.user}@{catalog.host}:{catalog.port}/{self._database}"
            settings = f'warehouse = "{self._root}"\n{settings}[catalog]\nurl = "{url}"\n'
            options = ("--shared",)
            homes.append(directory / "home2")
            homes[1].mkdir()
        self.daemons = [Daemon(one, settings, directory / f"{one.name}.log", *options) for one in homes]

    def files(self, path: str) -> Path:
        """Return the directory with the files of the Delta table at a path."""
        assert path.startswith(f"{self._root}/"), path
        return self.warehouse / path.removeprefix(f"{self._root}/")

    @property
    def _database(self) -> str:
        return self.directory.name

    @property
    def daemon(self) -> Daemon:
        """One that runs, if any does."""
        return next((one for one in self.daemons if one.running), self.daemons[0])

    def family(self) -> list[psutil.Process]:
        """Return the processes of all daemons."""
        return [process for one in self.daemons for process in one.family()]

    def sessions(self) -> str:
        """Return the condition that a row of the catalog server's pg_stat_activity is of a session of the node."""
        return f"datname = '{self._database}'"

    def close(self, *, keep: bool) -> None:
        """End the daemons; they may take their time, and leave no process behind.  `keep` the files."""
        family = self.family()
        for process in family:
            if process.is_running():
                process.resume()
        for one in self.daemons:
            if keep:
                one.kill()
            elif one.running:
                one.terminate()
        wait_until(lambda: not [one for one in family if _lives(one)], f"the end of {family}")
        if self.catalog is not None and not keep:
            self.catalog.drop_database(self._database)
        home = self.daemons[0].home
        if self._mounted and keep:
            shutil.copytree(home, self.directory / "kept", symlinks=True, ignore=_sockets)
        if self._mounted:
            # Lazily: a process of the daemon may end a moment later.
            subprocess.run(["umount", "-l", home], check=True)
        if not keep:
            shutil.rmtree(self.warehouse, ignore_errors=True)
            shutil.rmtree(self.directory)


def _sockets(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(directory, name).is_socket()]


def javas(process: psutil.Process) -> list[psutil.Process]:
    """Return a daemon's JVMs; it asks `java -version` before it starts one."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == "java" and "-version" not in child.cmdline():
                found.append(child)
    return found


def workers(process: psutil.Process) -> list[psutil.Process]:
    """Return a daemon's worker processes, those that are starting, too."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            if "launcher.worker_process" in child.cmdline():
                found.append(child)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class OtherSpark:
    """A process that runs statements on Delta tables, with a Spark of its own; started when it is first asked.

    What it says is in `log`.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, statement: str) -> str:
        """Run a statement; return "", or the error's first line."""
        with self._lock:
            if self._process is None:
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.crash.other_spark"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(statement) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"another program's Spark has ended\n{self._log.read_text(errors='replace')[-4000:]}"
            return str(json.loads(answer))

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


class Machine:
    """Servers and nodes, made when a round asks for them; `directory` has everything that is kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.other_spark = OtherSpark(directory / "other_spark.log")
        self._server: EmbeddedPostgres | None = None
        self._catalog: EmbeddedPostgres | None = None
        self._store: S3Server | None = None
        self._node: Node | None = None
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.other_spark.close()
        if self._node is not None:
            self._node.close(keep=error is not None)
        for server in (self._server, self._catalog):
            if server is not None:
                server.close()
        if self._store is not None:
            self._store.kill()

    def server(self, version: str) -> EmbeddedPostgres:
        """Return the publisher of this version; one runs at a time."""
        if self._server is not None and self._server.version != version:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = EmbeddedPostgres(version, settings=_SERVER)
        return self._server.start()

    def catalog(self) -> EmbeddedPostgres:
        """Return the server with the catalogs of nodes that several daemons share."""
        if self._catalog is None:
            self._catalog = EmbeddedPostgres("18")
        return self._catalog.start()

    def store(self) -> S3Server:
        """Return the server with the tables of nodes that keep them on S3."""
        if self._store is None:
            self._store = S3Server(self.directory / "s3")
            self._store.start()
        return self._store

    def node(self, kind: str) -> Node:
        """Return the node of this kind, with its daemons running; one runs at a time."""
        if self._node is not None and self._node.kind != kind:
            node, self._node = self._node, None
            node.close(keep=False)
        if self._node is None:
            self._made += 1
            catalog = self.catalog() if kind == SHARED else None
            store = self.store() if kind == STORE else None
            self._node = Node(self.directory / f"node{self._made}", kind, catalog=catalog, store=store)
        for one in self._node.daemons:
            one.ensure()
        return self._node

    def give_up(self) -> Path:
        """Leave the node and the server of a round that failed, for reading; return where they are.  Later rounds get others."""
        node, self._node = self._node, None
        assert node is not None
        server, self._server = self._server, None
        if server is not None:
            (node.directory / "server.log").write_text(server.read_log())
            server.stop("fast")
            shutil.copytree(server.data_dir, node.directory / "publisher", symlinks=True)
            server.close()
        node.close(keep=True)
        if node.catalog is not None:
            self._catalog = None
            node.catalog.stop("fast")
            shutil.copytree(node.catalog.data_dir, node.directory / "catalog", symlinks=True)
            node.catalog.close()
        return node.directory


def can_mount() -> bool:
    """Whether a small tmpfs can be mounted."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def can_store() -> bool:
    """Whether there is an S3 server, or one can be built."""
    return s3_server.program() is not None or s3_server.can_build()


def kind_here(kind: str) -> str:
    """Return the kind, or the usual one where there can be no small disk, or no S3 server."""
    possible = {SMALL_DISK: can_mount, STORE: can_store}
    return kind if possible.get(kind, lambda: True)() else OURS


def anonymous(process: psutil.Process) -> int:
    """Return the MB of memory that the process has of its own."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) >> 10
    return 0
