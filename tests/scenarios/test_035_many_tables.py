"""Many tables in one subscription: all are copied, a few at a time."""

from __future__ import annotations

import pytest

from tests.support.replica import Replica, wait_until

COUNT = 100


def make(replica: Replica, count: int) -> list[str]:
    names = [f"t{number:04}" for number in range(count)]
    for first in range(0, count, 100):
        replica.execute(
            "; ".join(
                f"CREATE TABLE {name} (id int PRIMARY KEY, t text); INSERT INTO {name} SELECT g, md5(g::text) "
                f"FROM generate_series(1, 20) g"
                for name in names[first : first + 100]
            )
        )
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return names


@pytest.mark.full
def test_a_hundred_tables(replica: Replica) -> None:
    """max_sync_workers_per_subscription bounds slots and connections; rows written meanwhile arrive."""
    names = make(replica, COUNT)
    replica.subscribe()
    slots = connections = step = 0
    while set(replica.states().values()) != {"r"}:
        ((sync_slots, sessions),) = replica.query(
            "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg\\_%'), count(*) "
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        slots, connections = max(slots, sync_slots), max(connections, sessions)
        name = names[step * 37 % COUNT]
        replica.execute(
            f"INSERT INTO {name} VALUES ({1000 + step}, 'new'); UPDATE {name} SET t = 'x' WHERE id = {step % 20}"
        )
        step += 1
    assert 1 <= slots <= 3
    # Per sync worker: its slot's, the table lock's, the task's and the progress'.  Then apply's and the monitor's.
    assert connections <= 3 * 4 + 3
    replica.assert_equal(*names[:: COUNT // 20])
    wait_until(lambda: replica.slots() == [replica.name], "the sync slots to be dropped")
    for name in names:
        assert len(replica.rows(name, "id")) == replica.query(f"SELECT count(*) FROM {name}")[0][0], name
