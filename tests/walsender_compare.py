"""Our decoding beside PostgreSQL's: the same WAL, the same plugin, and what differs.

Two kinds (design: a logical slot on the server pins catalog_xmin and hides pruning):

    `Decoding`, `slot_changes` and `differences`    bytes against those of a logical slot on the same server
    `Decoding` and `Replayed`                       no slot: the changes applied to an empty copy, against the tables
"""

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
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from pubsub.errors import PublisherError
from pubsub.protocol.copyboth import XLogData, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation, read_message
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.testing.servers import EmbeddedPostgres
from tests.walsender_options import Asked

_TEXT_ENDS = re.compile(rb"COMMIT|PREPARE TRANSACTION|ROLLBACK PREPARED")
_PREPARED = re.compile(rb"(PREPARE TRANSACTION|COMMIT PREPARED|ROLLBACK PREPARED) ('[^']*')")
HEADER = struct.Struct(">QI")
"""What is before each of pgoutput's messages: its LSN and its length."""
Definition = tuple[bytes, ...]
"""A relation's Type messages and its Relation message, without what streams have between."""


@dataclass(frozen=True)
class Message:
    """What a plugin wrote: its LSN, its transaction (0 where that is not told), its bytes."""

    lsn: int
    xid: int
    data: bytes

    def __repr__(self) -> str:
        return f"<{Lsn(self.lsn)} {self.data[:200]!r}>"


class Decoding:
    """`python -m walsender decode` in a process of its own; a context manager that ends it."""

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
        """`interpreted`: without the compiled modules (walsender/hot); `asked`: plugin, publications and options in one."""
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
            *asked.arguments(),
            *more,
        ]
        environment = {**os.environ, "WALSENDER_INTERPRETED": "1"} if interpreted else None
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
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
        self.directory.cleanup()

    def wait_consistent(self, timeout: float = 60.0) -> int:
        """The consistent point that it says."""
        while True:
            line = self._lines.get(timeout=timeout)
            assert line is not None, "".join(self.errors)
            if found := re.match(r"consistent point ([0-9A-F]+/[0-9A-F]+)", line):
                return int(Lsn.parse(found[1]))

    def wait_for(self, lsn: int, timeout: float = 60.0) -> None:
        """Wait until the WAL up to `lsn` is decoded and written: until it says so at SIGUSR1."""
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
        """Wait until a decoding with --end is done; what it wrote."""
        code = self.process.wait(timeout)
        assert code == 0, "".join(self.errors)
        return list(self.messages())

    def stop(self) -> list[Message]:
        """End it; what it wrote."""
        self.process.terminate()
        return self.finish()

    def messages(self) -> Iterator[Message]:
        return read_messages(self.output.read_bytes(), pgoutput=self.plugin == "pgoutput")


def read_messages(data: bytes, *, pgoutput: bool = True) -> Iterator[Message]:
    """What the command writes."""
    if not pgoutput:
        # A value may hold line ends: the next line starts with an LSN and an xid.
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
    """A logical slot; its consistent point."""
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
    """What PostgreSQL's own decoding gives."""
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
        # A walsender, other than these functions, leaves out the LSN where more of the same change follows.
        for number, m in enumerate(found):
            if m.data[:1] in {b"R", b"Y"} or (m.data[:1] in {b"B", b"b", b"S"} and found[number + 1].data[:1] == b"O"):
                found[number] = Message(0, m.xid, m.data)
    return found


