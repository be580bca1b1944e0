"""Up to where the output's consumer keeps what was decoded, and how far a physical slot may move because of that.

decoder ──► where decoding could begin again, from which position on ──► Restarts ──► slot
consumer ──► LSNs on standard input, or what is durable in the output's file ──► Restarts
"""

from __future__ import annotations

import os
import threading
from typing import Final

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn

_MOST: Final = 1000
"""Restarts that are kept; of more, those that lie close together are forgotten."""
_RECEIVE: Final = 4096
_LONGEST: Final = 100
"""Characters of a line."""


class Restarts:
    """Where decoding can begin again, by what is kept by then.  `redo`: where it began now."""

    def __init__(self, redo: int) -> None:
        self._found = [(0, redo)]
        self._apart = 0
        """Bytes of WAL that at least lie between two that are kept, but for the newest."""

    def note(self, position: int, restart: int) -> None:
        """Note that from `restart` on all is decoded whole that was not sent before `position`."""
        found = self._found
        if restart <= found[-1][1]:
            return
        if len(found) > 2 and found[-1][0] - found[-2][0] < self._apart:
            del found[-1]
        found.append((position, restart))
        if len(found) > _MOST:
            self._apart = 2 * (position - found[0][0]) // _MOST
            thinned = found[:1]
            for one in found[1:-1]:
                if one[0] - thinned[-1][0] >= self._apart:
                    thinned.append(one)
            self._found = [*thinned, found[-1]]

    @property
    def moves(self) -> bool:
        """Whether there is one to move to."""
        return len(self._found) > 1

    def kept(self, position: int) -> int:
        """Return the newest restart for a consumer that keeps everything from before `position`."""
        while len(self._found) > 1 and self._found[1][0] <= position:
            del self._found[0]
        return self._found[0][1]


class Confirmations:
    """LSNs that a consumer writes to the file `descriptor`, one a line: it keeps what was committed before.

    A thread reads, since the file may be anything.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lsn = 0
        self._error: PubsubError | None = None
        threading.Thread(target=self._read, name="confirmations", daemon=True).start()

    def newest(self) -> int:
        """Return the newest one; 0: there is none.  Raises PubsubError once something else was read."""
        if self._error is not None:
            raise self._error
        return self._lsn

    def _read(self) -> None:
        rest = b""
        try:
            while data := os.read(self._descriptor, _RECEIVE):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._lsn = max(self._lsn, Lsn.parse(line[:_LONGEST].decode("ascii", "replace").strip()))
                if len(rest) > _LONGEST:
                    Lsn.parse(rest[:_LONGEST].decode("ascii", "replace"))
        except OSError as error:
            self._error = PubsubError(f"could not read from standard input: {error.strerror}", sqlstate="58030")
        except PubsubError as error:
            error.context = "a confirmed position on standard input"
            self._error = error
