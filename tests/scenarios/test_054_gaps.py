"""A slot that lost changes, and an archive that has them: the subscription goes on from the archive, and copies nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from catalog.records import Subscription
from catalog.store import Catalog
from launcher import altersubscription
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import ConnectionFailure
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.archived import archive_of, archived_server
from tests.support.captured_logs import captured_logs
from tests.support.replica import Faults, Replica, RunningNode, wait_until


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    version = getattr(request, "param", "18")
    with archived_server(
        version, max_slot_wal_keep_size="1MB", max_prepared_transactions=5, logical_decoding_work_mem="64kB"
    ) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, n int, v text); CREATE TABLE u (id int PRIMARY KEY)")
        server.execute("INSERT INTO t SELECT g, 0, repeat(md5(g::text), 100) FROM generate_series(1, 50) g")
        server.execute("CREATE PUBLICATION p FOR TABLE t, u")
        yield server


@pytest.fixture
def archive(server: EmbeddedPostgres) -> Path:
    return archive_of(server)


class Followed(Replica):
    """A subscription with a folder of its own, because all these databases have one name."""

    def subscribe(self, publication: str = "p", **options: object) -> None:
        given = {"target": f"'{self.name}'", "wal_archive": f"'{self.archive}'", **options}
        super().subscribe(publication, **given)
        self.assert_equal("t", "u")

    @property
    def archive(self) -> Path:
        return archive_of(self.database.server)

    def is_lost(self) -> bool:
        found = self.query(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{self.name}'")
        return found == [("lost",)]

    def lose_the_slot(self) -> None:
        """Write until the server has invalidated the slot, which has no reader."""

        def write() -> bool:
            # Others may write rows with greater ids meanwhile.
            self.execute("INSERT INTO u SELECT least(min(id), 0) - g FROM u, generate_series(1, 1000) g GROUP BY g")
            self.query("SELECT pg_switch_wal()")
            self.execute("CHECKPOINT")
            return self.is_lost()

        wait_until(write, "the slot is lost")

    def generations(self) -> list[int]:
        return [self.relation(table).copy_generation for table in ("t", "u")]

    def status(self) -> dict[str, Any]:
        found = self.node.run(self.node._node.status()).as_json()["subscriptions"]
        return next(one for one in found if one["name"] == self.name)

    def has_a_slot(self) -> bool:
        return self.slots() == [self.name] and not self.is_lost()

    def goes_on(self) -> None:
        """Check that the tables are equal, and follow what is written once the slot keeps everything again."""
        self.assert_equal("t", "u")
        wait_until(self.has_a_slot, "the slot to have been made anew")
        self.execute("INSERT INTO t (id, n, v) SELECT max(id) + 1, 2, 'later' FROM t", "DELETE FROM u WHERE id % 2 = 0")
        self.assert_equal("t", "u")


@contextmanager
def written(replica: Followed) -> Iterator[None]:
    """Write small transactions, and streamed ones beside them, while the body runs."""
    stop = threading.Event()

    def small() -> None:
        with psycopg.connect(replica.conninfo, autocommit=True) as connection:
            number = 100_000
            while not stop.wait(0.01):
                number += 1
                connection.execute("INSERT INTO t (id, n, v) VALUES (%s, 0, 'w')", (number,))
                connection.execute("UPDATE t SET n = n + 1 WHERE id = %s", (number - 5,))

    def large() -> None:
        with psycopg.connect(replica.conninfo) as connection:
            number = 1_000_000
            while not stop.is_set():
                for _ in range(3):
                    number += 1000
                    connection.execute(
                        "INSERT INTO u SELECT g FROM generate_series(%s::int, %s::int) g", (number, number + 999)
                    )
                    stop.wait(0.1)
                connection.commit()

    writers = [threading.Thread(target=write) for write in (small, large)]
    for one in writers:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in writers:
            one.join()


@pytest.fixture
def replica(node: RunningNode, server: EmbeddedPostgres) -> Iterator[Followed]:
    replica = Followed(node, Database(server, "postgres"))
    yield replica
    replica.leave()


def test_a_lost_slot_is_made_anew_and_its_gap_is_filled(replica: Followed) -> None:
    replica.subscribe()
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.execute(
        "UPDATE t SET n = 1 WHERE id <= 25",  # leaves large values unchanged
        "BEGIN; INSERT INTO t SELECT g, 1, 'a' FROM generate_series(51, 3000) g; SAVEPOINT s; DELETE FROM t WHERE id = 60;"
        "ROLLBACK TO s; UPDATE t SET id = -id WHERE id = 55; COMMIT",
        "ALTER TABLE t ADD w int DEFAULT 7",
        "INSERT INTO t VALUES (4000, 2, 'b', 8)",
        "TRUNCATE u",
    )
    replica.lose_the_slot()
    replica.execute("ALTER TABLE t RENAME w TO x; UPDATE t SET x = 9 WHERE id = 2; DELETE FROM t WHERE id = 3")
    with captured_logs() as logs:
        replica.alter("ENABLE")
        replica.goes_on()
    assert replica.generations() == generations, "a table was copied"
    events = [entry["event"] for entry in logs]
    assert "replication slot does not keep what is to be applied next; it is decoded from the archive" in events
    assert "replication slot keeps again what is to be applied next" in events


def test_a_command_fetches_what_is_missing(
    tmp_path: Path, spark: Spark, server: EmbeddedPostgres, archive: Path
) -> None:
    """Nothing is copied anew because it cannot run, and nothing that it has fetched stays."""
    away, home = tmp_path / "away", tmp_path / "node"
    command = f"test ! -e {away} || exit 126; test -n $PUBSUB_SYSTEM_IDENTIFIER && cp '{archive}/%f' %p"
    with RunningNode(home, spark, restore_command=command) as node:
        replica = Followed(node, Database(server, "postgres"))
        try:
            replica.subscribe(wal_archive="'restore_command'", on_slot_loss="resync")
            generations = replica.generations()
            replica.alter("DISABLE")
            replica.execute("UPDATE t SET n = 1 WHERE id <= 25")
            replica.lose_the_slot()
            away.touch()
            replica.alter("ENABLE")
            found = failure(replica, "could not restore file")
            assert "from archive: child process exited with exit code 126" in found["error"]
            assert replica.is_lost()
            away.unlink()
            replica.goes_on()
            assert replica.generations() == generations, "a table was copied"
            wait_until(lambda: not list((home / "spill").glob("walsender-spill-*")), "what was fetched is gone")
        finally:
            replica.leave()


@pytest.mark.full
@pytest.mark.parametrize("server", ["15", "16", "17"], indirect=True)
def test_under_load(replica: Followed) -> None:
    replica.subscribe(streaming="on")
    generations = replica.generations()
    replica.alter("DISABLE")
    with written(replica):
        replica.lose_the_slot()
        replica.alter("ENABLE")
        wait_until(replica.has_a_slot, "the slot to have been made anew")
        caught_up = replica.query("SELECT pg_current_wal_lsn()")
    assert caught_up
    replica.goes_on()
    assert replica.generations() == generations, "a table was copied"


def failure(replica: Followed, part: str) -> dict[str, Any]:
    def told() -> dict[str, Any] | None:
        one = replica.status()
        return one if part in (one["error"] or "") else None

    return wait_until(told, f"the error {part!r}")


@pytest.mark.full
def test_the_archive_has_a_hole(replica: Followed, archive: Path) -> None:
    """The file that is missing is named, with what a copy would cost; no slot is made before the hole is filled."""
    replica.subscribe()
    replica.alter("DISABLE")
    for _ in range(3):
        replica.execute("UPDATE t SET n = n + 1")
        ((name,),) = replica.query("SELECT pg_walfile_name(pg_switch_wal())")
    replica.lose_the_slot()
    wait_until((archive / name).exists, "the file in the archive")
    (archive / name).rename(archive / "aside")
    replica.alter("ENABLE")
    found = failure(replica, name)
    assert found["error"].startswith(f'could not fill the gap that replication slot "{replica.name}" leaves from 0/')
    assert "RESYNC TABLE with every table of the subscription, which would read 2 tables of" in found["hint"]
    assert replica.is_lost()
    whole = (archive / "aside").read_bytes()
    (archive / name).write_bytes(whole[:500_000] + b"x" * 8192 + whole[508_192:])
    failure(replica, "could not fill the gap")
    (archive / "aside").rename(archive / name)
    replica.goes_on()


@pytest.mark.full
def test_the_archive_has_another_timeline_s_segments(
    replica: Followed, archive: Path, server: EmbeddedPostgres
) -> None:
    """Of a standby that was promoted beside the server, which goes on: what it wrote never happened here."""
    replica.subscribe()
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.execute("UPDATE t SET n = 1")
    with server.make_standby("sb") as other:
        other.promote()
        for number in range(3):
            other.execute(f"UPDATE t SET n = 100 + {number}; INSERT INTO u VALUES (-{number + 1})")
            other.query("SELECT pg_switch_wal()")
        wait_until(lambda: len([*archive.glob(f"00000002{'?' * 16}")]) >= 3, "the other timeline in the archive")
    replica.execute("UPDATE t SET n = n + 1 WHERE id < 20")
    replica.lose_the_slot()
    replica.alter("ENABLE")
    replica.goes_on()
    assert replica.generations() == generations, "a table was copied"


@pytest.mark.full
@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_the_archive_is_away(replica: Followed, archive: Path, left: str) -> None:
    """That is no missing segment, nor is one that is not mounted: tables are not copied anew because of it."""
    replica.subscribe(on_slot_loss="resync")
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.execute("UPDATE t SET n = 1")
    replica.lose_the_slot()
    archive.rename(archive.with_name("elsewhere"))
    if left == "nothing":
        replica.alter("ENABLE")
        found = failure(replica, f'could not open directory "{archive}": No such file or directory')
    else:
        archive.mkdir()
        replica.alter("ENABLE")
        found = failure(replica, "could not fill the gap")
        assert "mounted" in found["hint"]
        archive.rmdir()
    assert found["error"].startswith("could not fill the gap")
    archive.with_name("elsewhere").rename(archive)
    replica.goes_on()
    assert replica.generations() == generations, "a table was copied"


@pytest.mark.full
def test_two_phase_commit_is_asked_for_before_the_gap_is_filled(replica: Followed) -> None:
    """The worker once began again for it at once, over and over, and filled nothing."""
    replica.subscribe()
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.alter("SET (two_phase = true)")
    replica.lose_the_slot()
    replica.execute("UPDATE t SET n = 1")
    with captured_logs() as logs:
        replica.alter("ENABLE")
        replica.goes_on()
    enabled = "SELECT two_phase FROM pg_replication_slots"
    wait_until(lambda: replica.query(enabled) == [(True,)], "two-phase to be enabled")
    assert replica.generations() == generations, "a table was copied"
    assert sum(entry["event"] == "apply worker starts again" for entry in logs) < 3


@pytest.mark.full
def test_the_slot_is_made_anew_by_hand(replica: Followed) -> None:
    """It begins too late; so it does if the worker ends between the making of a slot and its position."""
    replica.subscribe()
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.database.server.drop_slot(replica.name)
    replica.execute("UPDATE t SET n = 1")
    replica.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
    replica.execute("UPDATE t SET n = n + 1 WHERE id < 10")
    replica.alter("ENABLE")
    replica.goes_on()
    assert replica.generations() == generations, "a table was copied"


@pytest.mark.full
@pytest.mark.parametrize("point", ["gap: caught up", "gap: slot made"])
def test_the_worker_ends_around_the_new_slot(replica: Followed, fault: Faults, point: str) -> None:
    replica.subscribe()
    replica.alter("DISABLE")
    replica.database.server.drop_slot(replica.name)
    replica.execute("UPDATE t SET n = 1")
    with written(replica):
        fault.arm(point, "hold")
        replica.alter("ENABLE")
        fault.wait(point)
        replica.alter("DISABLE")
        fault.clear()
        replica.execute("UPDATE t SET n = n + 1 WHERE id < 10")
        replica.alter("ENABLE")
        wait_until(replica.has_a_slot, "the slot to have been made anew")
    replica.goes_on()


@pytest.mark.full
def test_prepared_transactions_around_a_gap(replica: Followed) -> None:
    """Prepared before the gap and ended in it, prepared in it and ended after it."""
    replica.subscribe(two_phase="true")
    wait_until(
        lambda: replica.query("SELECT two_phase FROM pg_replication_slots") == [(True,)], "two-phase to be enabled"
    )
    for gid, key in (("early", 7001), ("never", 7002)):
        replica.execute(f"BEGIN; INSERT INTO t VALUES ({key}, 1, '{gid}'); PREPARE TRANSACTION '{gid}'")
    replica.caught_up()
    replica.alter("DISABLE")
    replica.execute("COMMIT PREPARED 'early'", "BEGIN; INSERT INTO t VALUES (7003, 1, 'a'); PREPARE TRANSACTION 'a'")
    replica.execute("COMMIT PREPARED 'a'", "ROLLBACK PREPARED 'never'")
    replica.lose_the_slot()
    replica.execute("BEGIN; INSERT INTO t VALUES (7004, 1, 'open'); PREPARE TRANSACTION 'open'")
    replica.alter("ENABLE")
    # The new slot waits for the prepared transaction, as every slot does; the stream goes on meanwhile.
    replica.execute("UPDATE t SET n = 5 WHERE id < 10")
    replica.assert_equal("t", "u")
    wait_until(
        lambda: any("It waits for transaction" in (one["detail"] or "") for one in replica.status()["warnings"]),
        "status to tell what the slot waits for",
    )
    replica.execute("COMMIT PREPARED 'open'")
    replica.goes_on()


@pytest.mark.full
def test_every_table_is_copied_anew_if_the_subscription_says_so(replica: Followed) -> None:
    """Once a day by default; the second loss within a day stops the subscription, as without the option."""
    replica.subscribe(wal_archive="none", on_slot_loss="resync")
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.lose_the_slot()
    replica.execute("UPDATE t SET n = 1")
    with captured_logs() as logs:
        replica.alter("ENABLE")
        wait_until(
            lambda: all(new > old for new, old in zip(replica.generations(), generations, strict=True)), "copies"
        )
        replica.goes_on()
        wait_until(lambda: replica.status()["error"] is None, "the error to be overcome")
        again = replica.generations()
        replica.alter("DISABLE")
        replica.database.server.drop_slot(replica.name)
        replica.alter("ENABLE")
        failure(replica, "does not exist")
        wait_until(
            lambda: any("tables are not copied anew again today" in entry["event"] for entry in logs),
            "the limit to be told",
        )
    (told,) = [entry for entry in logs if entry["event"] == "replication slot was lost: every table is copied anew"]
    assert told["tables"] == 2
    assert replica.generations() == again
    replica.alter(f"SET (wal_archive = '{replica.archive}')")
    replica.goes_on()
    assert replica.generations() == again


@pytest.mark.full
@pytest.mark.parametrize("where", ["drop_slots_of", "begin_stream_anew"])
def test_copies_anew_that_are_interrupted(replica: Followed, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Before the tables are to be copied, or before the slot is made: neither counts, and what was written meanwhile is there.

    Once they have begun nothing ends them.
    """
    replica.subscribe(wal_archive="none", on_slot_loss="resync")
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.lose_the_slot()
    replica.execute("UPDATE t SET n = 1")
    step = getattr(altersubscription, where)

    async def interrupted(*_: object) -> None:
        monkeypatch.setattr(altersubscription, where, step)
        replica.execute("INSERT INTO t VALUES (9001, 1, 'meanwhile')")
        raise ConnectionFailure("the publisher is away")

    paused: list[object] = []
    alter = Catalog.alter_subscription

    async def altered(self: Catalog, oid: int, **changes: Any) -> Subscription:
        if "options" in changes:
            paused.append((await self.subscription(oid)).paused)
        return await alter(self, oid, **changes)

    monkeypatch.setattr(altersubscription, where, interrupted)
    monkeypatch.setattr(Catalog, "alter_subscription", altered)
    with captured_logs() as logs:
        replica.alter("ENABLE")
        wait_until(lambda: [one + 1 for one in generations] == replica.generations(), "copies")
        replica.goes_on()
    assert replica.generations() == [one + 1 for one in generations], "once"
    assert bool(paused) == (where == "drop_slots_of")
    assert None not in paused, "a change of the subscription ends its workers"
    assert not any("not copied anew again today" in entry["event"] for entry in logs)


