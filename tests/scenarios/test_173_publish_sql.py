"""SQL over slots through `pubsub publish`: changes as rows, prepared statements, drivers; compared with PostgreSQL's own slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg import pq

from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from tests.support.publish import Publish
from tests.support.replica import wait_until


@pytest.fixture
def ours(served: Publish, database: Database) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(served.conninfo(dbname=database.name), autocommit=True) as connection:
        yield connection
        for (name,) in connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall():
            connection.execute(f"SELECT pg_drop_replication_slot('{name}')")
    assert database.query("SELECT slot_name FROM pg_replication_slots") == []


@pytest.fixture
def theirs(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A connection to PostgreSQL itself, whose own slots are dropped afterwards."""
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        yield connection
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


SCRIPT = [
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "INSERT INTO t VALUES (1, 'one'), (2, NULL)",
    "BEGIN; UPDATE t SET v = 'two' WHERE id = 2; DELETE FROM t WHERE id = 1; COMMIT",
    "INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(10, 14) n",
    "TRUNCATE t",
]


def test_changes_are_postgresql_s_rows(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database
) -> None:
    """get and peek, their options and limits, in the places where such a function can stand."""
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('changes', 'test_decoding')")
    database.execute("CREATE TABLE warm (id int)")  # so that both slots stand behind the same WAL
    for connection in (theirs, ours):
        connection.execute("SELECT count(*) FROM pg_logical_slot_get_changes('changes', NULL, NULL)")
    for statement in SCRIPT:
        database.execute(statement)
    (middle,) = theirs.execute("SELECT max(lsn) FROM pg_logical_slot_peek_changes('changes', NULL, 4)").fetchone() or ()
    for query in (
        "SELECT * FROM pg_logical_slot_peek_changes('changes', NULL, NULL)",
        "SELECT data FROM pg_logical_slot_peek_changes('changes', NULL, NULL, 'include-xids', '0', 'skip-empty-xacts', 'on')",
        "SELECT data FROM pg_logical_slot_peek_changes('changes', NULL, NULL, VARIADIC ARRAY['include-xids', 'off']) WITH_ALIAS",
        "SELECT count(*), min(c.lsn) FROM pg_logical_slot_peek_changes('changes', NULL, 1) AS c",
        "SELECT c.d FROM pg_logical_slot_peek_changes('changes', NULL, 4) c (l, x, d)",
        f"SELECT data FROM pg_logical_slot_peek_changes('changes', '{middle}', NULL)",
        "SELECT (pg_logical_slot_peek_changes('changes', NULL, 4)).data",
        "SELECT 1 AS one, (pg_logical_slot_peek_changes('changes', NULL, 4)).*",
        "SELECT * FROM pg_logical_slot_peek_binary_changes('changes', NULL, 3)",
        "SELECT pg_logical_slot_peek_changes('changes', NULL, 2)::text",
        "SELECT data FROM pg_logical_slot_get_changes('changes', NULL, 1)",
        "SELECT data FROM pg_logical_slot_get_changes('changes', NULL, 1)",
        "WITH c AS (SELECT * FROM pg_logical_slot_get_changes('changes', NULL, NULL)) SELECT data, xid FROM c ORDER BY lsn, data",
        "SELECT count(*) FROM pg_logical_slot_get_changes('changes', NULL, NULL)",
    ):
        query = query.replace("WITH_ALIAS", "")
        expected = theirs.execute(query).fetchall()
        assert ours.execute(query).fetchall() == expected, query
    for query in (
        "SELECT * FROM pg_logical_slot_get_changes('changes', NULL, NULL, 'nope', '1')",
        "SELECT * FROM pg_logical_slot_get_changes('changes', NULL, NULL, 'include-xids')",
        "SELECT * FROM pg_logical_slot_get_changes('changes', NULL, NULL, 'force-binary', 'on')",
        "SELECT * FROM pg_logical_slot_get_changes(NULL, NULL, NULL)",
        "SELECT * FROM pg_logical_slot_get_changes('nope', NULL, NULL)",
    ):
        errors = []
        for connection in (theirs, ours):
            with pytest.raises(psycopg.Error) as caught:
                connection.execute(query)
            errors.append((caught.value.sqlstate, caught.value.diag.message_primary))
        assert errors[0] == errors[1], query


