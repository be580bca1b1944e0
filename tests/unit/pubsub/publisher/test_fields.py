"""Parsing PostgreSQL's arrays, the inverse of writing them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pubsub.publisher.connection import array_literal
from pubsub.publisher.fields import array


@given(st.lists(st.text(max_size=8), max_size=4))
def test_array_reads_what_array_literal_writes(values: list[str]) -> None:
    assert array(array_literal(values)) == tuple(values)


def test_array_reads_what_needs_no_quotes() -> None:
    assert array('{id,x,"a,b"}') == ("id", "x", "a,b")
