"""pgoutput's codec: every message is read back as written, and any bytes raise ProtocolViolation or are a message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pubsub.errors import ProtocolViolation
from pubsub.protocol.pgoutput import Message, Oid, StreamAbort, Truncate, read_message, write_message
from tests.property.protocol_strategies import messages, mutated

Case = tuple[Message, bool, bool]


@given(messages())
@settings(max_examples=300)
def test_written_messages_are_read_back(case: Case) -> None:
    message, streaming, parallel = case
    assert read_message(write_message(message), streaming=streaming, parallel=parallel) == message


@given(messages(), st.binary(max_size=30))
def test_a_message_is_read_from_the_middle_of_a_frame(case: Case, header: bytes) -> None:
    message, streaming, parallel = case
    frame = header + write_message(message)
    assert read_message(frame, streaming=streaming, parallel=parallel, start=len(header)) == message


@given(messages())
@settings(max_examples=200)
def test_every_truncation_is_refused(case: Case) -> None:
    message, streaming, parallel = case
    data = write_message(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            read_message(data[:length], streaming=streaming, parallel=parallel)


@given(messages(), st.binary(min_size=1, max_size=8))
@settings(max_examples=200)
def test_trailing_bytes_are_refused(case: Case, trailing: bytes) -> None:
    message, streaming, parallel = case
    with pytest.raises(ProtocolViolation):
        read_message(write_message(message) + trailing, streaming=streaming, parallel=parallel)


@given(messages(), st.data())
@settings(max_examples=400)
def test_mutations_are_refused_or_decode_to_what_can_be_written(case: Case, data: st.DataObject) -> None:
    message, streaming, parallel = case
    check_any_bytes(data.draw(mutated(write_message(message))), streaming, parallel)


@given(st.sampled_from(b"BCORYIUDTMSEcAbPpKrx"), st.binary(max_size=80), st.booleans(), st.booleans())
@settings(max_examples=400)
def test_any_bytes_are_refused_or_decode_to_what_can_be_written(
    kind: int, body: bytes, streaming: bool, parallel: bool
) -> None:
    check_any_bytes(bytes([kind]) + body, streaming, parallel)


def check_any_bytes(data: bytes, streaming: bool, parallel: bool) -> None:
    try:
        message = read_message(data, streaming=streaming, parallel=parallel)
    except ProtocolViolation:
        return
    again = write_message(message)
    assert read_message(again, streaming=streaming, parallel=parallel) == message
    # The only form that is written shorter than it may arrive is pg_catalog spelt out.
    assert again == data or b"pg_catalog\0" in data


@given(messages())
def test_a_message_read_in_the_other_mode_never_escapes_the_codec(case: Case) -> None:
    message, streaming, parallel = case
    data = write_message(message)
    if isinstance(message, StreamAbort):
        with pytest.raises(ProtocolViolation):
            read_message(data, parallel=not parallel)
    check_any_bytes(data, not streaming, parallel)


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 40))
def test_a_count_of_relations_has_to_fit_the_message(count: int, length: int) -> None:
    data = b"T" + count.to_bytes(4, "big") + b"\0" + bytes(length)
    if count * 4 == length:
        assert read_message(data) == Truncate((Oid(0),) * count, False, False)
    else:
        with pytest.raises(ProtocolViolation):
            read_message(data)
