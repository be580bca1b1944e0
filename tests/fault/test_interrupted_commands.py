"""Commands that wait, interrupted at random moments: each ends in psql's words, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from catalog.records import PinnedSnapshot
from pubsub import jars
from pubsub.delta import pins, table
from tests.fault.daemon import Daemon, Subscribed
from tests.scenarios.test_060_commands import ignores_sigint
from tests.support.replica import PATIENCE, wait_until

_CANCELED = "ERROR:  canceling statement due to user request\n"
_ENDED_BEFORE = -signal.SIGINT
"""The exit code if the signal comes while modules load, or when all is done: it ends the process as it ends any other."""


def catches_sigint(pid: int) -> bool:
    """Return whether the process has a handler for SIGINT; False for one that has ended and was not waited for."""
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> signal.SIGINT - 1 & 1)


class Commands:
    """Commands on a node, in processes with a directory of their own for temporary files, and random moments to interrupt them."""

    def __init__(self, home: Path, scratch: Path) -> None:
        self.home = home
        self.scratch = scratch
        seed = int(os.environ.get("PUBSUB_SEED") or random.SystemRandom().randrange(1 << 32))
        print(f"seed {seed}")
        self.random = random.Random(seed)
        scratch.mkdir()

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command that leads a process group, as a shell's jobs do, and wait until it heeds signals."""
        process = subprocess.Popen(
            ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.scratch)},
            start_new_session=True,
        )
        with process:
            try:
                # Python itself, which starts first, would answer with a traceback.
                wait_until(
                    lambda: process.poll() is not None or not ignores_sigint(process.pid), "the program has begun"
                )
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def pubsub(self, *arguments: str, home: Path | None = None) -> tuple[str, ...]:
        return (sys.executable, "-m", "pubsub.cli", "--home", str(home or self.home), "--verbose", *arguments)

    def times(self, command: tuple[str, ...], undo: Callable[[], None] = lambda: None) -> float:
        """Run a command to its end, and what undoes it; return the seconds that it took."""
        begun = time.monotonic()
        with self.started(*command) as process:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, out + err
        takes = time.monotonic() - begun
        undo()
        return takes

    def interrupted(self, command: tuple[str, ...], within: float) -> int:
        """Send SIGINT at a random moment, as a terminal does, to all processes of the command; return the exit code."""
        with self.started(*command) as process:
            if self.random.random() < 0.7:
                # Half of the time goes by before the command itself begins.
                wait_until(lambda: process.poll() is not None or catches_sigint(process.pid), "the command to begin")
                within /= 2
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, within))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err, err
        if process.returncode == 130:
            assert err.endswith(_CANCELED), err
        assert list(self.scratch.iterdir()) == []
        return process.returncode


@pytest.fixture
def commands(daemon: Daemon, tmp_path: Path) -> Commands:
    return Commands(daemon.home, tmp_path / "scratch")


def as_expected(ended: Counter[int]) -> None:
    print(ended)
    assert set(ended) <= {0, 130, _ENDED_BEFORE}, ended
    assert ended[130] > 1, ended


def pinned(daemon: Daemon) -> tuple[PinnedSnapshot, ...]:
    found: tuple[PinnedSnapshot, ...] = daemon.client(lambda node: node.pinned_snapshots())
    return found


def holding(subscribed: Subscribed, name: str) -> list[str]:
    return [table for table, one in subscribed.relations().items() if pins.holds(one.path, name)]


