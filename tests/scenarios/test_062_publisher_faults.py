"""Faults of a publisher under a subscription: each is reported with its reason and a hint, and nothing is lost."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from catalog.store import Catalog
from pubsub.cli.app import app
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.captured_logs import captured_logs
from tests.support.replica import Faults, Replica, RunningNode, wait_until

on_both = pytest.mark.parametrize("server", ["15", "18"], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """A server that a test may break; PostgreSQL 18 unless the test names a version."""
    with EmbeddedPostgres(getattr(request, "param", "18"), settings={"max_prepared_transactions": 5}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE TABLE u (id int PRIMARY KEY)")
        server.execute("INSERT INTO t SELECT g, 0 FROM generate_series(1, 50) g; CREATE PUBLICATION p FOR TABLE t, u")
        yield server


class Followed(Replica):
    """A subscription with a folder of its own, because all these databases have one name."""

    def subscribe(self, publication: str = "p", **options: object) -> None:
        super().subscribe(publication, target=f"'{self.name}'", **options)


@pytest.fixture
def replica(node: RunningNode, server: EmbeddedPostgres) -> Iterator[Replica]:
    replica = Followed(node, Database(server, "postgres"))
    yield replica
    replica.leave()


def status(replica: Replica) -> dict[str, Any]:
    found = replica.node.run(replica.node._node.status()).as_json()["subscriptions"]
    return next(one for one in found if one["name"] == replica.name)


def failure(replica: Replica, part: str) -> dict[str, Any]:
    """Wait for an error that contains `part`; return `status`, and check that pg_stat_subscription agrees."""

    def told() -> dict[str, Any] | None:
        one = status(replica)
        return one if part in (one["error"] or "") else None

    found = wait_until(told, f"the error {part!r}")
    (row,) = replica.node.fetch(
        f"SELECT error, error_hint FROM pg_stat_subscription WHERE subname = '{replica.name}' AND relid IS NULL"
    )
    assert part in row["error"]
    assert row["error_hint"]
    return found


def warned(replica: Replica, part: str) -> dict[str, Any]:
    def told() -> dict[str, Any] | None:
        return next((one for one in status(replica)["warnings"] if part in one["message"]), None)

    return wait_until(told, f"the warning {part!r}")


def cut(server: EmbeddedPostgres, slot: str) -> None:
    server.query(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'")


def resync(replica: Replica) -> None:
    replica.alter("RESYNC TABLE t, u")
    replica.execute("UPDATE t SET n = n + 1")
    replica.assert_equal("t", "u")


@pytest.mark.full
@on_both
def test_the_slot_is_dropped_and_made_anew(replica: Replica, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    replica.assert_equal("t", "u")
    server.drop_slot(replica.name)
    replica.execute("UPDATE t SET n = 1")
    found = failure(replica, f'replication slot "{replica.name}" does not exist')
    assert "RESYNC TABLE" in found["hint"]
    # A new slot of that name lacks what was written meanwhile; a stock subscriber would go on without it.
    server.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
    found = failure(replica, f'replication slot "{replica.name}" begins at')
    assert "RESYNC TABLE" in found["hint"]
    server.drop_slot(replica.name)
    with pytest.raises(Exception, match="does not exist"):
        replica.alter("RESYNC TABLE t")
    resync(replica)
    wait_until(lambda: status(replica)["error"] is None, "the error to be overcome")


@on_both
def test_the_slot_is_lost(node: RunningNode, server: EmbeddedPostgres, replica: Replica) -> None:
    """max_slot_wal_keep_size: first a warning, then the reason."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.alter("DISABLE")
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '48MB'")
    server.execute("ALTER SYSTEM SET max_wal_size = '64MB'")
    server.query("SELECT pg_reload_conf()")
    replica.execute("CREATE TABLE filler (b text)", "UPDATE t SET n = 2")
    for _ in range(3):
        replica.execute("INSERT INTO filler SELECT repeat(md5(g::text), 30) FROM generate_series(1, 12000) g")
        server.query("SELECT pg_switch_wal()")
    replica.alter("SET (batch_age = '30ms')")  # the publisher is looked at again, which is rare while disabled
    warning = warned(replica, "retains")
    assert "max_slot_wal_keep_size" in warning["hint"]
    assert status(replica)["retained_wal_bytes"] > 30_000_000
    while server.query(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{replica.name}'") != [
        ("lost",)
    ]:
        replica.execute("INSERT INTO filler SELECT repeat(md5(g::text), 30) FROM generate_series(1, 12000) g")
        replica.execute("CHECKPOINT")
    replica.alter("ENABLE")
    found = failure(replica, "replication slot" if server.version == "18" else "slot")
    assert "wal_status is lost" in found["detail"]
    assert "RESYNC TABLE" in found["hint"]
    replica.execute("DROP TABLE filler")
    resync(replica)