@pytest.mark.full
def test_changes_have_the_session_s_own_texts(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database
) -> None:
    """As SET, and SET LOCAL in a transaction, say: where the client began with other settings, too."""
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('texts', 'test_decoding')")
    database.execute('CREATE SCHEMA "a B\\"; CREATE TABLE "a B\\".named ()')
    database.execute("CREATE TABLE t (a timestamptz, b interval, c bytea, d float8, e regclass)")
    database.execute(
        "INSERT INTO t VALUES ('2026-11-29 01:02:03+00', '1 day 2 hours', '\\x00ff', 0.1::float4, '\"a B\\\".named')"
    )
    settings = (
        "SET {} TimeZone = 'Asia/Kolkata'",
        "SET {} DateStyle = 'SQL, DMY'",
        "SET {} IntervalStyle = 'iso_8601'",
        "SET {} bytea_output = 'escape'",
        "SET {} extra_float_digits = -5",
        'SET {} search_path = public, "a B\\"',
        "SET {} quote_all_identifiers = on",
    )
    query = (
        "SELECT data FROM pg_logical_slot_peek_changes('texts', NULL, NULL, 'include-xids', '0') WHERE data ~ 'INSERT'"
    )
    first = theirs.execute(query).fetchall()
    assert ours.execute(query).fetchall() == first
    for prepare in (False, True):
        found = []
        for connection in (theirs, ours):
            with connection.transaction():
                for setting in settings:
                    connection.execute(setting.format("LOCAL").encode())
                found.append(connection.execute(query, prepare=prepare).fetchall())
                connection.execute("SELECT 1")
        assert found[1] == found[0] != first
        assert ours.execute(query, prepare=prepare).fetchall() == first
    for setting in settings:
        for connection in (theirs, ours):
            connection.execute(setting.format("").encode())
        assert ours.execute(query).fetchall() == theirs.execute(query).fetchall(), setting


def test_a_call_with_a_limit_leaves_the_slot_where_its_rows_end(
    ours: psycopg.Connection[Any], database: Database
) -> None:
    """It is decoded on to the next row: where decoding may begin then does not serve for that row."""
    database.execute("CREATE TABLE t (id int)")
    ours.execute("SELECT pg_create_logical_replication_slot('limited', 'test_decoding')")
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("CHECKPOINT")  # with a list of running transactions
    database.execute("INSERT INTO t VALUES (2)")
    get = "SELECT data FROM pg_logical_slot_get_changes('limited', NULL, 1, 'include-xids', 'off')"
    for number in (1, 2):
        row = f"table public.t: INSERT: id[integer]:{number}"
        assert ours.execute(get.encode()).fetchall() == [("BEGIN",), (row,), ("COMMIT",)]
        assert ours.execute(
            "SELECT restart_lsn <= confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'limited'"
        ).fetchall() == [(True,)]


@pytest.mark.full
@pytest.mark.parametrize(
    "encoding",
    ["LATIN1", pytest.param("UTF8", marks=pytest.mark.full), pytest.param("SQL_ASCII", marks=pytest.mark.full)],
)
def test_changes_are_not_lost_whatever_bytes_they_have(served: Publish, database: Database, encoding: str) -> None:
    """What the upstream server takes comes back as it is; what is no text there is refused, and the slot stays."""
    name = f"{database.name}_{encoding.lower()}"
    database.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    with ExitStack() as stack:
        stack.callback(database.execute, f"DROP DATABASE {name} WITH (FORCE)")
        more: dict[str, Any] = {"dbname": name, "client_encoding": encoding, "autocommit": True}
        theirs = stack.enter_context(psycopg.connect(database.conninfo, **more))
        ours = stack.enter_context(psycopg.connect(served.conninfo(), **more))
        stack.callback(ours.execute, "SELECT pg_drop_replication_slot('odd')")
        stack.callback(theirs.execute, "SELECT pg_drop_replication_slot('odd')")
        theirs.execute("CREATE TABLE t (v text)")
        for connection in (theirs, ours):
            connection.execute("SELECT pg_create_logical_replication_slot('odd', 'test_decoding')")
        # Gr\xfc\xdfe, as the encoding has it.
        word = "U&'Gr\\00fc\\00dfe'" if encoding != "SQL_ASCII" else r"convert_from('\x4772fcdf65', 'SQL_ASCII')"
        theirs.execute(f"INSERT INTO t VALUES ({word}), ('it''s \\u0041 \\')")
        shown = "SELECT encode(convert_to(data, getdatabaseencoding()), 'hex') FROM {}('odd', NULL, NULL, 'include-xids', '0')"
        for function in ("pg_logical_slot_peek_changes", "pg_logical_slot_get_changes"):
            for prepare in (False, True):
                query = shown.format(function)
                expected = theirs.execute(query).fetchall()
                assert ours.execute(query, prepare=prepare).fetchall() == expected
                assert bool(expected) != (prepare and "get" in function)
        for content, is_text in ((r"\xff", encoding != "UTF8"), (r"\x6100", False)):
            theirs.execute(f"SELECT pg_logical_emit_message(true, 'p', '{content}'::bytea)")
            query = shown.format("pg_logical_slot_get_changes")
            if is_text:
                assert ours.execute(query).fetchall() == theirs.execute(query).fetchall()
                continue
            standing = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'odd'"
            before = ours.execute(standing).fetchall()
            for prepare in (False, True):
                with pytest.raises(psycopg.errors.CharacterNotInRepertoire, match="invalid byte sequence") as caught:
                    ours.execute(query, prepare=prepare)
                assert "pg_logical_slot_get_binary_changes" in (caught.value.diag.message_hint or "")
            assert ours.execute(standing).fetchall() == before
            query = "SELECT data FROM pg_logical_slot_get_binary_changes('odd', NULL, NULL, 'include-xids', '0')"
            found = ours.execute(query).fetchall()
            assert found == theirs.execute(query).fetchall()
            assert any(bytes.fromhex(content[2:]) in row for (row,) in found)


