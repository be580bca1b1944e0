"""The messages of PostgreSQL's protocol, version 3, as a server reads and writes them (protocol.h, postgres.c, pqcomm.c).

A message is a type (1 byte), its length with these four bytes, and its body.  The first ones of a client have no type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Final

from pubsub.errors import ProtocolViolation, PubsubError

SSL_REQUEST: Final = 80877103
GSS_REQUEST: Final = 80877104
CANCEL_REQUEST: Final = 80877102
MAX_STARTUP: Final = 10_000
"""MAX_STARTUP_PACKET_LENGTH."""
MAX_AUTHENTICATION: Final = 65_535
"""PG_MAX_AUTH_TOKEN_LENGTH: the longest message of a client that has not authenticated yet."""
MAX_SASL: Final = 1_024
"""PG_MAX_SASL_MESSAGE_LENGTH: the longest one in a SASL exchange."""
MAX_MESSAGE: Final = 0x3FFFFFFF - 1
"""PQ_LARGE_MESSAGE_LIMIT."""

TEXT: Final = 25
INT4: Final = 23
INT8: Final = 20
BYTEA: Final = 17
_SIZES: Final = {INT4: 4, INT8: 8}

_U32: Final = Struct(">I")
_HEAD: Final = Struct(">cI")
_COLUMN: Final = Struct(">IhIhih")
_U16: Final = Struct(">H")


class Closed(Exception):
    """The other side has closed the connection."""


class InvalidLength(ProtocolViolation):
    """A message's length is none that it can have.  `kind`: its type."""

    def __init__(self, kind: bytes) -> None:
        super().__init__("invalid message length")
        self.kind = kind


async def first_byte(reader: asyncio.StreamReader) -> int:
    """Return the next byte, which stays to be read.  Raises Closed."""
    byte = await _exactly(reader, 1)
    buffer: bytearray = reader._buffer  # type: ignore[attr-defined]
    buffer[:0] = byte
    return byte[0]


