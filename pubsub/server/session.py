"""A client's session with the node itself, dbname=pubsub: the simple and the extended protocol (postgres.c: PostgresMain).

Rows go out as they are read, and no faster than the client takes them.  Every statement sees the catalog of its own moment.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from launcher.notices import SHOWN, Notice
from pubsub.backend import authentication
from pubsub.backend import messages as m
from pubsub.backend.listener import Client
from pubsub.backend.users import User
from pubsub.errors import FeatureNotSupported, ProtocolViolation, PubsubError, SqlSyntaxError
from pubsub.server import statements, values
from pubsub.server.queries import Environment
from pubsub.server.session_parameters import SERVER_VERSION, SessionParameters
from pubsub.server.statements import Answer, Cursor, Statement
from pubsub.server.system_catalogs.database import Caller
from pubsub.server.values import Field
from pubsub.sql.parser import script_statements
from walsender import repl_gram as gram

if TYPE_CHECKING:
    from pubsub.server.backend import NodeBackend

_LONGEST: Final = 64 << 20
"""Bytes of a message of a client."""
_FLUSH: Final = 1 << 16

logger = structlog.get_logger()


@dataclass(slots=True)
class _Portal:
    """A bound statement: its parameters, result formats, and once it runs its answer."""

    statement: Statement
    parameters: tuple[str | None, ...]
    formats: tuple[int, ...]
    fields: tuple[Field, ...] | None = None
    answer: Answer | None = None
    held: list[tuple[Any, ...]] = field(default_factory=list)
    sent: int = 0


class Session:
    """One client.  `run` lasts until it leaves."""

    def __init__(self, backend: NodeBackend, client: Client, user: User, *, replication: bool = False) -> None:
        self.backend = backend
        self.user = user
        self.status = b"I"
        """As ReadyForQuery says: I, T or E."""
        self.replication = replication
        """Whether it takes replication commands."""
        self.versions: Mapping[str, int] = {}
        """Versions at which tables are read until the transaction ends, by path: a slot's snapshot."""
        self.prepared: dict[str, Statement] = {}
        self.cursors: dict[str, Cursor] = {}
        self.parameters = SessionParameters(
            client.parameters, client.user, f"{SERVER_VERSION} (pubsub {backend.version})", superuser=user.is_superuser
        )
        self._client = client
        self._reader = client.reader
        self._writer = client.writer
        self._portals: dict[str, _Portal] = {}
        self._works = False
        self._cancelled = False
        self._skipping = False
        self.pid = 0

    async def run(self) -> None:
        """Serve the client.  Raises PubsubError, which is fatal, and Closed."""
        key = self.backend.keys.new(self._client.version, self._cancel)
        self.pid = int.from_bytes(key[:4], "big")
        try:
            self._writer.write(m.message(b"R", authentication.OK))
            for name, value in self.parameters.reported():
                self.report(name, value)
            self._writer.write(m.message(b"K", key) + m.ready(self.status))
            await self._take_all()
        finally:
            self.backend.keys.forget(key)
            for slot in self.backend.publisher.slots:
                if slot.owner is self:
                    (self.backend.publisher.slots.drop if slot.temporary else self.backend.publisher.slots.free)(slot)

    def report(self, name: str, value: str) -> None:
        """Tell the client a parameter's value, if it is one that clients are told of (ParameterStatus)."""
        if self.parameters.is_reported(name) or name == "server_version":
            self._writer.write(m.message(b"S", f"{name}\0{value}\0".encode()))

    async def environment(self) -> Environment:
        """Return what queries work with, as of now."""
        version = f"{SERVER_VERSION} (pubsub {self.backend.version})"
        caller = Caller(self.user.name, self.pid, self.parameters.values(), version)
        return await self.backend.environment(caller, self.versions)

    @property
    def reader(self) -> asyncio.StreamReader:
        return self._reader

    def send(self, data: bytes) -> None:
        """Send whole messages to the client."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait while the client does not read."""
        await self._writer.drain()

    def end(self) -> None:
        """End the session from outside."""
        self._client.end()

    def _cancel(self) -> None:
        if self._works:
            self._cancelled = True
            self._client.task.cancel()

    # Messages

    async def _take_all(self) -> None:
        while True:
            await self._writer.drain()
            kind, length = await m.read_head(self._reader)
            if kind == b"X":
                return
            if self._skipping and kind != b"S":
                await m.skip(self._reader, length)
                continue
            if length > _LONGEST:
                raise ProtocolViolation(f"messages of more than {_LONGEST >> 20} MB are not taken here")
            body = await m.read_body(self._reader, length)
            try:
                with self._working():
                    await self._take(kind, body)
            except PubsubError as error:
                self._refuse(kind, error)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                self._client.task.uncancel()
                self._cancelled = False
                self._refuse(kind, PubsubError("canceling statement due to user request", sqlstate="57014"))
            except (m.Closed, ConnectionError):
                raise
            except Exception as error:
                logger.exception("a statement has failed", reason=str(error))
                self._refuse(kind, PubsubError(f"internal error: {error}", sqlstate="XX000"))

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def _refuse(self, kind: bytes, error: PubsubError) -> None:
        position = None
        if isinstance(error, SqlSyntaxError) and error.position is not None:
            position = self._start + error.position + 1
        self._writer.write(m.error(error, position=position))
        if self.status == b"T":
            self.status = b"E"
        if kind == b"Q":
            self._writer.write(m.ready(self.status))
        else:
            self._skipping = True

    _start = 0
    """Where the statement that is being carried out begins in the client's query."""

    async def _take(self, kind: bytes, body: bytes) -> None:
        self._start = 0
        match kind:
            case b"Q":
                await self._query(m.cstring(body))
            case b"P":
                self._parse(body)
            case b"B":
                await self._bind(body)
            case b"D":
                await self._describe(body)
            case b"E":
                await self._execute(body)
            case b"C":
                name = m.cstring(body[1:])
                (self.prepared if body[:1] == b"S" else self._portals).pop(name, None)
                self._writer.write(m.message(b"3"))
            case b"S":
                self._skipping = False
                if self.status == b"I":
                    self._portals.clear()
                self._writer.write(m.ready(self.status))
            case b"H":
                pass
            case b"d" | b"c" | b"f":
                pass  # of a COPY that has failed
            case b"F":
                raise FeatureNotSupported("function calls are not supported")
            case _:
                raise ProtocolViolation(f"invalid frontend message type {kind[0]}")

    def _tell(self, notice: Notice) -> None:
        if notice.severity in SHOWN:
            failure = PubsubError(notice.message, sqlstate="00000" if notice.severity == "NOTICE" else "01000",
                                  detail=notice.detail, hint=notice.hint)  # fmt: skip
            self._writer.write(m.error(failure, notice.severity))

    # The simple protocol

    async def _query(self, script: str) -> None:
        if self.replication:
            command = gram.parse_command(script)
            if command is not None:
                from pubsub.server.publishing import commands

                self._writer.write(await commands.carry_out(self, command))
                self._writer.write(m.ready(self.status))
                return
        place = 0
        any_statement = False
        self._portals.pop("", None)
        try:
            texts = script_statements(script)
        except SqlSyntaxError as error:
            raise error
        for text in texts:
            place = max(script.find(text, place), place)
            self._start = place
            statement = Statement.parse(text, place)
            place += len(text)
            if statement.is_empty:
                continue
            any_statement = True
            async with self._deadline():
                answer = await statements.carry_out(self, statement, (), self._tell)
                await self._send(answer)
        if not any_statement:
            self._writer.write(m.message(b"I"))
        self._writer.write(m.ready(self.status))

    def _deadline(self) -> _Deadline:
        return _Deadline(self.parameters.statement_timeout)

    async def _send(self, answer: Answer) -> None:
        if answer.copy is not None:
            await self._send_copy(answer)
            return
        if answer.fields is None or answer.rows is None:
            self._writer.write(m.complete(answer.tag))
            return
        self._writer.write(m.fields([(one.name, one.oid, one.size, 0) for one in answer.fields]))
        count = 0
        async for batch in answer.rows:
            count += len(batch)
            await self._send_rows(batch, answer.fields, ())
        self._writer.write(m.complete(f"{answer.tag} {count}" if answer.counts else answer.tag))

    async def _send_rows(
        self, batch: Sequence[tuple[Any, ...]], fields: Sequence[Field], formats: Sequence[int]
    ) -> None:
        zone = self.parameters.zone
        oids = [one.oid for one in fields]
        parts: list[bytes] = []
        size = 0
        for row in batch:
            if any(formats):
                data = m.row(
                    [
                        values.as_binary(value, oid) if form else values.as_text(value, zone)
                        for value, oid, form in zip(row, oids, formats, strict=True)
                    ]
                )
            else:
                data = m.row([values.as_text(value, zone) for value in row])
            parts.append(data)
            size += len(data)
            if size > _FLUSH:
                self._writer.write(b"".join(parts))
                parts, size = [], 0
                await self._writer.drain()
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def _send_copy(self, answer: Answer) -> None:
        assert answer.copy is not None
        count = len(answer.fields or ())
        form = int(answer.copy_binary)
        self._writer.write(m.message(b"H", struct.pack(">bh", form, count) + struct.pack(">h", form) * count))
        lines = 0
        async for line in answer.copy:
            lines += 1
            self._writer.write(m.message(b"d", line))
            if self._writer.transport.get_write_buffer_size() > _FLUSH:
                await self._writer.drain()
        self._writer.write(m.message(b"c") + m.complete(f"COPY {lines - form}"))

    # The extended protocol

    def _parse(self, body: bytes) -> None:
        name, _, rest = body.partition(b"\0")
        encoded, _, types = rest.partition(b"\0")
        text = encoded.decode("utf-8", "surrogateescape")
        oids = tuple(int.from_bytes(types[at : at + 4], "big") for at in range(2, len(types) - 3, 4))
        texts = script_statements(text)
        if len(texts) > 1:
            raise SqlSyntaxError("cannot insert multiple commands into a prepared statement")
        statement = Statement.parse(texts[0] if texts else "", 0, oids)
        key = name.decode("utf-8", "surrogateescape")
        if key and key in self.prepared:
            raise PubsubError(f'prepared statement "{key}" already exists', sqlstate="42P05")
        if self.status == b"E" and not statement.ends_block and not statement.is_empty:
            raise PubsubError(
                "current transaction is aborted, commands ignored until end of transaction block", sqlstate="25P02"
            )
        self.prepared[key] = statement
        self._writer.write(m.message(b"1"))

    def _statement(self, name: str) -> Statement:
        found = self.prepared.get(name)
        if found is None:
            shown = f'prepared statement "{name}"' if name else "unnamed prepared statement"
            raise PubsubError(f"{shown} does not exist", sqlstate="26000")
        return found

    async def _bind(self, body: bytes) -> None:
        portal, name, formats, given, after = _read_bind(body)
        statement = self._statement(name)
        if portal and portal in self._portals:
            raise PubsubError(f'cursor "{portal}" already exists', sqlstate="42P03")
        types: tuple[int, ...] = ()
        if given:
            types, _ = await statements.describe(self, statement)
        if len(given) != len(types):
            raise ProtocolViolation(
                f'bind message supplies {len(given)} parameters, but prepared statement "{name}" requires {len(types)}'
            )
        if len(formats) not in (0, 1, len(given)):
            raise ProtocolViolation(f"bind message has {len(formats)} parameter formats but {len(given)} parameters")
        forms = list(formats) * len(given) if len(formats) == 1 else list(formats) or [0] * len(given)
        texts = tuple(
            None if value is None else values.parameter_text(value, oid, bool(form))
            for value, oid, form in zip(given, types, forms, strict=True)
        )
        bound = Statement(statement.text, statement.start, types or statement.types, statement.tokens)
        self._portals[portal] = _Portal(bound, texts, after)
        self._writer.write(m.message(b"2"))

    async def _describe(self, body: bytes) -> None:
        name = m.cstring(body[1:])
        if body[:1] == b"S":
            statement = self._statement(name)
            types, fields = await statements.describe(self, statement)
            packed = b"".join(struct.pack(">I", one) for one in types)
            self._writer.write(m.message(b"t", struct.pack(">H", len(types)) + packed))
            self._describe_fields(fields, ())
            return
        cursor = self.cursors.get(name)
        if cursor is not None:
            self._describe_fields(cursor.fields, ())
            return
        portal = self._portal(name)
        if portal.fields is None:
            await self._begin(portal)
        self._describe_fields(portal.fields, _formats(portal.formats, len(portal.fields or ())))

    def _describe_fields(self, fields: Sequence[Field] | None, formats: Sequence[int]) -> None:
        if fields is None:
            self._writer.write(m.message(b"n"))
            return
        forms = formats or [0] * len(fields)
        self._writer.write(
            m.fields([(one.name, one.oid, one.size, form) for one, form in zip(fields, forms, strict=True)])
        )

    def _portal(self, name: str) -> _Portal:
        found = self._portals.get(name)
        if found is None:
            raise PubsubError(f'portal "{name}" does not exist', sqlstate="34000")
        return found

    async def _begin(self, portal: _Portal) -> None:
        """Run a query, so that its columns are known; other statements are described only."""
        if portal.statement.is_query:
            portal.answer = await statements.carry_out(self, portal.statement, portal.parameters, self._tell)
            portal.fields = portal.answer.fields
        else:
            _, portal.fields = await statements.describe(self, portal.statement)

    async def _execute(self, body: bytes) -> None:
        name = m.cstring(body)
        limit = int.from_bytes(body[len(name.encode("utf-8", "surrogateescape")) + 1 :][:4], "big")
        portal = self._portal(name)
        if portal.statement.is_empty:
            self._writer.write(m.message(b"I"))
            return
        async with self._deadline():
            if portal.answer is None:
                portal.answer = await statements.carry_out(self, portal.statement, portal.parameters, self._tell)
                portal.fields = portal.answer.fields
            await self._run(portal, limit)

    async def _run(self, portal: _Portal, limit: int) -> None:
        """Send a portal's next rows, all for a limit of 0."""
        answer = portal.answer
        assert answer is not None
        if answer.copy is not None:
            await self._send_copy(answer)
            return
        if answer.fields is None or answer.rows is None:
            self._writer.write(m.complete(answer.tag))
            return
        formats = _formats(portal.formats, len(answer.fields))
        sent = 0
        while not limit or sent < limit:
            if not portal.held:
                batch = await anext(answer.rows, None)
                if batch is None:
                    tag = f"{answer.tag} {portal.sent}" if answer.counts else answer.tag
                    self._writer.write(m.complete(tag))
                    return
                portal.held = list(batch)
            count = min(len(portal.held), limit - sent) if limit else len(portal.held)
            await self._send_rows(portal.held[:count], answer.fields, formats)
            portal.held = portal.held[count:]
            sent += count
            portal.sent += count
        self._writer.write(m.message(b"s"))