@pytest.mark.full
def test_publications_are_named_in_the_client_s_encoding(served: Publish, database: Database) -> None:
    """A session with another encoding than UTF-8 once ended at such a name."""
    name = f"{database.name}_latin1"
    database.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with ExitStack() as stack:
        stack.callback(database.execute, f"DROP DATABASE {name} WITH (FORCE)")
        more: dict[str, Any] = {"dbname": name, "client_encoding": "LATIN1", "autocommit": True}
        theirs = stack.enter_context(psycopg.connect(database.conninfo, **more))
        ours = stack.enter_context(psycopg.connect(served.conninfo(), **more))
        theirs.execute(
            'CREATE TABLE "Gr\u00fc\u00dfe" ("\u00e9" text); CREATE PUBLICATION "ver\u00f6ff" FOR ALL TABLES'
        )
        for connection in (theirs, ours):
            connection.execute("SELECT pg_create_logical_replication_slot('named', 'pgoutput')")
            stack.callback(connection.execute, "SELECT pg_drop_replication_slot('named')")
        theirs.execute("INSERT INTO \"Gr\u00fc\u00dfe\" VALUES ('\u00e4')")
        peek = (
            "pg_logical_slot_peek_binary_changes('named', NULL, NULL, 'proto_version', '1', 'publication_names', '{}')"
        )
        for encoding in ("LATIN1", "UTF8"):
            for connection in (theirs, ours):
                connection.execute(f"SET client_encoding = {encoding}".encode())
            for what in ("data", "max(data)"):
                query = f"SELECT {what} FROM {peek}"
                expected = theirs.execute(query.format('"ver\u00f6ff"').encode(theirs.info.encoding)).fetchall()
                assert ours.execute(query.format('"ver\u00f6ff"').encode(ours.info.encoding)).fetchall() == expected
                for name_of_none in ("g\u00efbt", '"'):
                    states = []
                    for connection in (theirs, ours):
                        answer = connection.pgconn.exec_(query.format(name_of_none).encode(connection.info.encoding))
                        states.append(answer.error_field(pq.DiagnosticField.SQLSTATE))
                    assert states[1] == states[0]


@pytest.mark.full
def test_a_large_answer_comes_whole_and_one_that_is_too_large_keeps_the_slot(
    ours: psycopg.Connection[Any], database: Database
) -> None:
    ours.execute("SELECT pg_create_logical_replication_slot('large', 'test_decoding')")
    size = 50 << 20
    database.execute(f"SELECT pg_logical_emit_message(true, 'p', repeat('x', {size}))")
    query = "SELECT sum(length(data)) > {} FROM pg_logical_slot_{}_changes('large', NULL, NULL)"
    for function in ("peek", "peek_binary", "get"):
        assert ours.execute(query.format(size, function)).fetchone() == (True,)
    database.execute(f"SELECT pg_logical_emit_message(true, 'p', repeat('x', {size})) FROM generate_series(1, 2)")
    standing = "SELECT confirmed_flush_lsn FROM pg_replication_slots"
    before = ours.execute(standing).fetchall()
    for function in ("get", "get_binary"):
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="the changes are too many"):
            ours.execute(query.format(0, function))
    assert ours.execute(standing).fetchall() == before


def _answer(pgconn: pq.PGconn, query: str) -> list[object]:
    """Return all that a client is told by an answer: its columns, the values, the tag, an error's code and text."""
    result = pgconn.exec_(query.encode())
    numbers = range(result.nfields)
    told = [(result.fname(n), result.ftype(n), result.fsize(n), result.fmod(n), result.fformat(n)) for n in numbers]
    rows = [[result.get_value(row, n) for n in numbers] for row in range(result.ntuples)]
    error = result.error_field(pq.DiagnosticField.SQLSTATE), result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
    return [told, rows, result.command_status, error]


