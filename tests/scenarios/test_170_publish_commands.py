"""`pubsub publish` as a client sees it: commands, SQL over slots, roles and connections, compared with PostgreSQL's own walsender."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pubsub.backend import messages as m
from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until


@pytest.fixture
def ours(served: Publish, database: Database) -> Iterator[str]:
    """The connection string of the test's database through our server; it must leave no slot."""
    yield served.conninfo(dbname=database.name)
    left = served.query("SELECT slot_name FROM pg_replication_slots", dbname=database.name)
    assert left == []
    assert database.query("SELECT slot_name FROM pg_replication_slots") == [], "none is ever on the server behind it"


class Walsender:
    """A logical replication connection, of which each answer is put into plain values."""

    def __init__(self, conninfo: str) -> None:
        self.pgconn = pq.PGconn.connect(f"{conninfo} replication=database".encode())
        assert self.pgconn.status == pq.ConnStatus.OK, self.pgconn.error_message

    def __enter__(self) -> Walsender:
        return self

    def __exit__(self, *_: object) -> None:
        self.pgconn.finish()

    def run(self, command: str) -> Any:
        """Return (columns with types, rows, tag), or (SQLSTATE, message, detail, hint); a stream is ended at once."""
        result = self.pgconn.exec_(command.encode())
        if result.status == pq.ExecStatus.COPY_BOTH:
            self.pgconn.put_copy_end()
            self.pgconn.flush()
            while self.pgconn.get_copy_data(0)[0] > 0:
                pass
            results = []
            while (one := self.pgconn.get_result()) is not None:
                results.append((one.status, (one.command_status or b"").decode()))
            return results
        if result.status == pq.ExecStatus.FATAL_ERROR:
            fields = (
                pq.DiagnosticField.SQLSTATE,
                pq.DiagnosticField.MESSAGE_PRIMARY,
                pq.DiagnosticField.MESSAGE_DETAIL,
                pq.DiagnosticField.MESSAGE_HINT,
            )
            return tuple((result.error_field(field) or b"").decode() for field in fields)
        columns = [((result.fname(n) or b"").decode(), result.ftype(n)) for n in range(result.nfields)]
        rows = [
            tuple(None if (v := result.get_value(r, n)) is None else v.decode() for n in range(result.nfields))
            for r in range(result.ntuples)
        ]
        return columns, rows, (result.command_status or b"").decode()


_CHANGING = re.compile(r"\b[0-9A-F]+/[0-9A-F]+\b|\b[0-9A-F]{8}-[0-9A-F]{8}-\d+\b|PID \d+")


def plain(answer: object) -> str:
    """Return an answer without positions, snapshots' names and process ids."""
    return _CHANGING.sub("*", str(answer))


def both(ours: str, theirs: str, commands: Sequence[str]) -> None:
    with Walsender(ours) as mine, Walsender(theirs) as other:
        for command in commands:
            expected = plain(other.run(command))
            assert plain(mine.run(command)) == expected, command
            assert mine.pgconn.transaction_status == other.pgconn.transaction_status, command


