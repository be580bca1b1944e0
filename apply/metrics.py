"""What a running worker counts about itself; the launcher writes it to the catalog once a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import numpy as np

from apply.batch import Transaction, lag_seconds
from catalog.records import Warned
from pubsub.protocol.lsn import INVALID_LSN, Lsn

# Lags from 1 ms to about 3 hours, 5 % apart: percentiles without keeping every transaction.
_EDGES: Final = 0.001 * 1.05 ** np.arange(332)

_WARNING_HOLDS: Final = 60.0  # seconds
_MOST_WARNINGS: Final = 20
#: What takes no longer is no wait, in seconds.
_PATIENCE: Final = 2.0


class LagHistogram:
    """Seconds from the publisher's commit to durable in Delta, over transactions."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, np.int64)
        self.greatest = 0.0
        self.latest: float | None = None

    def add(self, transactions: Sequence[Transaction], now: int) -> None:
        """Count `transactions`, durable at `now` (microseconds since 2000-01-01 UTC)."""
        lags = lag_seconds(transactions, now)
        self._counts += np.bincount(np.searchsorted(_EDGES, lags), minlength=len(self._counts))
        self.greatest = max(self.greatest, float(lags.max()))
        self.latest = float(lags[-1])

    def percentile(self, percent: float) -> float | None:
        """The lag that `percent` of the transactions did not exceed, in seconds; None before the first."""
        total = int(self._counts.sum())
        if total == 0:
            return None
        index = int(np.searchsorted(np.cumsum(self._counts), total * percent / 100.0))
        return min(float(_EDGES[min(index, len(_EDGES) - 1)]), self.greatest)


@dataclass(slots=True)
class Figures:
    """One worker's figures; LSNs are 0 and times None until known."""

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
    """As in pg_stat_replication_slots, of what moved to disk here."""
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    """Transactions received while in progress, the blocks and bytes that they came in."""
    caught_up: bool = False
    behind_since: float | None = None
    """While committed transactions are not durable: since when none has become so (time.monotonic())."""
    rows: dict[int, tuple[str, int, Lsn]] = field(default_factory=dict)
    """Of tables that were committed to: the application id, the rows that the table then held, and the commit's LSN."""
    lag: LagHistogram = field(default_factory=LagHistogram)
    warned: dict[str, tuple[float, Warned]] = field(default_factory=dict)
    """What the publisher warned of on the stream, by its text, and when (time.monotonic())."""

    waiting: tuple[float, Warned] | None = None
    """What the worker waits for, and from when on that is worth telling (time.monotonic())."""

    def received(self, now: float, *, caught_up: bool, pending: bool) -> None:
        """Whether all that was received is durable, and whether committed transactions are `pending`.  `now`: time.monotonic()."""
        self.caught_up = caught_up
        if not pending:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now

    @contextmanager
    def waits_for(self, what: str, *, patience: float = _PATIENCE) -> Iterator[None]:
        """While the body runs, for longer than `patience` seconds, status says that the worker waits for that."""
        before, self.waiting = self.waiting, (time.monotonic() + patience, Warned(f"waits for {what}"))
        try:
            yield
        finally:
            self.waiting = before

    def wait(self, now: float) -> Warned | None:
        """What the worker has waited for, for some time.  `now`: time.monotonic()."""
        return self.waiting[1] if self.waiting is not None and self.waiting[0] <= now else None

    def warn(self, warning: Warned, now: float) -> None:
        """The publisher has said so on the stream.  `now`: time.monotonic(); infinity for what holds from now on."""
        if warning.message in self.warned or len(self.warned) < _MOST_WARNINGS:
            self.warned[warning.message] = (now, warning)

    def warnings(self, now: float) -> list[Warned]:
        """Those that still hold: a walsender that waits says so again."""
        return [warning for at, warning in self.warned.values() if now - at < _WARNING_HOLDS]