class _Deadline:
    """statement_timeout; None: none."""

    def __init__(self, seconds: float | None) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise PubsubError("canceling statement due to statement timeout", sqlstate="57014") from None


def _formats(given: Sequence[int], count: int) -> Sequence[int]:
    """Return a format for each column.  Raises ProtocolViolation."""
    if len(given) == count:
        return given
    if len(given) > 1:
        raise ProtocolViolation(f"bind message has {len(given)} result formats but query has {count} columns")
    return list(given or (0,)) * count


def _read_bind(body: bytes) -> tuple[str, str, tuple[int, ...], list[bytes | None], tuple[int, ...]]:
    """Read a Bind: portal, statement, formats, values, result formats.  Raises ProtocolViolation."""
    portal, first, rest = body.partition(b"\0")
    name, second, data = rest.partition(b"\0")
    if not first or not second:
        raise ProtocolViolation("invalid string in message")
    try:
        (count,) = struct.unpack_from(">H", data)
        formats = struct.unpack_from(f">{count}H", data, 2)
        at = 2 + 2 * count
        (count,) = struct.unpack_from(">H", data, at)
        at += 2
        found: list[bytes | None] = []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, at)
            at += 4
            if length > len(data) - at:
                raise ProtocolViolation("insufficient data left in message")
            found.append(None if length < 0 else data[at : at + length])
            at += max(length, 0)
        (count,) = struct.unpack_from(">H", data, at)
        after = struct.unpack_from(f">{count}H", data, at + 2)
    except struct.error as error:
        raise ProtocolViolation("insufficient data left in message") from error
    text = [one.decode("utf-8", "surrogateescape") for one in (portal, name)]
    return text[0], text[1], formats, found, after
