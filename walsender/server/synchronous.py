"""Commits that wait for subscribers: synchronous_standby_names of the upstream server may name them (syncrep.c).

The upstream server knows no subscriber.  For each stream whose application_name stands in that setting there is a stand-in:
a walsender of physical replication under the same name, which reports what the subscriber reports.

    subscriber ── status updates ──► stream ──► stand-in ── status updates ──► upstream server
                                                 ▲ its WAL, which is not looked at ──┘

A walsender counts only while it has sent everything, so the WAL comes once more for each stand-in, and is thrown away.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from pubsub.errors import ConnectionFailure, PublisherError, PubsubError
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import format_conninfo, parse_conninfo
from pubsub.publisher.replication import identify_system
from walsender.source.stream import WalStream

if TYPE_CHECKING:
    from walsender.server.stream import Stream

_LOOK: Final = 2.0
"""Seconds between two looks at the setting, while there are streams."""
_STATE: Final = (
    "SELECT pg_catalog.current_setting('synchronous_standby_names'), (SELECT pg_catalog.json_object_agg(pid,"
    " pg_catalog.json_build_array(sync_priority, sync_state)) FROM pg_catalog.pg_stat_replication WHERE sync_state IS NOT NULL)"
)
_NAMES: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')

logger = structlog.get_logger()


class SynchronousStandbys:
    """The stand-ins of one upstream server's subscribers.

    `streams` returns the streams that run; `timeout`: wal_receiver_timeout, in seconds.
    """

    def __init__(self, conninfo: str, streams: Callable[[], Iterable[Stream]], timeout: float) -> None:
        self._conninfo = conninfo
        self._streams = streams
        self._timeout = timeout
        self._running: dict[Stream, asyncio.Task[None]] = {}
        self._soon = asyncio.Event()

    def look_soon(self) -> None:
        """Streams have begun or ended."""
        self._soon.set()

    async def run(self) -> None:
        """Keep the stand-ins that are needed, until cancelled."""
        try:
            while True:
                while not self._streams():
                    await self._soon.wait()
                    self._soon.clear()
                try:
                    async with await Connection.connect(
                        self._conninfo, application_name="walsender", answer_timeout=self._timeout
                    ) as connection:
                        await self._watch(connection)
                except ConnectionFailure:
                    await asyncio.sleep(_LOOK)  # the feed says that the server cannot be reached
                except PublisherError as error:
                    logger.warning("synchronous_standby_names cannot be read", reason=error.message)
                    await asyncio.sleep(_LOOK)
        finally:
            ending = list(self._running.values())
            self._keep(())
            await asyncio.gather(*ending, return_exceptions=True)

    async def _watch(self, connection: Connection) -> None:
        """Look at the setting for as long as there are streams."""
        while self._streams():
            self._soon.clear()
            await self._look(connection)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._soon.wait()
        self._keep(())

    async def _look(self, connection: Connection) -> None:
        ((names, listed),) = await connection.query(_STATE)
        states = json.loads(listed or "{}")
        streams = list(self._streams())
        for stream in streams:
            stream.sync_priority, stream.sync_state = states.get(str(stream.stand_in_pid), (0, "async"))
        self._keep([stream for stream in streams if is_named(stream.application_name, names or "")])

    def _keep(self, wanted: Iterable[Stream]) -> None:
        """Start and end stand-ins, so that these streams have one."""
        wanted = set(wanted)
        for stream in [one for one, task in self._running.items() if one not in wanted or task.done()]:
            task = self._running.pop(stream)
            if task.done() and not task.cancelled():
                task.result()
            task.cancel()
        for stream in wanted - self._running.keys():
            self._running[stream] = asyncio.create_task(self._stand_in(stream), name="synchronous standby")

    async def _stand_in(self, stream: Stream) -> None:
        """Report what the stream's client reports, until the connection breaks."""
        parameters = {**parse_conninfo(self._conninfo), "application_name": stream.application_name}
        try:
            async with await Connection.connect(
                format_conninfo(parameters), replication=True, answer_timeout=self._timeout
            ) as connection:
                await self._report(connection, stream)
        except PubsubError as error:
            logger.warning(
                "the report of a synchronous standby has ended", name=stream.application_name, reason=error.message
            )
        finally:
            stream.stand_in_pid = None

    async def _report(self, connection: Connection, stream: Stream) -> None:
        identity = await identify_system(connection)
        wal = WalStream(connection, timeout=self._timeout, positions=lambda: stream.positions)
        await wal.start(identity.xlogpos, identity.timeline)
        stream.stand_in_pid = connection.backend_pid
        self.look_soon()

        async def report() -> None:
            while True:
                stream.replied.clear()
                await wal.send_status()
                await stream.replied.wait()

        reporting = asyncio.create_task(report())
        try:
            async for _ in wal.pieces():
                if reporting.done():
                    break
        finally:
            reporting.cancel()
            ended = await asyncio.gather(reporting, return_exceptions=True)
            await wal.close()
        if isinstance(ended[0], Exception):
            raise ended[0]


def is_named(name: str, setting: str) -> bool:
    """Return whether synchronous_standby_names names a standby (syncrep.c: SyncRepGetStandbyPriority).

    The words and numbers before the parentheses are taken for names, too: then a stand-in runs that nobody waits for.
    """
    names = {(quoted.replace('""', '"') or plain).lower() for quoted, plain in _NAMES.findall(setting)}
    return name.lower() in names or "*" in names
