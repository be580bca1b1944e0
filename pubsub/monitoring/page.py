"""The page at / and what it reads: /status.json (document.py).

The files of the page are in files/, and go out as they are.  Nothing of the node is written into them: the script asks for
/status.json, and puts what it gets into the page as text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import Final

import structlog

from pubsub.monitoring.answers import TEXT, Answer, Asked, Handler, as_json
from pubsub.monitoring.document import Observed, Query, document
from pubsub.monitoring.picture import Picture

#: Seconds between two samples of lag and throughput.
_EVERY: Final = 5.0
_FILES: Final = MappingProxyType(
    {
        "/": ("page.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
        "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
        "/icon.svg": ("icon.svg", "image/svg+xml"),
    }
)

logger = structlog.get_logger()


class Page:
    """Answers what the page asks for, from pictures that `take` takes and what was `observed` before."""

    def __init__(self, take: Callable[[], Awaitable[Picture]], observed: Observed, ready_lag: float) -> None:
        self._take = take
        self._observed = observed
        self._ready_lag = ready_lag

    def paths(self) -> Mapping[str, Handler]:
        """Return who answers which path."""
        directory = files("pubsub.monitoring") / "files"
        given = {
            path: partial(_file, Answer(HTTPStatus.OK, kind, (directory / name).read_bytes()))
            for path, (name, kind) in _FILES.items()
        }
        return {**given, "/status.json": self._status}

    async def _status(self, asked: Asked) -> Answer:
        try:
            query = Query.parse(asked.query)
        except ValueError as error:
            return Answer(HTTPStatus.BAD_REQUEST, TEXT, f"{error}\n".encode())
        picture = await self._take()
        self._observed.copies.look(picture.status)
        return as_json(HTTPStatus.OK, document(picture, self._observed, query, self._ready_lag), None)

    async def watch(self) -> None:
        """Take a sample every few seconds, until cancelled.  A failure costs a sample, and is said once."""
        failing: str | None = None
        while True:
            try:
                self._observed.sample(await self._take())
                failing = None
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if reason != failing:
                    logger.warning("a sample of lag and throughput could not be taken", reason=reason)
                failing = reason
            await asyncio.sleep(_EVERY)


async def _file(answer: Answer, asked: Asked) -> Answer:
    return answer
