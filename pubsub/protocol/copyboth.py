"""The messages inside copy-both mode: what the walsender and its client say to each other once START_REPLICATION is on.

    server → client   w XLogData     header of 25 bytes, then WAL or one message of the output plugin
                      k Keepalive    where the server is; may ask for an answer
    client → server   r StatusUpdate how far the client has come; may ask for an answer
                      h HotStandbyFeedback

A receiver of many rows does not build an XLogData for each: the payload of a frame starts at XLOG_HEADER.

Times are microseconds since 2000-01-01 UTC (timestamp.h: TimestampTz), signed.  The LSNs of a StatusUpdate are
exclusive: the first byte that has not been written, flushed, applied.

Follows walsender.c (WalSndPrepareWrite, WalSndKeepalive, ProcessStandbyReplyMessage,
ProcessStandbyHSFeedbackMessage) and worker.c (LogicalRepApplyLoop, send_feedback).
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import Final, assert_never

from pubsub.errors import ProtocolViolation
from pubsub.protocol.ids import Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.wire import Reader

PG_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
PG_EPOCH_UNIX_SECONDS: Final = 946_684_800

XLOG_HEADER: Final = 25
"""Bytes of an XLogData message before its payload."""

_MICROSECOND: Final = timedelta(microseconds=1)

_XLOG_DATA: Final = Struct(">QQq")
_KEEPALIVE: Final = Struct(">Qq")
_STATUS_UPDATE: Final = Struct(">QQQq")
_HOT_STANDBY_FEEDBACK: Final = Struct(">qIIII")


@dataclass(frozen=True, slots=True)
class XLogData:
    """WAL, or one message of the output plugin, that starts at `start_lsn`; `wal_end` is the server's end of WAL.

    Under logical decoding both are the change's own LSN, or 0.
    """

    start_lsn: Lsn
    wal_end: Lsn
    send_time: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Everything before `wal_end` was sent or is of no interest to this client."""

    wal_end: Lsn
    send_time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """The client's progress; the server may forget what lies before `flushed`."""

    written: Lsn
    flushed: Lsn
    applied: Lsn
    time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class HotStandbyFeedback:
    """The oldest transactions that a standby's queries still see, in tables and in catalogs; 0: none."""

    time: int
    xmin: Xid
    xmin_epoch: int
    catalog_xmin: Xid
    catalog_xmin_epoch: int


ServerMessage = XLogData | Keepalive
ClientMessage = StatusUpdate | HotStandbyFeedback


def read_server_message(data: bytes) -> ServerMessage:
    """One copy-data payload from a walsender.  Raises ProtocolViolation."""
    kind = data[:1]
    if kind == b"w":
        reader = Reader(data, 1, "XLogData")
        start_lsn, wal_end, send_time = reader.fields(_XLOG_DATA)
        return XLogData(Lsn(start_lsn), Lsn(wal_end), send_time, reader.rest())
    if kind == b"k":
        reader = Reader(data, 1, "Keepalive")
        wal_end, send_time = reader.fields(_KEEPALIVE)
        keepalive = Keepalive(Lsn(wal_end), send_time, reader.flag("reply requested"))
        reader.end()
        return keepalive
    raise _unexpected(data)


def read_client_message(data: bytes) -> ClientMessage:
    """One copy-data payload from a walsender's client.  Raises ProtocolViolation."""
    kind = data[:1]
    message: ClientMessage
    if kind == b"r":
        reader = Reader(data, 1, "StatusUpdate")
        written, flushed, applied, sent = reader.fields(_STATUS_UPDATE)
        message = StatusUpdate(Lsn(written), Lsn(flushed), Lsn(applied), sent, reader.flag("reply requested"))
    elif kind == b"h":
        reader = Reader(data, 1, "HotStandbyFeedback")
        sent, xmin, xmin_epoch, catalog_xmin, catalog_xmin_epoch = reader.fields(_HOT_STANDBY_FEEDBACK)
        message = HotStandbyFeedback(sent, Xid(xmin), xmin_epoch, Xid(catalog_xmin), catalog_xmin_epoch)
    else:
        raise _unexpected(data)
    reader.end()
    return message


def write_server_message(message: ServerMessage) -> bytes:
    """The bytes of `message`.  Raises ValueError for a field out of its range."""
    try:
        match message:
            case XLogData():
                header = _XLOG_DATA.pack(message.start_lsn, message.wal_end, message.send_time)
                return b"w" + header + message.data
            case Keepalive():
                return (
                    b"k"
                    + _KEEPALIVE.pack(message.wal_end, message.send_time)
                    + (b"\1" if message.reply_requested else b"\0")
                )
            case _:
                assert_never(message)
    except struct.error as error:
        raise ValueError(f"a field out of range: {error}") from error


def write_client_message(message: ClientMessage) -> bytes:
    """The bytes of `message`.  Raises ValueError for a field out of its range."""
    try:
        match message:
            case StatusUpdate():
                positions = _STATUS_UPDATE.pack(message.written, message.flushed, message.applied, message.time)
                return b"r" + positions + (b"\1" if message.reply_requested else b"\0")
            case HotStandbyFeedback():
                return b"h" + _HOT_STANDBY_FEEDBACK.pack(
                    message.time, message.xmin, message.xmin_epoch, message.catalog_xmin, message.catalog_xmin_epoch
                )
            case _:
                assert_never(message)
    except struct.error as error:
        raise ValueError(f"a field out of range: {error}") from error


def pg_now() -> int:
    """PostgreSQL's time now, for callers to hand to a message; nothing else in this module reads a clock."""
    return pg_time_from_unix_ns(time.time_ns())


def pg_time_from_unix_ns(nanoseconds: int) -> int:
    """PostgreSQL's time for a Unix time in nanoseconds (time.time_ns()); rounded down to a microsecond."""
    return nanoseconds // 1000 - PG_EPOCH_UNIX_SECONDS * 1_000_000


def pg_time_from_datetime(moment: datetime) -> int:
    """PostgreSQL's time for an aware datetime.  Raises TypeError for a naive one."""
    return (moment - PG_EPOCH) // _MICROSECOND


def pg_time_to_datetime(microseconds: int) -> datetime:
    """The moment in UTC.  Raises ProtocolViolation where a datetime can not hold it: the number came from the wire."""
    try:
        return PG_EPOCH + timedelta(microseconds=microseconds)
    except OverflowError as error:
        raise ProtocolViolation(f"timestamp out of range: {microseconds} microseconds since 2000-01-01") from error


def _unexpected(data: bytes) -> ProtocolViolation:
    if not data:
        return ProtocolViolation("no data left in message")
    return ProtocolViolation(f"unexpected message type 0x{data[0]:02X} in copy-both mode")
