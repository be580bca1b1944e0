"""The parts of a connection that need no server."""

from __future__ import annotations

import pytest

from pubsub.publisher.connection import SESSION_SETTINGS, array_literal, session_settings, session_settings_sql


def test_transaction_timeout_is_set_from_17_on() -> None:
    assert set(session_settings(160014)) == set(SESSION_SETTINGS)
    assert set(session_settings(170000)) == {*SESSION_SETTINGS, "transaction_timeout"}


def test_one_statement_makes_all_settings() -> None:
    statement = session_settings_sql(180000)
    assert statement.count("set_config") == len(session_settings(180000))
    assert "set_config('search_path', '', false)" in statement
    assert ";" not in statement


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
