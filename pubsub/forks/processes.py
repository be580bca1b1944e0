"""Start processes that are forked from one that has imported what they need (fork_server.py has the messages)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from pubsub.errors import PubsubError
from pubsub.forks import fork_server
from pubsub.forks.channel import Channel

_STOP: Final = 5.0


class Process:
    """A process that was forked; `start` of Processes returns it."""

    def __init__(self, number: int, channel: Channel) -> None:
        self._number = number
        self._channel = channel
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()

    @property
    def pid(self) -> int:
        return self.started.result()

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        self._channel.send(fork_server.KILL, fork_server.CONTENTS.pack(self._number, 0))

    async def wait(self) -> int:
        """Wait for its end; return the exit code, which is negative for a signal."""
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        self._ended.set_result(code)


class Processes:
    """Starts them.  The one that they are forked from is started with the first, and anew when it has died.

    `programs`: the modules that they run, by names of at most 15 bytes, which the system shows for them.
    """

    def __init__(self, programs: Mapping[str, str]) -> None:
        self._programs = programs
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._processes: dict[int, Process] = {}
        self._channel: Channel | None = None
        self._fork_server: asyncio.subprocess.Process

    async def start(self, program: str, files: Sequence[int]) -> Process:
        """Start a program with open files, which the caller may close.  Raises PubsubError, OSError."""
        which = list(self._programs).index(program)
        async with self._lock:
            channel = self._channel or await self._begin()
        number = next(self._numbers)
        process = self._processes[number] = Process(number, channel)
        channel.send(fork_server.FORK, fork_server.CONTENTS.pack(number, which), files)
        # If this is cancelled, the process ends with the other ends of its files.
        await asyncio.shield(process.started)
        return process

    async def close(self) -> None:
        """Kill what runs."""
        async with self._lock:
            if self._channel is None:
                return
            self._channel.close()
            self._gone()
            try:
                async with asyncio.timeout(_STOP):
                    await self._fork_server.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._fork_server.kill()
                await self._fork_server.wait()

    async def _begin(self) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._fork_server = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", fork_server.__name__, str(theirs.fileno())),
                    *(f"{name}={module}" for name, module in self._programs.items()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # NumPy, which pyarrow imports, would start a thread for each processor; nothing here computes with it.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours, self._message, self._gone)
        return self._channel

    def _message(self, kind: bytes, contents: bytes, _files: list[int]) -> None:
        number, said = fork_server.CONTENTS.unpack(contents)
        if kind == fork_server.FORKED:
            self._processes[number].started.set_result(said)
        elif kind == fork_server.NOT_FORKED:
            self._processes.pop(number).started.set_exception(OSError(said, os.strerror(said)))
        elif kind == fork_server.EXITED:
            self._processes.pop(number).end(said)

    def _gone(self) -> None:
        """Kill what was forked: what told of its end is gone."""
        self._channel = None
        processes, self._processes = self._processes, {}
        for process in processes.values():
            if not process.started.done():
                process.started.set_exception(PubsubError("the process that others are forked from has ended"))
                continue
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.end(-signal.SIGKILL)