@pytest.mark.full
def test_the_slot_of_a_copy_is_warned_of(replica: Replica, server: EmbeddedPostgres, fault: Faults) -> None:
    """It retains WAL as long as the copy takes, while the subscription's own moves on."""
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '48MB'")
    server.query("SELECT pg_reload_conf()")
    replica.execute("CREATE TABLE filler (b text)")
    fault.arm("copy planned public.t")
    with captured_logs() as logs:
        replica.subscribe()
        fault.wait("copy planned public.t")
        retained = "SELECT max(pg_current_wal_lsn() - restart_lsn) > 40000000 FROM pg_replication_slots WHERE slot_name ~ '_sync_'"
        while server.query(retained) != [(True,)]:
            replica.execute("INSERT INTO filler SELECT repeat(md5(g::text), 30) FROM generate_series(1, 3000) g")
        warning = warned(replica, "with which table public.t is copied, retains")
        assert "max_slot_wal_keep_size" in warning["hint"]
        told = ("replication slot is lost, or soon will be", "replication slot is in no danger any more")
        wait_until(lambda: [one for one in logs if one["event"] == told[0]], "the log to tell")
        fault.release("copy planned public.t")
        replica.assert_equal("t", "u")
        wait_until(lambda: [one for one in logs if one["event"] == told[1]], "the end of the danger")
    assert [one["slot"].split("_")[2] for one in logs if one["event"] in told] == ["sync", "sync"]
    assert replica.relation("t").copy_generation == 1