SETTINGS = [
    "RESET ALL",
    pytest.param("SET bytea_output = escape", marks=pytest.mark.full),
    "SET client_encoding = LATIN1",
    pytest.param("SET client_encoding = 'SQL_ASCII'", marks=pytest.mark.full),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_plain_query_is_answered_as_postgresql_answers_it(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database, setting: str
) -> None:
    """Its rows do not pass the upstream server: columns, texts and encodings are those that it would send."""
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('plain', 'test_decoding')")
    database.execute("CREATE TABLE t (v text); INSERT INTO t VALUES ('Gr\u00fc\u00dfe'), ('\\ it''s'), (NULL)")
    database.execute("INSERT INTO t VALUES ('\u20ac')")  # LATIN1 does not have it
    peek = "pg_logical_slot_peek_changes('plain', NULL, NULL, 'include-xids', '0', 'skip-empty-xacts', '1')"
    queries = (
        f"SELECT * FROM {peek}",
        f"SELECT * FROM {peek.replace('peek', 'peek_binary')}",
        f"SELECT FROM {peek}",
        f'SELECT data, "xid" x, DATA AS "y z", c.* FROM pg_catalog.{peek} AS c;',
        f"SELECT c.a, d FROM {peek} c (a, b, d)",
        f"SELECT data FROM {peek.replace('NULL, NULL', 'NULL, 1')}",
        f"SELECT lsn FROM {peek.replace('NULL, NULL', 'NULL, -1')}",
        f"SELECT data, lsn + 1 FROM {peek} LIMIT 2",
        f"SELECT data FROM {peek} c (data, lsn)",
        f"SELECT nope FROM {peek}",
    )
    for connection in (theirs, ours):
        connection.execute(setting.encode())
    for query in queries if setting == "RESET ALL" else queries[:3]:
        assert _answer(ours.pgconn, query) == _answer(theirs.pgconn, query), query
    for connection in (theirs, ours):
        connection.execute(b"RESET ALL")
    if setting != "RESET ALL":
        return
    for connection in (theirs, ours):
        connection.execute("BEGIN")
    # Within a transaction that an error ends; and of a slot that is given back.
    for query in (
        f"SELECT data FROM {peek}",
        f"SELECT data FROM {peek.replace('plain', 'nope')}",
        f"SELECT data FROM {peek}",
        "COMMIT",
    ):
        assert _answer(ours.pgconn, query) == _answer(theirs.pgconn, query), query
    assert ours.pgconn.transaction_status == theirs.pgconn.transaction_status
    get = f"SELECT * FROM {peek.replace('peek', 'get')}"
    assert _answer(ours.pgconn, get) == _answer(theirs.pgconn, get)
    assert ours.execute(get.encode()).fetchall() == []


@pytest.mark.full
def test_rows_of_a_plain_query_are_sent_as_they_are_decoded(
    served: Publish, ours: psycopg.Connection[Any], database: Database
) -> None:
    """No more of them is in memory than a client has to take; and until it has all of them, the slot stays."""
    import psutil

    ours.execute("SELECT pg_create_logical_replication_slot('many', 'test_decoding')")
    database.execute("SELECT pg_logical_emit_message(true, 'p', repeat('x', 1 << 20)) FROM generate_series(1, 200)")
    standing = "SELECT active, confirmed_flush_lsn FROM pg_replication_slots"
    ((_, before),) = ours.execute(standing).fetchall()
    memory = psutil.Process(served.pid).memory_info().rss
    with served.connect(dbname=database.name) as taking:
        get = b"SELECT data FROM pg_logical_slot_get_changes('many', NULL, NULL, 'skip-empty-xacts', '1')"
        for all_of_them in (False, True):
            taking.pgconn.send_query(get)
            taking.pgconn.set_single_row_mode()
            sizes = []
            for _ in range(3):
                result = taking.pgconn.get_result()
                assert result is not None
                sizes.append(len(result.get_value(0, 0) or b""))
            # The client takes no more: others are served, and the slot is used, but does not move.
            assert ours.execute(standing).fetchall() == [(True, before)]
            if not all_of_them:
                taking.pgconn.get_cancel().cancel()
            while (result := taking.pgconn.get_result()) is not None:
                if result.ntuples:
                    sizes.append(len(result.get_value(0, 0) or b""))
                last = result
            assert psutil.Process(served.pid).memory_info().rss - memory < 60 << 20
            if not all_of_them:
                assert last.error_field(pq.DiagnosticField.SQLSTATE) == b"57014"
                assert ours.execute(standing).fetchall() == [(False, before)]
    assert len([one for one in sizes if one > 1 << 20]) == 200
    assert last.command_status == f"SELECT {len(sizes)}".encode()
    ((active, after),) = ours.execute(standing).fetchall()
    assert (active, Lsn.parse(after) > Lsn.parse(before)) == (False, True)


def test_an_error_in_one_call_keeps_the_rows_of_another(
    ours: psycopg.Connection[Any], served: Publish, database: Database
) -> None:
    """All calls of a query have their rows before a slot moves; each sees what those before it have done."""
    for name in ("one", "two"):
        ours.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')")
    database.execute("CREATE TABLE kept (id int); INSERT INTO kept VALUES (1)")
    # Autovacuum, too, ends transactions in which nothing is changed.
    options = "'include-xids', '0', 'skip-empty-xacts', '1'"
    get = f"SELECT data FROM pg_logical_slot_get_changes('{{}}', NULL, NULL, {options})"
    standing = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'one'"
    before = ours.execute(standing).fetchall()
    for separator in ("; ", " UNION ALL "):
        with pytest.raises(psycopg.errors.UndefinedObject):
            ours.execute(get.format("one") + separator + get.format("nope"))
        assert ours.execute(standing).fetchall() == before
    with psycopg.ClientCursor(ours) as cursor:
        cursor.execute("; ".join([get.format("one"), get.format("one"), standing, get.format("two")]))
        results = [cursor.fetchall()]
        while cursor.nextset():
            results.append(cursor.fetchall())
    first, again, moved, second = results
    assert "table public.kept: INSERT: id[integer]:1" in [data for (data,) in first]
    assert (again, second) == ([], first)
    assert moved > before
    assert ours.execute(standing).fetchall() == moved


def test_what_is_wrong_is_said_as_postgresql_says_it(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any]
) -> None:
    """SQLSTATE, message, hint and place; and nothing was carried out before it was found."""
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('w', 'test_decoding')")
    changes = "SELECT * FROM pg_logical_slot_get_changes"
    for query in (
        "SELECT pg_create_logical_replication_slot('x')",
        "SELECT pg_create_logical_replication_slot(1, 'pgoutput')",
        "SELECT pg_create_logical_replication_slot('x', 'pgoutput', nope => true)",
        "SELECT pg_create_logical_replication_slot('x', 'pgoutput', 'maybe')",
        "SELECT pg_create_logical_replication_slot('x', 'pgoutput', true, false, true)",
        "SELECT pg_drop_replication_slot(slot_name => 'w')",
        "SELECT pg_drop_replication_slot('w'), nope",
        "SELECT pg_replication_slot_advance('w', 'x')",
        f"{changes}('w', NULL, 99999999999)",
        f"{changes}('w', NULL, NULL, 'include-xids', NULL)",
        f"{changes}('w', NULL, NULL, VARIADIC ARRAY[['include-xids', '0'], ['only-local', '0']])",
        f"{changes}('w', NULL, NULL, VARIADIC NULL)",
        "SELECT slot_name FROM pg_replication_slots WHERE nope",
        "SELECT count(*) FROM pg_replication_slots TABLESAMPLE system (1)",
        "DELETE FROM pg_replication_slots",
        "BEGIN; CREATE TEMPORARY TABLE t (a int)",
        "SELECT pg_create_logical_replication_slot('x', 'pgoutput')",
        "ROLLBACK",
    ):
        errors: list[object] = []
        for connection in (theirs, ours):
            try:
                connection.execute(query)
            except psycopg.Error as error:
                diag = error.diag
                errors.append((diag.sqlstate, diag.message_primary, diag.message_hint, diag.statement_position))
            else:
                errors.append(None)
        assert errors[0] == errors[1], query
    for connection in (theirs, ours):
        assert connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == [("w",)]
        # The same of a statement that is prepared.
        with pytest.raises(psycopg.errors.UndefinedFunction) as caught:
            connection.execute("SELECT pg_drop_replication_slot(%s, slot_name => 1)", ["w"])
        assert caught.value.diag.statement_position == "8"


