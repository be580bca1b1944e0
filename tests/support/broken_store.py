"""A connection to a store that breaks: cut at any byte, refused with 503, or delayed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

_BUSY: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
_ANSWER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_BUSY)).encode() + b"\r\n\r\n" + _BUSY
)


class BrokenStore:
    """Forwards connections to `port`.  While `often` is above 0, so many of them in one are broken in one of these `ways`."""

    def __init__(self, port: int, seed: int, ways: Sequence[str] = ("cut", "busy", "slow")) -> None:
        self._to = ("127.0.0.1", port)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.often = 0.0
        #: How many were cut, refused or delayed.
        self.broken = dict.fromkeys(ways, 0)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in (self._listener, *self._open):
            _end(one)

    def break_all(self) -> None:
        """Cut what is open: connections are kept, and otherwise only new ones would break."""
        for one in self._open:
            _end(one)
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        how = ""
        if self._random.random() < self.often:
            how = self._random.choice(list(self.broken))
            self.broken[how] += 1
        with suppress(OSError):
            if how == "busy":
                here.recv(1 << 16)
                here.sendall(_ANSWER)
                _end(here)
                return
            there = socket.create_connection(self._to)
            self._open += (here, there)
            left = [self._random.randrange(20_000) if how == "cut" else 1 << 62]
            slow = 0.2 if how == "slow" else 0.0
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._forward, args=(*pair, left, slow), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int], slow: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(slow)
                sink.sendall(data[: max(0, left[0])])
                left[0] -= len(data)
                if left[0] <= 0:
                    break
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
