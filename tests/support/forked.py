"""A program to be forked: it says that it runs, and ends as it is told to, or with its socket."""

from __future__ import annotations

import socket


def main(descriptor: int) -> int:
    with socket.socket(fileno=descriptor) as sock:
        sock.sendall(b"here")
        return int(sock.recv(10) or b"0")
