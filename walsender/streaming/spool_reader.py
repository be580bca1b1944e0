"""Reads a spool in an event loop: a segment that only the archive has is fetched in a thread (a restore_command may take long)."""

from __future__ import annotations

import asyncio
import os
import threading
from asyncio import Future
from collections.abc import Callable, Iterator

from walsender.feed.spool import Spool


class SpoolReader:
    """The WAL of `spool`.  `on_fetched` is called when a segment has come from the archive, or has not."""

    def __init__(self, spool: Spool, on_fetched: Callable[[], None] = lambda: None) -> None:
        self._spool = spool
        self._on_fetched = on_fetched
        self._fetch: Future[int] | None = None
        self._start = 0
        """Where the WAL begins that is fetched."""
        self._stop = threading.Event()
        """Ends the restore_command that fetches it."""

    @property
    def is_fetching(self) -> bool:
        """Whether a segment is being fetched: there is nothing to read until `on_fetched` is called."""
        return self._fetch is not None and not self._fetch.done()

    def read(self, lsn: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (LSN, bytes) from `lsn` up to `end`, or up to a segment that has to be fetched, which begins then.

        Raises WalMissing if the archive does not have it either, PubsubError if it cannot be asked.
        """
        while lsn < end and not self.is_fetching:
            fetched, self._fetch = self._fetch, None
            if fetched is not None:
                self._spool.adopt(self._start, fetched.result())
            for position, data in self._spool.read_kept(lsn, end):
                yield position, data
                lsn = position + len(data)
            if lsn < end:
                self._start, self._stop = lsn, threading.Event()
                self._fetch = asyncio.get_running_loop().run_in_executor(None, self._spool.fetch, lsn, self._stop)
                self._fetch.add_done_callback(lambda _: self._on_fetched())

    async def fetched(self) -> None:
        """Wait until what is being fetched has come, or has not."""
        if self._fetch is not None:
            await asyncio.wait({self._fetch})

    def close(self) -> None:
        """End a restore_command that still runs, and close what is open; it can be read again."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._stop.set()
            fetch.add_done_callback(_discard)
        self._spool.close()


def _discard(fetch: Future[int]) -> None:
    """Close what was fetched for nobody."""
    if not fetch.cancelled() and fetch.exception() is None:
        os.close(fetch.result())