def test_what_is_not_executed_changes_nothing(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database
) -> None:
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('e', 'test_decoding')")
    database.execute("CREATE TABLE t (a int)")
    explain = "EXPLAIN (COSTS off) SELECT data FROM pg_logical_slot_get_changes('e', NULL, NULL)"
    query = "SELECT count(*) FROM pg_logical_slot_get_changes('e', NULL, -1)"
    for statement in (explain, "EXPLAIN (COSTS off) SELECT pg_drop_replication_slot('e')", query):
        assert ours.execute(statement).fetchall() == theirs.execute(statement).fetchall()
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="not supported in PREPARE here"):
        ours.execute("PREPARE d AS SELECT pg_drop_replication_slot('e')")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="not supported in ROWS FROM here"):
        ours.execute("SELECT * FROM ROWS FROM (pg_logical_slot_get_changes('e', NULL, NULL), generate_series(1, 2))")
    ours.execute("CREATE VIEW v AS SELECT slot_name FROM pg_replication_slots")
    assert "pg_replication_slots" in database.query("SELECT pg_get_viewdef('v'::regclass)")[0][0]
    assert ours.execute("SELECT count(*) > 0 FROM pg_logical_slot_get_changes('e', NULL, NULL)").fetchall() == [(True,)]


def test_statements_without_parameters_in_the_extended_protocol(
    ours: psycopg.Connection[Any], database: Database
) -> None:
    ours.execute("SELECT pg_create_logical_replication_slot('u', 'test_decoding')")
    database.execute("CREATE TABLE t (a int)")
    ours.execute("CREATE TEMPORARY TABLE slots AS SELECT slot_name FROM pg_replication_slots", prepare=True)
    assert ours.execute("SELECT * FROM slots").fetchall() == [("u",)]
    changes = "SELECT data FROM pg_logical_slot_get_changes('u', NULL, NULL)"
    ours.execute(f"CREATE TEMPORARY TABLE changes AS {changes}", prepare=True)
    assert ours.execute("SELECT count(*) > 0 FROM changes").fetchall() == [(True,)]