def test_the_slot_is_in_use(replica: Replica, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.alter("DISABLE")
    other = psycopg.connect(server.conninfo(replication="database", application_name="thief"), autocommit=True)
    try:
        copy = other.pgconn
        copy.send_query(
            f"START_REPLICATION SLOT {replica.name} LOGICAL 0/0 (proto_version '1', publication_names 'p')".encode()
        )
        wait_until(
            lambda: (
                server.query(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{replica.name}'") == [(True,)]
            ),
            "the thief",
        )
        replica.alter("ENABLE")
        found = failure(replica, "is active for PID")
        assert "thief" in found["detail"]
    finally:
        other.close()
    replica.execute("UPDATE t SET n = 3")
    replica.assert_equal("t", "u")
    wait_until(lambda: status(replica)["error"] is None, "the error to be overcome")


@on_both
def test_a_publication_is_dropped_and_comes_back(replica: Replica, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.execute("UPDATE t SET n = 4", "DROP PUBLICATION p", "INSERT INTO u VALUES (1)")
    if server.version == "15":
        found = failure(replica, 'publication "p" does not exist')
    else:
        found = failure(replica, "does not exist on the publisher")
    assert found["hint"]
    warned(replica, 'publication "p" does not exist')
    kept = replica.rows("u")
    assert kept == []
    replica.execute("CREATE PUBLICATION p FOR TABLE t, u", "INSERT INTO u VALUES (2)")
    if server.version == "15":
        # 15's walsender looks publications up as of the change, so the error stays forever.
        found = failure(replica, 'publication "p" does not exist')
        wait_until(lambda: "RESYNC" in (status(replica)["hint"] or ""), "the hint")
    else:
        wait_until(lambda: replica.rows("u") == [{"id": 2}], "the row that is published again")
        assert "RESYNC" in warned(replica, "skipped loading publication")["hint"]
    resync(replica)


@pytest.mark.full
def test_a_publication_is_altered_under_load(replica: Replica, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    replica.execute("INSERT INTO u VALUES (1)")
    replica.assert_equal("t", "u")
    replica.execute("ALTER PUBLICATION p DROP TABLE u", "INSERT INTO u VALUES (2)", "UPDATE t SET n = 5")
    replica.assert_equal("t")
    assert replica.rows("u") == [{"id": 1}]
    replica.execute("ALTER PUBLICATION p ADD TABLE u", "INSERT INTO u VALUES (3)")
    replica.alter("REFRESH PUBLICATION")
    replica.caught_up()
    assert sorted(row["id"] for row in replica.rows("u")) == [1, 3]
    replica.execute("ALTER PUBLICATION p SET (publish = 'insert')", "DELETE FROM t", "INSERT INTO u VALUES (4)")
    replica.caught_up()
    assert len(replica.rows("t")) == 50
    assert sorted(row["id"] for row in replica.rows("u")) == [1, 3, 4]


def test_another_cluster_at_the_address(replica: Replica, server: EmbeddedPostgres) -> None:
    replica.subscribe()
    replica.assert_equal("t", "u")
    server.stop()
    with EmbeddedPostgres(server.version, port_of=server) as other:
        other.execute("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE TABLE u (id int PRIMARY KEY)")
        other.execute("CREATE PUBLICATION p FOR TABLE t, u")
        other.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
        other.execute("INSERT INTO t VALUES (1000, 0)")
        found = failure(replica, "is another database system")
        assert "system identifier" in found["detail"]
        assert len(replica.rows("t")) == 50
        other.stop()
        server.start()
        replica.execute("INSERT INTO t VALUES (51, 0)")
        replica.assert_equal("t", "u")
        # By command the other system may be followed: every table is copied anew.
        server.stop()
        other.start()
        replica.database = Database(other, "postgres")
        resync(replica)
        other.stop()
    server.start()
    replica.database = Database(server, "postgres")


class Copy:
    """A copy of a stopped server's files, as a backup has them; `swap` puts it in their place, and the files in its."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._copy = server.data_dir.with_name("copy")
        server.stop()
        subprocess.run(["cp", "-a", server.data_dir, self._copy], check=True)  # the owner, too
        server.start()

    def swap(self) -> None:
        self._server.stop()
        aside = self._copy.with_name("aside")
        self._server.data_dir.rename(aside)
        self._copy.rename(self._server.data_dir)
        aside.rename(self._copy)
        self._server.start()


def end_of_wal(server: EmbeddedPostgres) -> Lsn:
    ((end,),) = server.query("SELECT pg_current_wal_flush_lsn()::text")
    return Lsn.parse(end)


def write_until(server: EmbeddedPostgres, lsn: Lsn) -> None:
    """Commit other transactions until the WAL has passed `lsn`."""
    while end_of_wal(server) <= lsn:
        server.execute("INSERT INTO t SELECT coalesce(max(id), 0) + 1, -1 FROM t")


@pytest.mark.parametrize(
    ("server", "seen"),
    [
        ("18", "when it has passed"),
        pytest.param("18", "while it is behind", marks=pytest.mark.full),
        pytest.param("15", "when it has passed", marks=pytest.mark.full),
        pytest.param("15", "while it is behind", marks=pytest.mark.full),
    ],
    indirect=["server"],
)
def test_a_publisher_is_restored_from_a_copy(replica: Replica, server: EmbeddedPostgres, seen: str) -> None:
    """Same system, same timeline: what it writes from now on would be taken for what it had written before."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    copy = Copy(server)
    for key in range(51, 91):
        replica.execute(f"INSERT INTO t VALUES ({key}, 1)")
    replica.assert_equal("t", "u")
    held = end_of_wal(server)
    rows = replica.rows("t", "* FROM delta_t ORDER BY id")
    if seen == "when it has passed":
        replica.alter("DISABLE")
    copy.swap()
    if seen == "when it has passed":
        write_until(server, held)
        replica.alter("ENABLE")
        found = failure(replica, "does not have the commit at")
    else:
        found = failure(replica, "the publisher's WAL ends at")
        # Later its WAL has passed that; nothing of it is taken all the same.
        write_until(server, held)
        cut(server, replica.name)
        found = failure(replica, "was found to lack WAL before")
    assert "RESYNC TABLE" in found["hint"]
    assert "CONNECTION" in found["hint"]
    assert replica.rows("t", "* FROM delta_t ORDER BY id") == rows
    with pytest.raises(Exception, match="was found to lack WAL before"):
        replica.alter("RESYNC TABLE t")
    resync(replica)
    wait_until(lambda: status(replica)["error"] is None, "the error to be overcome")
    replica.execute("INSERT INTO t VALUES (1000, 1)")
    replica.assert_equal("t", "u")


@pytest.mark.full
@on_both
def test_a_publisher_is_restored_to_where_nothing_was_published(replica: Replica, server: EmbeddedPostgres) -> None:
    """It lacks nothing that was received: what it publishes before the origin, to which keepalives had moved, is new."""
    replica.subscribe()
    replica.execute("INSERT INTO t VALUES (51, 1)")
    replica.assert_equal("t", "u")
    server.execute("CREATE TABLE unpublished (n int); INSERT INTO unpublished SELECT generate_series(1, 1000)")
    copy = Copy(server)
    server.execute("INSERT INTO unpublished SELECT generate_series(1, 1000)")
    held = end_of_wal(server)
    wait_until(lambda: replica.received_lsn() >= held, "a keepalive")
    replica.assert_equal("t", "u")
    replica.alter("DISABLE")
    copy.swap()
    write_until(server, held)
    assert len(replica.query("SELECT FROM t WHERE n = -1")) > 1
    replica.alter("ENABLE")
    replica.assert_equal("t", "u")


@pytest.mark.full
def test_a_skipped_transaction_stays_skipped_where_the_slot_has_gone_back(
    replica: Replica, server: EmbeddedPostgres
) -> None:
    """A server that was restored to a moment before the transaction was skipped, or that has crashed, would send it again."""
    replica.subscribe()
    replica.execute("ALTER TABLE u ADD at timestamptz", "INSERT INTO t VALUES (51, 1)")
    replica.assert_equal("t")
    replica.execute("BEGIN; INSERT INTO t VALUES (52, 2); INSERT INTO u VALUES (1, 'infinity'); COMMIT")
    replica.error()
    (lsn,) = re.findall(r"finished at ([0-9A-F]+/[0-9A-F]+)", replica.node.statistics(replica.name)["error_detail"])
    copy = Copy(server)
    replica.alter(f"SKIP (lsn = '{lsn}')")
    replica.execute("CREATE TABLE unpublished (n int)")
    held = end_of_wal(server)
    wait_until(lambda: replica.received_lsn() >= held, "a keepalive")
    replica.caught_up()
    replica.alter("DISABLE")
    copy.swap()
    write_until(server, held)
    replica.alter("ENABLE")
    replica.assert_equal("t", where="id <> 52")
    assert [row for row in replica.rows("t") if row["id"] == 52] == []


@pytest.mark.full
def test_a_copy_of_the_publisher_answers_by_mistake(replica: Replica, server: EmbeddedPostgres) -> None:
    """When the right server is back, CONNECTION has it looked at again, and nothing was lost."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    copy = Copy(server)
    replica.execute("INSERT INTO t SELECT g, 1 FROM generate_series(51, 90) g")
    replica.assert_equal("t", "u")
    copy.swap()
    failure(replica, "the publisher's WAL ends at")
    copy.swap()
    replica.execute("INSERT INTO t VALUES (91, 1)")
    failure(replica, "was found to lack WAL before")
    replica.alter(f"CONNECTION '{server.conninfo()}'")
    replica.assert_equal("t", "u")
    assert len(replica.rows("t")) == 91


@pytest.mark.full
@on_both
def test_every_kind_of_commit_is_found_again(replica: Replica, server: EmbeddedPostgres) -> None:
    """A worker that starts looks for the last commit: a plain, an empty-handed, a large, a streamed, a prepared one; DDL with it."""
    replica.subscribe(streaming="on", two_phase="true")
    replica.assert_equal("t", "u")
    server.execute("ALTER SYSTEM SET logical_decoding_work_mem = '64kB'")
    server.query("SELECT pg_reload_conf()")
    server.query("SELECT pg_replication_origin_create('elsewhere')")
    origin = (
        "SELECT pg_replication_origin_session_setup('elsewhere'); BEGIN; "
        "SELECT pg_replication_origin_xact_setup('0/1234', '2020-02-03 04:05:06'); "
    )
    steps = [
        ["INSERT INTO t VALUES (51, 1)"],
        [
            "BEGIN; CREATE TABLE w AS SELECT g FROM generate_series(1, 5000) g; INSERT INTO u VALUES (1); DROP TABLE w; COMMIT"
        ],
        ["INSERT INTO t SELECT g, g FROM generate_series(100, 20000) g"],
        ["BEGIN; INSERT INTO t VALUES (52, 1); PREPARE TRANSACTION 'g'", "COMMIT PREPARED 'g'"],
        ["BEGIN; INSERT INTO t VALUES (53, 1); SAVEPOINT a; DELETE FROM t WHERE id < 10; RELEASE a; COMMIT"],
        ["TRUNCATE u"],
        # The stream tells the time of the origin's commit, which is another part of the record.
        [f"{origin} INSERT INTO u VALUES (2); COMMIT"],
        [f"{origin} INSERT INTO u VALUES (3); PREPARE TRANSACTION 'o'", "COMMIT PREPARED 'o'"],
    ]
    reader = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{replica.name}' AND active"
    with captured_logs() as entries:
        for statements in steps:
            replica.execute(*statements)
            replica.assert_equal("t", "u")
            before = server.query(reader)
            cut(server, replica.name)
            wait_until(lambda before=before: server.query(reader) not in ([], before), "the worker to follow again")
    assert not [entry for entry in entries if "does not show" in entry["event"]]


@pytest.mark.full
def test_wal_level_is_lowered(replica: Replica, server: EmbeddedPostgres) -> None:
    """A server with logical slots does not start with this setting, so the slot is gone, too."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.alter("DISABLE")
    server.drop_slot(replica.name)
    server._settings["wal_level"] = "replica"
    server.restart()
    replica.alter("ENABLE")
    found = failure(replica, "wal_level")
    assert "wal_level = logical" in found["hint"]
    server._settings["wal_level"] = "logical"
    server.restart()
    failure(replica, "does not exist")
    resync(replica)


@pytest.mark.full
def test_a_transaction_that_stays_open_holds_a_copy_up(replica: Replica, server: EmbeddedPostgres) -> None:
    """`status` names the transaction: creating a slot waits for every transaction that runs then."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    with psycopg.connect(server.conninfo(application_name="forgotten")) as open_one:
        open_one.execute("INSERT INTO t VALUES (60, 0)")
        ((xid,),) = open_one.execute("SELECT txid_current()::text").fetchall()
        pid = open_one.info.backend_pid
        replica.execute("CREATE TABLE late (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE late")
        replica.alter("REFRESH PUBLICATION")

        def waiting() -> dict[str, Any] | None:
            table = next(t for t in status(replica)["tables"] if t["name"] == "public.late")
            found: dict[str, Any] | None = table["waiting"]
            return found

        told = wait_until(waiting, "the wait")
        assert f"transaction {xid} of process {pid}" in told["detail"]
        assert "forgotten" in told["detail"]
        assert str(pid) in told["hint"]
        open_one.commit()
    replica.assert_equal("t", "u", "late")
    open_prepared = server.connect()
    open_prepared.execute("BEGIN")
    open_prepared.execute("INSERT INTO u VALUES (9)")
    open_prepared.execute("PREPARE TRANSACTION 'left behind'")
    replica.execute("CREATE TABLE later (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE later")
    replica.alter("REFRESH PUBLICATION")

    def prepared() -> bool:
        table = next(t for t in status(replica)["tables"] if t["name"] == "public.later")
        return table["waiting"] is not None and "left behind" in table["waiting"]["detail"]

    wait_until(prepared, "the wait for a prepared transaction")
    open_prepared.execute("COMMIT PREPARED 'left behind'")
    open_prepared.close()
    replica.assert_equal("t", "u", "late", "later")


@pytest.mark.full
def test_disable_on_error_is_not_for_a_publisher_that_is_away(replica: Replica, server: EmbeddedPostgres) -> None:
    """Nothing is disabled before the stream begins (worker.c: run_apply_worker); a shutdown is no error at all."""
    replica.subscribe(disable_on_error="true")
    replica.assert_equal("t", "u")
    server.stop()
    failure(replica, "could not connect to the publisher")
    server.start()
    replica.execute("UPDATE t SET n = 6")
    replica.assert_equal("t", "u")
    assert status(replica)["enabled"]
    assert replica.node.statistics(replica.name)["apply_error_count"] == 0


@pytest.mark.full
def test_a_slot_that_waits_is_given_up(replica: Replica, server: EmbeddedPostgres) -> None:
    """DISABLE and DROP take effect while a table's slot waits to be created; nothing of it stays on the publisher."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    with psycopg.connect(server.conninfo()) as open_one:
        open_one.execute("INSERT INTO t VALUES (60, 0)")
        replica.execute("CREATE TABLE late (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE late")
        replica.alter("REFRESH PUBLICATION")
        making = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%' AND state = 'active'"
        wait_until(lambda: server.query(making), "the slot to be wanted")
        replica.alter("DISABLE")
        wait_until(lambda: not server.query(making), "the slot to be given up")
        assert replica.slots() == [replica.name]
        replica.alter("ENABLE")
        wait_until(lambda: server.query(making), "the slot to be wanted again")
        replica.execute("UPDATE t SET n = 7 WHERE id < 5")
        replica.assert_equal("u", caught_up=False)
        replica.drop()
        assert replica.slots() == []
        open_one.rollback()


@pytest.mark.full
def test_a_slot_that_is_idle_for_too_long(replica: Replica, server: EmbeddedPostgres) -> None:
    """18's idle_replication_slot_timeout: a disabled subscription gets a warning."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.alter("DISABLE")
    server.execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
    server.query("SELECT pg_reload_conf()")

    def lost() -> bool:
        server.execute("CHECKPOINT")
        return server.query("SELECT invalidation_reason FROM pg_replication_slots") == [("idle_timeout",)]

    wait_until(lost, "the slot to be invalidated")
    replica.alter("SET (disable_on_error = false)")  # the publisher is looked at again
    assert "idle_timeout" in warned(replica, "has been invalidated")["detail"]
    server.execute("ALTER SYSTEM RESET idle_replication_slot_timeout")
    server.query("SELECT pg_reload_conf()")
    replica.alter("ENABLE")
    assert "idle_timeout" in failure(replica, "replication slot")["detail"]
    resync(replica)


def test_a_slot_that_no_table_explains_is_named(replica: Replica, server: EmbeddedPostgres) -> None:
    """By status, and by check; slots of other nodes, and those of tables that are being copied, are not."""
    replica.subscribe()
    replica.assert_equal("t", "u")
    node = replica.node
    node_id = node.run(node._node.catalog.node()).node_id
    subid = replica.relation("t").subid
    left = f"pg_{subid}_sync_4711_{node_id}"
    for name in (left, f"pg_{subid}_sync_4711_815"):
        server.query(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    told = warned(replica, f'replication slot "{left}" on the publisher is left over')
    assert "retains" in told["detail"]
    assert told["hint"] == f"SELECT pg_drop_replication_slot('{left}') on the publisher."
    ran = CliRunner().invoke(app, ["--home", str(node._node.settings.home), "check", server.conninfo(), "p"])
    assert f'WARNING:  replication slot "{left}" on the publisher is left over' in ran.output
    server.drop_slot(left)
    wait_until(lambda: status(replica)["warnings"] == [], "the warning to end")
    server.drop_slot(f"pg_{subid}_sync_4711_815")


@pytest.mark.full
def test_a_subscription_whose_commit_is_not_answered_keeps_its_slot(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's server may have stored it all the same: without its slot it would lack what comes until there is another."""
    store = Catalog.create_subscription

    async def unanswered(*given: Any) -> Any:
        await store(*given)
        raise PubsubError("could not access the catalog: the connection was closed", sqlstate="08006")

    monkeypatch.setattr(Catalog, "create_subscription", unanswered)
    with pytest.raises(PubsubError, match="the connection was closed"):
        replica.subscribe()
    replica.created = True
    replica.execute("INSERT INTO t VALUES (51, 0)")
    replica.assert_equal("t", "u")
