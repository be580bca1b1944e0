"""Ports on 127.0.0.1 for servers of tests: no two that are held at a time are the same, whichever processes hold them."""

from __future__ import annotations

import random
import socket
from typing import Final

from pubsub.errors import PubsubError

# Below the ports that Linux uses for outgoing connections, so that no client takes a server's port while it restarts.
_PORTS: Final = range(20000, 32000)
_TRIES: Final = 100


class Port:
    """A port that is nobody else's while this object lives.

    Its number is also the name of an abstract Unix socket (unix(7)), which the kernel gives to one process, and takes back
    when that ends in whatever way.
    """

    def __init__(self, number: int, held: socket.socket) -> None:
        self.number: Final = number
        self._held = held

    @classmethod
    def reserve(cls) -> Port:
        """Return a port that nothing listens on.  Raises PubsubError if there is none."""
        for number in random.sample(_PORTS, _TRIES):
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                held.bind(f"\0pubsub-port-{number}")
                if _is_free(number):
                    return cls(number, held)
            except OSError:
                pass  # another process has reserved it
            held.close()
        raise PubsubError("there is no free port for a server", sqlstate="53000")


def _is_free(number: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return False
    return True