class ServerStream:
    """PostgreSQL's own walsender on a slot, followed while the changes are made; a context manager.

    What it publishes of a transaction that was in progress when a publication was altered depends on what it has cached: a
    snapshot of before does not take back what was read with a later one, so that it may go by the altered publication.  Ours
    goes by the publication as it was at each change.

    A walsender that streams can fail (XX000, XX001) while catalogs are written anew: "could not map filenumber" at the next
    change of a relation after a subtransaction was rolled back, "could not read block".  Then it is begun anew, without
    streaming, behind the last transaction that it sent: `failed` says so, and transactions have to be compared as wholes
    (`assembled`).  WAL that it can not decode so, either ("unexpected duplicate for tablespace", as pg_logical_slot_peek_changes
    says of it, too), is as far as it comes: `stopped`.
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
        """The messages, once the server has sent all up to `lsn`, or has stopped for good before."""
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
                    if error.sqlstate not in {"XX000", "XX001"}:
                        raise
                    self.failed = error.message
                    self._found = _finished(self._found, pgoutput="proto_version" in self._options)
                    if self._options.pop("streaming", None) is None:
                        self.stopped = True
        except BaseException as error:
            self._failure = error

    async def _receive(self, start: int) -> None:
        # What it sends once more are messages outside of transactions.
        again = set(self._found) if start else set()
        async with await Connection.connect(self._conninfo, replication=True) as connection:
            if "proto_version" not in self._options:
                await connection.query("SET search_path = public")  # test_decoding's names are those of a session
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
    """Without the transactions of which the end is missing."""
    if not pgoutput:
        ends = [number for number, m in enumerate(messages, 1) if _TEXT_ENDS.match(m.data)]
        return list(messages[: max(ends, default=0)])
    ended = {m.data[1:5] for m in messages if m.data[:1] == b"c"} | _aborted(messages)
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
    """Where the last transaction ends; 0: there is none."""
    places = {b"C": 10, b"c": 14, b"P": 10, b"p": 10, b"K": 10, b"r": 10}
    ends = [int.from_bytes(m.data[skip : skip + 8]) for m in messages if (skip := places.get(m.data[:1], 0))]
    return max(ends, default=0)


def as_sent(messages: Sequence[Message], *, pgoutput: bool) -> list[Message]:
    """What the command writes, without what a walsender does not send: of test_decoding's lines the transaction, and where
    it is said with the first change that it begins, the LSN of that, and what comes behind `flush_lsn`'s message, transactions
    without changes."""
    if pgoutput:
        return list(messages)
    ends = (
        number for number, m in enumerate(messages) if m.data.startswith(b"message: transactional: 1 prefix: end, ")
    )
    # Its transaction's COMMIT is next.
    upto = next(ends, len(messages)) + 2
    return [Message(0 if m.data.startswith(b"BEGIN") else m.lsn, 0, m.data) for m in messages[:upto]]


def flush_lsn(server: EmbeddedPostgres, dbname: str = "postgres") -> int:
    """The end of the WAL, all of it flushed."""
    server.execute("SELECT pg_logical_emit_message(true, 'end', '')", dbname)
    ((lsn,),) = server.query("SELECT pg_current_wal_insert_lsn()")
    return int(Lsn.parse(str(lsn)))


def comparable(messages: Sequence[Message], *, pgoutput: bool, at_once: bool = False) -> list[tuple[object, ...]]:
    """Messages in a form that is equal for equal decodings: repeats of Relation and Type messages are taken out, and each
    row, or truncation, has the definitions in effect beside it.  `at_once`: for a subscriber's leader, which takes up what a
    stream says while a parallel worker applies the stream."""
    if not pgoutput:
        return [(m.lsn, m.xid, m.data) for m in messages]
    found: list[tuple[object, ...]] = []
    relations: dict[bytes, Definition] = {}
    in_stream: dict[bytes, _Spooled] = {}
    types: list[bytes] = []
    stream: _Spooled | None = None
    for m in messages:
        kind = m.data[:1]
        skip = 5 if stream is not None else 1
        if stream is not None and kind not in {b"E", b"O"}:
            stream.enter(m.data[1:5])
        if kind == b"Y":
            types.append(m.data[skip:])
        elif kind == b"R":
            oid, definition = m.data[skip : skip + 4], (*types, m.data[skip:])
            types = []
            if stream is not None:
                stream.definitions.append((oid, definition))
            if stream is None or at_once:
                relations[oid] = definition
        elif kind in {b"I", b"U", b"D", b"T"}:
            if kind == b"T":
                (count,) = struct.unpack_from(">I", m.data, skip)
                oids = [m.data[skip + 5 + 4 * i : skip + 9 + 4 * i] for i in range(count)]
            else:
                oids = [m.data[skip : skip + 4]]
            inside = dict(stream.definitions) if stream is not None else {}
            found.append((m.lsn, m.data, [inside.get(oid) or relations.get(oid) for oid in oids]))
        else:
            if kind == b"S":
                stream = in_stream.setdefault(m.data[1:5], _Spooled())
            elif kind == b"E":
                stream = None
            elif kind == b"A" and m.data[1:5] in in_stream:
                in_stream[m.data[1:5]].abort(m.data[5:9])
            elif kind in {b"c", b"p"}:
                xid = m.data[1:5] if kind == b"c" else m.data[26:30]
                applied = in_stream.pop(xid, _Spooled())
                if not at_once:
                    relations.update(applied.definitions)
            found.append((m.lsn, m.data))
    _messages_first(found)
    return found


def _messages_first(found: list[tuple[object, ...]]) -> None:
    """A logical message bears the LSN where its record ends, and so may the next record's changes bear it.  Where those are of
    another subtransaction, a server merges the two by LSN, and which comes first is the chance of its heap
    (ReorderBufferIterCompare): here the message, as in the WAL."""
    for number, item in enumerate(found):
        if _kind(item) == b"M":
            place = number
            while place > 0 and found[place - 1][0] == item[0] and _kind(found[place - 1]) in {b"I", b"U", b"D", b"T"}:
                found[place] = found[place - 1]
                place -= 1
            found[place] = item


def _kind(item: tuple[object, ...]) -> bytes:
    data = item[1]
    assert isinstance(data, bytes)
    return data[:1]


def inconsistency(messages: Sequence[Message], *, parallel: bool = False, only_local: bool = False) -> str:
    """Empty where a subscriber can read every row by the definition that it has then, and every stream has come to an end.
    `parallel`: also one that applies streams in parallel, where it can.  `only_local`: origin = none; then a stream of which
    the commit came from elsewhere has no end, nor has it with a server (DecodeCommit: ReorderBufferForget)."""
    for at_once in (False, True) if parallel else (False,):
        streaming = False
        for item in comparable(messages, pgoutput=True, at_once=at_once):
            data = item[1]
            assert isinstance(data, bytes)
            kind = data[:1]
            streaming = kind == b"S" or (streaming and kind != b"E")
            if kind in {b"I", b"U", b"D"}:
                effect = item[2]
                assert isinstance(effect, list)
                (columns,) = struct.unpack_from(">H", data, 10 if streaming else 6)
                if effect[0] is None or columns != _columns(effect[0]):
                    return f"a row of {columns} columns: {_shown(item)}"
    begun = {m.data[1:5] for m in messages if m.data[:1] == b"S"}
    ended = {m.data[26:30] if m.data[:1] == b"p" else m.data[1:5] for m in messages if m.data[:1] in {b"c", b"p"}}
    if not only_local and (left := begun - ended - _aborted(messages)):
        return f"streams without an end: {[int.from_bytes(xid) for xid in left]}"
    return ""


def _columns(definition: Definition) -> int:
    relation = read_message(b"R" + definition[-1])
    assert isinstance(relation, Relation)
    return len(relation.columns)


class _Spooled:
    """The definitions in a streamed transaction, as a subscriber that spools it will come by them (worker.c)."""

    def __init__(self) -> None:
        self.definitions: list[tuple[bytes, Definition]] = []
        """Each relation's oid and its messages, in order."""
        self._first: dict[bytes, int] = {}

    def enter(self, xid: bytes) -> None:
        """The next message is of the (sub)transaction `xid`."""
        self._first.setdefault(xid, len(self.definitions))

    def abort(self, xid: bytes) -> None:
        """What came since the subtransaction's first message is cut off (stream_abort_internal)."""
        start = self._first.get(xid)
        if start is not None:
            del self.definitions[start:]
            self._first = {other: first for other, first in self._first.items() if first < start}


