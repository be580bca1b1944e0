"""What was passed on to the upstream server, in order, and to whom its answers go: the client, or this program.

    client ──► pass_on ──┐
                         ├──► upstream ──► run ──┬──► client
    we ──► ask, describe ┘                       └──► who asked

The protocol has no names for questions: the server answers in order, and after an error in the extended protocol it
ignores everything up to the next Sync (postgres.c: PostgresMain, ignore_till_sync).  So each question that is answered waits
in a queue for its answer.  A message that is long and whose content nobody here looks at passes in pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from pubsub.backend import messages as m
from pubsub.errors import ProgramLimitExceeded, PubsubError

PIECE: Final = 1 << 16
"""Bytes that are passed on at a time."""
_MOST: Final = 64 << 20
"""Bytes of an answer's rows that are kept: a question of ours that has a client's words in it may have any answer."""
_KEPT: Final = 20
"""Queries of a transaction that are kept."""
_HEAD: Final = Struct(">cI")
_READY: Final = frozenset(b"QFS")
"""Questions that ReadyForQuery ends."""
_SYNC: Final = ord("S")
_EXTENDED: Final = frozenset(b"PBDEC")
_ANSWERED: Final = {ord("P"): b"1", ord("B"): b"2", ord("C"): b"3", ord("D"): b"Tn", ord("E"): b"CIs"}
"""What ends the answer to a question."""
_ASYNCHRONOUS: Final = frozenset(b"NAS")
_IN_PIECES: Final = frozenset(b"DdT")


class Failed(Exception):
    """The batch of the extended protocol that a question of ours belongs to has failed already, and the client knows."""


class RefusedError(PubsubError):
    """The server has refused a text of the client's; `body`: its ErrorResponse, with the place of the mistake."""

    def __init__(self, body: bytes) -> None:
        error = m.read_error(body)
        super().__init__(error.message, sqlstate=error.sqlstate)
        self.body = body


@dataclass(eq=False, slots=True)
class _Question:
    kind: int
    collected: list[tuple[bytes, bytes]] | None = None
    """The answer's messages, if this program asks."""
    done: asyncio.Event | None = None
    hidden: int = 0
    """How many parameters of the statement, the last ones, the client does not know."""
    skipped: bool = field(default=False)
    size: int = 0
    """Bytes of the answer's rows."""


