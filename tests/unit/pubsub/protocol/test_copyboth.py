"""Copy-both messages byte by byte, and PostgreSQL's time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from pubsub.errors import ProtocolViolation
from pubsub.protocol import copyboth as cb
from pubsub.protocol.ids import Xid
from pubsub.protocol.lsn import Lsn

LSN = Lsn.parse("1/2A")
LSN_BYTES = b"\0\0\0\1\0\0\0\x2a"


def test_xlog_data() -> None:
    message = cb.XLogData(LSN, Lsn(2), 3, b"payload")
    data = b"w" + LSN_BYTES + b"\0\0\0\0\0\0\0\2" + b"\0\0\0\0\0\0\0\3" + b"payload"
    assert cb.write_server_message(message) == data
    assert cb.read_server_message(data) == message
    assert data[cb.XLOG_HEADER :] == b"payload"


def test_keepalive() -> None:
    message = cb.Keepalive(LSN, -1, True)
    data = b"k" + LSN_BYTES + b"\xff" * 8 + b"\1"
    assert cb.write_server_message(message) == data
    assert cb.read_server_message(data) == message


def test_status_update() -> None:
    message = cb.StatusUpdate(LSN, Lsn(2), Lsn(3), 4, False)
    data = b"r" + LSN_BYTES + b"".join(number.to_bytes(8, "big") for number in (2, 3, 4)) + b"\0"
    assert cb.write_client_message(message) == data
    assert cb.read_client_message(data) == message


def test_hot_standby_feedback() -> None:
    message = cb.HotStandbyFeedback(1, Xid(2), 3, Xid(4), 5)
    data = b"h" + (1).to_bytes(8, "big") + b"".join(number.to_bytes(4, "big") for number in (2, 3, 4, 5))
    assert cb.write_client_message(message) == data
    assert cb.read_client_message(data) == message


def test_primary_status() -> None:
    request = cb.PrimaryStatusRequest(1)
    data = b"p" + (1).to_bytes(8, "big")
    assert cb.write_client_message(request) == data
    assert cb.read_client_message(data) == request
    update = cb.PrimaryStatusUpdate(LSN, (1 << 32) + 5, (1 << 32) + 9, 4)
    numbers = b"".join(number.to_bytes(8, "big") for number in ((1 << 32) + 5, (1 << 32) + 9, 4))
    assert cb.write_primary_status(update) == b"s" + LSN_BYTES + numbers


@pytest.mark.parametrize(
    "data",
    [b"", b"r" + bytes(33), b"k" + bytes(16), b"k" + bytes(18), b"k" + bytes(16) + b"\2", b"w" + bytes(23), b"\xff"],
)
def test_malformed_server_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        cb.read_server_message(data)


@pytest.mark.parametrize(
    "data", [b"", b"w" + bytes(24), b"r" + bytes(32), b"r" + bytes(34), b"h" + bytes(25), b"p" + bytes(7)]
)
def test_malformed_client_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        cb.read_client_message(data)


def test_a_field_out_of_range_is_not_written() -> None:
    with pytest.raises(ValueError, match="out of range"):
        cb.write_server_message(cb.Keepalive(Lsn(1 << 64), 0, False))
    with pytest.raises(ValueError, match="out of range"):
        cb.write_client_message(cb.StatusUpdate(Lsn(0), Lsn(0), Lsn(0), 1 << 63, False))


def test_time_counts_from_2000() -> None:
    assert cb.pg_time_from_datetime(datetime(2000, 1, 1, 0, 0, 1, 5, UTC)) == 1_000_005
    assert cb.pg_time_to_datetime(-1) == datetime(1999, 12, 31, 23, 59, 59, 999_999, UTC)
    assert cb.pg_time_from_unix_ns(946_684_800_000_001_999) == 1
    assert cb.pg_time_from_unix_ns(0) == cb.pg_time_from_datetime(datetime(1970, 1, 1, tzinfo=UTC))


def test_time_heeds_the_zone() -> None:
    moment = datetime(2000, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert cb.pg_time_from_datetime(moment) == 0
    with pytest.raises(TypeError):
        cb.pg_time_from_datetime(datetime(2000, 1, 1))


def test_now_lies_between_two_readings_of_the_clock() -> None:
    before = datetime.now(UTC)
    now = cb.pg_time_to_datetime(cb.pg_now())
    assert before <= now <= datetime.now(UTC)


@pytest.mark.parametrize("microseconds", [(1 << 63) - 1, -(1 << 63)])
def test_infinite_times_are_refused(microseconds: int) -> None:
    with pytest.raises(ProtocolViolation, match="timestamp out of range"):
        cb.pg_time_to_datetime(microseconds)