def _aborted(messages: Sequence[Message]) -> set[bytes]:
    return {m.data[1:5] for m in messages if m.data[:1] == b"A" and m.data[1:5] == m.data[5:9]}


def _rolled_back(messages: Sequence[Message]) -> set[bytes]:
    """Those that were prepared."""
    return {m.data[34:38] for m in messages if m.data[:1] == b"r"}


def _without(messages: Sequence[Message], aborted: Set[bytes], rolled_back: Set[bytes]) -> list[Message]:
    """Streamed transactions that were aborted are left out, and what prepared ones changed that were rolled back: a server that
    reads late knows of it, and sends less.  That these were prepared stays, and what was said of relations, which holds.

    The end of one that was never said to be prepared is left out, too: one that has changed nothing, but is known to a server
    (rows locked, a subtransaction rolled back), which sends its COMMIT PREPARED without a PREPARE (ReorderBufferReplay
    returns where there is no base snapshot, ReorderBufferFinishPrepared does not).  Ours sends nothing of it.  So are Stream Aborts
    where there was no stream: 18 takes the subtransactions of what is prepared for streamed (ReorderBufferTruncateTXN), and says
    so where ROLLBACK PREPARED comes from an origin that is left out.
    """
    found: list[Message] = []
    inside: bytes | None = None
    prepared: set[bytes] = set()
    streamed: set[bytes] = set()
    for m in messages:
        kind = m.data[:1]
        if kind == b"S":
            inside = m.data[1:5]
            streamed.add(inside)
        elif kind in {b"P", b"p"}:
            inside = None
            prepared.add(m.data[26:30])
        elif kind == b"b":
            inside = m.data[25:29]
        if not (
            inside in aborted
            or (inside in rolled_back and kind in {b"I", b"U", b"D", b"T", b"M", b"O"})
            or (kind == b"A" and (m.data[1:5] in aborted or m.data[1:5] not in streamed))
            or (kind == b"K" and m.data[26:30] not in prepared)
            or (kind == b"r" and m.data[34:38] not in prepared)
        ):
            found.append(m)
        if kind == b"E":
            inside = None
    return found


