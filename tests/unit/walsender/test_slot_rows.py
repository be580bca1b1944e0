"""Which queries get a call's rows as they are decoded, and how these are written."""

from __future__ import annotations

import pytest

from pubsub.backend import messages as m
from walsender.server import slot_rows, slot_sql

PEEK = "pg_logical_slot_peek_changes('s', NULL, NULL)"


@pytest.mark.parametrize(
    ("query", "places"),
    [
        (f"SELECT * FROM {PEEK}", [0, 1, 2]),
        (f"SELECT data, c.Xid AS x, c.*, lsn FROM pg_catalog.{PEEK} AS c;", [2, 1, 0, 1, 2, 0]),
        (f"SELECT d, lsn FROM {PEEK} c (l, lsn, d)", [2, 1]),
        (f"SELECT FROM {PEEK}", []),
        (f'SELECT "Data" FROM {PEEK}', None),
        (f"SELECT c FROM {PEEK} c", None),
        (f"SELECT data FROM {PEEK} c (data, lsn)", None),
        (f"SELECT count(*) FROM {PEEK}", None),
        (f"SELECT data || '' FROM {PEEK}", None),
        (f"SELECT DISTINCT data FROM {PEEK}", None),
        (f"SELECT data FROM {PEEK} LIMIT 1", None),
        (f"SELECT data FROM {PEEK} WHERE data > ''", None),
        (f"SELECT data FROM {PEEK} ORDER BY xid", None),
        (f"SELECT data INTO t FROM {PEEK}", None),
        (f"SELECT data FROM {PEEK} FOR UPDATE", None),
        (f"SELECT data FROM {PEEK} TABLESAMPLE system (1)", None),
        (f"SELECT data FROM {PEEK}, t", None),
        (f"SELECT data FROM {PEEK} JOIN t ON true", None),
        (f"SELECT * FROM {PEEK} WITH ORDINALITY", None),
        (f"SELECT data FROM {PEEK} UNION ALL SELECT 'x'", None),
        (f"WITH c AS (SELECT 1) SELECT data FROM {PEEK}", None),
        (f"SELECT data FROM (SELECT * FROM {PEEK}) c", None),
        (f"SELECT {PEEK}", None),
        (f"SELECT ({PEEK}).data", None),
        (f"DECLARE c CURSOR FOR SELECT data FROM {PEEK}", None),
        (f"COPY (SELECT data FROM {PEEK}) TO STDOUT", None),
        ("SELECT * FROM pg_create_logical_replication_slot('s', 'pgoutput')", None),
    ],
)
def test_only_a_plain_query_does_without_the_server(query: str, places: list[int] | None) -> None:
    _, (call,) = slot_sql.find(query)
    assert slot_rows.columns(query, call) == places


def test_rows_have_their_columns_in_order() -> None:
    rows = [(0x1_0000_00AB, 4_000_000_000, b"one"), (2, 7, b"")]
    written = slot_rows._messages(rows, [2, 0, 1, 0], bytes.upper, "{:X}")
    assert written == m.row([b"ONE", "1/AB", "4000000000", "1/AB"]) + m.row([b"", "0/2", "7", "0/2"])
    assert slot_rows._messages(rows[:1], [0], bytes, "{:08X}") == m.row(["1/000000AB"])
    assert slot_rows._messages(rows, [], bytes, "{:X}") == 2 * m.row([])
