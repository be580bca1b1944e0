"""kill -9 of a daemon whose tables keep deleted rows: each is there once, with its time, and no other is marked."""

from __future__ import annotations

from itertools import count

import pytest

from pubsub.delta.table import query
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults
from tests.support.soft_deletes import assert_rows, watch


@pytest.mark.full
def test_killed_from_the_copy_to_the_feedback(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In a copy; between the commits of a batch; before the origin is stored: while rows go, come back, and change their keys."""
    numbers = count(1)

    def write() -> None:
        number = next(numbers)
        for statement in (
            f"DELETE FROM d WHERE id % 17 = {number % 17} AND id < 1000",
            f"INSERT INTO d SELECT g, 'again {number}' FROM generate_series({number}, 300, 5) g ON CONFLICT DO NOTHING",
            f"UPDATE d SET id = id + 1000 * {number} WHERE id IN (SELECT id FROM d WHERE id < 1000 ORDER BY id % 13, id LIMIT 3)",
        ):
            subscribed.database.execute(statement)
        subscribed.write()

    subscribed.database.execute(
        "CREATE TABLE d (id int PRIMARY KEY, v text); ALTER TABLE d ALTER v SET STORAGE EXTERNAL;"
        "INSERT INTO d SELECT g, repeat('x', 3000) || g FROM generate_series(1, 300) g; ALTER PUBLICATION p ADD TABLE d;"
        + watch("d")
    )
    fault.arm("copying public.d")
    subscribed.subscribe(deletes="public.d (soft)")
    fault.wait("copying public.d")
    daemon.kill()
    write()
    fault.clear()
    fault.arm("copy committed public.d", "kill")
    daemon.start()
    daemon.killed_by_fault()
    ((ready,),) = subscribed.database.query("SELECT clock_timestamp()")
    write()
    points = ("commit public.d", "committed public.d", "committed public.a", "batch committed")
    subscribed.killed_at(fault, points, write)
    rows = query(subscribed.relations()["d"].path, "SELECT * FROM t").read_all().to_pylist()
    assert len(assert_rows(rows, subscribed.database.query, "d", "id, v", since=ready)) > 20
    subscribed.assert_equal()
