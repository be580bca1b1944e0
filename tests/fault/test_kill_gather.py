"""kill -9 of a daemon whose subscription writes tables of several schemas to one Delta table: each one's rows are there once."""

from __future__ import annotations

import pytest

from pubsub.delta.table import query
from pubsub.node.node import Node
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults


@pytest.mark.full
def test_killed_between_the_commits_of_one_batch(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In the copies, when one is committed, and in a batch that has commits of two tables to one Delta table."""
    database = subscribed.database
    database.execute(
        """
        CREATE SCHEMA other;
        CREATE TABLE other.a (LIKE a INCLUDING ALL);
        INSERT INTO other.a SELECT id, 1, 'other' FROM a;
        ALTER PUBLICATION p ADD TABLE other.a
        """
    )

    def write() -> None:
        subscribed.write()
        # One transaction for both: one batch, and two commits.
        database.execute("UPDATE a SET n = n + 1 WHERE id % 7 = 0; UPDATE other.a SET n = n + 1 WHERE id % 7 < 2")

    fault.arm("copying public.a")
    subscribed.subscribe(gather="*.a (every)")
    fault.wait("copying public.a")
    daemon.kill()
    points = (
        *("copy committed public.a", "copy committed other.a", "commit public.a", "committed public.a"),
        *("commit other.a", "committed other.a", "batch committed"),
    )
    subscribed.killed_at(fault, points, write)

    async def paths(node: Node) -> dict[str, str]:
        return {one.qualified_name: one.path for one in (await node.state()).relations}

    found = daemon.client(paths)
    assert found["public.a"] == found["other.a"]
    for schema in ("public", "other"):
        ours = query(found["public.a"], f"SELECT id, n, t FROM t WHERE _pubsub_source = '{schema}'").read_all()
        rows = sorted(tuple(row.values()) for row in ours.to_pylist())
        assert rows == sorted(database.query(f"SELECT id, n, t FROM {schema}.a")), schema
