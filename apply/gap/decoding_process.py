"""A stream that a process of ours decodes (`python -m walsender decode --as-stream`), as if a walsender sent it.

It reads segments from an archive, or has a command fetch them, as long as they are there, and then from the server itself.  Its
output is a walsender's in copy-both mode.  The process ends when its output is closed, so it does not outlive this one; and where
the server is found on a later timeline, which must be stored before anything of it is (publisher_identity.remember).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, Self

from pubsub.backend import messages
from pubsub.errors import ConnectionFailure, ProtocolViolation, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.replication import RECEIVE_BYTES, StreamEnded

_HEADER: Final = Struct(">cI")
_CLOSE_TIMEOUT: Final = 5.0
"""Seconds that the process has to end by itself."""
_LAST_WORDS: Final = 4096
"""Bytes of standard error that are kept."""


@dataclass(frozen=True, slots=True)
class RestoreCommand:
    """A command of the shell that fetches a segment, with %f and %p.  `timeout`: seconds for each; 0: without end."""

    command: str
    timeout: float


class DecodingProcess:
    """The stream of one decoding process.  `start` makes it; `receive` is called by one task at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, on_warning: Callable[[PublisherError], None] = lambda _: None
    ) -> None:
        self._process = process
        self._on_warning = on_warning
        self._bytes = bytearray()
        self._wanted = _HEADER.size
        self._failure: PublisherError | StreamEnded | None = None
        self._said = bytearray()
        self._listening = asyncio.create_task(self._listen(), name="decoding process")
        self.last_receive: float = time.monotonic()
        """When the last frame arrived, or the process began: time.monotonic(), seconds."""

    @classmethod
    async def start(
        cls,
        conninfo: str,
        options: Mapping[str, str],
        start: Lsn,
        archive: Path | RestoreCommand,
        *,
        work_mem: int,
        receiver_timeout: float,
        scratch: Path,
        on_warning: Callable[[PublisherError], None],
    ) -> Self:
        """Start decoding what commits at or after `start`; `options` are pgoutput's.

        `work_mem`: bytes; `receiver_timeout`: seconds; `scratch`: a directory for large transactions.  `on_warning` is called with
        what pgoutput warns of.  Returns once decoding has begun.  Raises PublisherError with what keeps it from that.
        """
        command = [sys.executable, "-m", "walsender", "decode", "--conninfo-file", "-", "--output", "-", "--as-stream"]
        command += ["--start", str(start), "--work-mem", f"{work_mem}B"]
        if isinstance(archive, Path):
            command += ["--wal", str(archive)]
        else:
            command += ["--restore-command", archive.command]
            command += ["--restore-timeout", f"{round(archive.timeout * 1000)}ms"]
        command += ["--wal-receiver-timeout", f"{round(receiver_timeout * 1000)}ms", "--missing-publication", "server"]
        for name, value in options.items():
            command += ["--option", f"{name}={value}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=RECEIVE_BYTES,
            env={**os.environ, "TMPDIR": str(scratch)},
            # Ctrl-C on a terminal is this process's affair.
            start_new_session=True,
        )
        stream = cls(process, on_warning)
        try:
            await stream._tell(conninfo)
            await stream._fill()
            if stream._bytes.startswith(b"E"):
                await stream.receive()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> list[bytes]:
        """Wait for a frame, then return those that are there, up to `max_bytes` or one frame more.

        As ReplicationStream.receive: cancelling loses none; PublisherError has the reason why decoding has ended.
        """
        frames = self._take(max_bytes)
        while not frames:
            if self._failure is not None:
                raise self._failure
            await self._fill()
            frames = self._take(max_bytes)
        self.last_receive = time.monotonic()
        return frames

    async def send_status(self, written: int, flushed: int, applied: int, *, reply: bool = False) -> None:
        """Do nothing: the process says how far it is by itself, and keeps nothing for this reader."""

    async def close(self, timeout: float = _CLOSE_TIMEOUT) -> None:
        """End the process; wait until it is gone."""
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(timeout):
                # It may be writing to the pipe.
                while process.stdout is not None and await process.stdout.read(RECEIVE_BYTES):
                    pass
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            self._listening.cancel()

    async def _tell(self, conninfo: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):  # if it has ended, its output says why
            stdin.write(conninfo.encode())
            await stdin.drain()
            stdin.close()

    async def _listen(self) -> None:
        """Keep the last of what the process says on standard error."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_LAST_WORDS):
            self._said += data
            del self._said[:-_LAST_WORDS]

    async def _fill(self) -> None:
        """Read until there is a message; at the end of the output note why."""
        assert self._process.stdout is not None
        while len(self._bytes) < self._wanted:
            data = await self._process.stdout.read(RECEIVE_BYTES)
            if not data:
                code = await self._process.wait()
                await asyncio.wait({self._listening})
                raise ConnectionFailure(
                    "the decoding process ended unexpectedly",
                    detail=f"exit code {code}; it said: {self._said.decode(errors='replace').strip()}",
                )
            self._bytes += data
            if len(self._bytes) >= _HEADER.size:
                self._wanted = 1 + _HEADER.unpack_from(self._bytes)[1]

    def _take(self, max_bytes: int) -> list[bytes]:
        """Take whole CopyData messages, up to the one that ends the stream."""
        have, at, frames = self._bytes, 0, list[bytes]()
        self._wanted = _HEADER.size
        while len(have) - at >= _HEADER.size and at < max_bytes and self._failure is None:
            kind, length = _HEADER.unpack_from(have, at)
            end = at + 1 + length
            if end > len(have):
                self._wanted = end - at
                break
            if kind == b"d":
                frames.append(bytes(have[at + _HEADER.size : end]))
            elif kind == b"N":
                self._on_warning(_read_error(bytes(have[at + _HEADER.size : end])))
            else:
                self._failure = _end(kind, bytes(have[at + _HEADER.size : end]))
            at = end
        del have[:at]
        return frames


def _end(kind: bytes, body: bytes) -> PublisherError | StreamEnded:
    if kind == b"c":
        return StreamEnded("the decoding process has ended")
    if kind != b"E":
        raise ProtocolViolation(f"unexpected message of type {kind!r} from a decoding process")
    return _read_error(body)


def _read_error(body: bytes) -> PublisherError:
    error = messages.read_error(body)
    return PublisherError(
        error.message, sqlstate=error.sqlstate, detail=error.detail, hint=error.hint, context=error.context
    )
