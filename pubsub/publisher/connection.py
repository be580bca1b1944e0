"""A connection to a publisher: libpq, non-blocking, driven by asyncio's event loop.

libpq implements everything in a connection string (service files, .pgpass, TLS, channel binding); this module waits for
libpq's socket, sets the session's parameters and raises errors:

    ConnectionFailure   the connection could not be made, or broke
    PublisherError      the server reported an error: its SQLSTATE, message, detail and hint

Cancelling a query asks the server to stop it and then closes the connection: half a result is of no use, and a
CREATE_REPLICATION_SLOT that kept running would leave a slot behind.

Follows libpqwalreceiver.c (libpqrcv_connect, libpqrcv_exec) and fe-connect.c (PQconnectPoll, PQcancelStart).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import pq
from psycopg.pq import DiagnosticField, ExecStatus, PollingStatus
from psycopg.pq.abc import PGcancelConn, PGconn, PGresult

from pubsub.errors import ConnectionFailure, DataCorrupted, ProtocolViolation, PublisherError
from pubsub.publisher.conninfo import (
    Host,
    format_conninfo,
    parse_conninfo,
    resolve_hosts,
    split_report,
    with_hosts,
)
from pubsub.publisher.session_settings import session_settings_sql
from pubsub.sql.identifiers import quote_literal

_CANCEL_TIMEOUT: Final = 5.0  # seconds for a cancel request to get through
#: How long a host may take to let a client in where connect_timeout is not set, in seconds.  libpq would wait for ever.
_PATIENCE: Final = 60.0
_PARAMETER: Final = re.compile(r"\$(\d+)")

Row = tuple[str | None, ...]
Parameter = str | int | bool | Sequence[str] | Sequence[int] | None


class Connection:
    """One session on a publisher, made by `connect`; leaving its async context closes it.

    Queries run one at a time: a second one waits for the first.  Cancelling a query closes the connection.
    """

    def __init__(self, pgconn: PGconn, *, replication: bool) -> None:
        self.pgconn: Final = pgconn
        self.replication: Final = replication
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._closed = False
        self._waiting: dict[Callable[[int], bool], asyncio.Future[None]] = {}
        pgconn.notice_handler = self._noticed
        self.on_warning: Callable[[PublisherError], None] | None = None
        """Called with each of the server's warnings, with its fields; must not raise.  Other notices are dropped."""
        self.answer_timeout: float | None = None
        """Seconds that the server may take for an answer, after which the connection is taken for lost; None: for ever."""
        self.server_version: Final = pgconn.server_version
        """libpq's number: 180004 is 18.4."""
        self.backend_pid: Final = pgconn.backend_pid
        self.dbname: Final = pgconn.db.decode("utf-8", "surrogateescape")
        self.user: Final = pgconn.user.decode("utf-8", "surrogateescape")
        self.host: Final = pgconn.host.decode()
        """A name, an address, or a directory for a Unix-domain socket."""
        self.port: Final = pgconn.port.decode()

    @classmethod
    async def connect(
        cls,
        conninfo: str,
        *,
        replication: bool = False,
        application_name: str = "pubsub",
        answer_timeout: float = 0,
    ) -> Self:
        """Connect, and set the session's parameters.

        With `replication` the server side is a logical walsender of the database, which accepts replication commands,
        and SQL in the simple protocol.  `application_name` is used where the connection string names none.
        `answer_timeout`: seconds that the server may take for an answer; 0: for ever.

        libpq's connect_timeout (seconds, for each host; 0: for ever) applies, and is a minute if it is not set.  Raises
        ConnectionFailure; PubsubError (42601) for an invalid connection string; PublisherError if the session's
        parameters could not be set.
        """
        parameters = parse_conninfo(conninfo)
        parameters.pop("replication", None)
        if replication:
            parameters["replication"] = "database"
        parameters["client_encoding"] = "UTF8"
        parameters.setdefault("fallback_application_name", application_name)
        pgconn = await open_session(parameters)
        connection = cls(pgconn, replication=replication)
        connection.answer_timeout = _PATIENCE
        try:
            await connection.execute(session_settings_sql(connection.server_version))
        except BaseException:
            await connection.close()
            raise
        connection.answer_timeout = answer_timeout or None
        return connection

    @property
    def closed(self) -> bool:
        return self._closed

    async def query(self, sql: str, params: Sequence[Parameter] = ()) -> list[Row]:
        """Run `sql` and return the rows of its last statement, values as text.

        `$1` and so on stand for `params`; a list is an array.  With parameters `sql` must be a single statement.
        Raises PublisherError, ConnectionFailure; DataCorrupted for text that is not UTF-8, which a server with
        encoding SQL_ASCII may send.
        """
        result = await self._run(sql, params)
        columns = range(result.nfields)
        try:
            return [tuple([_text(result.get_value(row, c)) for c in columns]) for row in range(result.ntuples)]
        except UnicodeDecodeError as error:
            raise DataCorrupted(
                'invalid byte sequence for encoding "UTF8" in a result from the publisher', sqlstate="22021"
            ) from error

    async def execute(self, sql: str) -> str:
        """Run statements, or one replication command, and return the last one's command tag."""
        return _text((await self._run(sql, ())).command_status) or ""

    async def start_copy_both(self, command: str) -> None:
        """Run a command that enters copy-both mode; from then on only the stream may use the connection.

        Raises PublisherError (08P01) if the command does not enter copy-both mode.
        """
        result = await self._run(command, ())
        if result.status != ExecStatus.COPY_BOTH:
            raise PublisherError("the publisher did not start to stream", sqlstate="08P01")

    async def close(self) -> None:
        """End the session.  Tasks still waiting for it get ConnectionFailure.  Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for remove, future in self._waiting.items():
            remove(self.pgconn.socket)
            if not future.done():
                future.set_exception(_closed())
        self._waiting.clear()
        self.pgconn.finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "replication" if self.replication else "open"
        return f"<Connection {self.user}@{self.host}:{self.port}/{self.dbname} pid={self.backend_pid} {state}>"

    # Shared by queries and the replication stream.

    def check_open(self) -> None:
        """Raise ConnectionFailure if closed: libpq's functions must not be called any more."""
        if self._closed:
            raise _closed()

    async def readable(self) -> None:
        """Wait until bytes from the server, or the connection's end, can be read."""
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def writable(self) -> None:
        await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def flush(self) -> None:
        """Wait until libpq has sent all it has buffered.  Read too, so that the sides do not wait for each other."""
        try:
            while self.pgconn.flush() == 1:
                await self.writable()
                self.check_open()
                self.pgconn.consume_input()
        except psycopg.Error as error:
            raise self.lost("could not send data to the publisher") from error

    async def next_result(self) -> PGresult | None:
        """Wait for libpq's next result; return None after the last."""
        try:
            while self.pgconn.is_busy():
                await self.readable()
                self.check_open()
                self.pgconn.consume_input()
            return self.pgconn.get_result()
        except psycopg.Error as error:
            raise self.lost("could not receive data from the publisher") from error

    def lost(self, what: str) -> ConnectionFailure:
        """Make the error for a connection that broke during `what`, in libpq's words."""
        message, detail, hint = split_report(self.pgconn.error_message.decode("utf-8", "replace"))
        return ConnectionFailure(f"{what}: {message}", detail=detail, hint=hint)

    def error_of(self, result: PGresult, what: str | None = None) -> PublisherError | ConnectionFailure:
        """Make the error that `result` reports.

        With `what` its message is "what: SEVERITY:  message", as subscribers print it.
        """
        sqlstate = result.error_field(DiagnosticField.SQLSTATE)
        if sqlstate is None:  # libpq's own
            message, detail, hint = split_report(result.error_message.decode("utf-8", "replace"))
            return ConnectionFailure(f"{what}: {message}" if what else message, detail=detail, hint=hint)

        def field(code: DiagnosticField) -> str | None:
            value = result.error_field(code)
            return None if value is None else value.decode("utf-8", "replace")

        message = field(DiagnosticField.MESSAGE_PRIMARY) or ""
        if what is not None:
            message = f"{what}: {field(DiagnosticField.SEVERITY_NONLOCALIZED) or 'ERROR'}:  {message}"
        return PublisherError(
            message,
            sqlstate=sqlstate.decode(),
            detail=field(DiagnosticField.MESSAGE_DETAIL),
            hint=field(DiagnosticField.MESSAGE_HINT),
            context=field(DiagnosticField.CONTEXT),
        )

    def _noticed(self, result: PGresult) -> None:
        if self.on_warning is not None and result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) == b"WARNING":
            warning = self.error_of(result)
            if isinstance(warning, PublisherError):
                self.on_warning(warning)

    async def _ready(self, add: Callable[[int, Callable[[], None]], object], remove: Callable[[int], bool]) -> None:
        self.check_open()
        fd = self.pgconn.socket
        future = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        if remove in self._waiting:
            raise RuntimeError("two tasks wait for one connection")
        add(fd, wake)
        self._waiting[remove] = future
        try:
            await future
        finally:
            if not self._closed:  # once closed, the descriptor may already be another connection's
                del self._waiting[remove]
                remove(fd)

    async def _run(self, sql: str, params: Sequence[Parameter]) -> PGresult:
        async with self._lock:
            self.check_open()
            try:
                async with asyncio.timeout(self.answer_timeout):
                    return await self._exchange(sql, params)
            except TimeoutError:
                await self.close()
                raise ConnectionFailure(
                    f"the server has not answered for {self.answer_timeout:g} seconds",
                    hint="The network may have been cut without a word.",
                ) from None
            except asyncio.CancelledError:
                await self._abandon()
                raise

    async def _exchange(self, sql: str, params: Sequence[Parameter]) -> PGresult:
        values = [_parameter(value) for value in params]
        try:
            if not values:
                self.pgconn.send_query(sql.encode())
            elif self.replication:
                self.pgconn.send_query(with_literals(sql, params).encode())
            else:
                self.pgconn.send_query_params(sql.encode(), values)
        except psycopg.Error as error:
            raise self.lost("could not send data to the publisher") from error
        await self.flush()
        last: PGresult | None = None
        failed: PGresult | None = None
        while True:
            try:
                result = await self.next_result()
            except ConnectionFailure:
                if failed is None:
                    await self.close()
                    raise
                break  # the server said why before it closed the connection
            if result is None:
                break
            if result.status == ExecStatus.FATAL_ERROR:
                failed = failed or result
            else:
                last = result
            if result.status == ExecStatus.COPY_BOTH:
                break
            if result.status in {ExecStatus.COPY_IN, ExecStatus.COPY_OUT}:
                await self.close()
                raise PublisherError("COPY is not for this kind of connection", sqlstate="0A000")
        if failed is not None:
            reported = self.error_of(failed)
            if self.pgconn.status != pq.ConnStatus.OK:
                await self.close()
            raise reported
        if last is None:
            raise PublisherError("the publisher sent no result", sqlstate="08P01")
        return last

    async def _abandon(self) -> None:
        """Ask the server to cancel the query, for at most _CANCEL_TIMEOUT seconds, and close."""
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT):
                await _send_cancel(self.pgconn.cancel_conn())
        except (TimeoutError, psycopg.Error):
            pass  # the connection is closed in any case
        finally:
            await self.close()


