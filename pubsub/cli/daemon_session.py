"""Statements of `pubsub sql` carried out by the daemon that runs, through its socket, as psql would.

Only what is light is imported: the protocol's messages, and no driver.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Self

from catalog.home_lock import running_daemon
from launcher.notices import Notice
from pubsub.backend import messages as m
from pubsub.backend.socket_paths import SOCKET_NAME, short_path
from pubsub.errors import ConnectionFailure, PubsubError, SqlSyntaxError
from pubsub.node.node import Result
from pubsub.sql.parser import script_statements

_DATABASE: Final = "pubsub"


class DaemonSession:
    """A session with a node's daemon, made by `open`."""

    def __init__(self, home: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._home = home
        self._reader = reader
        self._writer = writer
        self._key = b""

    @classmethod
    async def open(cls, home: Path) -> Self | None:
        """Connect; return None if no daemon runs, or it has no socket.  Raises PubsubError if it refuses."""
        try:
            if not (home / SOCKET_NAME).exists() or not running_daemon(home):
                return None
            reader, writer = await _connected(home)
        except OSError:
            return None
        session = cls(home, reader, writer)
        parameters = {"user": getpass.getuser(), "database": _DATABASE, "application_name": "pubsub sql"}
        writer.write(m.startup(3 << 16, parameters))
        try:
            while True:
                kind, body = await m.read_message(reader)
                if kind == b"E":
                    raise m.read_error(body)
                if kind == b"K":
                    session._key = body
                if kind == b"Z":
                    return session
        except m.Closed:
            return None

    async def close(self) -> None:
        with suppress(OSError):
            self._writer.write(m.message(b"X"))
            self._writer.close()
            await self._writer.wait_closed()

    async def results(self, script: str, notify: Callable[[Notice], None]) -> AsyncIterator[Result]:
        """Run statements like Node.results.  Raises PubsubError."""
        for text in script_statements(script):
            async for result in self._statement(text, notify):
                yield result

    async def _statement(self, text: str, notify: Callable[[Notice], None]) -> AsyncIterator[Result]:
        self._writer.write(m.message(b"Q", text.encode("utf-8", "surrogateescape") + b"\0"))
        columns: tuple[str, ...] = ()
        readers: list[Callable[[str], Any]] = []
        rows: list[tuple[Any, ...]] = []
        notices: list[Notice] = []
        failure: PubsubError | None = None
        try:
            while True:
                kind, body = await m.read_message(self._reader)
                match kind:
                    case b"T":
                        columns, oids = m.read_description(body)
                        readers = [_READERS.get(oid, str) for oid in oids]
                    case b"D":
                        values = zip(m.read_row(body), readers, strict=True)
                        rows.append(tuple(None if value is None else read(value) for value, read in values))
                    case b"N":
                        notice = _notice(body)
                        notices.append(notice)
                        notify(notice)
                    case b"E":
                        failure = _error(body, text)
                    case b"C":
                        yield Result(m.cstring(body), tuple(notices), columns, tuple(rows))
                    case b"Z":
                        break
        except m.Closed:
            raise failure or ConnectionFailure("the daemon has ended the session") from None
        except asyncio.CancelledError:
            await self._cancel()
            raise
        if failure is not None:
            raise failure

    async def _cancel(self) -> None:
        """Let the daemon end what it does for this session."""
        with suppress(OSError):
            reader, writer = await _connected(self._home)
            length = (len(self._key) + 8).to_bytes(4, "big")
            writer.write(length + m.CANCEL_REQUEST.to_bytes(4, "big") + self._key)
            await writer.drain()
            await reader.read()
            writer.close()


async def _connected(home: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(home) as near:
            sock.connect(str(near / SOCKET_NAME))
        return await asyncio.open_unix_connection(sock=sock, limit=1 << 20)
    except BaseException:
        sock.close()
        raise


def _notice(body: bytes) -> Notice:
    fields = m.read_fields(body)
    return Notice(fields.get("M", ""), fields.get("S", "NOTICE"), fields.get("D"), fields.get("H"))


def _error(body: bytes, statement: str) -> PubsubError:
    failure = m.read_error(body)
    position = m.read_fields(body).get("P")
    if position is None:
        return failure
    found = SqlSyntaxError(failure.message, statement=statement, position=int(position) - 1, hint=failure.hint)
    found.sqlstate, found.detail, found.context = failure.sqlstate, failure.detail, failure.context
    return found


def _array(text: str) -> Any:
    """Read an array of texts without nested ones."""
    import re

    found: list[str | None] = []
    for quoted, plain in re.findall(r'"((?:[^"\\]|\\.)*)"|([^{},"]+)', text):
        found.append(re.sub(r"\\(.)", r"\1", quoted) if not plain else None if plain == "NULL" else plain)
    return tuple(found)


_READERS: Final[dict[int, Callable[[str], Any]]] = {
    16: lambda text: text == "t",
    17: lambda text: bytes.fromhex(text.removeprefix("\\x")),
    20: int,
    21: int,
    23: int,
    26: int,
    700: float,
    701: float,
    1082: date.fromisoformat,
    1114: datetime.fromisoformat,
    1184: datetime.fromisoformat,
    1700: Decimal,
    1009: _array,
}