def test_views_and_functions_have_their_own_columns(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database
) -> None:
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('c', 'test_decoding')")
        connection.execute("SELECT count(*) FROM pg_logical_slot_get_changes('c', NULL, NULL)")
    database.execute("CREATE TABLE t (a int)")
    for query in (
        "SELECT * FROM pg_get_replication_slots() WHERE false",
        "SELECT pg_catalog.pg_replication_slots.slot_name FROM pg_catalog.pg_replication_slots",
        "SELECT slot_name FROM ONLY pg_replication_slots",
        "SELECT n FROM pg_logical_slot_peek_changes('c', NULL, NULL) WITH ORDINALITY AS c (l, x, d, n) WHERE n = 1",
        "SELECT pg_drop_replication_slot(NULL)",
    ):
        answers = []
        for connection in (theirs, ours):
            cursor = connection.execute(query)
            answers.append(([one[:2] for one in cursor.description or ()], cursor.fetchall()))
        assert answers[0] == answers[1], query
    # A physical slot is the server's, and can be dropped by way of us as it was made.
    ours.execute("SELECT pg_create_physical_replication_slot('physical_one')")
    ours.execute("SELECT pg_drop_replication_slot('physical_one')")
    assert database.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'physical_one'") == [(0,)]


def test_binary_changes_are_pgoutput_s(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any], database: Database
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    options = "'proto_version', '1', 'publication_names', 'p'"
    query = f"SELECT lsn, data FROM pg_logical_slot_get_binary_changes('b', NULL, NULL, {options})"
    for connection in (theirs, ours):
        connection.execute("SELECT pg_create_logical_replication_slot('b', 'pgoutput')")
        connection.execute(query)
    database.execute("INSERT INTO t VALUES (1, 'one')")
    assert ours.execute(query).fetchall() == theirs.execute(query).fetchall() != []
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="produces binary output"):
        ours.execute(query.replace("_binary", ""))


@pytest.mark.full
def test_prepared_statements_see_the_slots_of_their_moment(ours: psycopg.Connection[Any], database: Database) -> None:
    """The extended protocol, with parameters, in batches and transactions."""
    run = ours.execute
    for number in range(7):  # psycopg prepares a statement that it has sent five times
        assert run(
            "SELECT slot_name FROM pg_create_logical_replication_slot(%s, %s)", [f"s{number}", "pgoutput"]
        ).fetchall() == [(f"s{number}",)]
        count = run(
            "SELECT count(*) FROM pg_replication_slots WHERE plugin = %s AND active = %s", ["pgoutput", False]
        ).fetchone()
        assert count == (number + 1,)
    assert run(
        "SELECT slot_name FROM pg_replication_slots WHERE slot_name = ANY(%s) ORDER BY 1", [["s1", "s3"]]
    ).fetchall() == [
        ("s1",),
        ("s3",),
    ]
    ((_, lsn),) = run("SELECT * FROM pg_replication_slot_advance(%s, pg_current_wal_lsn())", ["s1"]).fetchall()
    assert run("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", ["s1"]).fetchone() == (lsn,)
    with pytest.raises(psycopg.errors.UndefinedObject, match='replication slot "nope" does not exist'):
        run("SELECT pg_drop_replication_slot(%s)", ["nope"])
    assert run("SELECT 1 + %s", [1]).fetchone() == (2,)
    with ours.pipeline():
        dropped = [run("SELECT pg_drop_replication_slot(%s)", [f"s{number}"]) for number in range(3)]
        after = run("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE %s", ["s%"])
        assert [one.fetchone() for one in dropped] == [("",)] * 3
        assert after.fetchone() == (4,)
    with pytest.raises(psycopg.errors.UndefinedObject):
        pipelined(
            ours,
            ["CREATE TABLE gone (id int)", "SELECT pg_drop_replication_slot('s0')", "CREATE TABLE gone_too (id int)"],
        )
    assert run("SELECT to_regclass('gone'), to_regclass('gone_too')").fetchone() == (None, None), "one transaction"
    run("BEGIN")
    run("CREATE TABLE gone (id int)")
    with pytest.raises(psycopg.errors.UndefinedObject):
        run("SELECT pg_drop_replication_slot(%s)", ["s0"])
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        run("SELECT 1")
    run("ROLLBACK")
    assert run("SELECT to_regclass('gone')").fetchone() == (None,)
    assert run(
        "SELECT slot_name, pg_drop_replication_slot(slot_name)::text FROM pg_replication_slots"
        " WHERE slot_name > %s ORDER BY 1 LIMIT %s",
        ["s3", 2],
    ).fetchall() == [("s4", ""), ("s5", "")]


