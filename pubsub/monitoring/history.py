"""Lag and throughput of each subscription over the last hour and the last day, in memory, for the page.

Each span has POINTS points of equal steps, at multiples of the step since 1970: a subscription takes some 25 kB, however long the
node runs.  Nothing is stored: a new process begins with nothing, since Prometheus keeps what is to be kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, Final

from catalog.figures import SubscriptionStats
from pubsub.monitoring.picture import Picture
from pubsub.node.status import SubscriptionStatus

POINTS: Final = 240
#: Seconds from point to point.
STEPS: Final = MappingProxyType({"hour": 15, "day": 360})
_COUNTED: Final = ("transactions", "rows", "bytes")


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of a subscription, as they were at `time` (seconds since 1970)."""

    time: float
    transactions: int
    rows: int
    bytes: int

    @classmethod
    def of(cls, found: SubscriptionStats, time: float) -> _Counts:
        rows = found.rows_inserted + found.rows_updated + found.rows_deleted
        return cls(time, found.transactions, rows, found.bytes_received)


class _Span:
    """The points of one span; a point without a sample, or with an unknown lag, is NaN.

    `number` is the newest point's, counted in steps since 1970.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.number = -1
        self._lags = {name: _column(math.nan) for name in ("lag_seconds", "lag_bytes")}
        self._sums = {name: _column(0.0) for name in (*_COUNTED, "elapsed")}

    def add(self, now: float, lags: dict[str, float | None], counted: dict[str, float]) -> None:
        """Join a sample to the point of `now`: the greatest lag in it counts, and the sums of what was counted."""
        self._go_to(int(now // self.step))
        at = self.number % POINTS
        for name, value in lags.items():
            column = self._lags[name]
            if value is not None and not column[at] >= value:
                column[at] = value
        for name, value in counted.items():
            self._sums[name][at] += value

    def _go_to(self, number: int) -> None:
        """Empty the points after the newest one, up to `number`.  A clock that was set back begins anew."""
        if number < self.number or number - self.number >= POINTS:
            passed: Collection[int] = range(POINTS)
        else:
            passed = [one % POINTS for one in range(self.number + 1, number + 1)]
        for at in passed:
            for column in self._lags.values():
                column[at] = math.nan
            for column in self._sums.values():
                column[at] = 0.0
        self.number = number

    def document(self, now: float) -> dict[str, Any]:
        """Return the points, oldest first, None where nothing is known; `end`: when the last one ends (since 1970)."""
        last = int(now // self.step)
        order = range(last - POINTS + 1, last + 1)
        known = range(self.number - POINTS + 1, self.number + 1)
        elapsed = self._sums["elapsed"]

        def lag(column: array[float], number: int) -> float | None:
            value = column[number % POINTS] if number in known else math.nan
            return None if math.isnan(value) else round(value, 3)

        def rate(column: array[float], number: int) -> float | None:
            seconds = elapsed[number % POINTS] if number in known else 0.0
            return round(column[number % POINTS] / seconds, 2) if seconds else None

        return {
            "step": self.step,
            "end": (last + 1) * self.step,
            **{name: [lag(column, one) for one in order] for name, column in self._lags.items()},
            **{f"{name}_per_second": [rate(self._sums[name], one) for one in order] for name in _COUNTED},
        }


class History:
    """The spans of each subscription that there is."""

    def __init__(self) -> None:
        self._spans: dict[int, dict[str, _Span]] = {}
        self._before: dict[int, _Counts] = {}

    def sample(self, picture: Picture) -> None:
        """Join a picture; subscriptions that it lacks are forgotten.

        Counters that are lower than before were reset meanwhile: what they count now is all that is known.
        """
        now = picture.status.time.timestamp()
        counters = {one.subid: one for one in picture.state.statistics}
        oids = {one.oid for one in picture.state.subscriptions}
        for gone in self._spans.keys() - oids:
            del self._spans[gone]
            self._before.pop(gone, None)
        for one, status in zip(picture.state.subscriptions, picture.status.subscriptions, strict=True):
            counts = _Counts.of(counters.get(one.oid, SubscriptionStats(one.oid)), now)
            counted = _since(self._before.get(one.oid), counts)
            self._before[one.oid] = counts
            spans = self._spans.setdefault(one.oid, {name: _Span(step) for name, step in STEPS.items()})
            for span in spans.values():
                span.add(now, _lags(status), counted)

    def document(self, oid: int, span: str, now: float) -> dict[str, Any] | None:
        """Return a subscription's points; None before its first sample.  `span`: a key of STEPS."""
        spans = self._spans.get(oid)
        return None if spans is None else spans[span].document(now)


def _column(value: float) -> array[float]:
    return array("d", repeat(value, POINTS))


def _lags(status: SubscriptionStatus) -> dict[str, float | None]:
    return {"lag_seconds": status.lag_seconds, "lag_bytes": status.lag_bytes}


def _since(before: _Counts | None, now: _Counts) -> dict[str, float]:
    if before is None or now.time <= before.time:
        return {}
    found = {"elapsed": now.time - before.time}
    for name in _COUNTED:
        was, is_ = getattr(before, name), getattr(now, name)
        found[name] = is_ - was if is_ >= was else is_
    return found
