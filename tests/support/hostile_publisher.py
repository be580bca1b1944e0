"""A publisher that lies: it stands before a real server, and gives clients what a test makes of the server's messages.

    with HostilePublisher(port) as hostile:     # clients connect to hostile.port, without TLS
        hostile.tell(lie)                       # from now on lie(kind, body) says what is sent instead of each message
        hostile.behave()                        # the truth again; connections that were lied to are cut

A lie returns pieces of bytes, sent as they are, or None for the truth.  It may be a generator that never ends: it is closed
when the client goes, or the publisher is to behave.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

Lie = Callable[[bytes, bytes], Iterable[bytes] | None]

_HEAD: Final = struct.Struct(">cI")
_XLOG: Final = 25
"""The bytes of XLogData before the message: w, the start, the end of WAL, the time."""


def message(kind: bytes, body: bytes) -> bytes:
    return _HEAD.pack(kind, len(body) + 4) + body


class HostilePublisher:
    """The proxy, to a port on this machine.  `told`: how many messages were replaced."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.told = 0
        self._lie: Lie | None = None
        self._lock = threading.Lock()
        self._links: set[tuple[socket.socket, socket.socket]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._honest = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.behave()
        self._listener.close()

    def tell(self, lie: Lie) -> None:
        self.told = 0
        self._honest.clear()
        self._lie = lie

    def behave(self) -> None:
        lied, self._lie = self._lie, None
        self._honest.set()
        with self._lock:
            links = list(self._links) if lied is not None else []
        for link in links:
            for one in link:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def silence(self) -> Iterator[bytes]:
        """A piece of a lie: nothing comes until the publisher behaves."""
        self._honest.wait()
        yield from ()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            link = (client, server)
            with self._lock:
                self._links.add(link)
            forward = threading.Thread(target=_forward, args=(client, server), daemon=True)
            forward.start()
            try:
                with suppress(OSError):
                    self._answer(server, client)
            finally:
                with self._lock:
                    self._links.discard(link)
                for one in link:
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                forward.join()

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with server.makefile("rb") as answers:
            while head := answers.read(_HEAD.size):
                kind, length = _HEAD.unpack(head)
                body = answers.read(length - 4)
                lie = self._lie
                pieces = lie(kind, body) if lie is not None else None
                if pieces is None:
                    client.sendall(head + body)
                    continue
                self.told += 1
                for piece in pieces:
                    client.sendall(piece)
                    if self._honest.is_set():
                        return


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


# Lies about a stream.


def of_stream(change: Callable[[bytes, bytes], Iterable[bytes] | None]) -> Lie:
    """A lie about the messages of a stream: `change(head, message)`, `head` being XLogData's own bytes."""

    def lie(kind: bytes, body: bytes) -> Iterable[bytes] | None:
        return change(body[:_XLOG], body[_XLOG:]) if kind == b"d" and body[:1] == b"w" else None

    return lie


def instead(kind: bytes, *replacements: Callable[[bytes], bytes] | bytes) -> Lie:
    """Send these instead of each message of a stream of type `kind`: bytes, or what is made of the true message."""

    def change(head: bytes, true: bytes) -> Iterable[bytes] | None:
        if true[:1] != kind:
            return None
        return [message(b"d", head + (one if isinstance(one, bytes) else one(true))) for one in replacements]

    return of_stream(change)


def raw(kind: bytes, *pieces: bytes) -> Lie:
    """Send these bytes, which need not be messages at all, instead of each message of a stream of type `kind`."""
    return of_stream(lambda _, true: pieces if true[:1] == kind else None)


def patched(place: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    """Make a replacement that writes values at a place of the message; negative places count from its end."""

    def change(true: bytes) -> bytes:
        data = bytearray(true)
        struct.pack_into(form, data, place if place >= 0 else len(data) + place, *values)
        return bytes(data)

    return change


# Lies about the rows of queries.


def fields(row: bytes) -> list[bytes | None]:
    """Read a DataRow's body."""
    (count,) = struct.unpack_from(">H", row)
    found: list[bytes | None] = []
    place = 2
    for _ in range(count):
        (length,) = struct.unpack_from(">i", row, place)
        place += 4
        found.append(None if length < 0 else row[place : place + length])
        place += max(length, 0)
    return found


def data_row(values: Iterable[bytes | None]) -> bytes:
    values = list(values)
    parts = (struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value for value in values)
    return message(b"D", struct.pack(">H", len(values)) + b"".join(parts))
