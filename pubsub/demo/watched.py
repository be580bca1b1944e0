"""A program of the demo's, run under the watcher of pubsub.testing: it ends when this process ends, in whatever way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pubsub.demo.processes import kill_tree
from pubsub.testing import watcher


class Watched:
    """A running program, whose output goes to the file `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        config = {
            "command": list(command),
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "log": str(log),
            "uid": None,
            "gid": None,
            "remove": None,
        }
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._watcher.stdout is not None
        self.pid: int | None = int(self._watcher.stdout.readline() or 0) or None

    def ended(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._watcher.poll()

    def end(self, seconds: float) -> None:
        """End the program: in good order within `seconds`, else with all its processes at once."""
        process = self._watcher
        if process.poll() is None and self.pid is not None and seconds:
            os.kill(self.pid, signal.SIGTERM)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                seconds = 0
        if process.poll() is None and self.pid is not None:
            kill_tree(self.pid)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
