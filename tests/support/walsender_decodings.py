"""The decodings to compare, ours in a process of its own and PostgreSQL's from a slot, and the messages of both."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from pubsub.errors import PublisherError
from pubsub.protocol.copyboth import XLogData, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.walsender_options import Asked

_TEXT_ENDS = re.compile(rb"COMMIT|PREPARE TRANSACTION|ROLLBACK PREPARED")

HEADER = struct.Struct(">QI")
"""The header of each pgoutput message in our command's output: its LSN and its length."""


@dataclass(frozen=True)
class Message:
    """A message of an output plugin: its LSN, its transaction (0 if unknown), its bytes."""

    lsn: int
    xid: int
    data: bytes

    def __repr__(self) -> str:
        return f"<{Lsn(self.lsn)} {self.data[:200]!r}>"


class Decoding:
    """`python -m walsender decode` in a process of its own; leaving the context ends it."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        dbname: str,
        *,
        plugin: str = "pgoutput",
        publications: str = "p",
        proto_version: int = 1,
        options: Sequence[str] = (),
        more: Sequence[str] = (),
        conninfo: str | None = None,
        interpreted: bool = False,
        asked: Asked | None = None,
    ) -> None:
        """`interpreted`: without the compiled modules (walsender/hot); `asked` has plugin, publications and options."""
        if asked is None:
            given = dict(option.split("=", 1) for option in options)
            if plugin == "pgoutput":
                given["proto_version"] = str(proto_version)
            asked = Asked(plugin, publications, given)
        self.server = server
        self.dbname = dbname
        self.plugin = asked.plugin
        self.directory = tempfile.TemporaryDirectory(prefix="pubsub-decode-")
        self.output = Path(self.directory.name) / "output"
        arguments = [
            sys.executable,
            "-m",
            "walsender",
            "decode",
            "--conninfo",
            conninfo or server.conninfo(dbname),
            "--output",
            str(self.output),
            "--missing-publication",
            "server",
            *asked.arguments(),
            *more,
        ]
        environment = {**os.environ, "WALSENDER_INTERPRETED": "1"} if interpreted else None
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.errors: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.directory.cleanup()

    def wait_consistent(self, timeout: float = 60.0) -> int:
        """Wait until the command reports its consistent point, and return it."""
        while True:
            line = self._lines.get(timeout=timeout)
            assert line is not None, "".join(self.errors)
            if found := re.match(r"consistent point ([0-9A-F]+/[0-9A-F]+)", line):
                return int(Lsn.parse(found[1]))

    def wait_for(self, lsn: int, timeout: float = 60.0) -> None:
        """Wait until the WAL up to `lsn` is decoded and written, which the command reports at SIGUSR1."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.process.send_signal(signal.SIGUSR1)
            line = self._lines.get(timeout=timeout)
            assert line is not None, "".join(self.errors)
            if (found := re.match(r"position ([0-9A-F]+/[0-9A-F]+)", line)) and int(Lsn.parse(found[1])) >= lsn:
                return
            time.sleep(0.02)
        raise AssertionError(f"not decoded up to {Lsn(lsn)} in {timeout} seconds")

    def finish(self, timeout: float = 120.0) -> list[Message]:
        """Wait until a decoding with --end is done; return its messages."""
        code = self.process.wait(timeout)
        assert code == 0, "".join(self.errors)
        return list(self.messages())

    def stop(self) -> list[Message]:
        """End the decoding; return its messages."""
        self.process.terminate()
        return self.finish()

    def messages(self) -> Iterator[Message]:
        return read_messages(self.output.read_bytes(), pgoutput=self.plugin == "pgoutput")


def read_messages(data: bytes, *, pgoutput: bool = True) -> Iterator[Message]:
    """Parse the command's output."""
    if not pgoutput:
        # A value may contain line ends; a new message starts with an LSN and an xid.
        starts = [found.start() for found in re.finditer(rb"^[0-9A-F]+/[0-9A-F]+\t\d+\t", data, re.MULTILINE)]
        for start, end in pairwise([*starts, len(data)]):
            lsn_text, xid, text = data[start : end - 1].split(b"\t", 2)
            yield Message(int(Lsn.parse(lsn_text.decode())), int(xid), text)
        return
    position = 0
    while position + HEADER.size <= len(data):
        lsn, length = HEADER.unpack_from(data, position)
        position += HEADER.size
        yield Message(lsn, 0, data[position : position + length])
        position += length


