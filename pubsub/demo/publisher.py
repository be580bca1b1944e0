"""`pubsub publish` between the demo's database and its node, for `make demo WALSENDER=1`.

the database ── physical WAL ──► pubsub publish ── pgoutput ──► the node's daemon
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Final

from psycopg.conninfo import make_conninfo

from pubsub.demo.interruption import Interruption
from pubsub.demo.node import DemoFailed
from pubsub.demo.watched import Watched
from pubsub.publisher.conninfo import parse_conninfo

_HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.02
# The subscriptions' streams, and their copies.
_LIMITS: Final = ("--max-replication-slots=40", "--max-wal-senders=40")
# How a client reaches the database, which is different for the server between.
_PLACE: Final = ("host", "hostaddr", "port", "sslmode", "sslrootcert", "channel_binding", "target_session_attrs")


class DemoPublisher:
    """The server, in front of the database of the connection string `upstream`, with its directory in `home`."""

    def __init__(self, home: Path, upstream: str, interruption: Interruption) -> None:
        self._log = home / "publish.log"
        with socket.socket() as free:
            free.bind((_HOST, 0))
            self._port: int = free.getsockname()[1]
        self._watched: Watched | None = None
        self._interruption = interruption
        self._command = [
            *(sys.executable, "-m", "pubsub.cli", "--home", str(home), "publish", "--upstream", upstream),
            *("--listen", f"{_HOST}:{self._port}", *_LIMITS),
        ]

    def start(self) -> None:
        """Start it, and wait until it takes connections.  Raises DemoFailed, Interrupted."""
        self._watched = Watched(self._command, self._log)
        waited = 0.0
        while not self._listens():
            if self._watched.ended() is not None or waited > _START_SECONDS:
                raise DemoFailed("pubsub publish did not start", detail=self._log.read_text()[-2000:])
            self._interruption.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((_HOST, self._port)) == 0

    def conninfo(self, given: str) -> str:
        """Return a connection string of the database's server by way of this one."""
        kept = {name: value for name, value in parse_conninfo(given).items() if name not in _PLACE}
        return make_conninfo("", **kept, host=_HOST, port=self._port)

    def stop(self) -> None:
        """End it, if it was started."""
        if self._watched is not None:
            self._watched.end(_STOP_SECONDS)
            self._watched = None
