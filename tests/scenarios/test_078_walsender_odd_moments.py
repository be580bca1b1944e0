"""Moments that a decoder seldom meets: servers that crash or restart, commits that wait, files with the number of others."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, Message, create_slot, flush_lsn, slot_changes

pytestmark = pytest.mark.full

OPTIONS = {"proto_version": "1", "publication_names": "p"}
SETTINGS: dict[str, str | int] = {
    "autovacuum": "off",
    "max_prepared_transactions": 10,
    "allow_in_place_tablespaces": "on",
}
TABLE = "CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES"


def insert_lsn(server: EmbeddedPostgres) -> int:
    ((lsn,),) = server.query("SELECT pg_current_wal_insert_lsn()")
    return int(Lsn.parse(str(lsn)))


def inserted(messages: Sequence[Message]) -> list[bytes]:
    """Return the first column of each inserted row."""
    return [m.data[13 : 13 + int.from_bytes(m.data[9:13])] for m in messages if m.data[:1] == b"I"]


def followed(server: EmbeddedPostgres) -> None:
    """Wait until the decoding has read the catalogs, and follows the WAL."""
    seen = "SELECT 1 FROM pg_stat_replication WHERE application_name = 'walsender' AND state = 'streaming'"
    read = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'walsender' AND backend_type = 'client backend'"
    wait_until(lambda: bool(server.query(seen)) and not server.query(read), "the WAL is followed")


def test_a_commit_that_waits_for_a_synchronous_standby() -> None:
    """Its record lies before the checkpoint, and the list of running transactions still has it: it has taken place.

    What is changed while it waits, by a transaction that commits later, is sent.
    """
    local = "SET synchronous_commit = local; "
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (LIKE t); CREATE PUBLICATION p FOR TABLE t")
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.query("SELECT pg_reload_conf()")
        waits = threading.Thread(target=server.execute, args=("ALTER PUBLICATION p ADD TABLE u",))
        wait_until(lambda: server.query("SHOW synchronous_standby_names") == [("nobody",)], "the setting is there")
        waits.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: bool(server.query(waiting)), "the commit waits")
        server.execute("CHECKPOINT")
        with Decoding(server, "postgres") as decoding, server.connect() as one:
            followed(server)
            one.execute(local + "BEGIN; INSERT INTO u VALUES (1)")
            server.execute("ALTER SYSTEM RESET synchronous_standby_names")
            server.query("SELECT pg_reload_conf()")
            waits.join()
            server.execute("CHECKPOINT")
            decoding.wait_consistent()
            one.execute("INSERT INTO u VALUES (2); COMMIT")
            server.execute("INSERT INTO u VALUES (3)")
            decoding.wait_for(flush_lsn(server))
            assert inserted(decoding.stop()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("prepared", [False, True])
def test_what_a_crash_ends_is_undone_before_it_is_vacuumed(prepared: bool) -> None:
    """No record ends transactions that a crash of the server cuts off, and VACUUM removes their rows at once.

    A slot of the server's own would keep them; with checksums the first image of a page would be from before VACUUM.
    """
    with EmbeddedPostgres("18", settings=SETTINGS, initdb=["--no-data-checksums"]) as server:
        server.execute(TABLE)
        with Decoding(server, "postgres") as decoding:
            decoding.wait_consistent()
            lost, kept = server.connect(), server.connect()
            lost.execute(
                "BEGIN; CREATE TABLE lost (id serial PRIMARY KEY, a text); ALTER TABLE t ADD c int; SAVEPOINT s;"
                "CREATE TABLE lost_2 (id serial PRIMARY KEY); DROP TABLE lost; INSERT INTO t VALUES (-1)"
            )
            if prepared:
                kept.execute(
                    "BEGIN; CREATE TABLE kept (id int PRIMARY KEY); SAVEPOINT s; CREATE TABLE kept_2 (id int);"
                    "INSERT INTO kept VALUES (-2); INSERT INTO kept_2 VALUES (-3); PREPARE TRANSACTION 'x'"
                )
            decoding.wait_for(flush_lsn(server))
            server.kill()
            server.start()
            server.execute("VACUUM")
            for number in range(20):
                server.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY); INSERT INTO t{number} VALUES ({number})")
            if prepared:
                server.execute("COMMIT PREPARED 'x'")
                server.execute("INSERT INTO kept VALUES (20); INSERT INTO kept_2 VALUES (21)")
            server.execute("VACUUM")
            decoding.wait_for(flush_lsn(server))
            rows = [int(row) for row in inserted(decoding.stop())]
        assert rows == [*range(20), *((-2, -3, 20, 21) if prepared else ())]


@pytest.mark.parametrize("version", ["15", "16"])
def test_the_stream_of_a_transaction_that_a_crash_ended(version: str) -> None:
    """Its abort has no LSN.  (From 18 on a server that decodes after the crash streams nothing of it.)"""
    streaming = "on" if version == "15" else "parallel"
    options = {"proto_version": "2" if version == "15" else "4", "streaming": streaming}
    with EmbeddedPostgres(version, settings={**SETTINGS, "logical_decoding_work_mem": "64kB"}) as server:
        server.execute(TABLE)
        create_slot(server, "postgres", "compare", "pgoutput")
        with Decoding(
            server,
            "postgres",
            proto_version=int(options["proto_version"]),
            options=[f"streaming={streaming}"],
            more=["--work-mem", "64kB"],
        ) as decoding:
            decoding.wait_consistent()
            one = server.connect()
            one.execute("BEGIN; INSERT INTO t SELECT g, 'x' FROM generate_series(1, 3000) g")
            server.execute("INSERT INTO t VALUES (-1)")
            server.kill()
            server.start()
            server.execute("INSERT INTO t VALUES (-2)")
            server.execute("CHECKPOINT")
            end = flush_lsn(server)
            decoding.wait_for(end)
            ours = decoding.stop()
        given = {**options, "publication_names": "p"}
        theirs = slot_changes(server, "postgres", "compare", "pgoutput", given, work_mem="64kB")
    aborts = [m for m in theirs if m.data[:1] == b"A"]
    assert [(m.lsn, m.data[9:]) for m in aborts] == [(0, bytes(len(aborts[0].data) - 9))]
    assert [(m.lsn, m.data) for m in ours if m.data[:1] == b"A"] == [(m.lsn, m.data) for m in aborts]
    assert differences(ours, theirs) == ""


def test_prepared_before_decoding_began_and_over_two_restarts() -> None:
    """It was not seen whole, so that no point before its end is consistent, however often the server restarts."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute(TABLE)
        server.execute("BEGIN; INSERT INTO t VALUES (1); CREATE TABLE u (id int); PREPARE TRANSACTION 'x'")
        server.restart()
        with Decoding(server, "postgres") as decoding:
            followed(server)
            server.restart()
            server.execute("INSERT INTO t VALUES (2)")
            followed(server)
            server.restart("immediate")
            server.execute("INSERT INTO t VALUES (3)")
            server.execute("COMMIT PREPARED 'x'")
            ended = insert_lsn(server)
            server.execute("INSERT INTO t VALUES (4); INSERT INTO u VALUES (5)")
            end = flush_lsn(server)
            consistent = decoding.wait_consistent()
            decoding.wait_for(end)
            ours = decoding.stop()
        assert consistent <= ended
        assert inserted(ours) == [b"4", b"5"]


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("restarts", [1, 2])
def test_a_start_behind_restarts_over_which_a_transaction_was_prepared(two_phase: bool, restarts: int) -> None:
    """A shutdown checkpoint does not serve if a transaction was prepared there that ends behind the start."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute(TABLE)
        options = {**OPTIONS, "proto_version": "3", "two_phase": "on"} if two_phase else OPTIONS
        create_slot(server, "postgres", "compare", "pgoutput", two_phase=two_phase)
        server.execute("CHECKPOINT")
        server.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'x'")
        for number in range(restarts):
            server.execute(f"INSERT INTO t VALUES (1{number})")
            server.restart()
        ((redo,),) = server.query("SELECT redo_lsn FROM pg_control_checkpoint()")
        before = slot_changes(server, "postgres", "compare", "pgoutput", options)
        server.execute("INSERT INTO t VALUES (2)")
        start = insert_lsn(server)
        server.execute("INSERT INTO t VALUES (3)")
        server.execute("COMMIT PREPARED 'x'")
        server.execute("INSERT INTO t VALUES (4)")
        end = flush_lsn(server)
        theirs = slot_changes(server, "postgres", "compare", "pgoutput", options)
        assert len(before) == (4 if two_phase else 1) + 3 * restarts
        for begin, count in ((start, 2), (int(Lsn.parse(str(redo))), 3)):
            more = ["--start", str(Lsn(begin)), "--end", str(Lsn(end))]
            with Decoding(
                server,
                "postgres",
                proto_version=3 if two_phase else 1,
                options=["two_phase=on"] if two_phase else [],
                more=more,
            ) as decoding:
                ours = decoding.finish()
            # A stream that begins here was not sent the PREPARE, and gets it with the COMMIT PREPARED.
            assert inserted(ours) == [b"2", b"3", b"1", b"4"][-1 - count :]
            if begin != start and not two_phase:
                assert differences(ours, theirs) == ""


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "PREPARE TRANSACTION 'x'"])
def test_more_subtransactions_than_a_list_of_running_transactions_holds(end: str) -> None:
    """They had changed the catalogs when decoding began; the list names the whole transaction only."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute(TABLE)
        one = server.connect()
        one.execute("BEGIN; CREATE TABLE u (id int); INSERT INTO u VALUES (-1)")
        for number in range(70):
            one.execute(f"SAVEPOINT s{number}; CREATE TABLE u{number} (id int); ALTER TABLE u ADD c{number} int")
        with Decoding(server, "postgres") as decoding:
            followed(server)
            one.execute(
                "INSERT INTO u VALUES (-2); INSERT INTO u7 VALUES (-3); ROLLBACK TO s60; CREATE TABLE v (id int)"
            )
            server.execute("CHECKPOINT")
            server.execute("INSERT INTO t VALUES (1)")
            one.execute(end)
            if end.startswith("PREPARE"):
                server.restart()
                server.execute("VACUUM (SKIP_LOCKED)")
                server.execute("INSERT INTO t VALUES (2)")
                server.execute("COMMIT PREPARED 'x'")
            elif end == "ROLLBACK":
                server.execute("CREATE TABLE u (id int); CREATE TABLE v (id int)")
                for number in range(60):
                    server.execute(f"CREATE TABLE u{number} (id int)")
            server.execute("VACUUM")
            decoding.wait_consistent()
            server.execute("INSERT INTO u VALUES (1000); INSERT INTO v VALUES (1001)")
            for number in range(60):
                server.execute(f"INSERT INTO u{number} VALUES ({number})")
            decoding.wait_for(flush_lsn(server))
            rows = [int(row) for row in inserted(decoding.stop())]
        assert rows == [1000, 1001, *range(60)]


