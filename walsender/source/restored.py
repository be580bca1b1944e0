"""WAL segments that a restore_command fetches, a few at a time, into a directory of their own.

the reader wants an LSN ──► provide: the command, in a thread ──► a file in the directory ──► read, as in any archive
                                                             └──► older ones are removed
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from pubsub.errors import DataCorrupted
from pubsub.protocol.timeline import TimelineHistory
from walsender.source.restore import restore
from walsender.source.segments import SegmentDirectory
from walsender.xlog.geometry import Geometry

KEPT: Final = 4
"""Segments that stay: a record may span several, and the reader goes back to where it begins."""
_LOOK: Final = 1.0
"""Seconds between two words that a command still runs."""
_FETCHED: Final = ".fetched"


class RestoredSegments(SegmentDirectory):
    """Segments of the cluster `system_identifier` that `command` fetches within `timeout` seconds each (0: without end).

    `path` is made, and has no other contents.  The command finds the cluster's identifier in PUBSUB_SYSTEM_IDENTIFIER.
    """

    def __init__(self, command: str, timeout: float, path: Path, geometry: Geometry, system_identifier: int) -> None:
        path.mkdir(mode=0o700)
        super().__init__(path, geometry, system_identifier)
        self._command = command
        self._timeout = timeout
        self._kept: list[str] = []
        """The segments that are there, the one that was wanted last at the end."""
        self._numbers = itertools.count()
        self._newest = -1
        """Where the newest segment begins that was ever there."""
        self._environment = {**os.environ, "PUBSUB_SYSTEM_IDENTIFIER": str(system_identifier)}

    async def provide(self, lsn: int, history: TimelineHistory) -> AsyncGenerator[None]:
        """Fetch the segment that holds `lsn` if the archive has it, on the newest timeline first; yield now and then meanwhile.

        Raises PubsubError as `restore`, and DataCorrupted for a file that is no whole segment.
        """
        size = self._geometry.segment_size
        for timeline in history.timelines_of_segment(lsn, size):
            name = self._geometry.segment_name(timeline, lsn)
            if name not in self._kept:
                async for _ in self._fetch(name, size):
                    yield
                if not (self._path / name).exists():
                    continue
                self._newest = max(self._newest, lsn - lsn % size)
            else:
                self._kept.remove(name)
            self._kept.append(name)
            while len(self._kept) > KEPT:
                (self._path / self._kept.pop(0)).unlink()
            return

    async def provide_history(self, timeline: int) -> AsyncGenerator[None]:
        """Fetch the timeline's history file, if there is one."""
        if timeline > 1:
            async for _ in self._fetch(f"{timeline:08X}.history", None):
                yield

    def has_after(self, lsn: int) -> bool:
        """Return whether there was any segment after the one that holds `lsn`: a command cannot be asked for all names."""
        return self._newest > lsn

    async def _fetch(self, name: str, size: int | None) -> AsyncGenerator[None]:
        # A name of its own: one that is no longer wanted may still be ending.
        path = self._path / f"{name}.{next(self._numbers)}{_FETCHED}"
        stop = threading.Event()
        command = asyncio.create_task(
            asyncio.to_thread(
                restore, self._command, name, path, stop, timeout=self._timeout, environment=self._environment
            )
        )
        try:
            while not command.done():
                await asyncio.wait({command}, timeout=_LOOK)
                yield
        finally:
            stop.set()
            await asyncio.wait({command})
            if not path.is_file() or command.exception() is not None or not command.result():
                path.unlink(missing_ok=True)
        if command.result() and path.is_file():
            found = path.stat().st_size
            if size is not None and found != size:
                path.unlink()
                raise DataCorrupted(f'archive file "{name}" has wrong size: {found} instead of {size}')
            path.rename(self._path / name)
