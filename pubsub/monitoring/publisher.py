"""What `pubsub publish` answers monitors: the slots and streams of its server, and whether the upstream server's WAL comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Self

from pubsub.monitoring.answers import Answer, Asked, as_json
from pubsub.monitoring.endpoint import Endpoint
from pubsub.monitoring.picture import Served
from pubsub.monitoring.standby import no_picture

if TYPE_CHECKING:
    from prometheus_client import Metric

    from walsender.server.service import Service


class PublisherEndpoint(Endpoint):
    """The endpoint of a server without a node, and so without a page."""

    _publisher: Service

    @classmethod
    async def listen(cls, place: tuple[str, int], publisher: Service) -> Self:
        """Listen at host and port (0: a free one).  Raises PubsubError (58030)."""
        endpoint = await cls.open(place, no_picture, 0.0)
        endpoint._publisher = publisher
        return endpoint

    async def _families(self) -> Callable[[], Iterator[Metric]]:
        from pubsub.monitoring.metrics import of_publisher

        return partial(of_publisher, Served.of(self._publisher))

    async def _ready(self, asked: Asked) -> Answer:
        failing = self._publisher.feed.failing
        if failing is not None:
            return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "upstream": failing})
        return as_json(HTTPStatus.OK, {"status": "ready"})