def test_a_resumed_stream_does_not_send_a_prepare_again() -> None:
    """What was sent at its PREPARE is only ended after a resumption, there and here."""
    options = {**OPTIONS, "proto_version": "3", "two_phase": "on"}
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute(TABLE)
        create_slot(server, "postgres", "compare", "pgoutput", two_phase=True)

        def decode(*more: str) -> Decoding:
            return Decoding(server, "postgres", proto_version=3, options=["two_phase=on"], more=more)

        with decode() as decoding:
            since = decoding.wait_consistent()
            server.execute("BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'x'")
            server.execute("BEGIN; INSERT INTO t VALUES (3); PREPARE TRANSACTION 'y'")
            end = flush_lsn(server)
            decoding.wait_for(end)
            ours = decoding.stop()
        assert differences(ours, slot_changes(server, "postgres", "compare", "pgoutput", options)) == ""
        assert [m.data[:1] for m in ours] == [b"b", b"R", b"I", b"P", b"b", b"I", b"P"]
        server.restart()
        server.execute("COMMIT PREPARED 'x'")
        server.execute("ROLLBACK PREPARED 'y'")
        more = ["--start", str(Lsn(end)), "--two-phase-at", str(Lsn(since)), "--end", str(Lsn(flush_lsn(server)))]
        with decode(*more) as decoding:
            ours = decoding.finish()
        theirs = slot_changes(server, "postgres", "compare", "pgoutput", options)
    assert [m.data[:1] for m in theirs] == [b"K", b"r"]
    assert [(m.lsn, m.data) for m in ours] == [(m.lsn, m.data) for m in theirs]