def create_slot(server: EmbeddedPostgres, dbname: str, name: str, plugin: str, *, two_phase: bool = False) -> int:
    """Create a logical slot; return its consistent point."""
    ((lsn,),) = server.query(
        f"SELECT lsn FROM pg_create_logical_replication_slot('{name}', '{plugin}', false, {two_phase})", dbname
    )
    return int(Lsn.parse(str(lsn)))


def slot_changes(
    server: EmbeddedPostgres,
    dbname: str,
    slot: str,
    plugin: str,
    options: dict[str, str],
    upto: int | None = None,
    *,
    work_mem: str = "64MB",
) -> list[Message]:
    """Return the messages of PostgreSQL's own decoding."""
    given = "".join(f", '{name}', '{value}'" for name, value in options.items())
    limit = f"'{Lsn(upto)}'" if upto is not None else "NULL"
    kind = "binary_changes" if plugin == "pgoutput" else "changes"
    with server.connect(dbname) as connection:
        connection.execute(f"SET logical_decoding_work_mem = '{work_mem}'".encode())
        if plugin == "pgoutput":
            connection.execute(b"SET search_path = ''")  # as libpqwalreceiver does
        rows = connection.execute(
            f"SELECT lsn, xid::text, data FROM pg_logical_slot_get_{kind}('{slot}', {limit}, NULL{given})".encode()
        ).fetchall()
    found = [
        Message(int(Lsn.parse(str(lsn))), int(xid), bytes(data) if plugin == "pgoutput" else str(data).encode())
        for lsn, xid, data in rows
    ]
    if plugin == "pgoutput":
        # Unlike these functions, a walsender sends no LSN if more messages of the same change follow.
        for number, m in enumerate(found):
            if m.data[:1] in {b"R", b"Y"} or (m.data[:1] in {b"B", b"b", b"S"} and found[number + 1].data[:1] == b"O"):
                found[number] = Message(0, m.xid, m.data)
    return found


class ServerStream:
    """PostgreSQL's own walsender on a slot, followed while the changes are made; a context manager.

    For a transaction that was in progress when a publication was altered, its output depends on its caches: returning
    to an older snapshot does not invalidate entries that were read under a later one, so it may use the altered
    publication.  Ours uses the publication as it was at each change.

    A walsender that streams can fail (XX000, XX001) while catalogs are rewritten: "could not map filenumber" at the
    next change of a relation after a subtransaction was rolled back, "could not read block".  It is then restarted
    without streaming, after the last transaction that it sent: `failed` has the error, and transactions have to be
    compared as a whole (`assembled`).  If it cannot decode the WAL without streaming either ("unexpected duplicate
    for tablespace", which pg_logical_slot_peek_changes reports, too), it ends there: `stopped`.

    A walsender locks the catalogs it reads, so it can also be the victim of a deadlock with a client that rewrites them
    (40P01).  It is then restarted as it was.
    """

    def __init__(self, server: EmbeddedPostgres, dbname: str, slot: str, options: dict[str, str]) -> None:
        self._conninfo = server.conninfo(dbname)
        self._slot = slot
        self._options = dict(options)
        self._found: list[Message] = []
        self._position = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failed = ""
        self.stopped = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    @property
    def found(self) -> list[Message]:
        """The messages so far."""
        return self._found

    def wait_for(self, lsn: int, timeout: float = 60.0) -> list[Message]:
        """Return the messages once the server has sent all up to `lsn`, or has stopped for good."""
        deadline = time.monotonic() + timeout
        while self._position < lsn and not self.stopped:
            assert self._failure is None, self._failure
            assert time.monotonic() < deadline, f"the server has not sent {Lsn(lsn)} in {timeout} seconds"
            time.sleep(0.02)
        return self._found

    def _run(self) -> None:
        try:
            while not self.stopped:
                try:
                    asyncio.run(self._receive(_last_end(self._found)))
                    return
                except PublisherError as error:
                    if error.sqlstate not in {"XX000", "XX001", "40P01"}:
                        raise
                    self.failed = error.message
                    self._found = _finished(self._found, pgoutput="proto_version" in self._options)
                    if error.sqlstate != "40P01" and self._options.pop("streaming", None) is None:
                        self.stopped = True
        except BaseException as error:
            self._failure = error

    async def _receive(self, start: int) -> None:
        # After a restart the server repeats only messages outside of transactions.
        again = set(self._found) if start else set()
        async with await Connection.connect(self._conninfo, replication=True) as connection:
            if "proto_version" not in self._options:
                await connection.query("SET search_path = public")  # test_decoding's names depend on it
            stream = await replication.start(connection, self._slot, start, self._options)
            position = 0
            while not self._stop.is_set():
                try:
                    async with asyncio.timeout(0.1):
                        frames = await stream.receive()
                except TimeoutError:
                    self._position = position
                    await stream.send_status(position, position, position, reply=True)
                    continue
                for frame in frames:
                    message = read_server_message(frame)
                    if isinstance(message, XLogData):
                        found = Message(int(message.start_lsn), 0, message.data)
                        if found.data[:1] != b"M" or found not in again:
                            self._found.append(found)
                    else:
                        position = max(position, int(message.wal_end))


