"""What a node answers monitors: its metrics, and whether every subscription follows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from pubsub.monitoring.answers import Answer, as_json
from pubsub.monitoring.picture import Picture
from pubsub.monitoring.readiness import obstacles

if TYPE_CHECKING:
    from prometheus_client import Metric


class NodeSource:
    """An endpoint's source, from the pictures that `take` returns.  `ready_lag`: in seconds."""

    def __init__(self, take: Callable[[], Awaitable[Picture]], ready_lag: float) -> None:
        self._take = take
        self._ready_lag = ready_lag

    async def families(self) -> Callable[[], Iterator[Metric]]:
        """Return what makes the metrics of a picture."""
        from pubsub.monitoring.metrics import families

        return partial(families, (await self._take()).own())

    async def ready(self) -> Answer:
        """Answer whether every subscription follows, or which do not, and why."""
        picture = (await self._take()).own()
        found = obstacles(picture.status, self._ready_lag)
        if found:
            return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "subscriptions": found})
        return as_json(HTTPStatus.OK, {"status": "ready"})
