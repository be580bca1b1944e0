"""Messages between two processes, with open files, over a Unix socket.

    kind (1 byte), number of open files (1 byte), length (4 bytes), contents

Open files travel with the first byte of their message (unix(7): SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

_HEAD: Final = Struct(">cBI")
_RECEIVE: Final = 64 << 10
_MOST_FILES: Final = 16

OnMessage = Callable[[bytes, bytes, list[int]], None]
"""Takes a message's kind, contents and open files, which it has to close."""


def framed(kind: bytes, contents: bytes, files: int = 0) -> bytes:
    """Return a message as it is sent with that many open files."""
    return _HEAD.pack(kind, files, len(contents)) + contents


def receive(sock: socket.socket) -> tuple[bytes, bytes, list[int]] | None:
    """Return the next message of a blocking socket whose messages are short; None: the other end is gone."""
    data, files, _, _ = socket.recv_fds(sock, _HEAD.size, _MOST_FILES, socket.MSG_WAITALL)
    if len(data) < _HEAD.size:
        return None
    kind, _, length = _HEAD.unpack_from(data)
    return kind, sock.recv(length, socket.MSG_WAITALL), files


class Channel:
    """One end.  `on_message` gets what the other end has sent; `on_end` is called once, when that is gone.

    Made in a running event loop.  `send` never blocks: what the other end does not take is kept.
    """

    def __init__(self, sock: socket.socket, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._files: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._loop.add_reader(sock, self._readable)

    @property
    def is_clear(self) -> bool:
        """Whether the other end has taken everything."""
        return not self._unsent

    def send(self, kind: bytes, contents: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a message; the files may be closed afterwards."""
        if self._socket.fileno() < 0:
            return
        own = [os.dup(one) for one in files]
        self._unsent.append((memoryview(framed(kind, contents, len(own))), own))
        if len(self._unsent) == 1:
            self._write()

    def flush(self) -> None:
        """Send what is kept; blocks until the other end has taken it, or is gone."""
        if self._socket.fileno() >= 0:
            self._socket.setblocking(True)
            self._write()

    def close(self) -> None:
        """Close this end; the other one notices."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for number in (*self._files, *(one for _, files in self._unsent for one in files)):
            os.close(number)
        self._files.clear()
        self._unsent.clear()

    def _write(self) -> None:
        try:
            while self._unsent:
                data, files = self._unsent[0]
                sent = socket.send_fds(self._socket, [data], list(files)) if files else self._socket.send(data)
                for number in files:
                    os.close(number)
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = data[sent:], ()
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._ended()
            return
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, _RECEIVE, _MOST_FILES)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        self._files.extend(files)
        if not data:
            self._ended()
            return
        self._received += data
        received = self._received
        while len(received) >= _HEAD.size:
            kind, count, length = _HEAD.unpack_from(received)
            end = _HEAD.size + length
            if len(received) < end:
                break
            contents = bytes(received[_HEAD.size : end])
            del received[:end]
            self._on_message(kind, contents, [self._files.popleft() for _ in range(count)])

    def _ended(self) -> None:
        if self._socket.fileno() >= 0:
            self.close()
            self._on_end()
