"""pg_upgrade of the publisher, which keeps its slots: the subscription goes on in the new server with every row."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from pubsub.testing import binaries
from pubsub.testing.fault_points import Faults
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode, wait_until

pytestmark = [pytest.mark.full, pytest.mark.parametrize("version", ["19"])]

DDL = """
CREATE TABLE t (id int PRIMARY KEY, gone int, n int, note text);
CREATE TABLE log (at int, line text);
ALTER TABLE log REPLICA IDENTITY FULL;
CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE high PARTITION OF parts FOR VALUES FROM (100) TO (200);
ALTER TABLE t DROP gone
"""
ROWS = """
INSERT INTO t SELECT g, 0, (SELECT string_agg(md5((g * n)::text), '') FROM generate_series(1, 300) n)
FROM generate_series(1, 200) g;
INSERT INTO log SELECT g, 'line' FROM generate_series(1, 50) g;
INSERT INTO parts SELECT g, 'before' FROM generate_series(50, 99) g;
CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)
"""
TABLES = ("t", "log", "parts")


class Upgrade:
    """A server of version 18, and one of `version` that gets its files, its slots and its port."""

    def __init__(self, version: str) -> None:
        # The fetched archives lack programs that pg_upgrade asks the old server for.
        self.old = EmbeddedPostgres("18", wheel=True).start()
        self.new = EmbeddedPostgres(version, port_of=self.old)

    def run(self) -> None:
        """Upgrade the old server, which has been stopped, and start the new one."""
        self.new.start()
        self.new.stop()
        account = binaries.account()
        settings = "-c wal_level=logical -c max_replication_slots=10 -c fsync=off"
        ran = subprocess.run(
            [
                str(self.new.bin("pg_upgrade")),
                *("-b", str(self.old.bin("postgres").parent), "-B", str(self.new.bin("postgres").parent)),
                *("-d", str(self.old.data_dir), "-D", str(self.new.data_dir), "-U", self.old.user),
                *("-o", settings, "-O", settings, "-s", str(self.new.socket_dir)),
            ],
            cwd=self.new.socket_dir,
            capture_output=True,
            text=True,
            check=False,
            user=account.uid,
            group=account.gid,
            extra_groups=[] if account.uid is not None else None,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        self.new.start()

    def close(self) -> None:
        self.new.close()
        self.old.close()


@pytest.fixture
def upgrade(version: str) -> Iterator[Upgrade]:
    made = Upgrade(version)
    yield made
    made.close()


def write(replica: Replica, number: int) -> None:
    replica.execute(
        f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}; INSERT INTO t VALUES ({number}, 0, 'new');"
        f"DELETE FROM t WHERE id = {number - 1000}; UPDATE log SET line = 'changed' WHERE at = {number - 1000};"
        f"INSERT INTO log VALUES ({number}, 'new'); UPDATE parts SET id = id + 50 WHERE id = {number - 950}"
    )


def test_the_subscription_goes_on(node: RunningNode, upgrade: Upgrade, fault: Faults) -> None:
    """Disabled once it has everything, as PostgreSQL has it; then confirmed by a command: the new server is another system.

    The worker that has accepted it ends before it has applied anything of it.  The next one found the slot past what the
    tables hold, where the old system had its positions, and stopped for good.
    """
    replica = Replica(node, Database(upgrade.old, "postgres"))
    replica.execute(DDL, ROWS)
    replica.subscribe()
    for number in range(1001, 1006):
        write(replica, number)
    replica.until_ready()
    before = {table: replica.relation(table).copy_generation for table in TABLES}
    write(replica, 1006)
    replica.caught_up()
    replica.alter("DISABLE")
    upgrade.old.stop()
    upgrade.run()
    replica.database = Database(upgrade.new, "postgres")
    write(replica, 1007)
    replica.alter("ENABLE")
    wait_until(lambda: "is another database system" in replica.error(), "the refusal")
    fault.arm("commit public.t")
    replica.alter(f"CONNECTION '{replica.conninfo}'")
    fault.wait("commit public.t")
    replica.execute(
        f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
    )
    wait_until(lambda: "is another database system" not in replica.error(), "the stream's end")
    fault.release("commit public.t")
    for number in range(1008, 1012):
        write(replica, number)
    replica.assert_equal(*TABLES)
    assert {table: replica.relation(table).copy_generation for table in TABLES} == before, "nothing was copied again"
    replica.execute("CREATE TABLE late (id int PRIMARY KEY, v text); INSERT INTO late VALUES (1, 'late')")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("late", *TABLES)
    replica.drop()
