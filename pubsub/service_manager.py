"""Tell the service manager how the daemon is: sd_notify(3), the protocol of systemd and of others that took it over.

    READY=1      the daemon has its locks and listens; Type=notify waits for it
    WATCHDOG=1   the event loop turns; without it for WatchdogSec the manager kills and restarts the daemon
    STOPPING=1   it drains

Without $NOTIFY_SOCKET nothing is sent.  A message that cannot be sent is dropped: the daemon serves without its manager, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

#: Of the time that the manager waits for a sign of life.
_SHARE: Final = 3


class ServiceManager:
    """The manager's socket, made by `from_environment`."""

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = address
        self._watchdog = watchdog

    @classmethod
    def from_environment(cls) -> Self:
        """Take what the manager has set, and leave it to no child: the JVM is not the service."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        whose = os.environ.pop("WATCHDOG_PID", "")
        watched = microseconds.isdecimal() and int(microseconds) > 0 and whose in ("", str(os.getpid()))
        return cls(address or None, int(microseconds) / 1e6 if watched else None)

    def tell(self, message: str) -> None:
        """Send lines of NAME=value."""
        if self._address is None:
            return
        # "@" stands for the zero byte of an abstract address.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(message.encode(), address)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Give signs of life while the body runs."""
        living = asyncio.create_task(self._live(), name="watchdog")
        try:
            yield
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    async def _live(self) -> None:
        while self._watchdog is not None:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog / _SHARE)
