"""A database's catalogs, with which decoding begins: from disk, where they are saved now and then, or read from the server."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final

from pubsub.errors import ConnectionFailure, DataCorrupted, NotInPrerequisiteState, PublisherError
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import format_conninfo, parse_conninfo
from pubsub.reorderbuffer.files import FileFailure
from walsender.beginning import read_catalogs
from walsender.feed.archive import Archive
from walsender.feed.spool import Spool
from walsender.historic import upstream
from walsender.historic.state import CatalogState, CatalogStates, Taken
from walsender.source.retry import RETRY_INTERVAL, Retry
from walsender.streaming.passes import Pass
from walsender.streaming.requests import Task
from walsender.streaming.spool_source import SpoolSource

_SAVES: Final = 10.0
"""Least seconds between two savings, and at least `_SHARE` times what saving took."""
_SHARE: Final = 50
_THIN: Final = 64 << 20
"""Bytes of WAL between catalogs that are kept long."""


class Catalogs:
    """The catalogs of the task's database.  `needed`: the LSN from which on saved ones are needed."""

    def __init__(self, task: Task) -> None:
        self.needed = 0
        self._task = task
        self._tip = task.tip
        self._states = CatalogStates(Path(task.states))
        self._sources: set[SpoolSource] = set()
        self._taken: Taken | None = None
        self._saving = False
        self._saved_at = 0.0
        self._saving_took = 0.0

    def reaches(self, tip: int) -> None:
        """Note that there is WAL up to `tip`."""
        self._tip = tip
        for source in self._sources:
            source.reaches(tip)

    async def before(self, lsn: int, redo: int) -> CatalogState:
        """Return the newest from before `lsn`: from disk, or read from the server and the WAL from `redo` on.

        Those from before the spool serve only where the archive is needed in any case.  Raises PubsubError.
        """
        oldest = min(Spool(Path(self._task.spool), self._task.segment_size).starts(), default=0)
        while True:
            position = self._states.newest_before(lsn)
            if position is None or (
                # The list of running transactions at which a slot begins lies behind the redo position.
                position < oldest and (oldest <= redo < lsn or Archive.of(Path(self._task.spool)) is None)
            ):
                return await self._read(redo)
            try:
                state = self._states.load(position)
                server = state.facts.server
                if (server.system_identifier, server.database) != (self._task.system_identifier, self._task.database):
                    raise DataCorrupted("the catalogs are of another server or database")
            except (DataCorrupted, FileFailure) as error:
                print(error.report(), file=sys.stderr, flush=True)
                self._states.remove(position)
                continue
            return state

    # On disk

    def take(self, base: Pass, position: int) -> None:
        """Take those that the base pass has at a list of running transactions, to be saved, unless some were a moment ago."""
        now = time.monotonic()
        if self._taken is not None or self._saving:
            return
        if now - self._saved_at < max(_SAVES, _SHARE * self._saving_took):
            return
        self._taken = self._states.take(base.decoder.tracker, position, base.state)
        self._saving_took = time.monotonic() - now
        self._saved_at = now

    async def save(self) -> None:
        """Save what was taken."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        self._saving = True
        try:
            await asyncio.to_thread(self._write, taken)
        except FileFailure as error:
            print(error.report(), file=sys.stderr, flush=True)
        finally:
            self._saving = False

    def _write(self, taken: Taken) -> None:
        self._states.write(taken)
        self._states.keep_from(self.needed, _THIN)

    def forget(self) -> None:
        """Remove all that were saved."""
        self._states.keep_before(0)

    # From the server

    async def _read(self, redo: int) -> CatalogState:
        """Read them from the server; begin anew if it restarts meanwhile."""
        retry = Retry()
        while True:
            try:
                connection = await self._connect()
            except (ConnectionFailure, PublisherError) as error:
                retry.judge(error)
                await asyncio.sleep(RETRY_INTERVAL)
                continue
            async with connection:
                source = SpoolSource(Spool(Path(self._task.spool), self._task.segment_size), self._tip)
                self._sources.add(source)
                try:
                    server = await upstream.inspect(connection)
                    if server.system_identifier != self._task.system_identifier:
                        raise NotInPrerequisiteState("the upstream server is another one than before")
                    if server.database != self._task.database:
                        raise NotInPrerequisiteState("the database's name is another one's now")
                    return await read_catalogs(connection, server, source, redo)
                except (ConnectionFailure, PublisherError) as error:
                    await retry.judge_session(error, connection)
                finally:
                    self._sources.discard(source)

    async def _connect(self) -> Connection:
        """Connect to the database, whatever its name is now.  Raises ConnectionFailure, PubsubError."""
        conninfo = self._task.conninfo
        async with await self._connect_to(conninfo) as connection:
            name = await upstream.database_name(connection, self._task.database)
        return await self._connect_to(format_conninfo({**parse_conninfo(conninfo), "dbname": name}))

    async def _connect_to(self, conninfo: str) -> Connection:
        return await Connection.connect(
            conninfo, application_name="walsender", answer_timeout=self._task.answer_timeout
        )