@pytest.mark.parametrize(
    "commands",
    [
        ["IDENTIFY_SYSTEM", "SHOW wal_sender_timeout", "SHOW nope", "SELECT 1 AS one", "TIMELINE_HISTORY 99"],
        ["READ_REPLICATION_SLOT nope"],
        [
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "ALTER_REPLICATION_SLOT a (FAILOVER)",
            "ALTER_REPLICATION_SLOT nope (FAILOVER)",
            "READ_REPLICATION_SLOT a",
            "DROP_REPLICATION_SLOT a",
            "DROP_REPLICATION_SLOT a",
            "DROP_REPLICATION_SLOT a WAIT",
        ],
        ["CREATE_REPLICATION_SLOT a LOGICAL pgoutput", "SELECT 1", "DROP_REPLICATION_SLOT a"],
        [
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing', TWO_PHASE, FAILOVER)",
            "SELECT slot_name FROM pg_copy_logical_replication_slot('a', 'b')",
            "SELECT two_phase, two_phase_at IS NULL, failover FROM pg_replication_slots WHERE slot_name = 'b'",
            "DROP_REPLICATION_SLOT b",
            "SELECT pg_logical_emit_message(true, 'a', 'b') IS NOT NULL",
            "SELECT slot_name FROM pg_replication_slot_advance('a', pg_current_wal_lsn())",
            # It has two_phase already: what was sent at its PREPARE stays so.
            "ALTER_REPLICATION_SLOT a (TWO_PHASE true)",
            "SELECT two_phase_at < confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'a'",
            "DROP_REPLICATION_SLOT a",
        ],
        ["CREATE_REPLICATION_SLOT a LOGICAL test_decoding NOEXPORT_SNAPSHOT", "DROP_REPLICATION_SLOT a WAIT"],
        ["CREATE_REPLICATION_SLOT a TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", "DROP_REPLICATION_SLOT a"],
        [
            "CREATE_REPLICATION_SLOT \"A\" LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "CREATE_REPLICATION_SLOT \"\" LOGICAL pgoutput (SNAPSHOT 'nothing')",
            f"CREATE_REPLICATION_SLOT {'x' * 70} LOGICAL pgoutput (SNAPSHOT 'nothing')",
            f"DROP_REPLICATION_SLOT {'x' * 63}",
            "CREATE_REPLICATION_SLOT a LOGICAL nope (SNAPSHOT 'nothing')",
            "CREATE_REPLICATION_SLOT a TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER)",
        ],
        ["CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')"],
        ["BEGIN", "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'export')", "SELECT 1", "ROLLBACK"],
        ["BEGIN", "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')", "ROLLBACK"],
        [
            "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ",
            "SELECT 1",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')",
            "ROLLBACK",
        ],
        [
            "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')",
            "SELECT current_setting('transaction_isolation'), count(*) FROM pg_class WHERE relname = 'nope'",
            "COMMIT",
            "DROP_REPLICATION_SLOT a",
        ],
        ["BEGIN", "SELECT 1/0", "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')", "ROLLBACK"],
        ["START_REPLICATION SLOT nope LOGICAL 0/0 (proto_version '4', publication_names 'p')"],
        [
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (publication_names 'p')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (proto_version '9', publication_names 'p')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (proto_version '1', nope 'p')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (proto_version '1', publication_names 'p', streaming 'on')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (\"Proto_version\" '1')",
            "START_REPLICATION SLOT a LOGICAL 0/0 (proto_version '1', publication_names 'p', origin)",
            "DROP_REPLICATION_SLOT a",
        ],
        [
            "IDENTIFY_SYSTEM 'abc",
            'IDENTIFY_SYSTEM "abc',
            'SHOW ""',
            "TIMELINE_HISTORY 4294967296",
            "TIMELINE_HISTORY 99999999999999999999",
            "START_REPLICATION SLOT nope LOGICAL 123456789/0",
            "START_REPLICATION SLOT nope LOGICAL 0/123456789",
        ],
        [
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT)",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (RESERVE_WAL)",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput RESERVE_WAL",
            "CREATE_REPLICATION_SLOT a PHYSICAL (FAILOVER)",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "CREATE_REPLICATION_SLOT a PHYSICAL",
            "START_REPLICATION SLOT a PHYSICAL 0/0",
            "DROP_REPLICATION_SLOT a",
        ],
        ["BEGIN", "TIMELINE_HISTORY 44", "ROLLBACK"],
        [
            "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ",
            "SET LOCAL work_mem = '64kB'",
            "IDENTIFY_SYSTEM",
            "SHOW work_mem",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')",
            "SHOW work_mem",
            "COMMIT",
            "DROP_REPLICATION_SLOT a",
        ],
        [
            "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ",
            "SAVEPOINT s",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'use')",
            "ROLLBACK",
        ],
        [
            "BEGIN",
            "CREATE TEMPORARY TABLE t (a int)",
            "CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'nothing')",
            "ROLLBACK",
        ],
        # An error ends temporary slots: a command's, the server's own, and one within a transaction.
        [
            *("CREATE_REPLICATION_SLOT a TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", "READ_REPLICATION_SLOT b"),
            *("ALTER_REPLICATION_SLOT a (FAILOVER)", "DROP_REPLICATION_SLOT a"),
            *("CREATE_REPLICATION_SLOT a TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", "SELECT 1/0"),
            "DROP_REPLICATION_SLOT a",
            *("BEGIN", "CREATE_REPLICATION_SLOT a TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", "SELECT nope"),
            *("ROLLBACK", "DROP_REPLICATION_SLOT a"),
        ],
        [
            "CREATE_REPLICATION_SLOT a LOGICAL test_decoding (SNAPSHOT 'nothing')",
            'START_REPLICATION SLOT a LOGICAL 0/0 ("skip-empty-xacts", "include-xids", "stream-changes", "only-local")',
            "IDENTIFY_SYSTEM",
            'START_REPLICATION SLOT a LOGICAL 0/0 ("skip-empty")',
            "DROP_REPLICATION_SLOT a",
        ],
    ],
    ids=lambda commands: commands[0][:60],
)
def test_commands_are_answered_as_postgresql_answers_them(
    served: Publish, ours: str, database: Database, commands: list[str]
) -> None:
    both(ours, database.conninfo, commands)