@pytest.mark.full
def test_a_snapshot(commands: Commands, daemon: Daemon, subscribed: Subscribed) -> None:
    """It is pinned or not, in the catalog and in the tables."""
    subscribed.subscribe()
    subscribed.caught_up()
    plain = commands.pubsub("snapshot", subscribed.name)
    takes = commands.times(plain)
    ended = Counter(commands.interrupted(plain, 1.2 * takes) for _ in range(6))
    pin = commands.pubsub("snapshot", subscribed.name, "--pin", "mine")
    drop = commands.pubsub("snapshot", "--drop", "mine")

    def dropped() -> None:
        daemon.client(lambda node: node.drop_snapshot("mine"))

    takes = commands.times(pin, dropped)
    for _ in range(18):
        code = commands.interrupted(pin, 1.2 * takes)
        ended[code] += 1
        found = pinned(daemon)
        assert [one.complete for one in found] == [True] * len(found)
        assert bool(found) if code == 0 else not found or code == _ENDED_BEFORE
        assert len(holding(subscribed, "mine")) == 2 * len(found)
        if found:
            dropped()
    for _ in range(8):
        daemon.client(lambda node: node.snapshot(subscribed.name, pin="mine"))
        code = commands.interrupted(drop, 1.2 * takes)
        ended[code] += 1
        if pinned(daemon):
            assert code != 0
            dropped()
        assert not pinned(daemon)
        assert not holding(subscribed, "mine")
    as_expected(ended)
    subscribed.write()
    subscribed.assert_equal()


def sessions(subscribed: Subscribed) -> list[Any]:
    """Return the sessions on the publisher that hold a snapshot, or that a verification has opened."""
    return subscribed.database.query(
        "SELECT application_name, state, query FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND (application_name LIKE 'pubsub verify%' OR state LIKE 'idle in transaction%')"
    )


@pytest.mark.full
def test_a_snapshot_without_a_daemon(commands: Commands, daemon: Daemon, subscribed: Subscribed) -> None:
    """The command starts a Spark of its own, and that ends with it."""
    subscribed.subscribe()
    subscribed.caught_up()
    assert daemon.terminate() == 0
    pin = commands.pubsub("snapshot", subscribed.name, "--pin", "mine")
    drop = commands.pubsub("snapshot", "--drop", "mine")
    takes = commands.times(pin)
    commands.times(drop)
    ended: Counter[int] = Counter()
    for _ in range(5):
        code = commands.interrupted(pin, 1.1 * takes)
        ended[code] += 1
        assert len(holding(subscribed, "mine")) == 2 * len(pinned(daemon))
        if pinned(daemon):
            assert code in {0, _ENDED_BEFORE}
            commands.times(drop)
    as_expected(ended)


@pytest.mark.full
def test_a_verification(commands: Commands, daemon: Daemon, subscribed: Subscribed) -> None:
    """Nothing holds a snapshot on the publisher afterwards, or a version here."""
    subscribed.subscribe()
    subscribed.caught_up()
    verify = commands.pubsub("verify", subscribed.name)
    takes = commands.times(verify)
    ended: Counter[int] = Counter()
    for _ in range(18):
        code = commands.interrupted(verify, 1.2 * takes)
        ended[code] += 1
        assert not pinned(daemon)
        assert not any(pins.PROPERTY in properties for properties in all_properties(subscribed))
        wait_until(lambda: sessions(subscribed) == [], "the sessions to end", 30)
    as_expected(ended)
    commands.times(verify)
    subscribed.write()
    subscribed.assert_equal()


@pytest.mark.full
def test_a_repair(commands: Commands, daemon: Daemon, subscribed: Subscribed) -> None:
    """Rows that differ are copied anew or not; the next repair finds the rest."""
    subscribed.subscribe()
    subscribed.caught_up()
    (path,) = (one.path for name, one in subscribed.relations().items() if name == "a")
    repair = commands.pubsub("verify", subscribed.name, "--repair")
    takes = commands.times(commands.pubsub("verify", subscribed.name))
    ended: Counter[int] = Counter()
    for number in range(8):
        DeltaTable(path).delete(f"id % 50 = {number}")
        ended[commands.interrupted(repair, 2 * takes)] += 1
        assert not pinned(daemon)
        wait_until(lambda: sessions(subscribed) == [], "the sessions to end", 30)
    as_expected(ended)
    commands.times(repair)
    subscribed.write()
    subscribed.assert_equal()


_WAITING = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pubsub import Node

async def main():
    async with Node(sys.argv[1], workers=False) as node:
        await node.wait_for_catchup(sys.argv[2], "F/0", timeout=600)