def _without_rolled_back(lines: Sequence[Message], gids: Set[bytes]) -> list[Message]:
    """The same of test_decoding's lines, where it is not compared that they were prepared, either: with `skip-empty-xacts` that
    may not be said."""
    prepared = {end[2] for m in lines if (end := _PREPARED.match(m.data)) and end[1] == b"PREPARE TRANSACTION"}
    found: list[Message] = []
    begun = 0
    for m in lines:
        if m.data.startswith(b"BEGIN"):
            begun = len(found)
        found.append(m)
        end = _PREPARED.match(m.data)
        if end and end[1] == b"PREPARE TRANSACTION" and end[2] in gids:
            del found[begun:]
        elif end and (end[2] in gids or end[2] not in prepared):
            found.pop()
    return found


def _gids_rolled_back(lines: Sequence[Message]) -> set[bytes]:
    found = (_PREPARED.match(m.data) for m in lines)
    return {end[2] for end in found if end and end[1] == b"ROLLBACK PREPARED"}


def _stream_aborts(messages: Sequence[Message]) -> dict[bytes, Message]:
    """By transaction and subtransaction."""
    return {m.data[1:9]: m for m in messages if m.data[:1] == b"A"}


def assembled(messages: Sequence[Message], partly: Set[bytes] = frozenset()) -> list[tuple[object, ...]]:
    """The transactions in the order of their ends, each with its changes: the same whether, and where, it was streamed.

    What is sent at the beginning is left out: of a stream it is not known what it will come to.

    Logical messages are left out of transactions that are among `partly`, of which something was rolled back while they were
    streamed: in a stream a message bears the id of the whole transaction (pgoutput.c: pgoutput_message), so that one that is
    rolled back stays if it was sent before.
    """
    found: list[tuple[object, ...]] = []
    begun = b""
    open_ones: dict[bytes, list[tuple[bytes, tuple[object, ...]]]] = {}
    stream: bytes | None = None
    for item in comparable(messages, pgoutput=True):
        lsn, data, *effect = item
        assert isinstance(data, bytes)
        kind = data[:1]
        if kind == b"S":
            stream = data[1:5]
        elif kind == b"E":
            stream = None
        elif kind == b"B":
            begun = data[-4:]
        elif kind == b"b":
            begun = data[25:29]
        elif kind == b"O" or (kind == b"M" and (stream or begun) in partly):
            continue
        elif stream is not None:
            # Without the id of its (sub)transaction.
            open_ones.setdefault(stream, []).append((data[1:5], (lsn, data[:1] + data[5:], *effect)))
        elif kind == b"A":
            kept = open_ones.get(data[1:5], [])
            open_ones[data[1:5]] = [one for one in kept if one[0] != data[5:9]]
        elif kind == b"c":
            found += [one for _, one in open_ones.pop(data[1:5], [])]
            found.append((lsn, b"C" + data[5:]))
        elif kind == b"p":
            found += [one for _, one in open_ones.pop(data[26:30], [])]
            found.append((lsn, b"P" + data[1:]))
        else:
            if kind in {b"C", b"P"}:
                begun = b""
            found.append(item)
    # A transaction of which nothing is left is none.
    left: list[tuple[object, ...]] = []
    changed = False
    for item in found:
        kind = _kind(item)
        if changed or kind != b"C":
            left.append(item)
        changed = kind not in {b"C", b"P", b"K", b"r"} and (changed or not _stands_alone(item))
    return left