def _exchange(conninfo: str, *messages: tuple[bytes, bytes]) -> list[tuple[bytes, Any]]:
    """Return what a walsender answers to messages, up to the answer of a last query; errors by their fields."""
    given = conninfo_to_dict(conninfo)
    host, port = str(given["host"]), int(str(given["port"]))
    with socket.create_connection((host, port), timeout=60) as connection, connection.makefile("rb") as answers:
        parameters = {"user": str(given["user"]), "database": str(given["dbname"]), "replication": "database"}
        connection.sendall(m.startup(3 << 16, parameters))
        found: list[tuple[bytes, Any]] = []
        asked = False
        while True:
            kind, length = answers.read(1), int.from_bytes(answers.read(4), "big")
            body = answers.read(length - 4)
            if asked:
                error = m.read_error(body) if kind == b"E" else None
                found.append((kind, body if error is None else (error.sqlstate, error.message)))
                if kind == b"C" and body == b"COPY 0\0":
                    return found
            elif kind == b"Z":
                asked = True
                last = (b"Q", b"COPY (SELECT WHERE false) TO STDOUT\0")
                connection.sendall(b"".join(m.message(*one) for one in (*messages, last)))


_PARSE = (b"P", b"\0SELECT 1\0\0\0")
_SYNC = (b"S", b"")


@pytest.mark.parametrize(
    "messages",
    [
        [_PARSE, (b"B", bytes(8)), (b"E", bytes(5)), _SYNC],
        [_SYNC, (b"H", b""), (b"d", b"x"), (b"c", b""), (b"f", b"x\0")],
        [(b"F", bytes(20))],
        [(b"Q", b"BEGIN\0"), (b"C", b"S\0"), _SYNC, (b"Q", b"SELECT 1\0"), (b"Q", b"ROLLBACK\0")],
        [(b"Q", b"IDENTIFY_SYSTEM"), (b"Q", b"IDENTIFY_SYSTEM\0x\0"), (b"Q", b"DROP_REPLICATION_SLOT \xff\0")],
    ],
    ids=["batch", "ignored", "function", "transaction", "texts"],
)
def test_messages_are_answered_as_a_walsender_answers_them(
    ours: str, database: Database, messages: list[tuple[bytes, bytes]]
) -> None:
    """The extended protocol is refused there, once for a batch; a Sync alone is no mistake."""
    assert _exchange(ours, *messages) == _exchange(database.conninfo, *messages)


def _end_of_copy(conninfo: str, sent: bytes) -> list[tuple[bytes, Any]]:
    """Return how a walsender ends a stream, and the session, of a client that sends this in it: `END` if it hangs up."""
    with Walsender(conninfo) as one:
        one.run("CREATE_REPLICATION_SLOT odd LOGICAL test_decoding (SNAPSHOT 'nothing')")
    given = conninfo_to_dict(conninfo)
    host, port = str(given["host"]), int(str(given["port"]))
    found: list[tuple[bytes, Any]] = []
    with socket.create_connection((host, port), timeout=60) as connection, connection.makefile("rb") as answers:
        parameters = {"user": str(given["user"]), "database": str(given["dbname"]), "replication": "database"}
        connection.sendall(m.startup(3 << 16, parameters))
        asked = streams = False
        while True:
            kind = b""
            with suppress(ConnectionResetError):
                kind = answers.read(1)
            if not kind:
                found.append((b"END", None))
                break
            body = answers.read(int.from_bytes(answers.read(4), "big") - 4)
            if kind == b"Z" and not asked:
                asked = True
                connection.sendall(m.message(b"Q", b"START_REPLICATION SLOT odd LOGICAL 0/0\0"))
            elif kind == b"W":
                streams = True
                connection.sendall(sent)
            elif streams and kind == b"E":
                error = m.read_error(body)
                found.append((kind, (m.read_fields(body)["S"], error.sqlstate, error.message)))
            elif streams and kind != b"d":
                found.append((kind, body))
                if kind == b"Z":
                    break
    with Walsender(conninfo) as one:
        one.run("DROP_REPLICATION_SLOT odd WAIT")
    return found


