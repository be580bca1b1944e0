"""A standby takes over: the decoding goes on across the switch of timelines, from the stream and from an archive."""

from __future__ import annotations

import shutil
from pathlib import Path

from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import wait_until
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, flush_lsn
from tests.support.walsender_random import Replica

SETTINGS: dict[str, str | int] = {"autovacuum": "off", "wal_keep_size": "256MB"}


def change(server: EmbeddedPostgres, number: int) -> None:
    """Make rows and DDL whose meaning depends on what came before."""
    server.execute(
        f"INSERT INTO t1 SELECT g, 'row ' || g FROM generate_series({number * 100}, {number * 100 + 60}) g; "
        f"UPDATE t1 SET b = 'changed in {number}' WHERE id % 7 = {number % 7}; DELETE FROM t1 WHERE id % 11 = {number}"
    )
    server.execute(f"ALTER TABLE t1 ADD COLUMN c{number} int; INSERT INTO t1 VALUES ({-number})")
    server.execute(f"BEGIN; CREATE TABLE t2{number} (id int PRIMARY KEY); INSERT INTO t2{number} VALUES (1); COMMIT")


def test_a_promotion(tmp_path: Path) -> None:
    with EmbeddedPostgres("18", settings=SETTINGS) as primary:
        primary.execute("CREATE TABLE t1 (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        with primary.make_standby("sb") as standby:
            primary.execute("CHECKPOINT")
            one, two = (dict(part.split("=", 1) for part in s.conninfo().split()) for s in (primary, standby))
            conninfo = (
                f"user={one['user']} dbname=postgres host={one['host']},{two['host']} port={one['port']},{two['port']} "
                "target_session_attrs=read-write"
            )
            with Decoding(primary, "postgres", conninfo=conninfo) as decoding:
                start = decoding.wait_consistent()
                change(primary, 1)
                change(primary, 2)
                end = flush_lsn(primary)
                wait_until(
                    lambda: standby.query(f"SELECT pg_last_wal_replay_lsn() >= '{Lsn(end)}'") == [(True,)],
                    "the standby's replay",
                )
                archive = tmp_path / "archive"
                primary.stop()
                standby.promote()
                shutil.copytree(primary.data_dir / "pg_wal", archive)
                change(standby, 3)
                change(standby, 4)
                assert standby.query("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)") == [("00000002",)]
                end = flush_lsn(standby)
                decoding.wait_for(end)
                streamed = decoding.stop()
            replica = Replica()
            replica.apply(streamed)
            assert replica.difference(standby, "postgres") == ""
            # The last segments of the old primary and those of the new one, with its history, lie beside each other.
            for path in (standby.data_dir / "pg_wal").iterdir():
                if path.name.startswith("00000002"):
                    shutil.copy(path, archive)
            more = ["--wal", str(archive), "--start", str(Lsn(start)), "--end", str(Lsn(end))]
            # Before the new timeline's first checkpoint its history is found on the way, after it in the directory.
            for statement in ("SELECT", "CHECKPOINT"):
                standby.execute(statement)
                with Decoding(standby, "postgres", more=more) as decoding:
                    assert differences(decoding.finish(), streamed) == ""
