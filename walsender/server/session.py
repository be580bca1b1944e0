"""A client's session: its messages go to the upstream server, but for those about replication, which are answered here.

    client ──► _take ──► exchange.py ──► upstream, and its answers back
                  └────► commands.py       (replication commands), slot_statements.py (SQL over slots)

An answer of ours is sent when the upstream server has answered all that was passed on to it (`idle`), so that answers
come in the order of the questions.

Follows postgres.c (PostgresMain) and backend_startup.c.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from pubsub.backend import authentication, scram
from pubsub.backend import messages as m
from pubsub.backend.listener import Client, close
from pubsub.errors import FeatureNotSupported, InsufficientPrivilege, ProtocolViolation, PubsubError
from walsender import repl_gram as gram
from walsender.historic.client_encoding import client_codec
from walsender.plugins.test_decoding import FALSE, TRUE
from walsender.server import commands, slot_statements
from walsender.server.exchange import PIECE, Exchange, Failed, RefusedError
from walsender.server.link import without_channel_binding

if TYPE_CHECKING:
    from walsender.server.service import Service
    from walsender.server.stream import Stream

_UNDECODED: Final = re.compile("[\udc80-\udcff]")
# AuthenticationOk and AuthenticationSASLFinal want no answer.
_NO_ANSWER: Final = {0, 12}
_NO_PARAMETERS: Final = bytes(4)
_SASL: Final = 10
_SASL_CONTINUE: Final = 11
_SASL_FINAL: Final = 12
_LOOKED_AT: Final = {b"Q": 256 << 10, b"P": 256 << 10, b"B": 16 << 20, b"F": PIECE, b"d": PIECE}
"""Statements and parameters up to so many bytes are looked at; longer ones are passed on as they come."""
_KINDS: Final = frozenset((b"%c" % one) for one in b"QFXBCDEHPSdcf")
"""The messages that a client may send once its session has begun (postgres.c: SocketBackend)."""
_SMALL: Final = 10_000 - 4
"""PQ_SMALL_MESSAGE_LIMIT, which counts the length itself: the longest message of any other kind (postgres.c: SocketBackend)."""
_NAME_BYTES: Final = 63
"""Of a longer name of a database in a startup message the server takes so many (NAMEDATALEN)."""
_ROLE: Final = (
    "SELECT rolreplication OR rolsuper, pg_catalog.current_database(), oid,"
    " (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
    " FROM pg_catalog.pg_roles WHERE rolname = session_user"
)


class Session:
    """One client.  `run` lasts until either side ends it."""

    def __init__(self, service: Service, client: Client) -> None:
        self.service = service
        self.reader = client.reader
        self.writer = client.writer
        self.replication = False
        """Whether it is a logical walsender's session."""
        self.is_sender = False
        """Whether it counts as a walsender: it has authenticated, and its role may replicate."""
        self.physical = False
        """Whether it is one of physical replication, which the upstream server serves."""
        self.pid = 0
        """The process id of the upstream backend."""
        self.user = client.user
        self.user_oid: int | None = None
        """The role's oid; known of a walsender's session."""
        self.database = _cut(client.database)
        """As the startup message has it: bytes of an unknown encoding."""
        self.database_shown = client.database
        """In the client's encoding; known in a walsender's session."""
        self.database_oid = 0
        """Known in a logical walsender's session, and once a slot was made."""
        self.application_name = _in_ascii(client.parameters.get("application_name", ""))
        self.client = client.address
        self.port = client.port
        self.client_encoding = ""
        """As the upstream server reports it."""
        self.exported = False
        self.exchange: Exchange
        self.stream: Stream | None = None
        """The stream that it sends, for pg_stat_replication."""
        self.statements = slot_statements.Prepared()
        self._client = client
        self._up: asyncio.StreamWriter | None = None
        self._key = b""
        self._in_batch = False
        """Whether questions of ours must stay within the client's batch of the extended protocol."""
        self._skipping = False
        """Whether messages are ignored until the next Sync."""
        self._works = False
        """Whether it carries something out itself, which a cancel request ends."""
        self._cancelled = False

    @property
    def status(self) -> bytes:
        """As ReadyForQuery says: I, T or E."""
        return self.exchange.status

    # The beginning

    async def run(self) -> None:
        """Serve the client until it or the upstream server ends the session.  Raises PubsubError, which is fatal."""
        pump: asyncio.Task[None] | None = None
        try:
            if not await self._begin():
                return
            pump = asyncio.create_task(self.exchange.run())
            pump.add_done_callback(self._upstream_ended)
            if self.replication:
                await self._check_role()
            self._client.authenticated()
            self.send(m.ready(b"I"))
            await self._take_all()
        except asyncio.CancelledError:
            if pump is None or not pump.done():
                raise
            # The upstream server has ended the session, and has said why.
            self._client.task.uncancel()
            if self.exchange.last_words:
                self.send(self.exchange.last_words)
                with suppress(ConnectionError):
                    await self.writer.drain()
        finally:
            self.service.keys.forget(self._key)
            if pump is not None:
                pump.remove_done_callback(self._upstream_ended)
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
            self._leave()
            if self._up is not None:
                with suppress(ConnectionError, RuntimeError):
                    self._up.write(m.message(b"X"))
                await close(self._up)

    def _upstream_ended(self, _: asyncio.Task[None]) -> None:
        self.end()
        self.exchange.close()

    def end(self) -> None:
        """End the session from outside, as its process's SIGTERM does."""
        self._client.end()

    def check_client(self) -> None:
        """Raise Closed if the client is gone (pqcomm.c: pq_check_connection); what it has sent before may not be read yet."""
        if self.reader.at_eof() or self.writer.transport.is_closing():
            raise m.Closed
        sock = self.writer.get_extra_info("socket")
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        if poll.poll(0):
            raise m.Closed

    def _cancel(self) -> None:
        """Take a cancel request: what is carried out here ends; the upstream server gets it in any case."""
        if self._works:
            self._cancelled = True
            self._client.task.cancel()

    def drop_temporary(self) -> None:
        """Drop the session's temporary slots: an error ends them (postgres.c: PostgresMain, ReplicationSlotCleanup)."""
        for slot in self.service.slots:
            if slot.temporary and slot.owner is self:
                self.service.slots.drop(slot)

    def _leave(self) -> None:
        for slot in self.service.slots:
            if slot.owner is self:
                if slot.temporary:
                    self.service.slots.drop(slot)
                else:
                    self.service.slots.free(slot)

    async def _begin(self) -> bool:
        """Let the client authenticate; return whether a session has begun.  Raises Closed, PubsubError."""
        parameters = dict(self._client.parameters)
        replication = parameters.pop("replication", "false")
        if replication == "database":
            self.replication = True
        elif replication.lower() in TRUE:
            # Physical replication and base backups are the upstream server's own.
            self.physical = True
            parameters["replication"] = "true"
        elif replication.lower() not in FALSE:
            raise PubsubError(
                f'invalid value for parameter "replication": "{replication}"',
                sqlstate="22023",
                hint='Valid values are: "false", 0, "true", 1, "database".',
            )
        proven: scram.Proven | None = None
        if self.service.options.auth_file is not None:
            self._client.negotiate()
            _, proven = await authentication.by_password(self._client, self.service.options.auth_file)
            parameters = {name: value for name, value in parameters.items() if not name.startswith("_pq_.")}
        upstream, self._up = await self.service.upstream.connect()
        self.exchange = Exchange(upstream, self._up, self.writer, self._reported, self.drop_temporary)
        self._up.write(m.startup(self._client.version, parameters))
        return await self._authenticate(upstream, proven)

    async def _authenticate(self, upstream: asyncio.StreamReader, proven: scram.Proven | None) -> bool:
        """Pass messages on until the upstream server is ready; False if it refuses.

        `proven`: the client has authenticated here, and logs in there with what it has proven.
        """
        assert self._up is not None
        login = scram.Login(proven) if proven is not None else None
        shown = self.service.upstream.shows_certificate(self._up)
        # Who shows this program's certificate is let in as it, and not every user of this host may be.
        trusted = self._client.is_local or (self._client.is_of_this_host and not shown)
        asked = proven is not None or self.service.options.allow_trust or trusted
        limit = m.MAX_AUTHENTICATION
        while True:
            kind, body = await m.read_message(upstream)
            if kind == b"Z":
                return True
            if kind == b"K":
                self.pid = int.from_bytes(body[:4], "big")
                self._key = body
                self.service.keys.add(body, self._cancel)
            elif kind == b"S":
                self._reported(body)
            code = int.from_bytes(body[:4], "big") if kind == b"R" else 0
            if login is not None and (kind == b"v" or code):
                if kind == b"R":
                    self._up.write(_logged_in(login, code, body[4:]))
                continue
            if kind == b"R" and not code and not asked:
                raise PubsubError(
                    f'the upstream server lets the user "{self.user}" in without asking for anything',
                    sqlstate="28000",
                    detail=f"It knows this program's address{' and certificate' if shown else ''} only; "
                    f"the client's address is {self.client}.",
                    hint="Have its pg_hba.conf ask for a password where this program connects from, or let clients "
                    "authenticate here: auth_file in [walsender].  allow_trust there lets them in nevertheless.",
                )
            asked |= bool(code)
            if kind == b"R" and code == _SASL:
                body = without_channel_binding(body)
            if kind == b"R" and code == _SASL:
                # Bearer tokens are longer than what SCRAM says (auth-oauth.c: pg_be_oauth_mech).
                only_scram = all(name.startswith(b"SCRAM-") for name in body[4:].split(b"\0") if name)
                limit = m.MAX_SASL if only_scram else m.MAX_AUTHENTICATION
            self.send(m.message(kind, body))
            if kind == b"E":
                await self.writer.drain()
                return False
            if kind == b"R" and code not in _NO_ANSWER:
                answer = await m.read_message(self.reader, limit)
                if answer[0] != b"p":
                    raise ProtocolViolation(f"expected password response, got message type {answer[0][0]}")
                self._up.write(m.message(*answer))

    async def _check_role(self) -> None:
        """Take note of what a walsender's session needs.  Raises InsufficientPrivilege (walsender.c: InitWalSender)."""
        ((may, shown, oid, database_oid),) = await self.query(_ROLE)
        if may != "t":
            raise InsufficientPrivilege(
                "permission denied to start WAL sender",
                detail="Only roles with the REPLICATION attribute may start a WAL sender process.",
            )
        limit = self.service.options.max_wal_senders
        if sum(one.is_sender for one in self.service.sessions) >= limit:
            raise PubsubError(
                f'number of requested standby connections exceeds "max_wal_senders" (currently {limit})',
                sqlstate="53300",
            )
        self.is_sender = True
        self.database_shown = shown or self.database
        self.user_oid = int(oid or 0) or None
        self.database_oid = int(database_oid or 0)

    # The client's messages

    async def _take_all(self) -> None:
        while True:
            try:
                kind, length = await m.read_head(self.reader)
            except m.InvalidLength as error:
                if error.kind in _KINDS:
                    # Where the next message begins is not known: nothing is said any more (pqcomm.c: pq_getmessage).
                    return
                raise _no_message(error.kind) from None
            if kind not in _KINDS and not self.physical:
                raise _no_message(kind)
            if kind == b"X":
                return
            if kind not in _LOOKED_AT and length > _SMALL:
                return
            if self._skipping and kind != b"S":
                await m.skip(self.reader, length)
                continue
            body = b""
            if length <= _LOOKED_AT.get(kind, _SMALL):
                body = await m.read_body(self.reader, length)
            elif self.replication and kind in b"PBF":
                await m.skip(self.reader, length)  # refused, whatever it says
            else:
                if kind == b"Q":
                    await self._end_export()
                await self.exchange.pass_on_long(kind, length, self.reader)
                continue
            self._skipping = False
            try:
                await self._take(kind, body)
            except Failed:
                self._skipping = True
            except PubsubError as error:
                await self._refuse(kind, error)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                self._client.task.uncancel()
                self._cancelled = False
                await self._refuse(kind, PubsubError("canceling statement due to user request", sqlstate="57014"))
            finally:
                self._works = False
            await self.writer.drain()

    async def _refuse(self, kind: bytes, error: PubsubError) -> None:
        """Send an error of ours, and let the upstream server's transaction fail, too."""
        self.drop_temporary()
        if kind in b"PBDEC":
            # The server answers the Sync (postgres.c: ignore_till_sync).
            await self.exchange.fail()
            self.send(self.error(error))
            self._skipping = True
            return
        await self.exchange.idle()
        self.send(self.error(error))
        await self.exchange.fail()
        self.send(self.exchange.reports() + m.ready(self.status))

    async def _take(self, kind: bytes, body: bytes) -> None:
        if self.physical:
            await self.exchange.pass_on(kind, body)
        elif kind == b"Q":
            await self._query(body)
        elif self.replication and kind in b"PBDEC":
            # The words of forbidden_in_wal_sender.
            raise ProtocolViolation("extended query protocol not supported in a replication connection")
        elif self.replication and kind == b"F":
            raise ProtocolViolation("fastpath function calls not supported in a replication connection")
        elif kind in b"PBDC":
            await slot_statements.take(self, kind, body)
        else:
            await self.exchange.pass_on(kind, body)

    async def _query(self, body: bytes) -> None:
        text = m.cstring(body)
        await self._end_export()
        if self.replication and self._is_readable(text, body):
            version = self.service.feed.server.version
            command = gram.parse_command(self.in_unicode(text), version=version, notice=self._notice)
            if command is not None:
                await self.exchange.idle()
                with self.working():
                    await commands.carry_out(self, command)
                return
        if await slot_statements.carry_out(self, text):
            return
        await self.exchange.pass_on(b"Q", body)

    async def _end_export(self) -> None:
        """Let an exported snapshot go, which lasts until the next command (snapbuild.c: SnapBuildClearExportedSnapshot)."""
        if self.exported:
            await self.exchange.idle()
            await self.query("ROLLBACK")
            self.exported = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """What is carried out here within this context, a cancel request ends."""
        self._works = True
        try:
            yield
        finally:
            self._works = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Questions of ours within this context stay within the client's batch of the extended protocol."""
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False

    def _notice(self, notice: PubsubError) -> None:
        self.send(self.error(notice, "NOTICE"))

    def _is_readable(self, text: str, body: bytes) -> bool:
        """Return whether a query is one text in the client's encoding; of another one the server says what is wrong."""
        if body.find(b"\0") != len(body) - 1:
            return False
        return self.client_encoding != "UTF8" or text.isascii() or not _UNDECODED.search(text)

    @property
    def _codec(self) -> str:
        is_utf8 = self.client_encoding in {"", "UTF8", "SQL_ASCII"}
        return "utf-8" if is_utf8 else client_codec(self.client_encoding)

    def in_unicode(self, text: str) -> str:
        """Return a message's text, which was read as UTF-8, as the client's encoding has it."""
        if text.isascii() or self._codec == "utf-8":
            return text
        return text.encode("utf-8", "surrogateescape").decode(self._codec, "surrogateescape")

    def error(self, failure: PubsubError, severity: str = "ERROR") -> bytes:
        """Return an error or notice in the client's encoding; one of the upstream server's as that has sent it."""
        if isinstance(failure, RefusedError):
            return m.message(b"E", failure.body)
        try:
            codec = self._codec
        except FeatureNotSupported:
            codec = "ascii"  # one that Python does not know
        return m.error(failure, severity, codec=codec)

    async def forward(self, kind: bytes, body: bytes) -> None:
        """Pass a message on; its answer goes to the client."""
        await self.exchange.pass_on(kind, body)

    async def query(self, sql: str) -> list[list[str | None]]:
        """Ask the upstream server in the client's session; return the rows of the last result, in text.

        Raises PubsubError with the server's words.  The client sees nothing of it but the transaction's state.
        """
        if self._in_batch:
            return await self.exchange.ask_bound(sql, (), _NO_PARAMETERS)
        _, found = await self.exchange.ask(sql)
        return found

    def answer(self, data: bytes) -> None:
        """Send an answer of ours to a simple query, and that the session is ready."""
        self.send(data + self.exchange.reports() + m.ready(self.status))

    def send(self, data: bytes) -> None:
        """Send whole messages to the client."""
        self.writer.write(data)

    def _reported(self, body: bytes) -> None:
        name, value, _ = body.split(b"\0")
        if name == b"client_encoding":
            self.client_encoding = value.decode("ascii", "replace")