def _finished(messages: Sequence[Message], *, pgoutput: bool = True) -> list[Message]:
    """Remove the transactions whose end is missing."""
    if not pgoutput:
        ends = [number for number, m in enumerate(messages, 1) if _TEXT_ENDS.match(m.data)]
        return list(messages[: max(ends, default=0)])
    ended = {m.data[1:5] for m in messages if m.data[:1] == b"c"} | aborted_streams(messages)
    ended |= {m.data[26:30] for m in messages if m.data[:1] == b"p"}
    found: list[Message] = []
    stream: bytes | None = None
    begun: int | None = None
    for m in messages:
        kind = m.data[:1]
        if kind == b"S":
            stream = m.data[1:5]
        elif kind in {b"B", b"b"}:
            begun = len(found)
        if stream is None or stream in ended:
            found.append(m)
        if kind == b"E":
            stream = None
        elif kind in {b"C", b"P"}:
            begun = None
    return found[:begun]


def _last_end(messages: Sequence[Message]) -> int:
    """Return the end LSN of the last transaction, 0 without one."""
    places = {b"C": 10, b"c": 14, b"P": 10, b"p": 10, b"K": 10, b"r": 10}
    ends = [int.from_bytes(m.data[skip : skip + 8]) for m in messages if (skip := places.get(m.data[:1], 0))]
    return max(ends, default=0)


def as_sent(messages: Sequence[Message], *, pgoutput: bool) -> list[Message]:
    """Reduce the command's messages to what a walsender sends.

    This removes, from test_decoding's lines, the transaction; the LSN of BEGIN, which is sent with the first change;
    and all that follows `flush_lsn`'s message, which are transactions without changes.
    """
    if pgoutput:
        return list(messages)
    ends = (
        number for number, m in enumerate(messages) if m.data.startswith(b"message: transactional: 1 prefix: end, ")
    )
    # The COMMIT of its transaction is the next line.
    upto = next(ends, len(messages)) + 2
    return [Message(0 if m.data.startswith(b"BEGIN") else m.lsn, 0, m.data) for m in messages[:upto]]


def flush_lsn(server: EmbeddedPostgres, dbname: str = "postgres") -> int:
    """Commit a message `end`, which flushes the WAL, and return the WAL's end."""
    server.execute("SELECT pg_logical_emit_message(true, 'end', '')", dbname)
    ((lsn,),) = server.query("SELECT pg_current_wal_insert_lsn()")
    return int(Lsn.parse(str(lsn)))


def aborted_streams(messages: Sequence[Message]) -> set[bytes]:
    return {m.data[1:5] for m in messages if m.data[:1] == b"A" and m.data[1:5] == m.data[5:9]}