def test_slots_over_restarts_of_both_servers(tmp_path: Path) -> None:
    """Rows of ours are PostgreSQL's own: PREPAREs are not repeated, whichever server restarts, and what a crash ends is forgotten."""
    with EmbeddedPostgres("18", settings=SETTINGS, initdb=["--no-data-checksums"]) as server:
        server.execute(TABLE + "; CREATE TABLE w (id int)")
        publish = Publish(tmp_path / "node", server.conninfo())
        try:
            for slot, two_phase in (("plain", "false"), ("phases", "true")):
                made = "SELECT pg_create_logical_replication_slot('{}', 'test_decoding', false, {})"
                publish.query(made.format(slot, two_phase))
                server.query(made.format("their_" + slot, two_phase))

            def compare(*statements: str) -> None:
                for statement in statements:
                    server.execute(statement)
                changes = (
                    "SELECT lsn, xid, data FROM pg_logical_slot_get_changes('{}', NULL, NULL, 'skip-empty-xacts', 'on')"
                )
                for slot in ("plain", "phases"):
                    ours, theirs = (
                        publish.query(changes.format(slot)),
                        server.query(changes.format("their_" + slot)),
                    )
                    assert ours == theirs, slot

            compare("INSERT INTO t VALUES (1)", "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'x'")
            server.restart()
            compare("INSERT INTO t VALUES (3)", "BEGIN; ALTER TABLE w ADD c int; SAVEPOINT s; PREPARE TRANSACTION 'y'")
            publish.terminate()
            server.restart()
            publish.start()
            compare("ROLLBACK PREPARED 'y'", "ALTER TABLE w ADD c int", "INSERT INTO w VALUES (4, 4)")
            lost = server.connect()
            lost.execute("BEGIN; CREATE TABLE lost (id serial PRIMARY KEY, b text); INSERT INTO t VALUES (5)")
            compare("BEGIN; CREATE TABLE kept (a int); INSERT INTO kept VALUES (6); PREPARE TRANSACTION 'z'")
            publish.terminate()
            # A slot of the server's own that moved since the last checkpoint goes back in a crash.
            server.execute("CHECKPOINT")
            server.kill()
            server.start()
            publish.start()
            compare("VACUUM", "INSERT INTO t VALUES (7)", "CREATE TABLE u (a int)", "INSERT INTO u VALUES (8)")
            compare("COMMIT PREPARED 'x'", "COMMIT PREPARED 'z'", "VACUUM", "INSERT INTO kept VALUES (9)")
        finally:
            publish.terminate()