def array_literal(values: Sequence[str] | Sequence[int]) -> str:
    """Write a one-dimensional array in PostgreSQL's text format (arrayfuncs.c: array_in)."""
    quoted = (str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in quoted) + "}"


async def open_session(parameters: Mapping[str, str]) -> PGconn:
    """Connect, or raise ConnectionFailure.  After a host that does not answer in time, try again without it.

    Each host has connect_timeout seconds, or a minute.  What is returned is non-blocking.
    """
    try:
        return await _open(parameters)
    except ConnectionFailure as error:
        message = f"could not connect to the publisher: {error.message}"
        raise ConnectionFailure(message, detail=error.detail, hint=error.hint) from None


async def _open(parameters: Mapping[str, str]) -> PGconn:
    hosts = await resolve_hosts(parameters)
    reports: list[str] = []
    while True:
        conninfo = format_conninfo(with_hosts(parameters, hosts))
        pgconn = pq.PGconn.connect_start(conninfo.encode("utf-8", "surrogateescape"))
        try:
            silent = await _poll(pgconn)
        except BaseException:
            pgconn.finish()
            raise
        if silent is None and pgconn.status == pq.ConnStatus.OK:
            pgconn.nonblocking = 1
            return pgconn
        reports.append(_silent_report(silent) if silent else pgconn.error_message.decode("utf-8", "replace"))
        pgconn.finish()
        rest = [host for host in hosts if silent and not _same_place(host, silent)]
        if silent is None or not rest or len(rest) == len(hosts):
            message, detail, hint = split_report("\n".join(report.rstrip() for report in reports))
            raise ConnectionFailure(message, detail=detail, hint=hint)
        hosts = rest


