"""What the server decides without one: where a snapshot fits, which SQL is about slots."""

from __future__ import annotations

import pytest

from pubsub.errors import PubsubError
from pubsub.sql.lexer import tokenize
from walsender.feed.commits import VisibleSet, fitting
from walsender.server import slot_edits, slot_sql
from walsender.server.stream import running_xids
from walsender.server.synchronous import is_named


@pytest.mark.parametrize(
    ("commits", "snapshot", "found"),
    [
        ([], "100:100:", 9000),
        ([(10, 90), (20, 95)], "100:100:", 9000),
        ([(10, 90), (20, 100), (30, 101)], "100:100:", 20),
        ([(10, 90), (20, 97), (30, 101)], "97:101:97", 20),
        ([(10, 97), (20, 98)], "97:101:97", None),  # 98 is visible already, and 97, logged before it, is not
        ([(10, 97), (20, 98)], "97:101:97,98", 10),
        ([(10, 4294967290), (20, 3)], "4294967296:4294967298:", 20),  # transaction ids have wrapped around
    ],
)
def test_where_a_snapshot_fits(commits: list[tuple[int, int]], snapshot: str, found: int | None) -> None:
    assert fitting(commits, VisibleSet.parse(snapshot), 9000) == found


@pytest.mark.parametrize(
    ("highest", "locked", "oldest", "following"),
    [
        (100, [], 100, 100),
        (100, [97, 99], 97, 100),
        (101, [101, 105], 101, 106),  # running, and begun after the last one that has ended
        ((1 << 32) + 5, [4294967290, 3], 4294967290, (1 << 32) + 5),  # transaction ids have wrapped around
        ((1 << 32) - 2, [4294967295, 4], (1 << 32) - 1, (1 << 32) + 5),
    ],
)
def test_which_transactions_have_ended(highest: int, locked: list[int], oldest: int, following: int) -> None:
    assert running_xids(highest, locked) == (oldest, following)


@pytest.mark.parametrize(
    ("sql", "views"),
    [
        ("SELECT * FROM pg_replication_slots", 1),
        ("select 1 from PG_CATALOG.Pg_Replication_Slots as s where s.slot_name = 'a'", 1),
        ('SELECT * FROM "pg_replication_slots" JOIN pg_stat_replication ON true', 2),
        ("SELECT * FROM x, pg_replication_slots", 1),
        ("TABLE pg_replication_slots", 1),
        ("SELECT count(*) FROM pg_get_replication_slots()", 1),
        ("SELECT 'FROM pg_replication_slots'", 0),
        ("SELECT 1 -- FROM pg_replication_slots", 0),
        ("SELECT $$ FROM pg_replication_slots $$", 0),
        ("SELECT * FROM mine.pg_replication_slots", 0),
        ("SELECT pg_replication_slots.slot_name FROM t pg_replication_slots", 0),
        ("SELECT 'unterminated FROM pg_replication_slots", 0),
    ],
)
def test_views_are_found_where_relations_stand(sql: str, views: int) -> None:
    found, calls = slot_sql.find(sql)
    assert (len(found), calls) == (views, [])
    changed = slot_edits.edited(
        sql, [slot_edits.view_edit(view, slot_edits.literal([{"slot_name": "it's"}])) for view in found]
    )
    assert changed.count("jsonb_populate_recordset") == views
    if views:
        tokenize(changed)


def test_results_are_told_apart_by_arguments_that_name_columns() -> None:
    """Others are evaluated once: what pg_current_wal_lsn() says a second time must not hide the results."""
    _, (call,) = slot_sql.find("SELECT (pg_replication_slot_advance(slot_name, pg_current_wal_lsn())).end_lsn FROM s")
    assert call.row_key(["a", "0/1"]) == ["a", None]
    assert "pg_current_wal_lsn" not in slot_edits.call_edit(call, "c")[2]
    _, (call,) = slot_sql.find("SELECT * FROM pg_replication_slot_advance($1, pg_current_wal_lsn())")
    assert call.row_key(["a", "0/1"]) == [None, None]
    assert "$1" in slot_edits.call_edit(call, "c")[2], "its type is known by its place"


def test_a_view_within_a_call_goes_with_it() -> None:
    query = "SELECT * FROM pg_replication_slot_advance('a', (SELECT max(restart_lsn) FROM pg_replication_slots))"
    views, (call,) = slot_sql.find(query)
    assert views == []
    assert [view.name for view in slot_sql.find(call.arguments_query())[0]] == ["pg_replication_slots"]


