"""Say by the exit code whether the node's daemon is alive, for a container's health check.

    python -m pubsub.monitoring.health     0: it is; 1: it is not, with the reason on standard error

With [http] in pubsub.toml the daemon is asked for /health; without it, only that a process has the node counts.
"""

from __future__ import annotations

import sys
from http.client import HTTPConnection, HTTPException
from typing import Final

from catalog.home_lock import running_daemon
from pubsub.errors import PubsubError
from pubsub.node.node import home_directory
from pubsub.settings import Settings

_SECONDS: Final = 5.0
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens there


def obstacle() -> str | None:
    """Return why the daemon is not alive; None if it is."""
    home = home_directory()
    try:
        place = Settings.load(home).http.place()
    except PubsubError as error:
        return error.message
    if running_daemon(home) is None:
        return f'no daemon runs on node "{home}"'
    if place is None or place[1] == 0:
        return None
    host, port = place
    connection = HTTPConnection(_ANY.get(host, host), port, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{host}:{port} does not answer: {error}"
    finally:
        connection.close()
    return None if status == 200 else f"{host}:{port} answers {status}"


if __name__ == "__main__":
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
    sys.exit(reason is not None)
