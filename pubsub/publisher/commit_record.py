"""Look into a server's WAL whether the record of a transaction's commit is where it was.

A server that was restored from a copy of its files has the same system identifier and timeline, and once it has written as much
WAL as the lost one had, no position shows that it is another.  Its WAL does: another record, or the middle of one, is where the
commit was.  The walsender streams the page that the record begins on, and what follows:

    page header   magic, flags (a segment's first page has a longer header), …
    record        length, xid, previous record, info, resource manager, checksum; its data, with the time of the commit
    page header   wherever a page begins within the record

Follows xlogrecord.h (XLogRecord), xlog_internal.h (XLogPageHeaderData), xact.h (xl_xact_commit).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

from pubsub.errors import PubsubError
from pubsub.protocol import commands
from pubsub.protocol.copyboth import XLogData, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import number
from pubsub.publisher.replication import ReplicationStream

#: A commit's record holds the files that it drops and the messages of invalidation; a longer one is not looked at.
_LONGEST: Final = 16 << 20

#: How long the server may take to stream the record, in seconds.
_PATIENCE: Final = 20.0

_PAGES: Final = {1 << power for power in range(10, 17)}  # what XLOG_BLCKSZ may be
_PAGE_HEADER: Final = 24
_LONG_PAGE_HEADER: Final = 40
_PAGE_FLAGS: Final = 2  # xlp_info
_LONG: Final = 2  # XLP_LONG_HEADER
_MAGIC: Final = 0xD1  # the higher byte of xlp_magic, on machines that store it last
_RECORD_HEADER: Final = 24
_RESOURCE_MANAGER: Final = 17
_XACT: Final = 1  # RM_XACT_ID


class CannotTell(Exception):
    """The server does not show the record: the WAL is removed, or it does not stream WAL to this role, or in this format."""


async def is_commit_at(conninfo: str, application_name: str, timeline: int, lsn: Lsn, time: int, end: Lsn) -> bool:
    """Tell whether a commit of this time is at `lsn` in the server's WAL of `timeline`, and ends at `end` at the latest.

    `time` is in microseconds since 2000-01-01 UTC.  The server must have all WAL before `end`.  Raises CannotTell.
    """
    try:
        async with (
            asyncio.timeout(_PATIENCE),
            await Connection.connect(conninfo, replication=True, application_name=application_name) as connection,
        ):
            ((size,),) = await connection.query("SHOW wal_block_size")
            page = number(size)
            if page not in _PAGES:
                raise CannotTell(f"the server's WAL has pages of {page} bytes")
            begin = Lsn(lsn - lsn % page)
            await connection.start_copy_both(commands.start_physical_replication(None, begin, timeline))
            wal = _Wal(ReplicationStream(connection), begin, page, end)
            return await _is_commit(wal, lsn, time)
    except (PubsubError, TimeoutError, ValueError) as error:
        raise CannotTell(str(error) or "the server did not answer in time") from error


async def _is_commit(wal: _Wal, lsn: Lsn, time: int) -> bool:
    header = await wal.content(lsn, _RECORD_HEADER)
    if header is None or header[_RESOURCE_MANAGER] != _XACT:
        return False
    length = int.from_bytes(header[:4], "little")
    if length > _LONGEST:
        raise CannotTell(f"the record at {lsn} has {length} bytes")
    record = await wal.content(lsn, length)
    return record is not None and struct.pack("<q", time) in record


class _Wal:
    """WAL that a server streams from `begin` on, where a page begins; nothing is read past `end`."""

    def __init__(self, stream: ReplicationStream, begin: Lsn, page: int, end: Lsn) -> None:
        self._stream = stream
        self._begin = begin
        self._page = page
        self._limit = end - begin
        self._wal = bytearray()

    async def content(self, lsn: Lsn, length: int) -> bytes | None:
        """Return `length` bytes of records from `lsn` on, without the headers of pages; None if that is past the end.

        Raises CannotTell, and the errors of the stream.
        """
        found = bytearray()
        place = lsn - self._begin
        while len(found) < length:
            if place % self._page == 0:
                if not await self._have(place + _PAGE_HEADER):
                    return None
                place += _LONG_PAGE_HEADER if self._wal[place + _PAGE_FLAGS] & _LONG else _PAGE_HEADER
            stop = min(place - place % self._page + self._page, place + length - len(found))
            if not await self._have(stop):
                return None
            found += self._wal[place:stop]
            place = stop
        return bytes(found)

    async def _have(self, size: int) -> bool:
        """Receive until the first `size` bytes are here; return False if they are past the end."""
        if size > self._limit:
            return False
        while len(self._wal) < size:
            for frame in await self._stream.receive():
                message = read_server_message(frame)
                if isinstance(message, XLogData):
                    self._wal += message.data
        if self._wal[1] != _MAGIC:
            raise CannotTell("the server's WAL is in another byte order")
        return True