def _stands_alone(item: tuple[object, ...]) -> bool:
    """Whether it is a logical message that belongs to no transaction."""
    data = item[1]
    return isinstance(data, bytes) and data[:2] == b"M\0"


def _shown(item: tuple[object, ...]) -> str:
    return " ".join(str(Lsn(part)) if isinstance(part, int) else repr(part)[:600] for part in item)


def differences(
    ours: Sequence[Message],
    theirs: Sequence[Message],
    *,
    pgoutput: bool = True,
    whole: bool = False,
    stopped: bool = False,
) -> str:
    """Empty where both are equal; else the first difference, with what is around it.  `whole`: see `assembled`.

    `stopped`: the server could not decode the rest.
    """
    partly = {m.data[1:5] for m in (*ours, *theirs) if pgoutput and m.data[:1] == b"A" and m.data[5:9] != m.data[1:5]}
    if pgoutput:
        aborts, other_aborts = _stream_aborts(ours), _stream_aborts(theirs)
        for key in aborts.keys() & other_aborts.keys():
            if (aborts[key].lsn, aborts[key].data) != (other_aborts[key].lsn, other_aborts[key].data):
                return f"a stream's abort: ours {aborts[key]}, the server's {other_aborts[key]}"
        aborted, rolled_back = _aborted(ours) | _aborted(theirs), _rolled_back(ours) | _rolled_back(theirs)
        ours, theirs = _without(ours, aborted, rolled_back), _without(theirs, aborted, rolled_back)
    else:
        gids = _gids_rolled_back(ours) | _gids_rolled_back(theirs)
        ours, theirs = _without_rolled_back(ours, gids), _without_rolled_back(theirs, gids)
    if whole:
        mine, other = assembled(ours, partly), assembled(theirs, partly)
    else:
        mine, other = comparable(ours, pgoutput=pgoutput), comparable(theirs, pgoutput=pgoutput)
    for number, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            before = "\n".join(f"  both    {_shown(x)}" for x in mine[max(0, number - 3) : number])
            after = "\n".join(f"  ours    {_shown(x)}" for x in mine[number : number + 3])
            after2 = "\n".join(f"  server  {_shown(x)}" for x in other[number : number + 3])
            return f"message {number} of {len(mine)} (server: {len(other)})\n{before}\n{after}\n{after2}"
    if len(mine) != len(other) and not (stopped and len(other) < len(mine)):
        rest = mine[len(other) :] or other[len(mine) :]
        return f"{len(mine)} messages, the server has {len(other)}; first of the rest: {[_shown(x) for x in rest[:3]]}"
    return ""
