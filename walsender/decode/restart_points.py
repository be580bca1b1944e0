"""Where another process must start reading WAL to continue from where a decoder is (snapbuild.c: SnapBuildProcessRunningXacts).

A list of running transactions serves once all of these have ended; a checkpoint does by the list that was written for it.
"""

from __future__ import annotations

from typing import Final

_LISTS: Final = 1000
"""How many lists of running transactions are kept while the record of their checkpoint has not come."""


class RestartPoints:
    """The positions, as LSNs.  `redo`: redo position of the checkpoint at which decoding starts."""

    def __init__(self, redo: int) -> None:
        self.point = redo
        """The redo position of a checkpoint; for a process that knows nothing."""
        self.known = 0
        """The newest list all of whose transactions have ended; for one that knows the catalogs there."""
        self.last_list = 0
        """The last list."""
        # Lists with the transactions that ran: since the last checkpoint; those that may serve; and checkpoints' that may.
        self._lists: list[tuple[int, frozenset[int]]] = []
        self._older: list[tuple[int, frozenset[int]]] = []
        self._checkpoints: list[tuple[int, frozenset[int]]] = []

    def checkpoint(self, redo: int) -> None:
        """Take note of a checkpoint's record."""
        self._lists = [one for one in self._lists if one[0] >= redo]
        self._checkpoints += [(redo, xids) for _, xids in self._lists[:1]]

    def listed(self, lsn: int, running: frozenset[int]) -> None:
        """Take note of a list of `running` transactions; move the positions to the newest that serve."""
        self.last_list = lsn
        self._lists = [*self._lists[-_LISTS:], (lsn, running)]
        older = [*self._older[-_LISTS:], (lsn, running)]
        ended = [number for number, (_, xids) in enumerate(older) if not xids or not xids & running]
        if ended:
            self.known = older[ended[-1]][0]
            del older[: ended[-1]]
        self._older = older
        serve = [number for number, (_, xids) in enumerate(self._checkpoints) if not xids & running]
        if serve:
            self.point = self._checkpoints[serve[-1]][0]
            del self._checkpoints[: serve[-1]]
