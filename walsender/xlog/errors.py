"""Errors of the WAL's readers; all of them tell the position."""

from __future__ import annotations

from pubsub.errors import DataCorrupted, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn

_HINT = "The WAL from here on cannot be decoded: take it from the server or its archive again, or start anew after it."


class WalCorrupted(DataCorrupted):
    """Bytes of the WAL that cannot be what a server wrote.  `lsn`: start of the record or the page."""

    def __init__(self, message: str, lsn: int, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, detail=detail, hint=hint or _HINT, context=f"WAL position {Lsn(lsn)}")
        self.lsn = Lsn(lsn)


class WalMissing(NotInPrerequisiteState):
    """WAL that is needed and no longer there (or not yet, in a directory that will not grow)."""

    def __init__(self, message: str, lsn: int, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, sqlstate="58P01", detail=detail, hint=hint, context=f"WAL position {Lsn(lsn)}")
        self.lsn = Lsn(lsn)
