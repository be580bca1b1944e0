"""A connection is cut at the byte that was asked for, but not before what is spared has been answered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pubsub.testing.bad_network import BadNetwork

_ANSWER = b"C\0\0\0\x09DROP\0" + b"Z\0\0\0\x05I"


@pytest.fixture
def port() -> Iterator[int]:
    """A server that answers each message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted, suppress(ConnectionError):
                    while accepted.recv(1000):
                        accepted.sendall(_ANSWER)

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def _said(sock: socket.socket, message: bytes) -> bytes:
    """Send a message; return what comes back, b"" if the connection is cut."""
    try:
        sock.sendall(message)
        return sock.recv(1000)
    except ConnectionError:
        return b""


def test_cut_at_a_byte(port: int) -> None:
    with BadNetwork(port) as network, socket.create_connection(("127.0.0.1", network.port)) as client:
        assert _said(client, b"DROP a") == _ANSWER
        network.cut_after(len(b"DROP a") + 3)
        assert _said(client, b"DROP a") in (_ANSWER[:3], b"")
        assert network.cuts == 1


def test_an_answer_that_is_spared(port: int) -> None:
    with (
        BadNetwork(port, spares=b"DROP") as network,
        socket.create_connection(("127.0.0.1", network.port)) as client,
    ):
        network.cut_after(3)
        assert _said(client, b"DROP a") == _ANSWER
        assert network.cuts == 0
        assert _said(client, b"another") == b""
        assert network.cuts == 1