@pytest.mark.parametrize("prepare", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_function_is_not_called_for_any_number_of_rows(ours: psycopg.Connection[Any], prepare: bool) -> None:
    """A billion rows would be collected here, before the role is looked at."""
    many = "SELECT pg_drop_replication_slot('none_' || n) FROM generate_series(1, {}) n"
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="for 10000 rows at most"):
        ours.execute(many.format(10_001).encode(), prepare=prepare)
    with pytest.raises(psycopg.errors.UndefinedObject, match='"none_1" does not exist'):
        ours.execute(many.format(10_000).encode(), prepare=prepare)


def test_a_prepared_statement_that_is_forgotten_carries_nothing_out(
    ours: psycopg.Connection[Any], theirs: psycopg.Connection[Any]
) -> None:
    """DEALLOCATE, DISCARD or a simple query took it away at the server; its function was carried out nevertheless."""
    answers = []
    for connection in (theirs, ours):
        pgconn = connection.pgconn
        connection.execute("SELECT pg_create_logical_replication_slot('kept', 'test_decoding')")
        found: list[Any] = []
        drop = b"SELECT pg_drop_replication_slot($1)"
        for name, forget in ((b"d", b"DEALLOCATE d"), (b"d", b"DISCARD ALL"), (b"", b"SELECT 1")):
            pgconn.prepare(name, drop)
            pgconn.exec_(forget)
            found.append(pgconn.exec_prepared(name, [b"kept"]).error_field(pq.DiagnosticField.SQLSTATE))
        # In an aborted transaction nothing is bound.
        pgconn.prepare(b"d", drop)
        pgconn.exec_(b"BEGIN; SELECT 1/0")
        found.append(pgconn.exec_prepared(b"d", [b"kept"]).error_field(pq.DiagnosticField.SQLSTATE))
        pgconn.exec_(b"ROLLBACK")
        found.append(pgconn.exec_prepared(b"d", [b"nope"]).error_field(pq.DiagnosticField.SQLSTATE))
        # Another statement has the name now.
        pgconn.exec_(b"DEALLOCATE d; PREPARE d AS SELECT 5")
        found.append(pgconn.exec_prepared(b"d", []).get_value(0, 0))
        pgconn.prepare(b"e", drop)
        found.append(pgconn.describe_prepared(b"e").nparams)
        pgconn.exec_(b"DEALLOCATE e; PREPARE e AS SELECT 5")
        found.append(pgconn.describe_prepared(b"e").nparams)
        standing = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'kept'"
        found.append(connection.execute(standing).fetchall())
        answers.append(found)
    assert answers[1] == answers[0] == [b"26000"] * 3 + [b"25P02", b"42704", b"5", 1, 0, [(1,)]]


@pytest.mark.full
@pytest.mark.parametrize("parameters", [False, True])
def test_an_argument_that_says_something_else_each_time(
    ours: psycopg.Connection[Any], database: Database, parameters: bool
) -> None:
    """As pg_current_wal_lsn() does: the changes that a call has taken are returned, else they would be lost."""
    database.execute("CREATE TABLE t (id int); CREATE SEQUENCE n")
    end = "%s::pg_lsn + nextval('n')::numeric" if parameters else "'F/0'::pg_lsn + nextval('n')::numeric"
    slots = "pg_replication_slots"
    given = ["F/0"] if parameters else None
    ours.execute("SELECT pg_create_logical_replication_slot('v', 'test_decoding')")
    for number, query in enumerate(
        (
            f"SELECT data FROM pg_logical_slot_get_changes('v', {end}, NULL, 'skip-empty-xacts', '1')",
            f"SELECT (pg_logical_slot_get_changes('v', {end}, NULL, 'skip-empty-xacts', '1')).data",
            f"SELECT (pg_logical_slot_get_changes(slot_name, {end}, NULL, 'skip-empty-xacts', '1')).data FROM {slots}",
        )
    ):
        database.execute(f"INSERT INTO t VALUES ({number})")
        _, (change,), _ = ours.execute(query, given).fetchall()
        assert change == f"table public.t: INSERT: id[integer]:{number}"
    moved = f"SELECT slot_name, (pg_replication_slot_advance(slot_name, {end})).end_lsn FROM pg_replication_slots"
    ((_, lsn),) = ours.execute(moved, given).fetchall()
    within = "(SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'v')"
    assert ours.execute(f"SELECT end_lsn FROM pg_replication_slot_advance('v', {within})").fetchall() == [(lsn,)]
    assert ours.execute(f"SELECT (pg_replication_slot_advance('v', {within})).end_lsn").fetchall() == [(lsn,)]


