"""`pubsub publish`: the publisher's server alone, in the foreground, until SIGTERM or SIGINT.

Its options are those of [walsender] in pubsub.toml, and go before them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from pubsub import logs
from pubsub.cli.privacy import harden, warn_of_readers
from pubsub.errors import PubsubError
from pubsub.node.node import make_home
from pubsub.protocol.lsn import Lsn
from pubsub.server.doors import Doors
from pubsub.settings import Settings
from pubsub.stacks import tell_when_asked

if TYPE_CHECKING:
    from pubsub.cli.common import Common

logger = structlog.get_logger()


class PastSlot(NamedTuple):
    """A slot that is to begin at the LSN `start`."""

    name: str
    plugin: str
    start: str


async def serve(common: Common, more: Mapping[str, Any], past: PastSlot | None = None) -> int:
    """Serve until cancelled; return the exit code.  Raises PubsubError, for example if the upstream server cannot be decoded.

    `more`: settings of the command line, see Settings.load.  `past`: a slot to make first.
    """
    logs.configure(logging.DEBUG if common.verbose else logging.INFO, verbose=common.verbose)
    logs.hear_libraries()
    tell_when_asked(asyncio.get_running_loop())
    harden()
    settings = Settings.load(common.home, more)
    warn_of_readers(settings)
    for name in ("upstream", "listen"):
        if getattr(settings.walsender, name) is None:
            raise PubsubError(
                f'parameter "walsender.{name}" is not set',
                sqlstate="22023",
                hint=f"Give --{name}, or set it in the table [walsender] of pubsub.toml.",
            )
    make_home(common.home)
    start = Lsn.parse(past.start) if past is not None else None
    doors = await Doors.open(settings)
    try:
        if past is not None and start is not None:
            await doors.begin_slot(past.name, past.plugin, start)
        async with _monitored(settings, doors) as http:
            logger.info(
                "publisher has started",
                listen=doors.place,
                http=http,
                directory=str(common.home / "walsender"),
                pid=os.getpid(),
            )
            try:
                await doors.failed()
            except asyncio.CancelledError:
                logger.info("publisher has ended")
    finally:
        await doors.close()
    return 0


@asynccontextmanager
async def _monitored(settings: Settings, doors: Doors) -> AsyncIterator[str | None]:
    """Serve what monitors ask for as long as the body runs, if [http] says where; yield the place.  Raises PubsubError."""
    place = settings.http.place()
    if place is None:
        yield None
        return
    from pubsub.monitoring.endpoint import Endpoint
    from pubsub.monitoring.publisher import PublisherSource

    assert doors.publisher is not None
    endpoint = await Endpoint.open(place, PublisherSource(doors.publisher))
    try:
        yield endpoint.place
    finally:
        await endpoint.close()
