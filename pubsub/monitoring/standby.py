"""What a daemon that stands by answers monitors: it lives, it is not ready, and its process's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, NoReturn, Self

from pubsub.monitoring.answers import Answer, Asked, as_json
from pubsub.monitoring.endpoint import Endpoint

if TYPE_CHECKING:
    from prometheus_client import Metric


class StandbyEndpoint(Endpoint):
    """The endpoint without a page; the subscriptions are shown by the daemon that has them."""

    @classmethod
    async def listen(cls, place: tuple[str, int]) -> Self:
        """Listen at host and port (0: a free one).  Raises PubsubError (58030)."""
        return await cls.open(place, no_picture, 0.0)

    async def _families(self) -> Callable[[], Iterator[Metric]]:
        from pubsub.monitoring.metrics import standing_by

        return standing_by

    async def _ready(self, asked: Asked) -> Answer:
        return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "standing by"})


async def no_picture() -> NoReturn:
    """Take the place of a picture where there is no node to take one of."""
    raise NotImplementedError