asyncio.run(main())
"""


@pytest.mark.full
def test_waits_and_copies_of_the_catalog(
    commands: Commands, daemon: Daemon, subscribed: Subscribed, tmp_path: Path
) -> None:
    """A wait for catch-up, which is a program's, ends as Python's programs do; no part of a backup is left."""
    subscribed.subscribe()
    subscribed.caught_up()
    for _ in range(3):
        with commands.started(sys.executable, "-c", _WAITING, str(daemon.home), subscribed.name) as process:
            time.sleep(commands.random.uniform(0.5, 4))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGINT
    for options in ((), ("--json",)):
        watch = commands.pubsub("status", "--watch", *options)
        assert {commands.interrupted(watch, 4) for _ in range(3)} <= {0, _ENDED_BEFORE}
    kept = tmp_path / "backups"
    kept.mkdir()
    file = kept / "backup"
    backup = commands.pubsub("catalog", "backup", str(file))
    takes = commands.times(backup, file.unlink)
    ended: Counter[int] = Counter()
    for _ in range(10):
        code = commands.interrupted(backup, 1.2 * takes)
        ended[code] += 1
        left = list(kept.iterdir())
        assert left in {0: ([file],), _ENDED_BEFORE: ([], [file])}.get(code, ([],))
        for one in left:
            one.unlink()
    as_expected(ended)
    commands.times(backup)
    elsewhere = tmp_path / "elsewhere"
    restore = commands.pubsub("catalog", "restore", str(file), home=elsewhere)
    takes = commands.times(restore)
    for _ in range(6):
        shutil.rmtree(elsewhere, ignore_errors=True)
        code = commands.interrupted(restore, 1.2 * takes)
        assert code in {0, 130, _ENDED_BEFORE}
        if code == 130:
            commands.times(restore)


@pytest.mark.full
def test_a_prompt(commands: Commands, daemon: Daemon) -> None:
    """Ctrl-C ends a statement, or the line that is being written, and never the prompt."""
    ours, theirs = pty.openpty()
    command = commands.pubsub("sql")
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        said = b""

        def found(text: bytes, seconds: float) -> bool:
            nonlocal said
            if select.select([ours], [], [], seconds)[0]:
                said += os.read(ours, 1 << 16)
            return text in said

        def until(text: bytes) -> None:
            wait_until(lambda: found(text, 0.1), text.decode())

        try:
            until(b"pubsub=> ")
            numbers = itertools.count()

            def interrupted() -> bool:
                """Interrupt a statement, or what comes before or after it; later on a slow machine."""
                number = next(numbers)
                os.write(ours, f"SELECT {number}, oid FROM pg_subscription;\n".encode())
                time.sleep(commands.random.uniform(0, 0.3 + 0.01 * number))
                process.send_signal(signal.SIGINT)
                time.sleep(commands.random.uniform(0, 0.1))
                return found(b"canceling statement due to user request", 0) and number >= 20

            wait_until(interrupted, "a statement to be canceled")
            # The last interrupt may take a line that is being written with it: ask until the prompt has read one.
            wait_until(
                lambda: os.write(ours, b"\nSELECT 'still ' || 'here';\n") and found(b"still here", 1), "an answer"
            )
            os.write(ours, b"\\q\n")
            assert process.wait(PATIENCE) == 0
            assert b"Traceback" not in said
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.full
def test_setup(commands: Commands, tmp_path: Path) -> None:
    """What was fetched so far stays whole; no part of a file is left."""
    source, into = jars.directory(), tmp_path / "jars"
    setup = ("env", f"PUBSUB_JARS={into}", *commands.pubsub("setup", "--from", str(source)))
    takes = commands.times(setup)
    ended: Counter[int] = Counter()
    for _ in range(10):
        shutil.rmtree(into, ignore_errors=True)
        ended[commands.interrupted(setup, 1.2 * takes)] += 1
        assert not into.exists() or not list(into.glob(".*"))
    as_expected(ended)


def all_properties(subscribed: Subscribed) -> list[Mapping[str, str]]:
    return [table.properties(one.path) for one in subscribed.relations().values()]
