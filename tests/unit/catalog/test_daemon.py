"""One daemon per node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.home_lock import LOCK_FILE, DaemonLock, running_daemon
from pubsub.errors import ObjectInUse, PubsubError

_HOLDER = """
import sys
from pathlib import Path
from catalog.home_lock import DaemonLock
lock = DaemonLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_refused_by_name_and_pid(tmp_path: Path) -> None:
    assert running_daemon(tmp_path) is None
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ObjectInUse) as caught:
            DaemonLock.acquire(tmp_path)
        assert str(tmp_path) in caught.value.message
        assert caught.value.detail == f"Its process id is {holder.pid}."
        assert running_daemon(tmp_path) == holder.pid
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    # The node is free, however the daemon ended, though its pid is still in the file.
    assert (tmp_path / LOCK_FILE).read_text() == f"{holder.pid}\n"
    assert running_daemon(tmp_path) is None
    with DaemonLock.acquire(tmp_path):
        pass


def test_release_lets_go(tmp_path: Path) -> None:
    lock = DaemonLock.acquire(tmp_path)
    with pytest.raises(ObjectInUse):
        DaemonLock.acquire(tmp_path)
    lock.release()
    lock.release()
    assert running_daemon(tmp_path) is None
    with DaemonLock.acquire(tmp_path):
        assert running_daemon(tmp_path) is not None


_PARENT = """
import subprocess, sys
from pathlib import Path
from catalog.home_lock import DaemonLock
lock = DaemonLock.acquire(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False, stdout=sys.stderr)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_that_outlives_its_daemon_does_not_keep_it(tmp_path: Path) -> None:
    """A JVM may outlive it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.communicate()
        with DaemonLock.acquire(tmp_path):
            assert running_daemon(tmp_path) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_home_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PubsubError, match="could not open lock file"):
        DaemonLock.acquire(tmp_path / "nowhere")
    assert running_daemon(tmp_path / "nowhere") is None