async def read_startup(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read a message without a type; return its code (the protocol's version, or a request) and the rest.

    Raises Closed, ProtocolViolation.
    """
    (length,) = _U32.unpack(await _exactly(reader, 4))
    if not 8 <= length <= MAX_STARTUP:
        raise ProtocolViolation("invalid length of startup packet")
    body = await _exactly(reader, length - 4)
    return int.from_bytes(body[:4], "big"), body[4:]


async def read_message(reader: asyncio.StreamReader, limit: int = MAX_MESSAGE) -> tuple[bytes, bytes]:
    """Read a message; return its type and body.  Raises Closed, and ProtocolViolation past `limit` bytes."""
    kind, length = await read_head(reader, limit)
    return kind, await _exactly(reader, length)


async def read_head(reader: asyncio.StreamReader, limit: int = MAX_MESSAGE) -> tuple[bytes, int]:
    """Read a message up to its body; return its type and the body's length.  Raises as `read_message`."""
    kind, length = _HEAD.unpack(await _exactly(reader, _HEAD.size))
    if length < 4 or length - 4 > limit:
        raise InvalidLength(kind)
    return kind, length - 4


async def read_body(reader: asyncio.StreamReader, length: int) -> bytes:
    """Read a message's body after its head.  Raises Closed."""
    return await _exactly(reader, length)


async def skip(reader: asyncio.StreamReader, length: int) -> None:
    """Read a message's body and drop it.  Raises Closed."""
    while length:
        piece = await reader.read(min(length, 1 << 16))
        if not piece:
            raise Closed
        length -= len(piece)


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Closed from error


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + _U32.pack(len(body) + 4) + body


def startup(version: int, parameters: Mapping[str, str]) -> bytes:
    """Return a startup message."""
    body = b"".join(f"{name}\0{value}\0".encode("utf-8", "surrogateescape") for name, value in parameters.items())
    body += b"\0"
    return _U32.pack(len(body) + 8) + _U32.pack(version) + body


def parameters(body: bytes) -> dict[str, str]:
    """Read a startup message's parameters.  Raises ProtocolViolation (postmaster.c: ProcessStartupPacket)."""
    parts = body.split(b"\0")
    if len(parts) < 2 or parts[-1] or parts[-2] or len(parts) % 2:
        raise ProtocolViolation("invalid startup packet layout: expected terminator as last byte")
    texts = [part.decode("utf-8", "surrogateescape") for part in parts[:-2]]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def negotiate(version: int, unknown: Sequence[str]) -> bytes:
    """Return NegotiateProtocolVersion: the newest version that there is, and the options that are not known."""
    names = b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in unknown)
    return message(b"v", _U32.pack(version) + _U32.pack(len(unknown)) + names)


def cstring(body: bytes) -> str:
    """Read the text that a message begins with.  Raises ProtocolViolation."""
    text, end, _ = body.partition(b"\0")
    if not end:
        raise ProtocolViolation("invalid string in message")
    return text.decode("utf-8", "surrogateescape")


def rows(columns: Sequence[tuple[str, int]], values: Iterable[Sequence[str | bytes | None]], tag: str) -> bytes:
    """Return a result in text: RowDescription, DataRows, CommandComplete.  `columns`: names and types' oids."""
    parts = [description(columns)]
    parts += [row(one) for one in values]
    parts.append(complete(tag))
    return b"".join(parts)


def fields(columns: Sequence[tuple[str, int, int, int]]) -> bytes:
    """Return a RowDescription; `columns`: name, type's oid, its size, and format (0: text, 1: binary)."""
    body = _U16.pack(len(columns))
    for name, oid, size, form in columns:
        body += name.encode("utf-8", "surrogateescape") + b"\0" + _COLUMN.pack(0, 0, oid, size, -1, form)
    return message(b"T", body)


def description(columns: Sequence[tuple[str, int]]) -> bytes:
    body = _U16.pack(len(columns))
    for name, oid in columns:
        body += name.encode() + b"\0" + _COLUMN.pack(0, 0, oid, _SIZES.get(oid, -1), -1, 0)
    return message(b"T", body)


def row(values: Sequence[str | bytes | None]) -> bytes:
    body = [_U16.pack(len(values))]
    for value in values:
        if value is None:
            body.append(b"\xff\xff\xff\xff")
            continue
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        body += (_U32.pack(len(data)), data)
    return message(b"D", b"".join(body))


def read_row(body: bytes) -> list[str | None]:
    """Read a DataRow's values, in text."""
    values: list[str | None] = []
    position = 2
    for _ in range(int.from_bytes(body[:2], "big")):
        length = int.from_bytes(body[position : position + 4], "big", signed=True)
        position += 4
        values.append(None if length < 0 else body[position : position + length].decode("utf-8", "surrogateescape"))
        position += max(length, 0)
    return values


def complete(tag: str) -> bytes:
    return message(b"C", tag.encode() + b"\0")


def ready(status: bytes) -> bytes:
    """Return ReadyForQuery; `status`: I, T or E."""
    return message(b"Z", status)


def error(failure: PubsubError, severity: str = "ERROR", position: int | None = None, *, codec: str = "utf-8") -> bytes:
    """Return an ErrorResponse, or with another `severity` than ERROR, FATAL and PANIC a NoticeResponse.

    `position`: of the mistake in the query, in characters from 1.  `codec`: Python's name for the client's encoding.
    """
    fields = [
        (b"S", severity),
        (b"V", severity),
        (b"C", failure.sqlstate),
        (b"M", failure.message),
        (b"D", failure.detail),
        (b"H", failure.hint),
        (b"W", failure.context),
        (b"P", None if position is None else str(position)),
    ]
    body = b"".join(code + _encoded(text, codec).replace(b"\0", b"") + b"\0" for code, text in fields if text)
    return message(b"E" if severity in {"ERROR", "FATAL", "PANIC"} else b"N", body + b"\0")


def _encoded(text: str, codec: str) -> bytes:
    """Return text as a client reads it; bytes that were no text stay, and what its encoding lacks is a question mark."""
    try:
        return text.encode(codec, "surrogateescape")
    except UnicodeEncodeError:
        return text.encode(codec, "replace")


def is_fatal(kind: bytes, body: bytes) -> bool:
    """Return whether a message is an error after which the server ends the session."""
    return kind == b"E" and (b"VFATAL\0" in body or b"VPANIC\0" in body)


def read_fields(body: bytes) -> dict[str, str]:
    """Read the fields of an ErrorResponse or NoticeResponse, by their letters."""
    parts = (part.decode("utf-8", "surrogateescape") for part in body.rstrip(b"\0").split(b"\0") if part)
    return {part[:1]: part[1:] for part in parts}


def read_error(body: bytes) -> PubsubError:
    """Read an ErrorResponse or NoticeResponse."""
    fields = read_fields(body)
    return PubsubError(
        fields.get("M", ""),
        sqlstate=fields.get("C"),
        detail=fields.get("D"),
        hint=fields.get("H"),
        context=fields.get("W"),
    )


def read_description(body: bytes) -> tuple[tuple[str, ...], list[int]]:
    """Read a RowDescription: the columns' names, and the oids of their types."""
    names: list[str] = []
    oids: list[int] = []
    position = 2
    for _ in range(int.from_bytes(body[:2], "big")):
        end = body.index(b"\0", position)
        names.append(body[position:end].decode("utf-8", "surrogateescape"))
        oids.append(_COLUMN.unpack_from(body, end + 1)[2])
        position = end + 1 + _COLUMN.size
    return tuple(names), oids
