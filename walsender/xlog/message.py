"""Logical messages in WAL (message.h: xl_logical_message)."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from walsender.xlog.errors import WalCorrupted
from walsender.xlog.record import Record

_HEAD: Final = Struct("<I?xxxQQ")


class Message(NamedTuple):
    """A message of pg_logical_emit_message; `database`: the oid of the database where it was written."""

    database: int
    transactional: bool
    prefix: bytes
    content: bytes


def parse_message(record: Record) -> Message:
    """Parse a logical message.  Raises WalCorrupted, struct.error."""
    database, transactional, prefix_size, size = _HEAD.unpack_from(record.main)
    start = _HEAD.size
    # The prefix ends with a zero, which is counted.
    prefix = record.main[start : start + max(prefix_size - 1, 0)]
    content = record.main[start + prefix_size : start + prefix_size + size]
    if len(content) != size:
        raise WalCorrupted("a logical message is too short", record.lsn)
    return Message(database, transactional, prefix, content)
