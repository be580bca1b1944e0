"""LagHistogram: percentiles within a bin's width of the exact ones.  Waits: those that last."""

from __future__ import annotations

import random
import time

import pytest

from apply.batch import Transaction
from apply.worker_statistics import Figures, LagHistogram
from catalog.records import Warned
from pubsub.protocol.lsn import Lsn

NOW = 10**15


def transactions(lags: list[float]) -> list[Transaction]:
    return [Transaction(1, Lsn(1), Lsn(2), NOW - round(lag * 1e6), 0, 0) for lag in lags]


def test_none_before_the_first() -> None:
    assert LagHistogram().percentile(50) is None


@pytest.mark.parametrize("percent", [1, 50, 95, 99, 100])
def test_percentiles(percent: int) -> None:
    chance = random.Random(percent)
    lags = [chance.lognormvariate(0, 1.5) for _ in range(4000)]
    histogram = LagHistogram()
    for first in range(0, len(lags), 100):
        histogram.add(transactions(lags[first : first + 100]), NOW)
    exact = sorted(lags)[max(0, -(-len(lags) * percent // 100) - 1)]
    assert exact * 0.999 <= histogram.percentile(percent) <= exact * 1.051 + 0.001  # type: ignore[operator]
    assert histogram.latest == pytest.approx(lags[-1], abs=1e-6)
    assert histogram.greatest == pytest.approx(max(lags), abs=1e-6)


def test_a_clock_that_is_behind_and_a_lag_of_days_are_counted() -> None:
    histogram = LagHistogram()
    histogram.add(transactions([-5.0, 200_000.0]), NOW)
    assert histogram.percentile(1) <= 0.001  # type: ignore[operator]
    assert histogram.percentile(100) is not None


def test_a_wait_is_reported_only_after_a_while() -> None:
    figures = Figures()
    soon, late = time.monotonic(), time.monotonic() + 60
    with figures.waits_for("Spark to start"):
        assert figures.wait(soon) is None
        assert figures.wait(late) == Warned("waits for Spark to start")
        with figures.waits_for("a slot", patience=100):
            assert figures.wait(late) is None
            assert figures.wait(late + 60) == Warned("waits for a slot")
        assert figures.wait(late) == Warned("waits for Spark to start")
    assert figures.wait(late) is None
