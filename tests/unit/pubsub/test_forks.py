"""Processes that are forked from one: each end is told, and none outlives what it was forked for."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pubsub.errors import PubsubError
from pubsub.forks import channel, fork_server
from pubsub.forks.processes import Process, Processes
from pubsub.testing.fault_points import wait_until


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes({"one": "tests.support.forked", "two": "tests.support.forked"})
    yield made
    await made.close()


async def _start(processes: Processes, program: str = "one") -> tuple[Process, socket.socket]:
    """Start a program; return it and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await processes.start(program, [theirs.fileno()])
            assert await asyncio.to_thread(ours.recv, 10) == b"here"
        except BaseException:
            ours.close()
            raise
    return process, ours


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("program", ["one", "two"])
async def test_one_tells_how_it_has_ended(processes: Processes, program: str) -> None:
    process, ours = await _start(processes, program)
    comm = await asyncio.to_thread(Path(f"/proc/{process.pid}/comm").read_text)
    assert comm == f"{program}\n"
    with ours:
        ours.sendall(b"7")
        assert await process.wait() == 7
    assert not _runs(process.pid)
    process.kill()  # which it is too late for


async def test_one_ends_with_its_socket(processes: Processes) -> None:
    process, ours = await _start(processes)
    ours.close()
    assert await process.wait() == 0


async def test_one_that_is_killed_takes_no_other_with_it(processes: Processes) -> None:
    (one, first), (other, second) = await _start(processes), await _start(processes)
    one.kill()
    assert await one.wait() == -signal.SIGKILL
    second.sendall(b"7")
    assert await other.wait() == 7
    first.close()
    second.close()


async def test_what_they_are_forked_from_dies(processes: Processes) -> None:
    """Its processes end with it, and the next one is forked from another."""
    process, first = await _start(processes)
    os.kill(processes._fork_server.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await asyncio.to_thread(wait_until, lambda: not _runs(process.pid), "the process ends")
    another, second = await _start(processes)
    assert another.pid != process.pid
    first.close()
    second.close()


async def test_what_they_are_forked_from_cannot_start(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PubsubError, match="the process that others are forked from has ended"):
        await _start(processes)


async def test_all_end_with_the_server(processes: Processes) -> None:
    process, ours = await _start(processes)
    await processes.close()
    await asyncio.to_thread(wait_until, lambda: not _runs(process.pid), "the process ends")
    ours.close()


async def test_a_start_that_is_given_up(processes: Processes) -> None:
    """Its process ends with its socket."""
    (await _start(processes))[1].close()
    starting = asyncio.create_task(_start(processes))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not processes._processes, "the process ends")


@pytest.fixture
def without_forks() -> Iterator[socket.socket]:
    """A process to fork from that has reached a limit."""
    ours, theirs = socket.socketpair()
    program = (
        "import errno, os, sys\n"
        "def fork(): raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "os.fork = fork\n"
        "from pubsub.forks import fork_server\n"
        "sys.exit(fork_server.main(int(sys.argv[1]), ['one=tests.support.forked']))"
    )
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield ours
        ours.close()
        assert process.wait() == 0


def test_none_can_be_forked(without_forks: socket.socket) -> None:
    """That is told of the one, and the others go on."""
    client, lent = socket.socketpair()
    with client, lent:
        for number in (7, 8):
            frame = channel.framed(fork_server.FORK, fork_server.CONTENTS.pack(number, 0), 1)
            socket.send_fds(without_forks, [frame], [lent.fileno()])
            message = channel.receive(without_forks)
            assert message is not None
            assert message[0] == fork_server.NOT_FORKED
            assert fork_server.CONTENTS.unpack(message[1]) == (number, errno.EAGAIN)
