"""Positions in the write-ahead log.

An `Lsn` is a 64-bit byte position that prints as in PostgreSQL (pg_lsn.c: pg_lsn_out); 0 means "no position"
(InvalidXLogRecPtr).  It is an int, so comparison and arithmetic just work; the hot path uses bare ints.
"""

from __future__ import annotations

from typing import Final, Self

from pubsub.errors import PubsubError

_MAX_HALF: Final = 0xFFFFFFFF


class Lsn(int):
    """A position in the WAL, in bytes from its start."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "16/B374D848".  Raises PubsubError (22P02) like pg_lsn_in."""
        high, slash, low = text.strip().partition("/")
        digits = "0123456789abcdefABCDEF"
        if not slash or not all(1 <= len(half) <= 8 and all(c in digits for c in half) for half in (high, low)):
            raise PubsubError(f'invalid input syntax for type pg_lsn: "{text}"', sqlstate="22P02")
        return cls((int(high, 16) << 32) | int(low, 16))

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & _MAX_HALF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec) if not spec or spec[-1] not in "dxX" else format(int(self), spec)


INVALID_LSN: Final = Lsn(0)
