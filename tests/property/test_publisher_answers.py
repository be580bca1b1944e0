"""What a publisher answers to queries, at random: a value, or a ProtocolViolation."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import ProtocolViolation
from pubsub.publisher import fields
from pubsub.publisher.connection import _text
from pubsub.publisher.definitions import rewritten

texts = st.one_of(
    st.none(),
    st.text(max_size=30),
    st.text(alphabet='{}",\\ab', max_size=20),
    st.integers().map(str),
    st.integers(0, 6000).map(lambda size: "9" * size),
)


@given(texts)
def test_a_field(value: str | None) -> None:
    for read in (fields.text, fields.number, fields.number_or_none, fields.truth, fields.as_oid):
        with suppress(ProtocolViolation):
            read(value)
    if value is not None:
        with suppress(ProtocolViolation):
            assert all(isinstance(one, str) for one in fields.array(value))


@given(texts, texts)
def test_the_files_of_a_table(before: str | None, now: str | None) -> None:
    rewritten(before or "", now or "")


@given(st.binary(max_size=20))
def test_the_text_of_a_field(value: bytes) -> None:
    with suppress(ProtocolViolation):
        assert (_text(value) or "").encode() == value
