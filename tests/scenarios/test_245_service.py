"""The daemon under a service manager and in a container, as far as a test can go: notifications, unit, image, another user."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.monitoring import health
from pubsub.testing.fixtures import Database
from tests.support.replica import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "pubsub.service"
IMAGE = ROOT / "deploy" / "container" / "Containerfile"


class Manager:
    """What a service manager sees of a daemon."""

    def __init__(self, home: Path, address: str) -> None:
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)
        self.log = home / "daemon.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pubsub.cli", "--home", str(home), "daemon"],
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"},
            )

    def hears(self, message: str, times: int = 1) -> bool:
        while True:
            try:
                self.said.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self.said.count(message) >= times

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


@pytest.fixture(params=["a path", pytest.param("an abstract address", marks=pytest.mark.full)])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    (tmp_path / "pubsub.toml").write_text('[http]\nlisten = "127.0.0.1:0"\n')
    address = str(tmp_path / "notify") if request.param == "a path" else f"@pubsub-test-{os.getpid()}"
    one = Manager(tmp_path, address)
    yield one
    one.close()


@pytest.mark.full
def test_the_manager_is_told(manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: manager.hears("READY=1"), "READY=1")
    # It listens by then.
    assert "daemon has started" in manager.log.read_text()
    monkeypatch.setenv("PUBSUB_HOME", str(tmp_path))
    assert health.obstacle() is None
    wait_until(lambda: manager.hears("WATCHDOG=1", 5), "five signs of life")
    assert "STOPPING=1" not in manager.said
    manager.process.terminate()
    assert manager.process.wait(PATIENCE) == 0
    wait_until(lambda: manager.hears("STOPPING=1"), "STOPPING=1")
    assert "no daemon runs" in (health.obstacle() or "")


@pytest.mark.full
def test_ready_again_with_other_settings(manager: Manager, tmp_path: Path) -> None:
    wait_until(lambda: manager.hears("READY=1"), "READY=1")
    settings = tmp_path / "pubsub.toml"
    settings.write_text(settings.read_text() + 'ready_lag = "2min"\n')
    manager.process.send_signal(signal.SIGHUP)
    wait_until(lambda: manager.hears("READY=1", 2), "READY=1 again")
    assert "STOPPING=1" not in manager.said


def test_health_asks_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the node, but does not answer, is not healthy."""
    from catalog.home_lock import DaemonLock

    monkeypatch.setenv("PUBSUB_HOME", str(tmp_path))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        (tmp_path / "pubsub.toml").write_text(f'[http]\nlisten = "0.0.0.0:{port}"\n')
        with DaemonLock.acquire(tmp_path):
            assert "does not answer" in (health.obstacle() or "")
        (tmp_path / "pubsub.toml").write_text("[http]\nlisten = 1\n")
        assert "invalid value" in (health.obstacle() or "")


def test_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (command,) = re.findall(r"(?m)^ExecStart=(\S+) daemon$", text)
    assert command == "/opt/pubsub/bin/pubsub"
    for line in (
        "Type=notify",
        "KillMode=mixed",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
    ):
        assert f"\n{line}\n" in text
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze")
    # It looks whether the program is there.
    unit = tmp_path / "pubsub.service"
    unit.write_text(text.replace(command, str(Path(sys.executable).parent / "pubsub")))
    verified = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(
        [tool, "security", "--offline=true", str(unit)], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"Overall exposure level for pubsub\.service: ([\d.]+)", rated)
    assert found is not None, rated
    assert float(found[1]) < 2.5


def instructions() -> list[tuple[str, str]]:
    """Return the Containerfile's instructions and their arguments."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in IMAGE.read_text().splitlines() if line[:1] != "#"))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line]


def test_the_image() -> None:
    """What it copies and runs is there, and it runs as a user without rights."""
    found = instructions()
    names = [name for name, _ in found]
    assert names.count("FROM") == 2
    last = found[len(names) - 1 - names[::-1].index("FROM") :]
    assert ("USER", "10001") in last
    assert [name for name, _ in last].index("USER") < [name for name, _ in last].index("ENTRYPOINT")
    copied = [argument.split()[0] for name, argument in found if name == "COPY" and "--from" not in argument]
    assert copied == ["dist/pubsub_delta-*.whl"]  # what test_244_wheel builds and installs as the next steps do
    steps = [argument for name, argument in found if name == "RUN"]
    assert any("pubsub setup" in step for step in steps)
    assert "python:3.1" in found[0][1]
    (check,) = (argument for name, argument in last if name == "HEALTHCHECK")
    module = json.loads(check.partition("CMD ")[2])
    assert module == ["python", "-m", health.__name__]
    (entry,) = (json.loads(argument) for name, argument in last if name == "ENTRYPOINT")
    (arguments,) = (json.loads(argument) for name, argument in last if name == "CMD")
    assert shlex.join([*entry, *arguments]) == "tini -- pubsub daemon"


#: As `podman run --read-only --tmpfs /tmp --cap-drop all -v …`: $1 can be written, and /tmp; the rest is the command.
_CONTAINED = """
set -e
mount -o remount,bind,ro /
mount --bind "$1" "$1"
mount -o remount,bind,rw "$1"
mount -t tmpfs tmpfs /tmp
shift
if (touch /usr/written) 2>/dev/null; then echo "/ can be written" >&2; exit 99; fi
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def may_contain() -> bool:
    if Path(sys.prefix).is_relative_to("/tmp"):
        return False  # it would be hidden
    tools = all(map(shutil.which, ("unshare", "setpriv", "mount")))
    return tools and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(not may_contain(), reason="this user may make no mount namespace, or the environment lies in /tmp")
def test_a_read_only_root(database: Database) -> None:
    """Nothing is written but in the node's directory and /tmp, and no capability is needed."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
    home = Path(tempfile.mkdtemp(prefix="pubsub-contained-", dir="/var/tmp"))
    environment = {**os.environ, "HOME": str(home), "PUBSUB_HOME": str(home)}
    environment.pop("TMPDIR", None)

    def contained(*arguments: str) -> list[str]:
        command = ["unshare", "--mount", "sh", "-c", _CONTAINED, "sh", str(home)]
        return [*command, sys.executable, "-m", *arguments]

    def run(*arguments: str) -> str:
        ran = subprocess.run(contained(*arguments), env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran
        return ran.stdout

    try:
        run("pubsub.cli", "init", database.conninfo, "--yes", "--subscription", "contained")
        with (home / "log").open("wb") as log:
            daemon = subprocess.Popen(contained("pubsub.cli", "daemon"), env=environment, stdout=log, stderr=log)
        try:

            def rows(expected: str) -> bool:
                # Without a copy that is done the SELECT is refused.
                command = contained("pubsub.cli", "sql", "--format", "csv", "SELECT count(*) FROM t")
                ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                return ran.stdout.split() == ["count", expected]

            wait_until(lambda: rows("2"), "the copy")
            assert daemon.poll() is None
            run("pubsub.monitoring.health")
            database.execute("INSERT INTO t VALUES (3)")
            wait_until(lambda: rows("3"), "the insert")
            run("pubsub.cli", "sql", "DROP SUBSCRIPTION contained")
            daemon.terminate()
            assert daemon.wait(PATIENCE) == 0, (home / "log").read_text()
            assert "Read-only file system" not in (home / "log").read_text() + (home / "spark.log").read_text()
        finally:
            daemon.kill()
            daemon.wait()
    finally:
        shutil.rmtree(home)