@pytest.mark.full
def test_a_standby_without_the_slot_takes_over(replica: Followed, server: EmbeddedPostgres) -> None:
    """What was not received lies on both timelines, partly only in the archive."""
    replica.subscribe()
    generations = replica.generations()
    with server.make_standby("sb") as standby:
        replica.alter("DISABLE")
        for number in range(4):
            replica.execute(f"UPDATE t SET n = {number} WHERE id < 20; INSERT INTO u VALUES ({number + 1})")
            replica.query("SELECT pg_switch_wal()")
        ((lsn,),) = replica.query("SELECT pg_current_wal_lsn()::text")
        wait_until(
            lambda: standby.query(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'") == [(True,)], "the standby's replay"
        )
        server.kill()
        standby.promote()
        replica.database = Database(standby, "postgres")
        for number in range(4):
            replica.execute(f"UPDATE t SET n = n + 1 WHERE id < 30; INSERT INTO u VALUES ({number + 11})")
            replica.query("SELECT pg_switch_wal()")
        replica.execute("CHECKPOINT")
        replica.alter(f"CONNECTION '{replica.conninfo}'")
        replica.alter("ENABLE")
        replica.goes_on()
        assert replica.generations() == generations, "a table was copied"
        replica.leave()


@pytest.mark.full
def test_a_standby_takes_over_while_the_gap_is_filled(
    replica: Followed, server: EmbeddedPostgres, fault: Faults
) -> None:
    """Its timeline is stored before anything of it is: else what is applied would seem lost in the failover."""
    replica.subscribe()
    generations = replica.generations()
    with server.make_standby("sb") as standby:
        ports = f"{server.port},{standby.port}"
        replica.alter(
            f"CONNECTION 'host=127.0.0.1,127.0.0.1 port={ports} user=postgres dbname=postgres target_session_attrs=read-write'"
        )
        replica.alter("DISABLE")
        replica.lose_the_slot()
        replica.execute("UPDATE t SET n = 3 WHERE id < 20")
        fault.arm("gap: being filled")
        replica.alter("ENABLE")
        fault.wait("gap: being filled")
        replica.assert_equal("t", "u")
        ((lsn,),) = replica.query("SELECT pg_current_wal_lsn()::text")
        wait_until(
            lambda: standby.query(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'") == [(True,)], "the standby's replay"
        )
        server.kill()
        standby.promote()
        replica.database = Database(standby, "postgres")
        replica.execute("UPDATE t SET n = 4 WHERE id < 30")
        replica.assert_equal("t", "u")
        fault.release("gap: being filled")
        replica.goes_on()
        wait_until(
            lambda: replica.query("SELECT active FROM pg_replication_slots") == [(True,)],
            "the stream from the new slot",
        )
        replica.goes_on()
        assert replica.generations() == generations, "a table was copied"
        replica.leave()


@pytest.mark.full
def test_a_slot_that_was_idle_for_too_long(replica: Followed, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    generations = replica.generations()
    replica.alter("DISABLE")
    replica.execute("UPDATE t SET n = 1")
    server.execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
    server.query("SELECT pg_reload_conf()")

    def lost() -> bool:
        replica.execute("CHECKPOINT")
        return replica.is_lost()

    wait_until(lost, "the slot to be invalidated")
    server.execute("ALTER SYSTEM RESET idle_replication_slot_timeout")
    server.query("SELECT pg_reload_conf()")
    with captured_logs() as logs:
        replica.alter("ENABLE")
        replica.goes_on()
    assert any(entry.get("reason") == "it was invalidated: idle_timeout" for entry in logs)
    assert replica.generations() == generations, "a table was copied"
