"""What a daemon that stands by answers monitors: it is not ready, and its process's metrics.

The subscriptions are shown by the daemon that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from pubsub.monitoring.answers import Answer, as_json

if TYPE_CHECKING:
    from prometheus_client import Metric


class StandbySource:
    """An endpoint's source where there is no node to take pictures of."""

    async def families(self) -> Callable[[], Iterator[Metric]]:
        """Return what makes the process's metrics."""
        from pubsub.monitoring.metrics import standing_by

        return standing_by

    async def ready(self) -> Answer:
        """Answer that it stands by."""
        return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "standing by"})
