"""A running worker's statistics; the launcher writes them to the catalog once a second."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Final

import numpy as np

from apply.batch import Transaction, lag_seconds
from catalog.figures import Warned
from pubsub.protocol.lsn import INVALID_LSN, Lsn

# Bins from 1 ms to about 3 hours, 5 % apart, so that percentiles need not keep every transaction's lag.
_EDGES: Final = 0.001 * 1.05 ** np.arange(332)

_WARNING_HOLDS: Final = 60.0  # seconds
_MOST_WARNINGS: Final = 20
#: A wait is not reported before this, in seconds.
PATIENCE: Final = 2.0


#: Every so many bins one is shown: each twice as wide as the one before.
_SHOWN: Final = 14
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ROWS: Final = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values were at most each bound, the last of which is infinite, and the values' sum."""

    buckets: tuple[tuple[float, int], ...]
    total: float


class Histogram:
    """A histogram of values by upper bounds, in ascending order; for what happens once a batch or a commit."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def distribution(self) -> Distribution:
        """Return what has been counted so far."""
        return Distribution(tuple(zip(self._bounds, accumulate(self._counts), strict=True)), self._total)


class LagHistogram:
    """A histogram, over transactions, of the seconds from the publisher's commit until durable in Delta."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, np.int64)
        self._total = 0.0
        self.greatest = 0.0
        self.latest: float | None = None

    def add(self, transactions: Sequence[Transaction], now: int) -> None:
        """Count `transactions`, durable at `now` (microseconds since 2000-01-01 UTC)."""
        lags = lag_seconds(transactions, now)
        self._counts += np.bincount(np.searchsorted(_EDGES, lags), minlength=len(self._counts))
        self._total += float(lags.sum())
        self.greatest = max(self.greatest, float(lags.max()))
        self.latest = float(lags[-1])

    def percentile(self, percent: float) -> float | None:
        """Return the lag in seconds that `percent` of the transactions did not exceed; None before the first."""
        total = int(self._counts.sum())
        if total == 0:
            return None
        index = int(np.searchsorted(np.cumsum(self._counts), total * percent / 100.0))
        return min(float(_EDGES[min(index, len(_EDGES) - 1)]), self.greatest)

    def distribution(self) -> Distribution:
        """Return what has been counted so far, in bins that double."""
        known = np.cumsum(self._counts)
        shown = [(float(_EDGES[at]), int(known[at])) for at in range(0, len(_EDGES), _SHOWN)]
        return Distribution((*shown, (math.inf, int(known[-1]))), self._total)


@dataclass(slots=True)
class Changes:
    """Rows that a worker has committed to one table, and in how many commits."""

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    commits: int = 0
    last: int | None = None
    """When the last one was made, in microseconds since 2000-01-01 UTC."""


@dataclass(slots=True)
class Figures:
    """One worker's statistics; LSNs are 0 and times None until known."""

    received_lsn: Lsn = INVALID_LSN
    publisher_lsn: Lsn = INVALID_LSN
    flush_lsn: Lsn = INVALID_LSN
    latest_end_lsn: Lsn = INVALID_LSN
    latest_end_time: datetime | None = None
    last_msg_send_time: datetime | None = None
    last_msg_receipt_time: datetime | None = None
    transactions: int = 0
    batches: int = 0
    commits: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    bytes_received: int = 0
    spill_txns: int = 0
    spill_count: int = 0
    spill_bytes: int = 0
    """As in pg_stat_replication_slots, but for transactions spilled to disk here."""
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    """Transactions received while in progress, and the blocks and bytes they came in."""
    caught_up: bool = False
    behind_since: float | None = None
    """None if nothing waits; otherwise when a batch last became durable, or when the wait began (time.monotonic())."""
    rows: dict[int, tuple[str, int, Lsn]] = field(default_factory=dict)
    """By relid: the application id, the rows that the table held after its last commit, and that commit's LSN."""
    lag: LagHistogram = field(default_factory=LagHistogram)
    changes: dict[int, Changes] = field(default_factory=dict)
    """By relid."""
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Of one table's commit."""
    batch_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    queued_bytes: int = 0
    """Received, and not yet staged, in memory; at most `queue_limit`, but for one read."""
    queue_limit: int = 0
    warned: dict[str, tuple[float, Warned]] = field(default_factory=dict)
    """The publisher's warnings on the stream by text, each with its time (time.monotonic())."""

    waiting: tuple[float, Warned] | None = None
    """The time from which a wait is reported (time.monotonic()), and the report."""

    def received(self, now: float, *, caught_up: bool, pending: bool) -> None:
        """Note whether everything received is durable, and whether committed transactions are `pending`.

        `now`: time.monotonic().
        """
        self.caught_up = caught_up
        if not pending:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now

    @contextmanager
    def waits_for(self, what: str, *, patience: float = PATIENCE) -> Iterator[None]:
        """Report, once the body has run for `patience` seconds, that the worker waits for `what`."""
        before, self.waiting = self.waiting, (time.monotonic() + patience, Warned(f"waits for {what}"))
        try:
            yield
        finally:
            self.waiting = before

    def wait(self, now: float) -> Warned | None:
        """Return the wait to report, if any.  `now`: time.monotonic()."""
        return self.waiting[1] if self.waiting is not None and self.waiting[0] <= now else None

    def warn(self, warning: Warned, now: float) -> None:
        """Note a warning of the publisher.  `now`: time.monotonic(), or infinity for a warning that never expires."""
        if warning.message in self.warned or len(self.warned) < _MOST_WARNINGS:
            self.warned[warning.message] = (now, warning)

    def warnings(self, now: float) -> list[Warned]:
        """Return the warnings of the last minute; a walsender that still waits repeats its warning."""
        return [warning for at, warning in self.warned.values() if now - at < _WARNING_HOLDS]
