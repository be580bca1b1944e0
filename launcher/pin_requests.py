"""Carry out the requests of `pubsub snapshot --pin` and `--drop` in the daemon, whose JVM makes the commits.

They are carried out one after the other, and beside the launcher's own work, since the JVM may have to start first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import structlog

from catalog.records import Request
from catalog.store import Catalog
from launcher.failures import typed
from launcher.request_tasks import RequestTasks
from pubsub.delta import pins
from pubsub.delta.spark.engine import Engine
from pubsub.errors import PubsubError

_WORK: Final = {"pin": pins.pin_all, "release": pins.release_all}

logger = structlog.get_logger()


def carry_out(tables: pins.Properties, kind: str, payload: Mapping[str, Any]) -> None:
    """Carry out a request.  Blocks.  Raises as pins.pin_all does."""
    _WORK[kind](tables, payload["paths"], payload["name"])


class PinRequests(RequestTasks):
    """The requests "pin" and "release"; their payload has the pin's name and the paths of the tables."""

    def __init__(self, catalog: Catalog, engine: Engine) -> None:
        super().__init__(_WORK.keys())
        self._catalog = catalog
        self._engine = engine
        self._one_at_a_time = asyncio.Lock()

    async def close(self) -> None:
        """Wait until what has begun has ended."""
        if self._tasks:
            await asyncio.wait([task for _, task in self._tasks.values()])

    async def _carry_out(self, request: Request) -> None:
        async with self._one_at_a_time:
            try:
                if request.id not in {pending.id for pending in await self._catalog.pending_requests()}:
                    return  # its command gave up
                error: PubsubError | None = None
                try:
                    await self._engine.run_without_spark(
                        carry_out, self._engine.transactions, request.kind, request.payload
                    )
                except Exception as failure:
                    error = typed(failure)
                await self._catalog.answer(request.id, error)
            except PubsubError as failure:
                # The request is still there: the next look at the catalog begins it again.
                logger.error("a request could not be answered", request=request.kind, reason=failure.message)
