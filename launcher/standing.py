"""How far a worker lags behind, and the log messages about what a subscription's workers wait for."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from apply.worker_statistics import Figures
from catalog.records import Warned
from launcher import worker_slots

logger = structlog.get_logger()


def lag(figures: Figures, now: float) -> float | None:
    """Return the seconds from a commit on the publisher until it is durable in Delta; None if there was none yet.

    `now` is time.monotonic().  While changes wait and none becomes durable the lag grows, whatever it was for the last
    one, and before the first one, too: it is not known yet when that was committed, but since when it waits.
    """
    if figures.caught_up:
        return 0.0
    latest, since = figures.lag.latest, figures.behind_since
    if since is None:
        return latest
    return max(latest or 0.0, now - since)


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
            logger.warning(wait.message, subscription=subscription, detail=wait.detail, hint=wait.hint)
        for key in before.keys() - now.keys():
            logger.info(f"no worker {key[0]} any more", subscription=subscription)
        self._logged[subscription] = now
