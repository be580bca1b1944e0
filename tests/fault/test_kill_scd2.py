"""kill -9 of a daemon whose tables keep every version of a row: each is there once, and its spans are those of the commits."""

from __future__ import annotations

from itertools import count

import pytest

from pubsub.delta.table import query
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults
from tests.support.versions import Snapshots


@pytest.mark.full
def test_killed_from_the_copy_to_the_feedback(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In a copy and in another one; between the commits of a batch; before the origin is stored."""
    numbers = count(1)
    database = subscribed.database
    database.execute(
        "CREATE TABLE d (id int PRIMARY KEY, v text, n int); ALTER TABLE d ALTER v SET STORAGE EXTERNAL;"
        "INSERT INTO d SELECT g, repeat('x', 3000) || g, g FROM generate_series(1, 200) g; ALTER PUBLICATION p ADD TABLE d"
    )
    snapshots = Snapshots(database.query, "d", "id, v, n")

    def write() -> None:
        number = next(numbers)
        emptied = (
            f"BEGIN; UPDATE d SET v = v || '!' WHERE id % 29 = {number}; TRUNCATE d;"
            f"INSERT INTO d SELECT g, repeat('y', 3000) || g, g FROM generate_series({number}, 200, 2) g; COMMIT"
        )
        for statement in (
            *([emptied] if number % 4 == 0 else []),
            f"UPDATE d SET n = n + 1 WHERE id % 7 = {number % 7}; DELETE FROM d WHERE id % 17 = {number % 17}",
            f"INSERT INTO d SELECT g, 'again {number}', 0 FROM generate_series({number}, 200, 5) g ON CONFLICT DO NOTHING",
            f"UPDATE d SET id = id + 1000 * {number} WHERE id IN (SELECT id FROM d WHERE id < 1000 ORDER BY id % 13, id LIMIT 3)",
            f"UPDATE d SET n = n + 1 WHERE id % 5 = {number % 5}",
        ):
            database.execute(statement)
            snapshots.take()
        subscribed.write()

    fault.arm("copying public.d")
    subscribed.subscribe(mode="public.d (scd2)")
    fault.wait("copying public.d")
    daemon.kill()
    write()
    fault.clear()
    fault.arm("copy committed public.d", "kill")
    daemon.start()
    daemon.killed_by_fault()
    snapshots.take()
    write()
    points = ("commit public.d", "committed public.d", "committed public.a", "batch committed")
    subscribed.killed_at(fault, points, write)

    def rows() -> list[dict[str, object]]:
        return query(subscribed.relations()["d"].path, "SELECT * FROM t").read_all().to_pylist()

    copied = min(int(str(row["_pubsub_valid_from_lsn"])) for row in rows())
    snapshots.assert_held(rows(), since=copied)
    assert sum(one.lsn >= copied for one in snapshots.taken) > 20
    for point in ("copying public.d", "copy committed public.d"):
        fault.arm(point, "kill")
        daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE public.d")
        daemon.killed_by_fault()
        fault.clear()
        daemon.start()
        subscribed.caught_up()
        write()
    subscribed.caught_up()
    snapshots.assert_held(rows(), since=copied)
    subscribed.assert_equal()
