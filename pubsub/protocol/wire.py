"""Reading and writing the fields of messages; every length is checked before it is used.

Integers are big-endian.  A `Reader` holds one whole message.  Whatever the bytes are, it raises nothing but
ProtocolViolation, with the messages of pqformat.c (pq_copymsgbytes, pq_getmsgstring, pq_getmsgend).  Writing raises
ValueError, since its input comes from this program.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from pubsub.errors import ProtocolViolation
from pubsub.protocol.lsn import Lsn

U8: Final = Struct(">B")
U16: Final = Struct(">H")
U32: Final = Struct(">I")
U64: Final = Struct(">Q")


class Reader:
    """A cursor over one message, from `start` to the end of `data`.  `name` is the message's name in errors."""

    __slots__ = ("_data", "_name", "_position")

    def __init__(self, data: bytes, start: int, name: str) -> None:
        self._data = data
        self._position = start
        self._name = name

    def fail(self, message: str) -> ProtocolViolation:
        """Return the error to raise for this message; the context follows worker.c: apply_error_callback."""
        return ProtocolViolation(message, context=f'while reading message type "{self._name}"')

    @property
    def remaining(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._position

    def fields(self, layout: Struct) -> tuple[int, ...]:
        """Read fixed-size integer fields, in the order of `layout`."""
        position = self._position
        end = position + layout.size
        if end > len(self._data):
            raise self.fail("insufficient data left in message")
        self._position = end
        return layout.unpack_from(self._data, position)

    def u8(self) -> int:
        position = self._position
        if position >= len(self._data):
            raise self.fail("no data left in message")
        self._position = position + 1
        return self._data[position]

    def u16(self) -> int:
        return self.fields(U16)[0]

    def u32(self) -> int:
        return self.fields(U32)[0]

    def lsn(self) -> Lsn:
        return Lsn(self.fields(U64)[0])

    def flag(self, what: str) -> bool:
        """Read a byte that must be 0 or 1."""
        value = self.u8()
        if value > 1:
            raise self.fail(f"unrecognized value {value} for {what}")
        return value == 1

    def take(self, length: int) -> bytes:
        """Read the next `length` bytes; `length` may be any number from the wire."""
        position = self._position
        end = position + length
        if length < 0 or end > len(self._data):
            raise self.fail("insufficient data left in message")
        self._position = end
        return self._data[position:end]

    def rest(self) -> bytes:
        return self.take(self.remaining)

    def string(self, limit: int | None = None) -> str:
        """Read a NUL-terminated string of at most `limit` bytes in UTF-8, every connection's client encoding."""
        position = self._position
        bound = len(self._data) if limit is None else min(len(self._data), position + limit + 1)
        end = self._data.find(b"\0", position, bound)
        if end < 0:
            raise self.fail("invalid string in message")
        self._position = end + 1
        try:
            return self._data[position:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail('invalid byte sequence for encoding "UTF8"') from error

    def end(self) -> None:
        """Refuse trailing bytes."""
        if self._position != len(self._data):
            raise self.fail("invalid message format")


def write_string(text: str, limit: int | None = None) -> bytes:
    """Return `text` in UTF-8, NUL-terminated.  Raises ValueError if it has a NUL or more than `limit` bytes."""
    encoded = text.encode("utf-8")
    if b"\0" in encoded:
        raise ValueError("a string of the protocol cannot hold a NUL")
    if limit is not None and len(encoded) > limit:
        raise ValueError(f"a string of {len(encoded)} bytes where {limit} are allowed")
    return encoded + b"\0"