@pytest.mark.parametrize(
    "sent",
    [
        m.message(b"f", b"enough\0"),
        m.message(b"Q", b"SELECT 1\0"),
        m.message(b"S"),
        m.message(b"d", b"?"),
        m.message(b"d"),
        m.message(b"d", b"r12345"),
        b"d\0\0\0\3",
        m.message(b"X"),
        m.message(b"c") + m.message(b"c") + m.message(b"d", b"?") + m.message(b"Q", b"SELECT nope\0"),
    ],
    ids=["CopyFail", "query", "sync", "unknown", "empty", "short", "no length", "terminate", "CopyDone twice"],
)
def test_what_ends_a_stream_and_what_the_session(ours: str, database: Database, sent: bytes) -> None:
    """As walsender.c: ProcessRepliesIfAny does it."""
    assert _end_of_copy(ours, sent) == _end_of_copy(database.conninfo, sent)


@pytest.mark.parametrize("value", ["database", "tr", "YES", "Database", "o", "2", ""])
def test_values_of_replication(ours: str, database: Database, value: str) -> None:
    def outcome(conninfo: str) -> object:
        pgconn = pq.PGconn.connect(make_conninfo(conninfo, replication=value).encode())
        said = pgconn.error_message.decode().rpartition("FATAL")[2]
        pgconn.finish()
        return said

    assert outcome(ours) == outcome(database.conninfo)


def _end_of_stream(pgconn: pq.PGconn) -> bytes:
    """Return what the client is told at the end of a stream that it does not end itself."""
    with suppress(psycopg.Error):
        while pgconn.get_copy_data(0)[0] > 0:
            pass
    result = pgconn.get_result()
    return pgconn.error_message + (result.error_message if result is not None else b"")