def pipelined(connection: psycopg.Connection[Any], statements: list[str]) -> None:
    with connection.pipeline():
        for statement in statements:
            connection.execute(statement)


def test_several_calls_in_one_query(ours: psycopg.Connection[Any]) -> None:
    (one, other) = (
        ours.execute(
            "SELECT a.slot_name, b.slot_name FROM pg_create_logical_replication_slot('a', 'pgoutput') a,"
            " pg_create_logical_replication_slot('b', 'test_decoding', temporary := true) b"
        ).fetchone()
        or ()
    )
    assert (one, other) == ("a", "b")
    cursor = ours.execute(
        "SELECT (pg_copy_logical_replication_slot('a', 'c', false, 'test_decoding')).slot_name::text;"
        "SELECT slot_name, plugin, temporary FROM pg_replication_slots ORDER BY 1;"
        "SELECT pg_drop_replication_slot('a'), pg_drop_replication_slot('b');"
        "SELECT count(*) FROM pg_replication_slots"
    )
    answers = [cursor.fetchall()]
    while cursor.nextset():
        answers.append(cursor.fetchall())
    assert answers == [
        [("c",)],
        [("a", "pgoutput", False), ("b", "test_decoding", True), ("c", "test_decoding", False)],
        [("", "")],
        [(1,)],
    ]
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        ours.execute("SELECT 1 WHERE pg_drop_replication_slot('c') IS NOT NULL")
    assert ours.execute(
        "WITH pg_replication_slots AS (SELECT 1 AS one) SELECT * FROM pg_replication_slots"
    ).fetchall() == [(1,)]
    ((same,),) = ours.execute(
        "SELECT s.datoid = d.oid FROM pg_replication_slots s JOIN pg_database d ON d.datname = s.database"
    ).fetchall()
    assert same


@pytest.mark.full
async def test_asyncpg_prepares_everything(served: Publish, ours: psycopg.Connection[Any], database: Database) -> None:
    connection = await asyncpg.connect(
        host="127.0.0.1", port=served.port, user=database.server.user, database=database.name
    )
    try:
        made = await connection.fetchrow(
            "SELECT * FROM pg_create_logical_replication_slot($1, $2)", "x", "test_decoding"
        )
        assert made["slot_name"] == "x"
        listed = await connection.prepare("SELECT slot_name, active FROM pg_replication_slots")
        assert [tuple(one) for one in await listed.fetch()] == [("x", False)]
        await connection.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
        rows = await connection.fetch(
            "SELECT data FROM pg_logical_slot_get_changes($1, NULL, $2, 'include-xids', 'off')", "x", 100
        )
        assert [one["data"] for one in rows][-3:] == ["BEGIN", "table public.t: INSERT: id[integer]:1", "COMMIT"]
        await connection.execute("SELECT pg_drop_replication_slot('x')")
        assert await listed.fetch() == []
    finally:
        await connection.close()


@pytest.mark.full
def test_a_call_that_decodes_can_be_cancelled(ours: psycopg.Connection[Any], database: Database) -> None:
    ours.execute("SELECT pg_create_logical_replication_slot('c', 'test_decoding')")
    database.execute("CREATE TABLE t AS SELECT n, repeat('x', 200) v FROM generate_series(1, 30000) n")
    ours.pgconn.send_query(b"SELECT count(*) FROM pg_logical_slot_get_changes('c', NULL, NULL)")
    cancel = ours.pgconn.get_cancel()
    with psycopg.connect(f"{ours.info.dsn} dbname={database.name}", autocommit=True) as other:
        wait_until(
            lambda: (
                other.execute("SELECT active FROM pg_replication_slots WHERE slot_name = 'c'").fetchone() == (True,)
            ),
            "it decodes",
        )
        cancel.cancel()
        result = ours.pgconn.get_result()
        assert result is not None
        assert result.error_message.startswith(b"ERROR:  canceling statement due to user request")
        assert ours.pgconn.get_result() is None
        assert ours.execute("SELECT active FROM pg_replication_slots WHERE slot_name = 'c'").fetchone() == (False,)
        (count,) = ours.execute("SELECT count(*) FROM pg_logical_slot_get_changes('c', NULL, NULL)").fetchone() or ()
        assert count > 30000
