"""A stock subscription with retain_dead_tuples, from 19 on: it asks the publisher which transactions have ended.

Until it is told, it keeps every dead row (worker.c: maybe_advance_nonremovable_xid).
"""

from __future__ import annotations

import pytest

from tests.support.replica import wait_until
from tests.support.stock_pairs import Make, Pair

_XMIN = "SELECT xmin::text::bigint FROM pg_replication_slots WHERE slot_name = 'pg_conflict_detection'"


def _advances(pair: Pair, beyond: int) -> None:
    """Wait until dead rows of transactions up to `beyond` may go; transactions of the subscriber's own pass meanwhile."""

    def has_advanced() -> bool:
        pair.sub("INSERT INTO own SELECT 1")
        ((xmin,),) = pair.subscribed(_XMIN)
        return xmin is not None and xmin > beyond

    wait_until(has_advanced, "dead rows may go")


def _next_xid(pair: Pair) -> int:
    ((xid,),) = pair.subscribed("SELECT pg_current_xact_id()::text::bigint")
    return int(xid)


@pytest.mark.parametrize(("publisher", "subscriber"), [("19", "19")])
def test_dead_rows_are_kept_until_the_publisher_says_what_has_ended(
    make: Make, publisher: str, subscriber: str
) -> None:
    pair = make(publisher, subscriber)
    pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.sub("CREATE TABLE own (a int)")
    pair.run("INSERT INTO t SELECT g, 'a' FROM generate_series(1, 10) g; CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe(options="WITH (retain_dead_tuples = true)")
    pair.synced()
    pair.equal("t")
    _advances(pair, _next_xid(pair))
    # A transaction of the publisher's that runs is waited for; the stream goes on meanwhile.
    with pair._connect(pair.publisher) as running:
        running.execute("BEGIN; INSERT INTO t VALUES (100)")
        pair.run("UPDATE t SET v = 'b' WHERE id = 1")
        pair.gives("SELECT v FROM t WHERE id = 1", "b")
        running.execute("COMMIT")
    pair.equal("t")
    _advances(pair, _next_xid(pair))
    # What a row was deleted by is known, so that an update that comes late is told apart from one of a row that never was.
    pair.sub("DELETE FROM t WHERE id = 2")
    pair.run("UPDATE t SET v = 'late' WHERE id = 2")
    pair.caught_up()
    pair.subscriber_says("conflict=update_deleted")
