"""The messages of copy-both mode, which a walsender and its client exchange after START_REPLICATION.

    server → client   w XLogData     header of 25 bytes, then WAL or one message of the output plugin
                      k Keepalive    the server's position; may request a reply
    client → server   r StatusUpdate the client's progress; may request a reply
                      h HotStandbyFeedback
                      p PrimaryStatusRequest   of a subscription with retain_dead_tuples, from 19 on; the answer is
    server → client   s PrimaryStatusUpdate

A receiver of many rows does not build an XLogData for each: a frame's payload starts at byte XLOG_HEADER.

Times are signed microseconds since 2000-01-01 UTC (timestamp.h: TimestampTz).  The LSNs of a StatusUpdate are
exclusive: the first byte not yet written, flushed, applied.

Follows walsender.c (WalSndPrepareWrite, WalSndKeepalive, ProcessStandbyReplyMessage,
ProcessStandbyHSFeedbackMessage, ProcessStandbyPSRequestMessage) and worker.c (LogicalRepApplyLoop, send_feedback).
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
_TIME: Final = Struct(">q")
_PRIMARY_STATUS: Final = Struct(">QQQq")


@dataclass(frozen=True, slots=True)
class XLogData:
    """WAL, or one message of the output plugin, from `start_lsn`; `wal_end` is the server's end of WAL.

    Under logical decoding both are the change's own LSN, or 0.
    """

    start_lsn: Lsn
    wal_end: Lsn
    send_time: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server has sent everything before `wal_end` that concerns this client."""

    wal_end: Lsn
    send_time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """The client's progress; the server may discard WAL before `flushed`."""

    written: Lsn
    flushed: Lsn
    applied: Lsn
    time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class HotStandbyFeedback:
    """The oldest transactions that a standby's queries can still see, in tables and in catalogs; 0 for none."""

    time: int
    xmin: Xid
    xmin_epoch: int
    catalog_xmin: Xid
    catalog_xmin_epoch: int


@dataclass(frozen=True, slots=True)
class PrimaryStatusRequest:
    """The client wants to know which transactions may still commit with a time that is past."""

    time: int


@dataclass(frozen=True, slots=True)
class PrimaryStatusUpdate:
    """Every transaction before `oldest_xid` has ended, its commit before `lsn`; no transaction before `next_xid` begins any more.

    Transaction ids have 64 bits.
    """

    lsn: Lsn
    oldest_xid: int
    next_xid: int
    send_time: int


ServerMessage = XLogData | Keepalive
ClientMessage = StatusUpdate | HotStandbyFeedback | PrimaryStatusRequest


def read_server_message(data: bytes) -> ServerMessage:
    """Read one copy-data payload from a walsender.  Raises ProtocolViolation."""
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
    """Read one copy-data payload from a walsender's client.  Raises ProtocolViolation."""
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
    elif kind == b"p":
        reader = Reader(data, 1, "PrimaryStatusRequest")
        (sent,) = reader.fields(_TIME)
        message = PrimaryStatusRequest(sent)
    else:
        raise _unexpected(data)
    reader.end()
    return message


def write_server_message(message: ServerMessage) -> bytes:
    """Return the bytes of `message`.  Raises ValueError for a field out of range."""
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
    """Return the bytes of `message`.  Raises ValueError for a field out of range."""
    try:
        match message:
            case StatusUpdate():
                positions = _STATUS_UPDATE.pack(message.written, message.flushed, message.applied, message.time)
                return b"r" + positions + (b"\1" if message.reply_requested else b"\0")
            case HotStandbyFeedback():
                return b"h" + _HOT_STANDBY_FEEDBACK.pack(
                    message.time, message.xmin, message.xmin_epoch, message.catalog_xmin, message.catalog_xmin_epoch
                )
            case PrimaryStatusRequest():
                return b"p" + _TIME.pack(message.time)
            case _:
                assert_never(message)
    except struct.error as error:
        raise ValueError(f"a field out of range: {error}") from error


def write_primary_status(update: PrimaryStatusUpdate) -> bytes:
    """Return the bytes of an answer to a PrimaryStatusRequest.  Raises ValueError for a field out of range."""
    try:
        return b"s" + _PRIMARY_STATUS.pack(update.lsn, update.oldest_xid, update.next_xid, update.send_time)
    except struct.error as error:
        raise ValueError(f"a field out of range: {error}") from error


def pg_now() -> int:
    """Return the current time as PostgreSQL's, for callers to put into a message.

    Nothing else in this module reads a clock.
    """
    return pg_time_from_unix_ns(time.time_ns())


def pg_time_from_unix_ns(nanoseconds: int) -> int:
    """Convert a Unix time in nanoseconds (time.time_ns()) to PostgreSQL's, rounded down to a microsecond."""
    return nanoseconds // 1000 - PG_EPOCH_UNIX_SECONDS * 1_000_000


def pg_time_from_datetime(moment: datetime) -> int:
    """Convert an aware datetime to PostgreSQL's time.  Raises TypeError for a naive one."""
    return (moment - PG_EPOCH) // _MICROSECOND


def pg_time_to_datetime(microseconds: int) -> datetime:
    """Convert PostgreSQL's time to a datetime in UTC.

    Raises ProtocolViolation if a datetime cannot hold it: the number came from the wire.
    """
    try:
        return PG_EPOCH + timedelta(microseconds=microseconds)
    except OverflowError as error:
        raise ProtocolViolation(f"timestamp out of range: {microseconds} microseconds since 2000-01-01") from error


def _unexpected(data: bytes) -> ProtocolViolation:
    if not data:
        return ProtocolViolation("no data left in message")
    return ProtocolViolation(f"unexpected message type 0x{data[0]:02X} in copy-both mode")
