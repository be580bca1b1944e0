"""How far behind a worker is, and what the workers of a subscription wait for: told in the log when it changes."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from apply.metrics import Figures
from catalog.records import Warned
from launcher import worker_slots

log = structlog.get_logger()


def lag(figures: Figures, now: float) -> float | None:
    """Seconds from a commit on the publisher to durable in Delta; None before anything is known.  `now`: time.monotonic().

    While nothing becomes durable it grows: what was applied last says nothing of what waits.
    """
    if figures.caught_up:
        return 0.0
    latest, since = figures.lag.latest, figures.behind_since
    if latest is None or since is None:
        return latest
    return max(latest, now - since)


class Told:
    """The waits that somebody can end, each logged once when it begins and once when it is over."""

    def __init__(self) -> None:
        self._told: dict[str, dict[tuple[str, str], Warned]] = {}

    def tell(self, subscription: str, waits: Iterable[Warned]) -> None:
        """What a subscription's workers wait for now.  Waits without a hint end by themselves, as a start of Spark does."""
        now = {(wait.message, wait.hint): wait for wait in waits if wait.hint and wait.message != worker_slots.MESSAGE}
        before = self._told.get(subscription, {})
        for key in now.keys() - before.keys():
            wait = now[key]
            log.warning(wait.message, subscription=subscription, detail=wait.detail, hint=wait.hint)
        for key in before.keys() - now.keys():
            log.info(f"no worker {key[0]} any more", subscription=subscription)
        self._told[subscription] = now
