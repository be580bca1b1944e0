"""A network between two programs that a test can make bad: a proxy that cuts, delays and silences connections.

with BadNetwork(port) as network:      # clients connect to network.port
    network.cut_after(1000)            # the next connections break after 1000 bytes more, in both directions together
    network.silence()                  # nothing passes any more, and nobody is told
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

_PIECE: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST."""
_READY: Final = b"Z\0\0\0\x05"
"""ReadyForQuery, without the transaction's status."""


class _Link:
    """One client's connection, and ours to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.silent = False
        self.spared = False
        self.closed = False

    def close(self, *, reset: bool) -> None:
        self.closed = True
        for one in (self.client, self.server):
            with suppress(OSError):  # another thread has closed it just now
                if reset:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.close()


class BadNetwork:
    """The proxy, to a port on this machine.  `piece`: how many bytes are passed on at a time, `delay`: seconds before each.

    `spares`: a client's words (of PostgreSQL's protocol) after which a connection is not cut before the server has answered.
    """

    def __init__(self, target: int, *, piece: int = _PIECE, delay: float = 0.0, spares: bytes | None = None) -> None:
        self.target, self.piece, self.delay, self.spares = target, piece, delay, spares
        self.cuts = 0
        """How many connections were cut."""
        self.connections = 0
        """How many there were."""
        self._left: int | None = None
        self._until_silence: int | None = None
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ended = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._listener.close()
        self.cut()

    def cut_after(self, count: int) -> None:
        """Let `count` bytes more pass, counted over all connections, then cut the connection whose byte is the next."""
        with self._lock:
            self._left = count

    def silence_after(self, count: int) -> None:
        """Let `count` bytes more pass, counted over all connections, then silence the connection whose byte is the next."""
        with self._lock:
            self._until_silence = count

    def cut(self, links: Iterable[_Link] | None = None) -> None:
        """Cut these connections now, by default all."""
        with self._lock:
            cut = self._links.copy() if links is None else self._links.intersection(links)
            self._links -= cut
        for link in cut:
            link.close(reset=True)

    def silence(self) -> set[_Link]:
        """Let nothing of the present connections pass any more, without closing them: half-open connections.  Return them."""
        with self._lock:
            for link in self._links:
                link.silent = True
            return self._links.copy()

    def restore(self) -> None:
        """Let everything pass as it comes; connections that were silenced are cut."""
        self.delay, self.piece = 0.0, _PIECE
        with self._lock:
            self._left = None
            silent = {link for link in self._links if link.silent}
        self.cut(silent)

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._lock:
                self._links.add(link)
                self.connections += 1
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: _Link) -> None:
        reset = False
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(link.client, selectors.EVENT_READ, link.server)
                selector.register(link.server, selectors.EVENT_READ, link.client)
                while not reset and not link.closed:
                    for key, _ in selector.select(1.0):
                        source, other = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        if link.silent:
                            time.sleep(0.05)  # what it would read stays where it is
                            continue
                        data = source.recv(self.piece)
                        if not data:
                            return
                        if self.delay:
                            time.sleep(self.delay)
                        if self._falls_silent(len(data)):
                            link.silent = True
                            continue
                        if source is link.client:
                            link.spared |= self.spares is not None and self.spares in data
                        passed = self._allowed(len(data), spared=link.spared)
                        other.sendall(data[:passed])
                        if source is link.server and data[-6:-1] == _READY:
                            link.spared = False
                        if passed < len(data):
                            reset = True
                            break
        except (OSError, ValueError):
            pass  # one side is gone
        finally:
            with self._lock:
                self._links.discard(link)
            link.close(reset=reset)

    def _falls_silent(self, count: int) -> bool:
        with self._lock:
            if self._until_silence is None:
                return False
            self._until_silence -= count
            if self._until_silence >= 0:
                return False
            self._until_silence = None
            return True

    def _allowed(self, count: int, *, spared: bool) -> int:
        with self._lock:
            if self._left is None:
                return count
            if spared:
                self._left = max(self._left - count, 0)
                return count
            if count <= self._left:
                self._left -= count
                return count
            passed, self._left = self._left, None
            self.cuts += 1
            return passed
