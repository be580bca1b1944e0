"""How far a worker lags behind, before its first batch, too."""

from __future__ import annotations

from apply.worker_statistics import Figures
from launcher.standing import lag

NOW = 1000.0


def test_a_worker_that_has_received_nothing_has_no_lag() -> None:
    assert lag(Figures(), NOW) is None


def test_a_worker_that_has_everything_does_not_lag() -> None:
    assert lag(Figures(caught_up=True), NOW) == 0


def test_the_lag_grows_while_the_first_batch_is_not_durable() -> None:
    """A JVM or a store that hangs at the first batch after a start must not look as if the worker followed."""
    figures = Figures()
    figures.received(NOW - 400, caught_up=False, pending=True)
    figures.received(NOW - 100, caught_up=False, pending=True)
    assert lag(figures, NOW) == 400
    assert lag(figures, NOW - 391) is None, "a backlog of hours may come: its lag is not called short"


def test_the_lag_grows_while_a_later_batch_is_not_durable() -> None:
    figures = Figures()
    figures.lag.latest = 3.0
    assert lag(figures, NOW) == 3
    figures.received(NOW - 1, caught_up=False, pending=True)
    assert lag(figures, NOW) == 3
    assert lag(figures, NOW + 400) == 401
