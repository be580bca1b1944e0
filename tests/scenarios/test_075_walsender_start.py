"""--start and --end give the same piece of PostgreSQL's own decoding, whatever ran and wherever checkpoints were."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, wait_until
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, Message, create_slot, flush_lsn, slot_changes

OPTIONS = {"proto_version": "1", "publication_names": "p"}
SETTINGS: dict[str, str | int] = {"autovacuum": "off", "min_wal_size": "2MB", "max_wal_size": "8MB"}
LOAD = "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({0} * 10000, {0} * 10000 + 2000) g"


def insert_lsn(server: EmbeddedPostgres) -> int:
    ((lsn,),) = server.query("SELECT pg_current_wal_insert_lsn()")
    return int(Lsn.parse(str(lsn)))


def piece(messages: Sequence[Message], start: int, end: int) -> list[Message]:
    """Return the transactions whose commit records lie in [start, end), and all definitions."""
    found: list[Message] = []
    for message in messages:
        if message.data[:1] == b"B":
            committed = int.from_bytes(message.data[1:9])
        if start <= committed < end or message.data[:1] in {b"R", b"Y"}:
            found.append(message)
    return found


def between(start: int, end: int) -> list[str]:
    return ["--start", str(Lsn(start)), "--end", str(Lsn(end))]


@pytest.mark.full
def test_a_start_among_transactions() -> None:
    """A checkpoint serves only if every transaction that ran at it has ended; otherwise an older one does.

    The end of any transaction can be the start.
    """
    with EmbeddedPostgres("18", settings=SETTINGS, initdb=["--wal-segsize=1"]) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        create_slot(server, "postgres", "compare", "pgoutput")
        server.execute(LOAD.format(1))
        with server.connect() as long, server.connect() as longer:
            longer.execute("BEGIN; INSERT INTO t VALUES (-1)")
            for number in range(2, 4):
                server.execute(LOAD.format(number))
                server.execute("CHECKPOINT")
            long.execute("BEGIN; INSERT INTO t VALUES (-2)")
            server.execute("CHECKPOINT")
            server.execute(LOAD.format(4))
            start = insert_lsn(server)
            server.execute("INSERT INTO t VALUES (-3)")
            server.execute("CHECKPOINT")
            long.execute("COMMIT")
            server.execute("INSERT INTO t VALUES (-4)")
            # The server has other checkpoints by now, and this transaction is still running.
            server.execute(LOAD.format(5))
            end = flush_lsn(server)
            with Decoding(server, "postgres", more=between(start, end)) as decoding:
                before_the_last = decoding.finish()
            longer.execute("COMMIT")
        end = flush_lsn(server)
        theirs = slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)
        wanted = piece(theirs, start, end)
        assert len(wanted) == 1 + 4 * 3 + 2003
        with Decoding(server, "postgres", more=between(start, end)) as decoding:
            assert differences(decoding.finish(), wanted) == ""
        assert differences(before_the_last, wanted[:-3]) == ""
        # A transaction's LSN is its commit record's: --start includes the transaction, --end excludes it.
        commits = [int.from_bytes(m.data[1:9]) for m in wanted if m.data[:1] == b"B"]
        with Decoding(server, "postgres", more=between(commits[1], commits[3])) as decoding:
            assert differences(decoding.finish(), piece(theirs, commits[1], commits[3])) == ""
        # Without the slot that held the WAL the start is impossible, and is refused as a whole.
        server.drop_slot("hold")
        server.drop_slot("compare")
        with server.connect() as long:
            long.execute("BEGIN; INSERT INTO t VALUES (-5)")
            for number in range(6, 12):
                server.execute(LOAD.format(number))
                server.execute("CHECKPOINT")
            start = insert_lsn(server)
            server.execute("INSERT INTO t VALUES (-6)")
            end = flush_lsn(server)
            long.execute("COMMIT")
            with Decoding(server, "postgres", more=between(start, end)) as decoding:
                assert decoding.process.wait(PATIENCE) == 1
                wait_until(lambda: "HINT:" in "".join(decoding.errors), "the error")
                assert "there is no consistent point before transaction" in "".join(decoding.errors)
                assert list(decoding.messages()) == []


def test_killed_and_begun_again_at_its_position() -> None:
    """A physical slot keeps the WAL that the next process needs, which is more than what this one has not read."""
    with EmbeddedPostgres("18", settings=SETTINGS, initdb=["--wal-segsize=1"]) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        create_slot(server, "postgres", "compare", "pgoutput")
        begin = insert_lsn(server)
        restart = "SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'hold'"
        ((first,),) = server.query(restart)
        position = begin
        ours: list[Message] = []
        with server.connect() as long:
            for number in range(3):
                more = ["--slot", "hold", "--start", str(Lsn(position))]
                with Decoding(server, "postgres", more=more) as decoding:
                    server.execute(LOAD.format(10 * number + 1))
                    if number != 1:
                        long.execute(f"BEGIN; INSERT INTO t VALUES (-{number + 1})")
                    for part in range(2, 6):
                        server.execute(LOAD.format(10 * number + part))
                        server.execute("CHECKPOINT")
                    if number == 1:
                        long.execute("COMMIT")
                    position = flush_lsn(server)
                    decoding.wait_consistent()
                    decoding.wait_for(position)
                    decoding.process.kill()
                    decoding.process.wait()
                    ours += decoding.messages()
            long.execute("ROLLBACK")
            theirs = slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)
            assert differences(ours, theirs) == ""
            with Decoding(server, "postgres", more=["--slot", "hold"]) as decoding:
                decoding.wait_consistent()
                for part in range(2):
                    server.execute(f"UPDATE t SET b = '{part}' WHERE id % 10 = 1")
                    server.execute("CHECKPOINT")
                wait_until(
                    lambda: server.query(f"SELECT pg_lsn '{first}' < ({restart})") == [(True,)], "the slot moves"
                )


def test_a_start_in_a_database_made_since_the_checkpoint() -> None:
    """The files at the checkpoint hold none of its catalogs; the WAL has them whole.  Others may be made meanwhile."""
    with EmbeddedPostgres("18", settings={"autovacuum": "off"}) as server:
        server.create_database("made")
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES", "made")
        create_slot(server, "made", "compare", "pgoutput")
        start = insert_lsn(server)
        server.execute("INSERT INTO t SELECT g FROM generate_series(1, 20) g", "made")
        server.execute("ALTER TABLE t ADD c int DEFAULT 7; UPDATE t SET b = 'x' WHERE id < 5", "made")
        server.create_database("other")
        server.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)", "other")
        server.execute("DELETE FROM t WHERE id > 10", "made")
        end = flush_lsn(server, "made")
        with Decoding(server, "made", more=between(start, end)) as decoding:
            ours = decoding.finish()
        theirs = slot_changes(server, "made", "compare", "pgoutput", OPTIONS)
        assert len(ours) > 30
        assert differences(ours, piece(theirs, start, end)) == ""


def test_a_start_where_the_server_was_shut_down() -> None:
    """No transaction ran at the shutdown checkpoint, so an older one, with a catalog's other file, is not needed."""
    with EmbeddedPostgres("15", settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        server.execute("VACUUM FULL pg_class")
        server.restart()
        ((redo,),) = server.query("SELECT redo_lsn FROM pg_control_checkpoint()")
        create_slot(server, "postgres", "compare", "pgoutput")
        server.execute("INSERT INTO t SELECT g FROM generate_series(1, 20) g")
        end = flush_lsn(server)
        with Decoding(server, "postgres", more=["--start", str(redo), "--end", str(Lsn(end))]) as decoding:
            ours = decoding.finish()
        assert differences(ours, piece(slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS), 0, end)) == ""


