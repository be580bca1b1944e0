"""Copy-both messages: written and read back; any other bytes raise ProtocolViolation or are a message."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import ProtocolViolation
from pubsub.protocol import copyboth as cb
from tests.property.protocol_strategies import client_messages, mutated, server_messages


@given(server_messages)
def test_a_server_message_is_read_back(message: cb.ServerMessage) -> None:
    assert cb.read_server_message(cb.write_server_message(message)) == message


@given(client_messages)
def test_a_client_message_is_read_back(message: cb.ClientMessage) -> None:
    assert cb.read_client_message(cb.write_client_message(message)) == message


@given(server_messages)
def test_a_truncated_server_message_is_refused(message: cb.ServerMessage) -> None:
    data = cb.write_server_message(message)
    # XLogData's payload has no length of its own, so only its header can be cut short.
    whole = cb.XLOG_HEADER if isinstance(message, cb.XLogData) else len(data)
    for length in range(whole):
        with pytest.raises(ProtocolViolation):
            cb.read_server_message(data[:length])


@given(client_messages)
def test_a_truncated_client_message_is_refused(message: cb.ClientMessage) -> None:
    data = cb.write_client_message(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            cb.read_client_message(data[:length])


@given(client_messages, st.binary(min_size=1, max_size=8))
def test_trailing_bytes_are_refused(message: cb.ClientMessage, trailing: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        cb.read_client_message(cb.write_client_message(message) + trailing)


@given(server_messages, client_messages, st.data())
def test_mutations_are_refused_or_decode_to_what_can_be_written(
    from_server: cb.ServerMessage, from_client: cb.ClientMessage, data: st.DataObject
) -> None:
    mutation = data.draw(mutated(cb.write_server_message(from_server)))
    with contextlib.suppress(ProtocolViolation):
        assert cb.write_server_message(cb.read_server_message(mutation)) == mutation
    mutation = data.draw(mutated(cb.write_client_message(from_client)))
    with contextlib.suppress(ProtocolViolation):
        assert cb.write_client_message(cb.read_client_message(mutation)) == mutation


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_survive_exactly(moment: datetime) -> None:
    assert cb.pg_time_to_datetime(cb.pg_time_from_datetime(moment)) == moment


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_time_from_the_wire_converts_or_is_refused(microseconds: int) -> None:
    try:
        moment = cb.pg_time_to_datetime(microseconds)
    except ProtocolViolation:
        return
    assert cb.pg_time_from_datetime(moment) == microseconds
