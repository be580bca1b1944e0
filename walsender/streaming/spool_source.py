"""The WAL of the spool as a source, as far as the server has said that it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from walsender.feed.spool import Spool
from walsender.streaming.spool_reader import SpoolReader
from walsender.xlog.reader import WalReader


class SpoolSource:
    """See source.Source.  `tip`: where the WAL in the spool ends."""

    def __init__(self, spool: Spool, tip: int) -> None:
        self._spool = SpoolReader(spool)
        self._tip = tip
        self._more = asyncio.Event()
        self.flushed = 0

    async def open(self) -> None:
        """Nothing is to be opened."""

    def reaches(self, lsn: int) -> None:
        """Note that there is WAL up to `lsn`."""
        self._tip = max(self._tip, lsn)
        self._more.set()

    async def feed(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """See source.Source.  Raises WalMissing."""
        reader.final = True
        while True:
            if reader.received < reader.position:
                # A segment ended early (XLOG_SWITCH), and the rest of it had not come.
                reader.restart_at(reader.position)
            for lsn, data in self._spool.read(reader.received, self._tip):
                reader.feed(lsn, data)
                yield False
                await asyncio.sleep(0)
            self._more.clear()
            if reader.received < self._tip:
                await self._spool.fetched()
                continue
            yield True
            await self._more.wait()

    async def keep_alive(self) -> None:
        """The server receives on its own."""

    async def close(self) -> None:
        self._spool.close()
