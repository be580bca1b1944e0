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

from pubsub.testing.servers import EmbeddedPostgres
from tests.crash.plan import OURS, SMALL_DISK, STATEMENTS
from tests.fault.daemon import SETTINGS, Daemon
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


class Node:
    """A home and its daemon; the process ids of all JVMs that it has had."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind = kind
        self.directory = directory
        self._mounted = False
        home = directory / "home"
        home.mkdir(parents=True)
        if kind == SMALL_DISK:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL}", "tmpfs", home], check=True)
            self._mounted = True
        self.daemon = Daemon(home)
        table = "[spark]\nstatement_rows = 1\n" if kind == STATEMENTS else ""
        self.settings = _TIMEOUT + SETTINGS.replace("[spark.conf]", f"{table}[spark.conf]", 1)
        (home / "pubsub.toml").write_text(self.settings)
        # A daemon that cannot say what happens cannot be judged: its log is on a disk that has room.
        self.daemon.log = directory / "daemon.log"
        self.lock = threading.Lock()
        """Held by whoever ends, stops or starts the daemon."""

    def close(self, *, keep: bool) -> None:
        """End the daemon; it may take its time, and leaves no process behind.  `keep` the files."""
        family: list[psutil.Process] = []
        if self.daemon.running:
            family = [self.daemon.process, *self.daemon.process.children(recursive=True)]
            for one in family:
                if one.is_running():
                    one.resume()
        if keep:
            self.daemon.kill()
        elif self.daemon.running:
            self.daemon.terminate()
        wait_until(lambda: not [one for one in family if _lives(one)], f"the end of {family}")
        if self._mounted and keep:
            shutil.copytree(self.daemon.home, self.directory / "kept", symlinks=True, ignore=_sockets)
        if self._mounted:
            # Lazily: a process of the daemon may end a moment later.
            subprocess.run(["umount", "-l", self.daemon.home], check=True)
        if not keep:
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


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class OtherSpark:
    """A process that runs statements on Delta tables, with a Spark of its own; started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, statement: str) -> str:
        """Run a statement; return "", or the error's first line."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.crash.other_spark"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(statement) + "\n")
            self._process.stdin.flush()
            return str(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


class Machine:
    """Servers and nodes, made when a round asks for them; `directory` has everything that is kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.other_spark = OtherSpark()
        self._server: EmbeddedPostgres | None = None
        self._stock: EmbeddedPostgres | None = None
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
        for server in (self._server, self._stock):
            if server is not None:
                server.close()

    def server(self, version: str) -> EmbeddedPostgres:
        """Return the publisher of this version; one runs at a time."""
        if self._server is not None and self._server.version != version:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = EmbeddedPostgres(version, settings=_SERVER)
        return self._server.start()

    def stock(self, version: str) -> EmbeddedPostgres:
        """Return the server with PostgreSQL's own subscribers."""
        if self._stock is not None and self._stock.version != version:
            self._stock.close()
            self._stock = None
        if self._stock is None:
            self._stock = EmbeddedPostgres(version, settings={"wal_retrieve_retry_interval": "300ms"})
        return self._stock.start()

    def node(self, kind: str) -> Node:
        """Return the node of this kind, with its daemon running; one runs at a time."""
        if self._node is not None and self._node.kind != kind:
            node, self._node = self._node, None
            node.close(keep=False)
        if self._node is None:
            self._made += 1
            self._node = Node(self.directory / f"node{self._made}", kind)
        self._node.daemon.ensure()
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
        return node.directory


def can_mount() -> bool:
    """Whether a small tmpfs can be mounted."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def kind_here(kind: str) -> str:
    """Return the kind, or the usual one where there can be no small disk."""
    return OURS if kind == SMALL_DISK and not can_mount() else kind


def anonymous(process: psutil.Process) -> int:
    """Return the MB of memory that the process has of its own."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) >> 10
    return 0