def reset_oid(server: EmbeddedPostgres, oid: int) -> None:
    """Have the server give the oid `oid` next, as after its counter has wrapped around."""
    server.stop()
    account = binaries.account()
    subprocess.run(
        [str(server.bin("pg_resetwal")), "-o", str(oid), str(server.data_dir)],
        check=True,
        capture_output=True,
        user=account.uid,
        group=account.gid,
        extra_groups=[] if account.uid is not None else None,
    )
    server.start()


def filenode(connection: psycopg.Connection, table: str) -> int:
    row = connection.execute(f"SELECT pg_relation_filenode('{table}')".encode()).fetchone()
    assert row is not None
    return int(str(row[0]))


def test_files_with_the_number_of_others() -> None:
    """Numbers of files are unique only within a tablespace; temporary tables have files of their own."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        setup = server.connect()
        setup.execute(TABLE.encode())
        setup.execute("CREATE TABLESPACE other LOCATION ''")
        setup.execute("CREATE TABLE a (id int PRIMARY KEY, b text); CREATE TABLE c (id int PRIMARY KEY)")
        setup.execute("TRUNCATE a")
        for _ in range(9):
            setup.execute("CREATE TABLE filler (id int); DROP TABLE filler")
        setup.execute("TRUNCATE t")
        number, temporary = filenode(setup, "a"), filenode(setup, "t")
        setup.close()
        reset_oid(server, number)
        server.execute("CREATE TABLE same (x int, y int, z text) TABLESPACE other")
        with server.connect() as one:
            assert filenode(one, "same") == number
        # The first temporary table of a session makes two schemas.
        reset_oid(server, temporary - 2)
        with server.connect() as session:
            session.execute("CREATE TEMP TABLE hides (q int, r int) ON COMMIT DELETE ROWS")
            assert filenode(session, "hides") == temporary
            create_slot(server, "postgres", "compare", "pgoutput")
            with Decoding(server, "postgres") as decoding, Decoding(server, "postgres", interpreted=True) as other:
                decoding.wait_consistent()
                other.wait_consistent()
                session.execute("BEGIN; INSERT INTO hides VALUES (1, 2); INSERT INTO t VALUES (1, 'one'); COMMIT")
                server.execute("INSERT INTO a VALUES (2, 'two'); INSERT INTO same VALUES (3, 3, 'three')")
                server.execute("INSERT INTO same VALUES (4, 4, 'four'); INSERT INTO a VALUES (5, 'five')")
                # The same in a transaction that has changed the catalogs, and with several rows in a record.
                server.execute(
                    "ALTER TABLE c ADD d int; INSERT INTO same VALUES (6, 6, 'six'); INSERT INTO a VALUES (7)"
                )
                with server.connect() as one, one.cursor() as cursor:
                    with cursor.copy("COPY same FROM STDIN") as copy:
                        copy.write("8\t8\teight\n9\t9\tnine\n")
                    with cursor.copy("COPY a FROM STDIN") as copy:
                        copy.write("10\tten\n11\televen\n")
                server.execute("UPDATE a SET b = 'x' WHERE id = 2; DELETE FROM a WHERE id = 5; TRUNCATE same")
                server.execute(
                    "ALTER TABLE a SET TABLESPACE other; INSERT INTO a VALUES (12); INSERT INTO same VALUES (13)"
                )
                server.execute("ALTER TABLE same SET TABLESPACE pg_default; INSERT INTO same VALUES (14)")
                end = flush_lsn(server)
                decoding.wait_for(end)
                other.wait_for(end)
                ours = decoding.stop()
                interpreted = other.stop()
        rows = inserted(ours)
        assert sorted(map(int, rows)) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
        assert differences(ours, slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)) == ""
        assert differences(interpreted, ours) == ""


def test_a_database_that_moves_to_another_tablespace() -> None:
    """All files of its default tablespace, catalogs among them, go on elsewhere with the numbers that they have.

    Nobody may be connected to the database then: only a decoding of WAL from before sees it.
    """
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute("CREATE TABLESPACE other LOCATION ''")
        server.create_database("moves")
        server.execute(TABLE, "moves")
        start = insert_lsn(server)
        server.execute("CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u VALUES (0)", "moves")
        server.execute("INSERT INTO t VALUES (1)", "moves")
        server.execute("INSERT INTO u VALUES (2); ALTER TABLE u ADD c int", "moves")
        server.execute("ALTER DATABASE moves SET TABLESPACE other")
        server.execute("INSERT INTO t VALUES (3); ALTER TABLE t ADD c int", "moves")
        server.execute("INSERT INTO t VALUES (4, '', 3); CREATE TABLE v (id int); INSERT INTO v VALUES (5)", "moves")
        server.execute("CREATE TABLE w (id int) TABLESPACE pg_default; INSERT INTO w VALUES (6)", "moves")
        server.execute("VACUUM", "moves")
        end = flush_lsn(server, "moves")
        with Decoding(server, "moves", more=["--start", str(Lsn(start)), "--end", str(Lsn(end))]) as decoding:
            rows = inserted(decoding.finish())
        assert rows == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]


def test_slots_of_a_database_that_moves_to_another_tablespace(tmp_path: Path) -> None:
    """The decoding process follows it: it is connected to the database only for a moment, when it begins."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        server.execute("CREATE TABLESPACE other LOCATION ''")
        server.create_database("moves")
        server.execute(TABLE, "moves")
        publish = Publish(tmp_path / "node", server.conninfo())
        nobody = "SELECT 1 FROM pg_stat_activity WHERE datname = 'moves'"
        try:
            publish.query("SELECT pg_create_logical_replication_slot('s', 'test_decoding')", dbname="moves")
            rows: list[str] = []
            for number, space in enumerate(("other", "pg_default", "other")):
                server.execute(f"INSERT INTO t VALUES ({number}); ALTER TABLE t ADD c{number} int", "moves")
                wait_until(lambda: not server.query(nobody), "nobody is connected")
                server.execute(f"ALTER DATABASE moves SET TABLESPACE {space}")
                server.execute(
                    f"INSERT INTO t (id, c{number}) VALUES (1{number}, 0); CREATE TABLE u{number} ()", "moves"
                )
                server.execute("VACUUM", "moves")
                if number == 1:
                    publish.kill()
                    publish.start()
                changes = "SELECT data FROM pg_logical_slot_get_changes('s', NULL, NULL, 'skip-empty-xacts', 'on')"
                found = publish.query(changes, dbname="moves")
                rows += [row.split("id[integer]:")[1].split()[0] for (row,) in found if "INSERT" in row]
        finally:
            publish.terminate()
        assert rows == ["0", "10", "1", "11", "2", "12"]


def test_a_start_before_a_database_was_copied_by_files() -> None:
    """No record has its catalogs: they are those of its template but where they have changed since."""
    with EmbeddedPostgres("18", settings=SETTINGS) as server:
        start = insert_lsn(server)
        server.execute("CREATE TABLE before (id int)")
        server.create_database("made", "STRATEGY file_copy")
        server.execute(TABLE, "made")
        server.execute("INSERT INTO t VALUES (1); ALTER TABLE t ADD c int; INSERT INTO t VALUES (2, '', 2)", "made")
        server.execute("CREATE TABLE u (id int); INSERT INTO u VALUES (3)", "made")
        server.execute("VACUUM", "made")
        end = flush_lsn(server, "made")
        with Decoding(server, "made", more=["--start", str(Lsn(start)), "--end", str(Lsn(end))]) as decoding:
            assert inserted(decoding.finish()) == [b"1", b"2", b"3"]