async def _poll(pgconn: PGconn) -> Host | None:
    """Drive a connection until it is established or has failed; return a host that timed out, else None."""
    seconds = _connect_timeout(pgconn)
    loop = asyncio.get_running_loop()
    current: Host | None = None
    deadline: float | None = None
    while pgconn.status != pq.ConnStatus.BAD:
        status = pgconn.connect_poll()
        if status in {PollingStatus.OK, PollingStatus.FAILED}:
            break
        here = Host(pgconn.host.decode(), pgconn.hostaddr.decode(), pgconn.port.decode())
        if here != current:
            current = here
            deadline = None if seconds is None else loop.time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                await _wait(pgconn.socket, read=status == PollingStatus.READING)
        except TimeoutError:
            return current
    return None


def connect_timeout(given: str | None) -> float | None:
    """Return connect_timeout in seconds, a minute where it is not given; None: no limit (fe-connect.c: pqConnectDBComplete)."""
    if not given:
        return _PATIENCE
    try:
        seconds = int(given)
    except ValueError:
        return None
    return max(seconds, 2) if seconds > 0 else None


def _connect_timeout(pgconn: PGconn) -> float | None:
    """Return it as libpq found it, which also looks in a service file and the environment."""
    found = (one.val.decode() for one in pgconn.info if one.keyword == b"connect_timeout" and one.val)
    return connect_timeout(next(found, None))


