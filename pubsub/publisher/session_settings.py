"""The settings that every session on a publisher makes for itself, before anything else.

ALTER DATABASE, ALTER ROLE and the server's configuration have settings for people, whom they log off, slow down or hold to
reading.  A session that copies for hours, or reads texts by their form, must not inherit them.

Follows pg_dump.c (setup_connection) and libpqwalreceiver.c (libpqrcv_connect).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SESSION_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # The server must not end a long copy, or a session that holds a snapshot or waits.  First, since a statement's
        # time is short with some of them.
        "statement_timeout": "0",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        # Errors are expected: of a slot that is gone already, of a lock that others hold.
        "exit_on_error": "off",
        # Publications and slots are made.  A deferrable transaction would wait for those of others.
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "default_transaction_deferrable": "off",
        # The same value always has the same text.
        "datestyle": "ISO",
        "intervalstyle": "postgres",
        "extra_float_digits": "3",
        "bytea_output": "hex",
        "timezone": "UTC",
        "client_encoding": "UTF8",
        # So has a name, and an expression that goes back into a statement.
        "quote_all_identifiers": "off",
        "standard_conforming_strings": "on",
        # No object in the search path shadows what a query names; a policy that would hide rows is an error.
        "search_path": "",
        "row_security": "off",
        # Warnings are passed on, others are of no use.
        "client_min_messages": "warning",
    }
)
"""Known to 15 and later; see `session_settings`."""

SERVER_17: Final = 170000


def session_settings(server_version: int) -> dict[str, str]:
    """Return SESSION_SETTINGS and those of later versions; `server_version` is libpq's number (150004 is 15.4)."""
    later = {"transaction_timeout": "0"} if server_version >= SERVER_17 else {}
    return {**later, **SESSION_SETTINGS}


def session_settings_sql(server_version: int) -> str:
    """Return statements that make the settings, to be sent at once, for SQL and replication connections alike.

    `options=-c …` in the connection string would not do: it would replace the options of a service file, and
    PGDATESTYLE and PGTZ in the environment would override it.  A statement after connecting overrides all of these.  A
    SELECT of set_config() would not do either: it needs a snapshot, for which a deferrable transaction may wait.
    """
    return "; ".join(f"SET {name} = '{value}'" for name, value in session_settings(server_version).items())
