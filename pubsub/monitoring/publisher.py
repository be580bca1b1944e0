"""What `pubsub publish` answers monitors: the slots and streams of its server, and whether the upstream server's WAL comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from pubsub.monitoring.answers import Answer, as_json
from pubsub.monitoring.picture import Served

if TYPE_CHECKING:
    from prometheus_client import Metric

    from walsender.server.service import Service


class PublisherSource:
    """An endpoint's source, of a server without a node."""

    def __init__(self, publisher: Service) -> None:
        self._publisher = publisher

    async def families(self) -> Callable[[], Iterator[Metric]]:
        """Return what makes the metrics of the server as it is now."""
        from pubsub.monitoring.metrics import of_publisher

        return partial(of_publisher, Served.of(self._publisher))

    async def ready(self) -> Answer:
        """Answer whether the upstream server's WAL comes."""
        failing = self._publisher.feed.failing
        if failing is not None:
            return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "upstream": failing})
        return as_json(HTTPStatus.OK, {"status": "ready"})