def _same_place(host: Host, other: Host) -> bool:
    """Return whether `host`, as requested, is `other`, as libpq reports it."""
    same_port = host.port in {"", other.port}
    return same_port and (host.address == other.address if host.address else host.name == other.name)


def _silent_report(host: Host) -> str:
    if not host.address or host.name.startswith("/"):
        where = f'on socket "{host.name}/.s.PGSQL.{host.port}"'
    elif host.address == host.name:
        where = f'at "{host.name}", port {host.port}'
    else:
        where = f'at "{host.name}" ({host.address}), port {host.port}'
    return f"connection to server {where} failed: timeout expired"


async def _wait(fd: int, *, read: bool) -> None:
    """Wait for a socket that no other task uses."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    if read:
        loop.add_reader(fd, wake)
    else:
        loop.add_writer(fd, wake)
    try:
        await future
    finally:
        if read:
            loop.remove_reader(fd)
        else:
            loop.remove_writer(fd)


async def _send_cancel(cancel: PGcancelConn) -> None:
    try:
        cancel.start()
        while (status := cancel.poll()) not in {PollingStatus.OK, PollingStatus.FAILED}:
            await _wait(cancel.socket, read=status == PollingStatus.READING)
    finally:
        cancel.finish()


def _closed() -> ConnectionFailure:
    return ConnectionFailure("the connection to the publisher is closed", sqlstate="08003")


def with_literals(sql: str, params: Sequence[Parameter]) -> str:
    """Put parameters into a statement as literals: a walsender supports only the simple protocol."""

    def literal(found: re.Match[str]) -> str:
        value = _parameter(params[int(found[1]) - 1])
        return "NULL" if value is None else quote_literal(value.decode())

    return _PARAMETER.sub(literal, sql)


def _parameter(value: Parameter) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str | int):
        return str(value).encode()
    return array_literal(value).encode()


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        raise ProtocolViolation("the publisher answered a query with text that is not in UTF-8") from None
