"""Many tables in one subscription of a real daemon: their cost in connections, slots and memory."""

from __future__ import annotations

import os

import pytest

from bench import machine
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import wait_until

COUNT = int(os.environ.get("PUBSUB_TABLES", "1000"))
LIMIT = 1 << 30


@pytest.mark.soak
def test_a_thousand_tables(subscribed: Subscribed, daemon: Daemon) -> None:
    """Every table is copied and followed, a few at a time; the daemon's process stays below a gigabyte."""
    database = subscribed.database
    names = [f"t{number:04}" for number in range(COUNT)]
    for first in range(0, COUNT, 100):
        some = names[first : first + 100]
        database.execute(
            "; ".join(
                f"CREATE TABLE {name} (id int PRIMARY KEY, t text); "
                f"INSERT INTO {name} SELECT g, md5(g::text) FROM generate_series(1, 20) g"
                for name in some
            )
        )
        database.execute(f"ALTER PUBLICATION p ADD TABLE {', '.join(some)}")
    machine.forget_peak(daemon.process.pid)
    subscribed.subscribe()
    most = {"slots": 0, "connections": 0}

    def ready() -> bool:
        ((slots, sessions),) = database.query(
            "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg\\_%'), count(*) "
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        most["slots"], most["connections"] = max(most["slots"], slots), max(most["connections"], sessions)
        return {relation.state.value for relation in subscribed.relations().values()} == {"r"}

    wait_until(ready, "all tables to be ready", patience=3600)
    peak = machine.peak_memory(daemon.process.pid)
    print(f"{COUNT} tables: at most {most}, {peak >> 20} MB")
    assert most["slots"] <= 2  # max_sync_workers_per_subscription
    assert most["connections"] <= 2 * 4 + 3
    assert peak < LIMIT, f"{peak >> 20} MB"
    for first in range(0, COUNT, 100):
        some = names[first : first + 100]
        database.execute(
            "; ".join(f"INSERT INTO {name} VALUES (0, 'new'); DELETE FROM {name} WHERE id = 7" for name in some)
        )
    # Comparing takes longer than copying did, so only some tables are compared.
    subscribed.assert_equal(names[:: max(COUNT // 40, 1)])
    peak = machine.peak_memory(daemon.process.pid)
    assert peak < LIMIT, f"{peak >> 20} MB"
