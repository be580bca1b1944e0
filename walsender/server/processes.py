"""The server's decoding processes, which are forked from one that has imported what they need (streaming/fork_server.py)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

from pubsub.errors import PubsubError
from walsender.streaming import requests
from walsender.streaming.channel import Channel

_STOP: Final = 5.0


class Process:
    """A process that was forked; `start` of Processes returns it."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self._channel = channel
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()

    @property
    def pid(self) -> int:
        return self.started.result()

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        self._channel.send(requests.KILL, requests.TWO.pack(self.number, 0))

    async def wait(self) -> int:
        """Wait for its end; return the exit code, which is negative for a signal."""
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        self._ended.set_result(code)


class Processes:
    """Starts them.  The one that they are forked from is started with the first, and anew when it has died."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._processes: dict[int, Process] = {}
        self._channel: Channel | None = None
        self._fork_server: asyncio.subprocess.Process

    async def start(self, program: int, sock: socket.socket) -> Process:
        """Start a program (requests.py) at one end of a socket, which the caller may close.  Raises PubsubError, OSError."""
        async with self._lock:
            channel = self._channel or await self._begin()
        number = next(self._numbers)
        process = self._processes[number] = Process(number, channel)
        channel.send(requests.FORK, requests.TWO.pack(number, program), [sock.fileno()])
        # One that nobody waits for any more ends as its socket does.
        await asyncio.shield(process.started)
        return process

    async def close(self) -> None:
        """End what runs."""
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
                    *(sys.executable, "-m", "walsender.streaming.fork_server", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours, self._message, self._gone)
        return self._channel

    def _message(self, kind: bytes, contents: bytes, _files: list[int]) -> None:
        number, said = requests.TWO.unpack(contents)
        if kind == requests.FORKED:
            self._processes[number].started.set_result(said)
        elif kind == requests.NOT_FORKED:
            self._processes.pop(number).started.set_exception(OSError(said, os.strerror(said)))
        elif kind == requests.EXITED:
            self._processes.pop(number).end(said)

    def _gone(self) -> None:
        """Kill what was forked, which nobody looks after any more."""
        self._channel = None
        processes, self._processes = self._processes, {}
        for process in processes.values():
            if not process.started.done():
                process.started.set_exception(PubsubError("the process that others are forked from has ended"))
                continue
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.end(-signal.SIGKILL)