def _no_message(kind: bytes) -> PubsubError:
    return ProtocolViolation(f"invalid frontend message type {kind[0]}")


def _logged_in(login: scram.Login, code: int, body: bytes) -> bytes:
    """Return the answer to a request of the upstream server, of a client that has authenticated here."""
    if code == _SASL:
        if scram.MECHANISM.encode() not in body.split(b"\0"):
            raise PubsubError("the upstream server does not offer SCRAM-SHA-256", sqlstate="28000")
        first = login.first()
        return m.message(b"p", scram.MECHANISM.encode() + b"\0" + len(first).to_bytes(4, "big") + first)
    if code == _SASL_CONTINUE:
        return m.message(b"p", login.final(body))
    if code == _SASL_FINAL:
        login.check(body)
        return b""
    raise PubsubError(
        "the upstream server wants this role's password, which is not known here",
        sqlstate="28000",
        hint="With auth_file, the upstream server's pg_hba.conf must say scram-sha-256 or trust for this program's host.",
    )


def _cut(name: str) -> str:
    return name.encode("utf-8", "surrogateescape")[:_NAME_BYTES].decode("utf-8", "surrogateescape")


def _in_ascii(text: str) -> str:
    """Return a name in printable ASCII, other bytes as \\xHH (string.c: pg_clean_ascii)."""
    return "".join(
        chr(byte) if 32 <= byte <= 126 else f"\\x{byte:02x}" for byte in text.encode("utf-8", "surrogateescape")
    )
