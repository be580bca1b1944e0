"""The parts of a connection that need no server."""

from __future__ import annotations

import pytest

from pubsub.publisher.connection import array_literal
from pubsub.publisher.session_settings import SESSION_SETTINGS, session_settings, session_settings_sql


def test_transaction_timeout_is_set_from_17_on() -> None:
    assert set(session_settings(160014)) == set(SESSION_SETTINGS)
    assert set(session_settings(170000)) == {*SESSION_SETTINGS, "transaction_timeout"}


def test_timeouts_come_first_and_no_statement_needs_a_snapshot() -> None:
    """A role's statement_timeout counts for each of the statements, and a deferrable transaction waits for its snapshot."""
    statements = session_settings_sql(180000).split("; ")
    assert len(statements) == len(session_settings(180000))
    assert statements[:2] == ["SET transaction_timeout = '0'", "SET statement_timeout = '0'"]
    assert all(one.startswith("SET ") for one in statements)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "{}"),
        (["a", "b c", ""], '{"a","b c",""}'),
        (['"', "\\", "{,}", "NULL"], '{"\\"","\\\\","{,}","NULL"}'),
        ([1, 2], '{"1","2"}'),
    ],
)
def test_array_literal(values: list[str] | list[int], text: str) -> None:
    assert array_literal(values) == text
