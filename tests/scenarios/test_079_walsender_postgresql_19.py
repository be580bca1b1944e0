"""What PostgreSQL 19 brought for the decoder: publications with EXCEPT, REPACK, a level of WAL that slots raise.

The bytes are compared with those of the server's own decoding, as in test_070.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.scenarios.test_070_walsender import SETTINGS, Case, Servers, compare
from tests.support.replica import PATIENCE, wait_until
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, create_slot, flush_lsn, slot_changes

on_19 = pytest.mark.parametrize("version", ["19"])


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


EXCEPT_SETUP = """
CREATE TABLE a (id int PRIMARY KEY, v text);
CREATE TABLE b (id int PRIMARY KEY, v text);
CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE part PARTITION OF root FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id);
CREATE TABLE leaf PARTITION OF part FOR VALUES FROM (0) TO (50);
CREATE TABLE other PARTITION OF part FOR VALUES FROM (50) TO (100);
CREATE TABLE alone (id int PRIMARY KEY, v text);
CREATE SEQUENCE counter;
CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE b, root);
CREATE PUBLICATION q FOR ALL TABLES EXCEPT (TABLE a) WITH (publish_via_partition_root);
CREATE PUBLICATION r FOR TABLE b, part;
CREATE PUBLICATION s FOR ALL SEQUENCES
"""
_ROWS = (
    "INSERT INTO a SELECT g, 'a' FROM generate_series({0} * 10, {0} * 10 + 4) g",
    "INSERT INTO b SELECT g, 'b' FROM generate_series({0} * 10, {0} * 10 + 4) g",
    "INSERT INTO root VALUES (50 + {0}, 'leaf')",
    "INSERT INTO alone VALUES ({0} * 10, 'alone')",
    "UPDATE a SET v = v || '!'",
    "UPDATE b SET v = v || '!'",
    "UPDATE root SET v = v || '!'",
    "SELECT nextval('counter')",
)
_ALTERED = (
    "ALTER PUBLICATION p SET ALL TABLES EXCEPT (TABLE a)",
    "ALTER PUBLICATION q SET ALL TABLES EXCEPT (TABLE root, b)",
    "ALTER TABLE part DETACH PARTITION leaf; INSERT INTO leaf VALUES (1, 'of its own')",
    "ALTER TABLE part ATTACH PARTITION leaf FOR VALUES FROM (0) TO (50); INSERT INTO root VALUES (2, 'below')",
    (
        "ALTER TABLE root DETACH PARTITION part; INSERT INTO part VALUES (40, 'of its own'); "
        "ALTER TABLE root ATTACH PARTITION part FOR VALUES FROM (0) TO (100)"
    ),
    (
        "BEGIN; ALTER PUBLICATION p SET ALL TABLES; INSERT INTO a VALUES (-1); "
        "ALTER PUBLICATION p SET ALL TABLES EXCEPT (TABLE a, b); INSERT INTO a VALUES (-2), (-3); COMMIT"
    ),
    "DROP TABLE b; CREATE TABLE b (id int PRIMARY KEY, v text)",
)
EXCEPT_STATEMENTS = (
    *(
        statement
        for number, altered in enumerate(_ALTERED, 1)
        for statement in (*(row.format(number) for row in _ROWS), altered)
    ),
    "INSERT INTO b VALUES (1, 'new')",
    "TRUNCATE a, b, alone",
    "TRUNCATE root",
)


@on_19
def test_publications_for_all_tables_but_some(upstreams: Servers, version: str) -> None:
    compare(
        upstreams[version],
        EXCEPT_SETUP,
        EXCEPT_STATEMENTS,
        [Case(publications=names) for names in ("p", "q", "p,q", "p,r", "q,r,s")],
    )


REPACK_SETUP = """
CREATE TABLE t (id int PRIMARY KEY, v text, w text);
ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
CREATE TABLE named (id int PRIMARY KEY, v text);
ALTER TABLE named REPLICA IDENTITY FULL;
CREATE INDEX by_v ON named (v);
CREATE TABLE u (id int PRIMARY KEY, v text);
CREATE PUBLICATION p FOR ALL TABLES
"""
_CHANGES = (
    "INSERT INTO t SELECT g, repeat('x', 3000), 'w' FROM generate_series({0} * 100, {0} * 100 + 30) g",
    "UPDATE t SET w = w || '!' WHERE id % 3 = 0",
    "UPDATE t SET v = v || 'y' WHERE id % 5 = 0",
    "UPDATE t SET id = -id WHERE id % 7 = 1",
    "DELETE FROM t WHERE id % 11 = 0",
    "INSERT INTO named SELECT g, md5(g::text) FROM generate_series({0} * 100, {0} * 100 + 30) g",
    "UPDATE named SET v = 'other' WHERE id % 4 = 0",
    "DELETE FROM named WHERE id % 9 = 0",
    "INSERT INTO u SELECT g, 'u' FROM generate_series({0} * 100, {0} * 100 + 30) g",
    "UPDATE u SET id = -id, v = 'moved' WHERE id % 4 = 0",
    "DELETE FROM u WHERE id % 9 = 0",
)


@on_19
def test_repack(upstreams: Servers, version: str) -> None:
    """A table is rewritten, and so are the catalogs that decoding reads."""
    rewrites = (
        "t",
        "named USING INDEX by_v",
        "pg_class",
        "pg_attribute",
        "pg_publication",
        "pg_type",
    )
    statements = [
        statement
        for number, name in enumerate(rewrites, 1)
        for statement in (
            *(one.format(number) for one in _CHANGES),
            f"REPACK {name}",
            f"ALTER TABLE t ADD c{number} int",
        )
    ]
    compare(
        upstreams[version],
        REPACK_SETUP,
        [*statements, *(one.format(9) for one in _CHANGES)],
        [Case(), Case("test_decoding"), Case("test_decoding", options={"include-rewrites": "on"})],
    )


@on_19
def test_repack_beside_changes(version: str) -> None:
    """REPACK (CONCURRENTLY) applies the changes made meanwhile to its own copy; decoding leaves them out.

    A session that has the table locked, and no xid, makes changes after the copy: REPACK waits for its lock.
    """
    kinds = ("pgoutput", "test_decoding")
    with EmbeddedPostgres(version, settings=SETTINGS) as server, ThreadPoolExecutor(1) as pool:
        for statement in REPACK_SETUP.split(";\n"):
            server.execute(statement)
        for plugin in kinds:
            create_slot(server, "postgres", f"compare_{plugin}", plugin)
        with Decoding(server, "postgres") as first, Decoding(server, "postgres", plugin="test_decoding") as second:
            for decoding in (first, second):
                decoding.wait_consistent()
            for number, table in enumerate(("t", "u", "t"), 1):
                for statement in _CHANGES:
                    server.execute(statement.format(number))
                with server.connect() as holder:
                    holder.execute(f"BEGIN; LOCK TABLE {table} IN ROW EXCLUSIVE MODE".encode())
                    done = pool.submit(server.execute, f"REPACK (CONCURRENTLY) {table}")
                    waits = (
                        f"SELECT 1 FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted "
                        "AND mode = 'AccessExclusiveLock'"
                    )
                    wait_until(
                        lambda waits=waits, done=done: server.query(waits) or done.done(), "REPACK has made its copy"
                    )
                    assert not done.done(), done.result()
                    for statement in _CHANGES:
                        if f" {table} " in statement:
                            holder.execute(statement.format(number + 50).encode())
                    holder.execute(b"COMMIT")
                done.result(PATIENCE)
            end = flush_lsn(server)
            for plugin, decoding in zip(kinds, (first, second), strict=True):
                decoding.wait_for(end)
                options = {"proto_version": "1", "publication_names": "p"} if plugin == "pgoutput" else {}
                theirs = slot_changes(server, "postgres", f"compare_{plugin}", plugin, options)
                assert len(theirs) > 300
                assert differences(decoding.stop(), theirs, pgoutput=plugin == "pgoutput") == ""


# The level of the WAL


@on_19
def test_a_level_that_a_slot_has_raised_is_not_enough(version: str) -> None:
    """It ends with the slot, and a decoding without one could not keep it."""
    with EmbeddedPostgres(version, settings={**SETTINGS, "wal_level": "replica"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        assert 'wal_level is "replica", and must be "logical"' in _refused(server)
        create_slot(server, "postgres", "raises", "pgoutput")
        assert server.query("SHOW effective_wal_level") == [("logical",)]
        assert 'and "logical" only while a logical slot exists' in _refused(server)


def _restarted(server: EmbeddedPostgres, wal_level: str) -> None:
    server._settings["wal_level"] = wal_level
    server.restart()


def _refused(server: EmbeddedPostgres, start: int = 0, end: int = 0) -> str:
    """Decode a piece, or from now on; return what the command said when it failed."""
    more = ["--start", str(Lsn(start)), "--end", str(Lsn(end))] if end else []
    with Decoding(server, "postgres", more=more) as decoding:
        assert decoding.process.wait(PATIENCE) == 1, list(decoding.messages())
        wait_until(lambda: any("HINT:" in one or "CONTEXT:" in one for one in decoding.errors), "the error")
        return "".join(decoding.errors)


@on_19
def test_wal_that_lacks_old_keys_is_refused(version: str) -> None:
    """The WAL of a server that had no logical slot, had one, had none again; then wal_level = logical.

    What the slot covered is decoded; a piece that goes on behind its end is not, and one from before its beginning neither.
    """
    with EmbeddedPostgres(version, settings={**SETTINGS, "wal_level": "replica"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION p FOR TABLE t")
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        server.execute("INSERT INTO t SELECT g FROM generate_series(1, 20) g; CHECKPOINT")
        before = flush_lsn(server)
        server.execute("UPDATE t SET id = -id WHERE id = 1")
        with server.connect() as running:
            running.execute(b"BEGIN; INSERT INTO t VALUES (100)")
            # The transaction has an xid, and so goes on without old keys; the slot waits for its end.
            with ThreadPoolExecutor(1) as pool:
                made = pool.submit(create_slot, server, "postgres", "raises", "pgoutput")
                wait_until(lambda: server.query("SHOW effective_wal_level") == [("logical",)], "the level is raised")
                in_between = flush_lsn(server)
                running.execute(b"UPDATE t SET id = -id WHERE id = 2; COMMIT")
                made.result(PATIENCE)
        server.execute("UPDATE t SET id = -id WHERE id = 3")
        server.execute("CHECKPOINT")
        start = flush_lsn(server)
        server.execute("UPDATE t SET id = -id WHERE id = 4")
        server.execute("DELETE FROM t WHERE id = 5")
        end = flush_lsn(server)
        theirs = [
            m
            for m in slot_changes(
                server, "postgres", "raises", "pgoutput", {"proto_version": "1", "publication_names": "p"}
            )
            if m.lsn >= start or m.data[:1] == b"R"
        ]
        server.drop_slot("raises")
        wait_until(lambda: server.query("SHOW effective_wal_level") == [("replica",)], "the level is lowered")
        server.execute("UPDATE t SET id = -id WHERE id = 6")
        server.execute("CHECKPOINT")
        without = flush_lsn(server)
        server.execute("UPDATE t SET id = -id WHERE id = 7")
        _restarted(server, "logical")
        server.execute("UPDATE t SET id = -id WHERE id = 8")
        last = flush_lsn(server)
        with Decoding(server, "postgres", more=["--start", str(Lsn(start)), "--end", str(Lsn(end))]) as decoding:
            assert differences(decoding.finish(), theirs) == ""
        assert "Its last logical slot is gone" in _refused(server, start, last)
        for lacking in (before, in_between):
            assert 'logical decoding requires "wal_level" >= "logical"' in _refused(server, lacking, end)
        assert 'logical decoding requires "wal_level" >= "logical"' in _refused(server, without, last)


@on_19
def test_a_server_that_has_just_been_given_the_level(version: str) -> None:
    """After the restart it is written that logical decoding is possible now: that is no reason to stop."""
    with EmbeddedPostgres(version, settings={**SETTINGS, "wal_level": "replica"}) as server:
        server.execute(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; "
            "CREATE ROLE reader LOGIN REPLICATION; "
            "GRANT EXECUTE ON FUNCTION pg_read_binary_file(text, bigint, bigint, boolean) TO reader"
        )
        _restarted(server, "logical")
        # A role that may not make a checkpoint begins at the one of the shutdown.
        with Decoding(server, "postgres", conninfo=server.conninfo(user="reader")) as decoding:
            server.execute("INSERT INTO t VALUES (1)")
            decoding.wait_consistent()
            server.execute("INSERT INTO t VALUES (2)")
            server.execute("UPDATE t SET id = 3 WHERE id = 2")
            decoding.wait_for(flush_lsn(server))
            kinds = b"".join(message.data[:1] for message in decoding.stop())
        assert kinds.endswith((b"BRICBUC", b"BICBUC")), kinds
