"""Keys of cancel requests: which client's session one is meant for (procsignal.c: SendCancelRequest)."""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
from collections.abc import Callable
from typing import Final

_LONG: Final = 32
"""MAX_CANCEL_KEY_LENGTH, from protocol 3.2 on."""
_SHORT: Final = 4
_PID: Final = 4


class CancelKeys:
    """The keys of one backend's sessions.  A key is a process id (4 bytes) and a secret."""

    def __init__(self) -> None:
        self._known: dict[bytes, Callable[[], None]] = {}
        # Each session has a number of its own; the first is this process's, so that they rarely look like others'.
        self._pids = itertools.count(os.getpid())

    def new(self, version: int, cancel: Callable[[], None]) -> bytes:
        """Make a key for a session of this protocol version."""
        pid = next(self._pids) & 0x7FFFFFFF
        key = pid.to_bytes(_PID, "big") + secrets.token_bytes(_LONG if version & 0xFFFF >= 2 else _SHORT)
        self.add(key, cancel)
        return key

    def add(self, key: bytes, cancel: Callable[[], None]) -> None:
        """Take a key that another server has given out."""
        self._known[key] = cancel

    def forget(self, key: bytes) -> None:
        self._known.pop(key, None)

    def cancel(self, request: bytes) -> bool:
        """Call what was given with this key; return whether there is one."""
        found = None
        for key, cancel in self._known.items():
            if hmac.compare_digest(key, request):
                found = cancel
        if found is not None:
            found()
        return found is not None
