"""What a daemon that stands by answers monitors: it lives, it is not ready, and its process's metrics."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import NoReturn, Self

from pubsub.monitoring.answers import Answer, Asked, as_json
from pubsub.monitoring.endpoint import Endpoint


class StandbyEndpoint(Endpoint):
    """The endpoint without a page; the subscriptions are shown by the daemon that has them."""

    @classmethod
    async def listen(cls, place: tuple[str, int]) -> Self:
        """Listen at host and port (0: a free one).  Raises PubsubError (58030)."""
        return await cls.open(place, _no_picture, 0.0)

    async def _metrics(self, asked: Asked) -> Answer:
        from pubsub.monitoring.metrics import exposition

        kind, body = await asyncio.to_thread(exposition, None, asked.accept)
        return Answer(HTTPStatus.OK, kind, body)

    async def _ready(self, asked: Asked) -> Answer:
        return as_json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "standing by"})


async def _no_picture() -> NoReturn:
    raise NotImplementedError