def test_calls_are_found_with_their_arguments() -> None:
    sql = (
        "SELECT a, pg_drop_replication_slot(f(slot_name, ')')) FROM pg_replication_slots WHERE true ORDER BY 1 LIMIT $2"
    )
    _, (call,) = slot_sql.find(sql)
    assert call.arguments == ("f(slot_name, ')')",)
    assert call.rows == "FROM pg_replication_slots WHERE TRUE ORDER BY 1 LIMIT $2"
    sql = "SELECT * FROM pg_create_logical_replication_slot('a', plugin => 'p', failover := true) s"
    _, (call,) = slot_sql.find(sql)
    assert (call.is_relation, call.has_alias) == (True, True)
    assert call.arguments == ("'a'", "'p'", None, None, "true")
    for options, found in {"": "ARRAY[]", ", 'a', f(b, c)": "ARRAY['a', f(b, c)]", ", VARIADIC $1": "$1"}.items():
        _, (call,) = slot_sql.find(f"SELECT (pg_logical_slot_get_changes('a', NULL, NULL{options})).data")
        assert call.arguments == ("'a'", "NULL", "NULL", found)
        assert (call.field, call.start, call.is_relation) == ("data", 7, False)


@pytest.mark.parametrize(
    ("sql", "sqlstate"),
    [
        ("SELECT pg_drop_replication_slot()", "42883"),
        ("SELECT pg_drop_replication_slot('a', 'b')", "42883"),
        ("SELECT 1 WHERE pg_drop_replication_slot('a') IS NULL", "0A000"),
        ("SELECT DISTINCT pg_drop_replication_slot(slot_name)::text FROM pg_replication_slots", "0A000"),
        ("SELECT d.* FROM s, LATERAL pg_drop_replication_slot(s.slot_name) d", "0A000"),
        ("SELECT pg_drop_replication_slot((SELECT 'a' FROM pg_create_logical_replication_slot('b', 'p')))", "0A000"),
        (
            "SELECT pg_drop_replication_slot((SELECT slot_name FROM pg_replication_slots WHERE slot_name = a)) FROM t",
            "0A000",
        ),
        ("DO $$ BEGIN PERFORM pg_drop_replication_slot('a'); END $$", "0A000"),
        ("do language plpgsql 'BEGIN PERFORM 1 FROM PG_Replication_Slots; END'", "0A000"),
        ("SELECT pg_get_replication_slots()", "0A000"),
        ("SELECT CASE WHEN false THEN pg_drop_replication_slot('a') END", "0A000"),
        (
            "SELECT CASE a WHEN 1 THEN 2 ELSE (pg_copy_logical_replication_slot('a', 'b')).lsn::text::int END FROM t",
            "0A000",
        ),
        ("SELECT a AND (pg_replication_slot_advance('a', '0/1')).end_lsn > '0/0' FROM t", "0A000"),
        ("SELECT coalesce(a, (pg_replication_slot_advance('a', '0/1')).end_lsn) FROM t", "0A000"),
        ("SELECT count(pg_drop_replication_slot('a')) FILTER (WHERE false)", "0A000"),
        ("SELECT (pg_catalog.pg_get_replication_slots()).slot_name", "0A000"),
    ],
)
def test_calls_that_cannot_be_carried_out_are_refused(sql: str, sqlstate: str) -> None:
    with pytest.raises(PubsubError) as caught:
        slot_sql.find(sql)
    assert caught.value.sqlstate == sqlstate


def test_what_one_statement_can_ask_is_bounded() -> None:
    """Each view and call takes work, and the text of what it shows."""
    for piece in ("pg_replication_slots t{}", "pg_drop_replication_slot('s{}')"):
        few = ", ".join(piece.format(number) for number in range(30))
        views, calls = slot_sql.find(f"SELECT 1 FROM {few}")
        assert len(views) + len(calls) == 30
        with pytest.raises(PubsubError) as caught:
            slot_sql.find(f"SELECT 1 FROM {few}, {piece.format(30)}, {piece.format(31)}")
        assert caught.value.sqlstate == "54000"
    # A call in a call in a call is not read once more for each of them.
    depth = 200
    with pytest.raises(PubsubError, match="cannot call pg_drop_replication_slot here"):
        slot_sql.find("SELECT " + "pg_drop_replication_slot(" * depth + "'s'" + ")" * depth)
    assert slot_sql.find("SELECT " + "pg_drop_replication_slot(" * 1000) == ([], [])


def test_statements_are_told_apart() -> None:
    text = "SELECT ';'; -- one;\nSELECT $$;$$;  "
    assert [text[start:end] for start, end in slot_sql.statements(text)] == ["SELECT ';';", " -- one;\nSELECT $$;$$;  "]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("", False),
        ("a_subscriber", False),
        ("Subscriber", True),
        ("FIRST 1 (other, subscriber)", True),
        ('ANY 2 (x,"subscriber",y)', True),
        ('1 ("sub""scriber")', False),
        ("ANY 1 (*)", True),
    ],
)
def test_whom_synchronous_standby_names_names(setting: str, named: bool) -> None:
    assert is_named("subscriber", setting) == named
    assert is_named('sub"scriber', setting) == ((named and "*" in setting) or '""' in setting)
