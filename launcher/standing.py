"""How far a worker lags behind, and the log messages about what a subscription's workers wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from apply.worker_statistics import Figures
from catalog.figures import Warned
from launcher import worker_slots

#: From so many seconds on it is told how long a worker's first batch is waited for.
_LONG: Final = 10.0

logger = structlog.get_logger()


def lag(figures: Figures, now: float) -> float | None:
    """Return the seconds from a commit on the publisher until it is durable in Delta; None as long as nobody can say.

    `now` is time.monotonic().  While changes wait and none becomes durable the lag grows, whatever it was for the last
    one.  Before the first one nothing is known but how long they wait: a backlog of hours may come, so a short wait is
    not called a short lag; a long one is told, since the first batch may hang.
    """
    if figures.caught_up:
        return 0.0
    latest, since = figures.lag.latest, figures.behind_since
    if since is None:
        return latest
    waited = now - since
    if latest is None:
        return waited if waited >= _LONG else None
    return max(latest, waited)


class WaitLog:
    """Logs each wait that a person can end: once when it begins and once when it is over."""

    def __init__(self) -> None:
        self._logged: dict[str, dict[tuple[str, str], Warned]] = {}

    def tell(self, subscription: str, waits: Iterable[Warned]) -> None:
        """Log how these waits differ from the last call's.

        Waits without a hint end by themselves, as a start of Spark does, and are not logged.
        """
        now = {(wait.message, wait.hint): wait for wait in waits if wait.hint and wait.message != worker_slots.MESSAGE}
        before = self._logged.get(subscription, {})
        for key in now.keys() - before.keys():
            wait = now[key]
            logger.warning(
                "worker waits", reason=wait.message, subscription=subscription, detail=wait.detail, hint=wait.hint
            )
        for key in before.keys() - now.keys():
            logger.info("no worker waits any more", reason=key[0], subscription=subscription)
        self._logged[subscription] = now
