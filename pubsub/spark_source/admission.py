"""Decide how many transactions one micro-batch takes.

The LSNs of the rows to come are counted, file by file, those with the least LSNs first, until no file is left that can have
a row below what the limits allow.  So the work is bounded by the limits and the files that they reach, not by the backlog,
as far as the files' LSNs do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pubsub.protocol.arrow_arrays import Indices


@dataclass(frozen=True, slots=True)
class Counted:
    """A file's rows to come: none has an LSN below `least`; there are at most `rows` (None: unknown); `lsns` reads their LSNs."""

    least: int
    rows: int | None
    lsns: Callable[[], Iterable[Indices]]


def last_admitted(files: Sequence[Counted], transactions: int | None, rows: int | None) -> int | None:
    """Return the LSN of the last transaction that the limits allow, None if they allow all.

    `files`: by their least LSNs, ascending.  `transactions`, `rows`: the most; None: no limit.  A transaction is never
    divided, so the first one is allowed however many rows it has.  All rows with one LSN count as one transaction.
    """
    if transactions is None and (rows is None or _at_most(files, rows)):
        return None
    counts = _Counts(transactions, rows)
    for file in files:
        if counts.refused is not None and file.least >= counts.refused:
            break
        for lsns in file.lsns():
            counts.add(lsns)
    return counts.last()


def _at_most(files: Iterable[Counted], rows: int) -> bool:
    known = [file.rows for file in files]
    return None not in known and sum(count or 0 for count in known) <= rows


class _Counts:
    """The least LSNs seen so far with their rows: as many as the limits allow.  What is seen later can only refuse more."""

    def __init__(self, transactions: int | None, rows: int | None) -> None:
        self._transactions = transactions
        self._most_rows = rows
        self._lsns: Indices = np.empty(0, np.int64)
        self._rows: Indices = np.empty(0, np.int64)
        #: The first LSN seen that is not allowed.  One below it, of a file yet to come, may be.
        self.refused: int | None = None

    def last(self) -> int | None:
        """Return the last LSN that is allowed; None if all are."""
        return None if self.refused is None else int(self._lsns[-1])

    def add(self, lsns: Indices) -> None:
        if self.refused is not None:
            lsns = lsns[lsns < self.refused]
        found, counts = np.unique(lsns, return_counts=True)
        self._lsns, places = np.unique(np.concatenate([self._lsns, found]), return_inverse=True)
        totals = np.zeros(len(self._lsns), np.int64)
        np.add.at(totals, places, np.concatenate([self._rows, counts]))
        self._rows = totals
        allowed = len(self._lsns) if self._transactions is None else self._transactions
        if self._most_rows is not None:
            allowed = min(allowed, int(np.searchsorted(np.cumsum(self._rows), self._most_rows, side="right")))
        allowed = max(allowed, 1)
        if len(self._lsns) > allowed:
            self.refused = int(self._lsns[allowed])
            self._lsns, self._rows = self._lsns[:allowed], self._rows[:allowed]
