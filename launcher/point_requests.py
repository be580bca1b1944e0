"""Carry out the requests of `pubsub verify` for an LSN at which publisher and tables can both be read.

hold point    the apply worker finds one (apply.snapshot_point); the answer has its LSN and the exported snapshot's name,
              which can be imported until
free point    or _LONGEST seconds later, whichever comes first
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog

from catalog.records import Request
from catalog.store import Catalog
from launcher import streaming_worker
from launcher.failures import typed
from launcher.request_tasks import RequestTasks
from launcher.runner import Runner
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn

#: How long a command may take to import a snapshot, in seconds.
_LONGEST: Final = 60.0
#: How often a request is looked for that its command may have withdrawn, in seconds.
_LOOK: Final = 2.0

logger = structlog.get_logger()


class PointRequests(RequestTasks):
    """The requests "hold point", whose payload may have the least LSN `at`, and "free point" of the same subscription."""

    def __init__(self, catalog: Catalog, runners: Mapping[int, Runner]) -> None:
        super().__init__({"hold point"})
        self._catalog = catalog
        self._runners = runners
        self._free: dict[asyncio.Event, int | None] = {}

    async def frees(self, request: Request) -> bool:
        """Return whether the request is "free point"; carry it out."""
        if request.kind != "free point":
            return False
        # All that there are: one command at a time verifies a subscription, and one that was interrupted may not have read the
        # answer to "hold point".
        for event, subid in self._free.items():
            if subid == request.subid:
                event.set()
        await self._catalog.answer(request.id)
        return True

    async def _carry_out(self, request: Request) -> None:
        """Carry out a request, unless its command gives up or is killed meanwhile: then the request is gone."""
        answered = asyncio.Event()
        work = asyncio.create_task(self._answer(request, answered), name="hold point")
        try:
            while not work.done() and not answered.is_set():
                await asyncio.wait({work}, timeout=_LOOK)
                if not answered.is_set() and await self._is_withdrawn(request):
                    return
            await work
        except PubsubError as error:
            logger.warning("a request could not be answered", request=request.kind, reason=error.message)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _is_withdrawn(self, request: Request) -> bool:
        return request.id not in {pending.id for pending in await self._catalog.pending_requests()}

    async def _answer(self, request: Request, answered: asyncio.Event) -> None:
        """Hold a point until it is freed; answer with it, or with the reason why there is none."""
        free = asyncio.Event()
        self._free[free] = request.subid
        try:
            _, worker = await streaming_worker.streaming(self._runners, request.subid or 0)
            async with worker.snapshot_point(at=_lsn(request.payload.get("at"))) as point:
                result = {"lsn": str(point.lsn), "snapshot": point.snapshot}
                waits = await self._catalog.answer(request.id, result=result)
                answered.set()
                if waits:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LONGEST):
                            await free.wait()
        except Exception as error:
            if not answered.is_set():
                answered.set()
                await self._catalog.answer(request.id, typed(error))
        finally:
            del self._free[free]


def _lsn(text: object) -> Lsn | None:
    return None if text is None else Lsn.parse(str(text))
