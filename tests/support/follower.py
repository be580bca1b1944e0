"""A subscriber that applies test_decoding's lines to a list, exactly once, through every cut of its connection."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.protocol.copyboth import XLogData, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection

_ID = re.compile(rb"INSERT: id\[(?:integer|bigint)\]:(\d+)")


class Follower:
    """Follows `slot` from a thread.  `ids`: of the inserted rows, in order of commit; `again`: those that were sent twice.

    `conninfo` is called for each connection.  It confirms what it has applied only while `confirms`.
    """

    def __init__(self, conninfo: Callable[[], str], slot: str, *, confirms: bool = True) -> None:
        self._conninfo = conninfo
        self._slot = slot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.confirms = confirms
        self.applied = 0
        """The end of the last transaction that was applied: what its origin would be."""
        self.ids: list[int] = []
        self.again: list[int] = []
        self.error: PubsubError | None = None
        """What ended it for good."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def is_confirmed(self, query: Callable[[str], list[tuple[Any, ...]]]) -> bool:
        """Return whether the slot's position has followed: what was applied does not come again."""
        slot = f"SELECT confirmed_flush_lsn >= '{Lsn(self.applied)}' FROM pg_replication_slots WHERE slot_name = '{self._slot}'"
        return query(slot) == [(True,)]

    def _run(self) -> None:
        while not self._stop.is_set() and self.error is None:
            try:
                asyncio.run(self._follow())
            except ConnectionFailure:
                self._stop.wait(0.05)
            except PubsubError as error:
                if error.sqlstate not in {"55006", "57P01", "57P03"}:
                    self.error = error
                self._stop.wait(0.05)

    async def _follow(self) -> None:
        async with await Connection.connect(self._conninfo(), replication=True) as connection:
            stream = await replication.start(connection, self._slot, 0, {"include-xids": "0"})
            ids: list[int] = []
            while not self._stop.is_set():
                frames: list[bytes] = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        frames = await stream.receive()
                for frame in frames:
                    message = read_server_message(frame)
                    if not isinstance(message, XLogData):
                        continue
                    if message.data == b"BEGIN":
                        ids = []
                    elif message.data == b"COMMIT":
                        if message.start_lsn > self.applied:
                            self.ids += ids
                            self.applied = int(message.start_lsn)
                        else:
                            self.again += ids
                    else:
                        ids += [int(one) for one in _ID.findall(message.data)]
                confirmed = self.applied if self.confirms else 0
                await stream.send_status(self.applied, confirmed, confirmed)
            await stream.close()