def test_a_stream_that_is_terminated_is_told_why(served: Publish, ours: str, database: Database) -> None:
    with Walsender(ours) as one:
        one.run("CREATE_REPLICATION_SLOT told LOGICAL test_decoding (SNAPSHOT 'nothing')")
        assert one.pgconn.exec_(b"START_REPLICATION SLOT told LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        database.execute(f"SELECT pg_terminate_backend({one.pgconn.backend_pid})")
        assert b"terminating connection due to administrator command" in _end_of_stream(one.pgconn)
    served.execute("SELECT pg_drop_replication_slot('told')", dbname=database.name)


def test_wal_sender_timeout_of_the_session(served: Publish, ours: str, database: Database) -> None:
    """It may be set after the connection was made."""
    with Walsender(ours) as one:
        one.run("CREATE_REPLICATION_SLOT late TEMPORARY LOGICAL test_decoding (SNAPSHOT 'nothing')")
        one.run("SET wal_sender_timeout = 100")
        assert one.pgconn.exec_(b"START_REPLICATION SLOT late LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        assert b"server closed the connection unexpectedly" in _end_of_stream(one.pgconn)


def test_a_slot_follows_its_database_s_new_name(served: Publish, ours: str, database: Database) -> None:
    renamed = f"{database.name}_renamed"
    database.execute(f"CREATE DATABASE {renamed}_before")
    with Walsender(served.conninfo(dbname=f"{renamed}_before")) as one:
        one.run("CREATE_REPLICATION_SLOT moved LOGICAL test_decoding (SNAPSHOT 'nothing')")
    wait_until(
        lambda: database.query(f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{renamed}_before'") == [(0,)],
        "nobody uses the database",
    )
    database.execute(f"ALTER DATABASE {renamed}_before RENAME TO {renamed}")
    try:
        seen = "SELECT s.database FROM pg_replication_slots s JOIN pg_database d ON d.oid = s.datoid"
        assert served.query(seen, dbname=database.name) == [(renamed,)]
        served.execute("CREATE TABLE t (a int)", dbname=renamed)
        changes = "SELECT count(*) > 0 FROM pg_logical_slot_peek_changes('moved', NULL, NULL)"
        assert served.query(changes, dbname=renamed) == [(True,)]
        with Walsender(served.conninfo(dbname=renamed)) as one:
            assert one.run("START_REPLICATION SLOT moved LOGICAL 0/0")[0] == (pq.ExecStatus.COMMAND_OK, "COPY 0")
            one.run("DROP_REPLICATION_SLOT moved")
    finally:
        served.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = 'moved'",
            dbname=database.name,
        )
        database.execute(f"DROP DATABASE {renamed} WITH (FORCE)")


def test_slots_go_with_their_database(served: Publish, ours: str, database: Database) -> None:
    """Whoever drops it: only a logical slot of its own keeps the upstream server from that."""
    name = f"{database.name}_gone"
    database.execute(f"CREATE DATABASE {name}")
    with Walsender(served.conninfo(dbname=name)) as one:
        one.run("CREATE_REPLICATION_SLOT gone LOGICAL test_decoding (SNAPSHOT 'nothing')")
        one.run("CREATE_REPLICATION_SLOT streaming LOGICAL test_decoding (SNAPSHOT 'nothing')")
        assert one.pgconn.exec_(b"START_REPLICATION SLOT streaming LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        with pytest.raises(psycopg.errors.ObjectInUse, match="is being accessed by other users"):
            database.execute(f"DROP DATABASE {name}")
        database.execute(f"DROP DATABASE {name} WITH (FORCE)")
        assert b"terminating connection due to administrator command" in _end_of_stream(one.pgconn)
    left = "SELECT slot_name FROM pg_replication_slots"
    wait_until(lambda: served.query(left, dbname=database.name) == [], "the slots are gone")


def test_a_role_sees_of_streams_what_postgresql_shows_it(served: Publish, ours: str, database: Database) -> None:
    """In simple queries and prepared statements: pg_stat_get_activity and pg_stat_get_wal_senders."""
    reader, member, owner = (f"{database.name}_{what}" for what in ("reader", "member", "owner"))
    with ExitStack() as stack:
        for role in (reader, member, owner):
            stack.callback(database.execute, f"DROP ROLE IF EXISTS {role}")
        database.execute(
            f"CREATE ROLE {reader} LOGIN; CREATE ROLE {member} LOGIN; CREATE ROLE {owner} LOGIN REPLICATION;"
            f"GRANT {owner} TO {member}; CREATE PUBLICATION p"
        )
        columns = "usename, client_addr IS NULL, client_port IS NULL, backend_start IS NULL, state IS NULL, sync_state IS NULL"
        query = f"SELECT {columns} FROM pg_stat_replication WHERE usename = '{owner}'"
        found: list[dict[str, Any]] = []
        for conninfo in (database.conninfo, ours):
            followed = make_conninfo(conninfo, user=owner)
            with Walsender(followed) as walsender:
                walsender.run("CREATE_REPLICATION_SLOT seen TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')")
                start = b"START_REPLICATION SLOT seen LOGICAL 0/0 (proto_version '1', publication_names 'p')"
                assert walsender.pgconn.exec_(start).status == pq.ExecStatus.COPY_BOTH
                seen: dict[str, Any] = {}
                for role in (reader, member, "postgres"):
                    with psycopg.connect(conninfo, user=role, autocommit=True) as connection:
                        seen[role] = connection.execute(query).fetchall()
                        assert (
                            connection.execute(f"{query} AND true = %s", [True], prepare=True).fetchall() == seen[role]
                        )
            found.append(seen)
            with psycopg.connect(conninfo, autocommit=True) as watcher:
                kept = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'seen'"
                wait_until(lambda: watcher.execute(kept).fetchone() == (0,), "the session has ended")  # noqa: B023
        assert found[1] == found[0]
        assert found[0][reader] == [(owner, True, True, True, True, True)]
        assert found[0][member] == [(owner, False, False, False, True, True)]


def test_a_slot_in_use_and_one_of_another_database(served: Publish, ours: str, database: Database) -> None:
    with Walsender(ours) as one, Walsender(ours) as two:
        one.run("CREATE_REPLICATION_SLOT used LOGICAL pgoutput (SNAPSHOT 'nothing')")
        database.execute("CREATE PUBLICATION p")
        start = "START_REPLICATION SLOT used LOGICAL 0/0 (proto_version '1', publication_names 'p')"
        assert one.pgconn.exec_(start.encode()).status == pq.ExecStatus.COPY_BOTH
        for command in (start, "DROP_REPLICATION_SLOT used", "ALTER_REPLICATION_SLOT used (FAILOVER)"):
            code, text, *_ = two.run(command)
            assert code == "55006"
            assert re.fullmatch(r'replication slot "used" is active for PID \d+', text)
        ((active, pid),) = served.query(
            "SELECT active, active_pid FROM pg_replication_slots WHERE slot_name = 'used'", dbname=database.name
        )
        assert active
        ((state, name),) = served.query("SELECT pid, state FROM pg_stat_replication", dbname=database.name)
        assert (state, name) == (pid, "streaming") or name == "catchup"
        with Walsender(served.conninfo(dbname="postgres")) as elsewhere:
            one.pgconn.finish()
            wait_until(lambda: elsewhere.run(start)[0] != "55006", "the slot is free")
            assert elsewhere.run(start)[:2] == ("55000", 'replication slot "used" was not created in this database')
        assert two.run("DROP_REPLICATION_SLOT used WAIT")[2] == "DROP_REPLICATION_SLOT"


def test_slots_survive_kill_9_and_temporary_ones_their_session(served: Publish, ours: str, database: Database) -> None:
    columns = "slot_name, plugin, temporary, active, two_phase, failover, confirmed_flush_lsn"
    listed = f"SELECT {columns} FROM pg_replication_slots ORDER BY 1"
    with Walsender(ours) as walsender:
        walsender.run("CREATE_REPLICATION_SLOT kept LOGICAL pgoutput (SNAPSHOT 'nothing', TWO_PHASE, FAILOVER)")
        walsender.run("CREATE_REPLICATION_SLOT gone TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')")
        before = served.query(listed, dbname=database.name)
        assert [row[:6] for row in before] == [
            ("gone", "pgoutput", True, True, False, False),
            ("kept", "pgoutput", False, False, True, True),
        ]
        served.kill()
    served.start()
    assert served.query(listed, dbname=database.name) == [before[1]]
    served.execute("SELECT pg_drop_replication_slot('kept')", dbname=database.name)


def test_sql_over_slots(served: Publish, ours: str, database: Database) -> None:
    """Wherever the names stand; strings and comments that hold them are left alone."""
    with psycopg.connect(ours, autocommit=True) as connection:
        run = connection.execute
        ((name, lsn),) = run("SELECT * FROM pg_create_logical_replication_slot('a', 'pgoutput')").fetchall()
        assert name == "a"
        assert run(
            "SELECT slot_name FROM pg_create_logical_replication_slot('b', 'test_decoding', true)"
        ).fetchall() == [("b",)]
        assert run("SELECT slot_name FROM pg_catalog.pg_replication_slots s ORDER BY s.slot_name").fetchall() == [
            ("a",),
            ("b",),
        ]
        assert run("SELECT count(*) FROM pg_replication_slots, pg_replication_slots AS t").fetchall() == [(4,)]
        assert run("WITH s AS (SELECT * FROM pg_replication_slots) SELECT plugin FROM s ORDER BY 1").fetchall() == [
            ("pgoutput",),
            ("test_decoding",),
        ]
        assert len(run("TABLE pg_replication_slots").fetchall()) == 2
        assert run(
            "SELECT 'pg_replication_slots' AS pg_replication_slots /* FROM pg_replication_slots */"
        ).fetchall() == [("pg_replication_slots",)]
        assert run("SELECT slot_name FROM pg_get_replication_slots() ORDER BY 1").fetchall() == [("a",), ("b",)]
        assert run("SELECT relname FROM pg_class WHERE oid = 'pg_replication_slots'::regclass").fetchall() == [
            ("pg_replication_slots",)
        ]
        assert run("SELECT slot_name FROM pg_stat_replication_slots ORDER BY 1").fetchall() == [("a",), ("b",)]
        database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")
        (current,) = run("SELECT pg_current_wal_lsn()").fetchone() or ()
        ((_, moved),) = run(f"SELECT * FROM pg_replication_slot_advance('a', '{current}')").fetchall()
        assert run("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'a'").fetchall() == [
            (moved,)
        ]
        assert Lsn.parse(lsn) < Lsn.parse(moved)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="minimum is"):
            run(f"SELECT pg_replication_slot_advance('a', '{lsn}')")
        assert run("SELECT slot_name FROM pg_copy_logical_replication_slot('a', 'c')").fetchall() == [("c",)]
        with pytest.raises(psycopg.errors.DuplicateObject):
            run("SELECT pg_create_logical_replication_slot('c', 'pgoutput')")
        dropped = run(
            "SELECT slot_name, pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name <> 'b' ORDER BY 1"
        )
        assert dropped.fetchall() == [("a", ""), ("c", "")]
        with pytest.raises(psycopg.errors.UndefinedObject, match='replication slot "a" does not exist'):
            run("SELECT pg_drop_replication_slot('a')")
        assert run("SELECT 1 + 1").fetchall() == [(2,)]


def test_everything_else_is_the_server_s(served: Publish, ours: str, database: Database) -> None:
    """COPY both ways, prepared statements, pipelines, notifications, errors, cancelling."""
    with psycopg.connect(ours) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        with cursor.copy("COPY t FROM STDIN") as copy:
            for number in range(5000):
                copy.write_row((number, "x" * 100))
        with cursor.copy("COPY t TO STDOUT") as copy:
            assert sum(1 for _ in copy.rows()) == 5000
        for number in range(10):
            cursor.execute("SELECT v FROM t WHERE id = %s", [number], prepare=True)
            assert cursor.fetchall() == [("x" * 100,)]
        with connection.pipeline():
            cursors = [connection.execute("SELECT count(*) FROM t WHERE id < %s", [n]) for n in range(50)]
            assert [one.fetchone() for one in cursors] == [(n,) for n in range(50)]
        connection.commit()
        connection.autocommit = True
        connection.execute("LISTEN c")
        database.execute("NOTIFY c, 'hello'")
        assert [one.payload for one in connection.notifies(timeout=30, stop_after=1)] == ["hello"]
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SET statement_timeout = 100; SELECT pg_sleep(100)")
    with psycopg.connect(ours, autocommit=True) as connection:
        connection.execute("SET application_name = 'cancelled'")
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or ()
        assert pid == connection.info.backend_pid
        cancelled = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND query LIKE 'SELECT pg_sleep%%' AND state = 'active'"
        connection.pgconn.send_query(b"SELECT pg_sleep(100)")
        with database.server.connect(database.name) as watcher:
            wait_until(lambda: watcher.execute(cancelled, [pid]).fetchone() == (1,), "it sleeps")
        connection.pgconn.get_cancel().cancel()
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.error_field(pq.DiagnosticField.SQLSTATE) == b"57014"
        assert connection.pgconn.get_result() is None


def test_roles_and_databases(served: Publish, ours: str, database: Database) -> None:
    database.execute("DROP ROLE IF EXISTS plain_role; CREATE ROLE plain_role LOGIN")
    try:
        assert served.query("SELECT current_user", dbname=database.name, user="plain_role") == [("plain_role",)]
        with (
            served.connect(dbname=database.name, user="plain_role") as plain_one,
            pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied to use replication slots"),
        ):
            plain_one.execute("SELECT pg_create_logical_replication_slot('a', 'pgoutput')")
        refused = pq.PGconn.connect(f"{ours} user=plain_role replication=database".encode())
        assert b"permission denied to start WAL sender" in refused.error_message
        refused.finish()
    finally:
        database.execute("DROP ROLE plain_role")
    with pytest.raises(psycopg.OperationalError, match='database "nope" does not exist'):
        served.connect(dbname="nope")
    with pytest.raises(psycopg.OperationalError, match='role "nope" does not exist'):
        served.connect(user="nope")
    with Walsender(ours) as walsender:
        pgconn = walsender.pgconn
        result = pgconn.exec_params(b"SELECT $1::int", [b"1"])
        assert result.error_field(pq.DiagnosticField.SQLSTATE) == b"08P01"


@pytest.mark.parametrize("encoding", ["LATIN1", pytest.param("UTF8", marks=pytest.mark.full)])
def test_names_in_other_alphabets(served: Publish, database: Database, encoding: str) -> None:
    """Names are bytes that all databases share: one of another encoding shows others, and JSON with them is refused there."""
    name, role = f"дé_{database.name}", f"жé_{database.name}"
    database.execute(f"CREATE DATABASE \"{name}\" ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    database.execute(f'CREATE ROLE "{role}" SUPERUSER LOGIN')
    with ExitStack() as stack:
        stack.callback(database.execute, f'DROP ROLE "{role}"')
        stack.callback(database.execute, f'DROP DATABASE "{name}" WITH (FORCE)')
        found = []
        for conninfo in (database.conninfo, served.conninfo()):
            here = make_conninfo(conninfo, dbname=name, client_encoding="UTF8")
            with psycopg.connect(here, autocommit=True) as session:
                session.execute("SELECT pg_create_logical_replication_slot('odd', 'test_decoding')")
                session.execute("CREATE TABLE IF NOT EXISTS t (a int)")
                session.execute("INSERT INTO t VALUES (1)")
                changes = "SELECT data FROM pg_logical_slot_get_changes('odd', NULL, NULL, 'include-xids', '0')"
                sent = session.execute(changes).fetchall()[-3:]
                slot = session.execute("SELECT database FROM pg_replication_slots WHERE slot_name = 'odd'").fetchall()
                with Walsender(make_conninfo(here, user=role, application_name=database.name)) as walsender:
                    _, ((*_, shown),), _ = walsender.run("IDENTIFY_SYSTEM")
                    started = walsender.pgconn.exec_(b"START_REPLICATION SLOT odd LOGICAL 0/0")
                    assert started.status == pq.ExecStatus.COPY_BOTH, started.error_message
                    streams = f"SELECT usename FROM pg_stat_replication WHERE application_name = '{database.name}'"
                    user = session.execute(streams).fetchall()
                found.append((slot, sent, shown, user))
                dropping = "SELECT pg_drop_replication_slot('odd')"
                wait_until(partial(_executed, session, dropping), "the slot is dropped")
        assert found[1] == found[0]
        assert found[0][0]


@pytest.mark.parametrize("encoding", ["LATIN1", "KOI8R", "SQL_ASCII", "UTF8", "EUC_TW"])
def test_errors_are_in_the_clients_encoding(served: Publish, database: Database, encoding: str) -> None:
    """Names in the words of an error come back as they were sent, from us as from PostgreSQL."""
    found = []
    name = "пéa"  # of which encodings have some letters; Python does not know EUC_TW
    for conninfo in (database.conninfo, served.conninfo()):
        here = make_conninfo(conninfo, client_encoding=encoding)
        with Walsender(here) as walsender:
            codec = {"LATIN1": "latin1", "KOI8R": "koi8-r", "EUC_TW": "ascii"}.get(encoding, "utf-8")
            said = []
            for letter in name:
                with suppress(UnicodeEncodeError):
                    sent = letter.encode(codec)
                    result = walsender.pgconn.exec_(b'DROP_REPLICATION_SLOT "' + sent + b'"')
                    said.append((sent in result.error_message, result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)))
            found.append(said)
    assert found[1] == found[0]
    assert found[0]
    assert all(whole for whole, _ in found[0])


def _executed(session: psycopg.Connection[Any], statement: str) -> bool:
    with suppress(psycopg.errors.ObjectInUse):
        session.execute(statement)
        return True
    return False


def test_an_exported_snapshot_shows_what_was_committed_before_the_slot(
    served: Publish, ours: str, database: Database
) -> None:
    database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")
    with Walsender(ours) as walsender, psycopg.connect(ours) as reader:
        _, ((_, _, name, _),), _ = walsender.run("CREATE_REPLICATION_SLOT a LOGICAL pgoutput (SNAPSHOT 'export')")
        database.execute("INSERT INTO t VALUES (2)")
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute(f"SET TRANSACTION SNAPSHOT '{name}'")
        assert reader.execute("SELECT * FROM t").fetchall() == [(1,)]
        reader.rollback()
        assert walsender.run("SELECT count(*) FROM t")[1] == [("2",)], "it ends with the next command"
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(psycopg.Error):
            reader.execute(f"SET TRANSACTION SNAPSHOT '{name}'")
        walsender.run("DROP_REPLICATION_SLOT a")


def test_tls_with_a_certificate_of_ours(publisher: EmbeddedPostgres, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    publish = Publish(tmp_path / "node", publisher.conninfo(), "--cert", str(certificate), "--key", str(key))
    try:
        for mode, used in {"disable": False, "require": True, "verify-full": True}.items():
            root = {"sslrootcert": certificate} if mode == "verify-full" else {}
            with publish.connect(sslmode=mode, **root) as connection:
                assert (connection.pgconn.ssl_in_use, connection.execute("SELECT 1").fetchone()) == (used, (1,))
    finally:
        assert publish.terminate() == 0, publish.tail()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"\0\0\0\1", b"invalid length of startup packet"),
        (b"GET / HTTP/1.0\r\n\r\n", b"invalid length of startup packet"),
        (b"\0\0\0\x0c\0\3\0\0abcd", b"invalid startup packet layout"),
        (b"\0\0\0\x09\0\2\0\0\0", b"unsupported frontend protocol 2.0"),
        (b"\0\0\0\x10\x04\xd2\x16\x2e" + bytes(8), b""),  # a cancel request with a wrong key
    ],
)
def test_what_is_not_the_protocol_ends_the_connection(served: Publish, sent: bytes, answer: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(1000), b""))
    assert answer in received
    assert bool(received) == bool(answer)