class Exchange:
    """One client's exchange with the upstream server; `run` carries the answers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        reported: Callable[[bytes], None] = lambda _: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`reported`: called with the body of each ParameterStatus; `failed`: before the client gets an error."""
        self._reported = reported
        self._on_error = failed
        self._reader = reader
        self._writer = writer
        self._client = client
        self._questions: deque[_Question] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed = False
        """Whether the server ignores messages until the next Sync."""
        self._copying = False
        """Whether it takes COPY data, and ignores Sync meanwhile (postgres.c: CopyGetData)."""
        self._extended = False
        """Whether messages of the extended protocol were passed on since the last Sync."""
        self._closed = False
        self.lent = False
        """Whether a stream writes to the client's socket: what the server says meanwhile, of its own accord, is left out."""
        self._unreported: dict[bytes, bytes] = {}
        """Settings that the server has reported while `lent`, by name, as messages."""
        self.last_words = b""
        """The error with which the server has ended the session meanwhile."""
        self.status = b"I"
        """As ReadyForQuery says: I, T or E."""
        self.transaction: list[bytes] = []
        """The client's simple queries since the transaction began, its BEGIN included; the first ones."""

    # Questions

    async def pass_on(self, kind: bytes, body: bytes, *, hidden: int = 0) -> None:
        """Pass a message of the client on; its answer goes to the client.  `hidden`: see _Question."""
        self._expect(kind, hidden=hidden)
        if kind == b"Q" and len(self.transaction) < _KEPT and len(body) < PIECE:
            self.transaction.append(body)
        self._writer.write(m.message(kind, body))
        await self._writer.drain()

    async def pass_on_long(self, kind: bytes, length: int, source: asyncio.StreamReader) -> None:
        """Pass on a message whose body is still to be read, in pieces.  Raises Closed."""
        self._expect(kind)
        self._writer.write(_HEAD.pack(kind, length + 4))
        await _copy(source, self._writer, length)

    async def ask(self, sql: str) -> tuple[bytes, list[list[str | None]]]:
        """Ask a simple query; return the last result's RowDescription and rows, in text.  Raises the server's PubsubError.

        The client sees nothing of it but the transaction's state.
        """
        await self.idle()
        question = self._expect(b"Q", ours=True)
        self._writer.write(m.message(b"Q", sql.encode("utf-8", "surrogateescape") + b"\0"))
        return await self._answer(question)

    async def ask_bound(self, sql: str, types: Sequence[int], bind: bytes) -> list[list[str | None]]:
        """Ask within the batch of the extended protocol that the client has begun, with its parameters.

        `bind`: a Bind message's body after the names, up to the result formats.  Raises the server's PubsubError, after
        which it ignores messages until the Sync; Failed if it did already.
        """
        name = b"\0"  # the portal's; the statement has a name, so that the client's unnamed one stays
        ours = b"pubsub slots\0"
        description = b"".join(one.to_bytes(4, "big") for one in types)
        text = sql.encode("utf-8", "surrogateescape") + b"\0"
        parse = ours + text + len(types).to_bytes(2, "big") + description
        close = (b"C", b"S" + ours)  # before, too: an error may have left it
        messages = [close, (b"P", parse), (b"B", name + ours + bind + b"\0\0"), (b"E", name + bytes(4)), close]
        questions = [self._expect(kind, ours=True) for kind, _ in messages]
        self._writer.write(b"".join(m.message(*one) for one in messages) + m.message(b"H"))
        await self._writer.drain()
        answers = [(await self._answer(question))[1] for question in questions]
        return answers[3]

    async def analyze(self, text: bytes, types: bytes, *, in_batch: bool) -> bytes:
        """Have the server look at a statement, and not execute it; return the body of its RowDescription, empty for none.

        Raises RefusedError; Failed as `ask_bound`.

        `types`: as a Parse message ends.  `in_batch`: within the batch of the extended protocol that the client has begun.
        """
        ours = b"pubsub slots\0"
        close = (b"C", b"S" + ours)
        messages = [close, (b"P", ours + text + b"\0" + types), (b"D", b"S" + ours), close]
        if not in_batch:
            await self.idle()
            messages.append((b"S", b""))
        questions = [self._expect(kind, ours=True) for kind, _ in messages]
        self._writer.write(b"".join(m.message(*one) for one in messages) + (m.message(b"H") if in_batch else b""))
        await self._writer.drain()
        failed = False
        description = b""
        for question in questions:
            try:
                columns, _ = await self._answer(question)
                description = columns or description
            except Failed:
                failed = True
            except PubsubError:
                if not in_batch:
                    await self.idle()
                raise RefusedError(_first(question, b"E")) from None
        if failed:
            raise Failed
        return description

    async def parameters_of(self, statement: bytes) -> list[int]:
        """Return the types of a prepared statement's parameters, within the batch that the client has begun.

        Raises RefusedError if there is none of this name; Failed as `ask_bound`.
        """
        question = self._expect(b"D", ours=True)
        self._writer.write(m.message(b"D", b"S" + statement + b"\0") + m.message(b"H"))
        try:
            await self._answer(question)
        except PubsubError:
            raise RefusedError(_first(question, b"E")) from None
        description = _first(question, b"t")
        return [int.from_bytes(description[at : at + 4], "big") for at in range(2, len(description), 4)]

    async def fail(self) -> None:
        """Make the batch, or the transaction, fail at the server, too: the client has got an error of ours."""
        if self._failed or self.status == b"E":
            return
        with suppress(PubsubError, Failed):
            if self._questions or self._extended:
                question = self._expect(b"P", ours=True)
                self._writer.write(m.message(b"P", b"pubsub slots\0(\0\0\0") + m.message(b"H"))
                await self._answer(question)
            elif self.status == b"T":
                await self.ask("SELECT 1/0")

    def reports(self) -> bytes:
        """Return what the client was not told of settings; it goes before ReadyForQuery (guc.c: ReportChangedGUCOptions)."""
        unreported, self._unreported = self._unreported, {}
        return b"".join(unreported.values())

    async def idle(self) -> None:
        """Wait until the server has answered everything.  Raises Closed."""
        await self._idle.wait()
        if self._closed:
            raise m.Closed

    def close(self) -> None:
        """The server has ended the connection: raise Closed where an answer is waited for, and for questions to come.

        A session that ends asks for something more on its way out, and would wait for ever.
        """
        self._closed = True
        while self._questions:
            self._finish(self._questions.popleft())
        self._idle.set()

    def _expect(self, kind: bytes, *, ours: bool = False, hidden: int = 0) -> _Question:
        if self._closed:
            raise m.Closed
        number = kind[0]
        question = _Question(number, [] if ours else None, asyncio.Event() if ours else None, hidden)
        if number in b"cf":
            self._copying = False
        if number not in _READY and number not in _EXTENDED:
            return question
        self._extended = number in _EXTENDED
        if number == _SYNC and self._copying:
            return question
        if self._failed and number != _SYNC:
            question.skipped = True
            if question.done is not None:
                question.done.set()
            return question
        self._questions.append(question)
        self._idle.clear()
        return question

    async def _answer(self, question: _Question) -> tuple[bytes, list[list[str | None]]]:
        assert question.done is not None
        assert question.collected is not None
        await self._writer.drain()
        await question.done.wait()
        if self._closed:
            raise m.Closed
        failure = next((body for kind, body in question.collected if kind == b"E"), None)
        if failure is not None:
            raise m.read_error(failure)
        if question.size > _MOST:
            raise ProgramLimitExceeded(f"the arguments of a function over slots can have {_MOST >> 20} MB at most here")
        if question.skipped:
            raise Failed
        columns = b""
        found: list[list[str | None]] = []
        for kind, body in question.collected:
            if kind == b"T":
                columns, found = body, []
            elif kind == b"D":
                found.append(m.read_row(body))
        return columns, found

    # Answers

    async def run(self) -> None:
        """Carry the answers until the server ends the connection."""
        with suppress(m.Closed, ConnectionError):
            while True:
                kind, length = await m.read_head(self._reader)
                question = self._questions[0] if self._questions else None
                ours = question.collected if question is not None else None
                if question is not None and ours is not None and kind == b"D":
                    question.size += length
                    if question.size > _MOST:
                        ours.clear()
                        await m.skip(self._reader, length)
                        continue
                if length > PIECE and ours is None and kind[0] in _IN_PIECES:
                    self._client.write(_HEAD.pack(kind, length + 4))
                    await _copy(self._reader, self._client, length)
                    continue
                await self._take(kind, await m.read_body(self._reader, length), question)

    async def _take(self, kind: bytes, body: bytes, question: _Question | None) -> None:
        ours = question.collected if question is not None else None
        if kind == b"S":
            self._reported(body)
        if kind[0] in _ASYNCHRONOUS:
            if kind == b"S" and self.lent:
                self._unreported[body.partition(b"\0")[0]] = m.message(kind, body)
            elif (ours is None or kind != b"N") and not self.lent:
                self._say(m.message(kind, body))
        elif ours is not None and not m.is_fatal(kind, body):
            if kind != b"Z":
                ours.append((kind, body))
        else:
            if kind == b"t" and question is not None and question.hidden:
                count = int.from_bytes(body[:2], "big") - question.hidden
                body = count.to_bytes(2, "big") + body[2 : 2 + 4 * count]
            if kind == b"E":
                self._on_error()
                if self.lent:
                    self.last_words = m.message(kind, body)
            if (kind != b"Z" or question is None or question.collected is None) and not self.lent:
                self._say(m.message(kind, body))
        if question is not None:
            self._ended(kind, body, question)
        elif kind == b"Z":
            self.status = body
        if self._client.transport.get_write_buffer_size() > PIECE:
            await self._client.drain()

    def _say(self, message: bytes) -> None:
        """Send the client a message; one that is gone is told nothing, which asyncio would log each time."""
        if not self._client.is_closing():
            self._client.write(message)

    def _ended(self, kind: bytes, body: bytes, question: _Question) -> None:
        """Note what a message says of the question that it answers, the first one."""
        if kind == b"Z":
            self._failed = self._copying = False
            self.status = body
            if body == b"I":
                self.transaction.clear()
            # A question without an answer of its own was ignored after an error.
            while self._questions:
                first = self._questions.popleft()
                self._finish(first, skipped=first.kind not in _READY)
                if first.kind in _READY:
                    break
        elif kind == b"G":
            self._copying = True
            if question.kind == ord("E"):
                # In copy mode the server ignores the Sync that has come already.
                self._questions = deque(one for one in self._questions if one.kind != _SYNC)
        elif kind == b"E" and question.kind in _EXTENDED:
            self._failed, self._copying = True, False
            self._finish(self._questions.popleft())
            while self._questions and self._questions[0].kind != _SYNC:
                self._finish(self._questions.popleft(), skipped=True)
        elif question.kind in _EXTENDED and kind in _ANSWERED[question.kind]:
            self._finish(self._questions.popleft())
        if not self._questions:
            self._idle.set()

    @staticmethod
    def _finish(question: _Question, *, skipped: bool = False) -> None:
        question.skipped = skipped
        if question.done is not None:
            question.done.set()


def _first(question: _Question, wanted: bytes) -> bytes:
    """Return the body of the answer's first message of a kind."""
    return next(body for kind, body in question.collected or () if kind == wanted)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, length: int) -> None:
    while length:
        piece = await source.read(min(length, PIECE))
        if not piece:
            raise m.Closed
        target.write(piece)
        length -= len(piece)
        await target.drain()
