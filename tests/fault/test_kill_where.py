"""kill -9 of a daemon whose tables have the rows that meet a condition: no row is lost, and none is there that does not meet it."""

from __future__ import annotations

import pytest

from pubsub.delta.table import query
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults

CONDITIONS = {"a": "n > 0 OR id < 500", "keyless": "n BETWEEN 1 AND 5"}


@pytest.mark.full
def test_killed_while_rows_come_and_go(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In the copy, when it is committed, in the commit of a batch whose keys are looked up, and before its origin is stored."""
    option = ", ".join(f"public.{table} ({condition})" for table, condition in CONDITIONS.items())
    fault.arm("copying public.a")
    subscribed.subscribe(where=option)
    fault.wait("copying public.a")
    daemon.kill()
    subscribed.write()
    points = ("copy committed public.a", "commit public.a", "committed public.a", "batch committed")
    subscribed.killed_at(fault, points, subscribed.write)
    relations = subscribed.relations()
    for table, columns in (("a", "id, n, t"), ("keyless", "n")):
        found = query(relations[table].path, f"SELECT {columns} FROM t").read_all().to_pylist()
        rows = sorted((tuple(row.values()) for row in found), key=repr)
        wanted = subscribed.database.query(f"SELECT {columns} FROM {table} WHERE {CONDITIONS[table]}")
        assert rows == sorted(wanted, key=repr), table
        assert 0 < len(rows) < subscribed.database.query(f"SELECT count(*) FROM {table}")[0][0]
