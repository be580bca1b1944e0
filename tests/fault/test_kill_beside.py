"""kill -9 of a daemon whose tables have a history and versions beside their mirrors: each has each change once."""

from __future__ import annotations

import pytest

from pubsub.delta.table import query
from tests.fault.daemon import Daemon, Subscribed
from tests.support.history import as_of
from tests.support.replica import Faults
from tests.support.versions import Snapshots, current


@pytest.mark.full
def test_killed_between_the_commits_of_one_batch(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In the copies, when one is committed, between the commits of one batch, and before its origin is stored."""
    fault.arm("copying public.a")
    subscribed.subscribe(mode="public.a (mirror + history + scd2)")
    fault.wait("copying public.a")
    daemon.kill()
    snapshots = Snapshots(subscribed.database.query, "a", "id, n, t")

    def write() -> None:
        subscribed.write()
        snapshots.take()

    copied = ("copy committed public.a", "copy committed public.a_history", "copy finished public.a_scd2")
    subscribed.killed_at(fault, copied, write)
    subscribed.caught_up()
    snapshots.taken.clear()  # of before the copies
    snapshots.take()
    daemon.kill()
    points = (
        *("commit public.a", "committed public.a", "commit public.a_history", "committed public.a_history"),
        *("commit public.a_scd2", "committed public.a_scd2", "batch committed"),
    )
    subscribed.killed_at(fault, points, write)
    relations = subscribed.relations()

    def rows(table: str) -> list[dict[str, object]]:
        return [dict(one) for one in query(relations[table].path, "SELECT * FROM t").read_all().to_pylist()]

    history, versions = rows("a_history"), rows("a_scd2")
    places = [(row["_pubsub_lsn"], row["_pubsub_seq"]) for row in history if row["_pubsub_op"] != "R"]
    assert len(places) == len(set(places))
    assert len(snapshots.taken) > len(points)
    for one in snapshots.taken:
        assert as_of(history, one.lsn, one.names, ("id",)) == one.rows
    snapshots.assert_held(versions)
    newest = snapshots.taken[-1].rows
    assert sorted((row["id"], row["n"], row["t"]) for row in rows("a")) == sorted(newest)
    assert len(current(versions)) == len(newest)