def test_a_transaction_that_is_prepared_outlives_the_server() -> None:
    """It ran when decoding began, so a part of it was not seen, and no point before its end is consistent."""
    settings: dict[str, str | int] = {"autovacuum": "off", "max_prepared_transactions": 5}
    with EmbeddedPostgres("18", settings=settings) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES")
        with server.connect() as one:
            one.execute("BEGIN; INSERT INTO t VALUES (1)")
            with Decoding(server, "postgres") as decoding:
                seen = "SELECT backend_type FROM pg_stat_activity WHERE application_name = 'walsender'"
                wait_until(lambda: server.query(seen) == [("walsender",)], "the catalogs are read")
                one.execute("INSERT INTO t VALUES (2); PREPARE TRANSACTION 'x'")
                server.restart()
                server.execute("INSERT INTO t VALUES (3)")
                server.execute("COMMIT PREPARED 'x'")
                ended = insert_lsn(server)
                server.execute("INSERT INTO t VALUES (4)")
                end = flush_lsn(server)
                consistent = decoding.wait_consistent()
                decoding.wait_for(end)
                ours = decoding.stop()
        assert consistent <= ended
        assert [message.data[-1:] for message in ours if message.data[:1] == b"I"] == [b"4"]


@pytest.mark.full
@pytest.mark.parametrize("version", ["15", "18", "19"])
def test_a_start_before_the_wal_was_for_logical_decoding(version: str) -> None:
    """Rows in that WAL are not whole and would be left out silently; other settings may change freely."""
    with EmbeddedPostgres(version, settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        server._settings["wal_level"] = "replica"
        server.restart()
        server.execute("CHECKPOINT")
        start = insert_lsn(server)
        server.execute("INSERT INTO t VALUES (1), (2)")
        server.execute("CHECKPOINT")
        server._settings["wal_level"] = "logical"
        server.restart()
        begin = insert_lsn(server)
        create_slot(server, "postgres", "compare", "pgoutput")
        server.execute("INSERT INTO t VALUES (3)")
        server.execute("CHECKPOINT")
        server._settings["max_connections"] = 50
        server.restart()
        server.execute("UPDATE t SET b = 'x'")
        end = flush_lsn(server)
        with Decoding(server, "postgres", more=between(start, end)) as decoding:
            assert decoding.process.wait(PATIENCE) == 1
            wait_until(lambda: "CONTEXT:" in "".join(decoding.errors), "the error")
            errors = "".join(decoding.errors)
            assert 'logical decoding requires "wal_level" >= "logical" on the primary' in errors
            assert "consistent point" not in errors
        with Decoding(server, "postgres", more=between(begin, end)) as decoding:
            ours = decoding.finish()
        assert len(ours) == 4 + 5
        assert differences(ours, slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)) == ""
