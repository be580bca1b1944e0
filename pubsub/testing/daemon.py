"""`pubsub daemon` in a process of its own, for tests that kill it, start it again, or hold it at a point."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pubsub import faults
from pubsub.testing.fault_points import PATIENCE, Faults, wait_until

if TYPE_CHECKING:
    from pubsub.node.node import Node

T = TypeVar("T")

#: Short intervals, and a JVM that compiles quickly rather than well.
SETTINGS: Final = """\
wal_retrieve_retry_interval = "300ms"
catalog_poll_interval = "50ms"
[spark.conf]
"spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1"
"spark.driver.memory" = "1g"
"""


_STANDS: Final = 10.0
"""Seconds for the tasks of an event loop that is held up; the threads are told of in any case."""


class Daemon:
    """A node's home and its daemon.  `settings`: the text of pubsub.toml; `faults`: the daemon's fault points.

    What the daemon prints is in `log`.  Commands (`execute`, `fetch` …) are given as a client does, and block.
    """

    def __init__(self, home: Path, settings: str = SETTINGS, environment: Mapping[str, str] | None = None) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "daemon.log"
        self.faults = Faults(home / "faults")
        self.environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        (home / "pubsub.toml").write_text(settings)

    @property
    def running(self) -> bool:
        """Whether the daemon's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's, of a daemon that was started."""
        assert self._process is not None, "the daemon was not started"
        return self._process.pid

    def start(self, *options: str) -> None:
        """Start `pubsub daemon`; return when it has the node.  Raises RuntimeError with the end of its log if it fails."""
        from catalog.home_lock import running_daemon

        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pubsub.cli", "--home", str(self.home), "daemon", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, faults.VARIABLE: str(self.faults.directory), **self.environment},
            )
        pid = self._process.pid
        wait_until(lambda: running_daemon(self.home) == pid or not self.running, "the daemon to have the node")
        if not self.running:
            raise RuntimeError(f"the daemon has ended\n{self.tail()}")

    def kill(self) -> None:
        """Kill the daemon as by kill -9; nothing happens if none runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def killed_by_fault(self, timeout: float = PATIENCE) -> None:
        """Wait until a fault point has killed the daemon.  Raises RuntimeError if it ended otherwise."""
        assert self._process is not None, "the daemon was not started"
        if (code := self._process.wait(timeout)) != -signal.SIGKILL:
            raise RuntimeError(f"the daemon has ended with {code}\n{self.tail()}")

    def terminate(self, timeout: float = PATIENCE) -> int:
        """Send SIGTERM, and return the exit code; 0 if none was started."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def stands(self) -> str:
        """Have the daemon log where its threads and tasks stand; return that with the end of the log before it."""
        if not self.running:
            return self.tail()
        before = self.log.stat().st_size

        def logged() -> str:
            return self.log.read_bytes()[before:].decode(errors="replace")

        os.kill(self.pid, signal.SIGUSR1)
        with suppress(TimeoutError):
            wait_until(lambda: "where this process stands" in logged() or not self.running, "it to be told", _STANDS)
        return self.log.read_bytes()[:before].decode(errors="replace")[-4000:] + logged()

    def client(self, work: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work(node)`, run as a client of the daemon."""
        from pubsub.node.node import Node

        async def run() -> T:
            async with Node(self.home, workers=False) as node:
                return await work(node)

        return asyncio.run(run())

    def execute(self, statement: str) -> None:
        """Carry a statement out.  Raises PubsubError."""
        self.client(lambda node: node.execute(statement))

    def fetch(self, statement: str) -> list[dict[str, Any]]:
        """Return the rows of a SELECT, by column.  Raises PubsubError."""
        return self.client(lambda node: node.fetch(statement))

    def wait_for_catchup(self, subscription: str, timeout: float = PATIENCE) -> None:
        """Wait until everything that is committed on the publisher now is visible.  Raises CatchupTimeoutError."""
        self.client(lambda node: node.wait_for_catchup(subscription, timeout=timeout))
