"""kill -9 of a real daemon within the copy of a large table and on its way to ready; what DROP finds afterwards."""

from __future__ import annotations

import pytest

from pubsub.delta.table import read_schema
from pubsub.testing.compare import compare_tables
from tablesync import choose_copier
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults, wait_until
from tests.support.unnamed_files import unnamed_files

#: Some 80 MB in few rows, so that the copy has several chunks.
BIG = """
CREATE TABLE big (id int PRIMARY KEY, n int NOT NULL, filler text, toasted text) WITH (fillfactor = 10);
ALTER TABLE big ALTER filler SET STORAGE PLAIN, ALTER toasted SET STORAGE EXTERNAL;
INSERT INTO big SELECT g, 0, repeat('f', 600), CASE WHEN g % 5 = 0 THEN repeat(md5(g::text), 100) END
  FROM generate_series(1, {rows}) g;
ALTER PUBLICATION p ADD TABLE big;
"""


def change(subscribed: Subscribed, number: int) -> None:
    """Run changes that leave TOAST values out, move rows and change keys."""
    subscribed.write()
    for statement in (
        f"UPDATE big SET n = n + 1 WHERE id % 20 < {number + 3}",
        f"UPDATE big SET id = -id WHERE id % 50 = {5 * number}",
        "UPDATE big SET n = n + 1 WHERE id < 0",
        f"DELETE FROM big WHERE id % 100 = {number}",
        f"INSERT INTO big SELECT id + 1000000 * {number}, 0, 'new', 'new' FROM big WHERE id BETWEEN 1 AND 50",
    ):
        subscribed.database.execute(statement)


@pytest.mark.full
def test_killed_within_a_copy_of_many_chunks(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """The finished chunks stay, and no later kill changes that."""
    subscribed.database.execute(BIG.format(rows=10_000))
    fault.arm("3 chunks of public.big", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    for number, (point, state) in enumerate(
        (
            ("copy goes on public.big", "d"),  # under its second snapshot; nothing is read
            ("window public.big", "f"),  # under its third
            ("read again public.big", "f"),  # a batch of the window is staged; its end is not stored
            ("whole public.big", "f"),
        ),
        1,
    ):
        change(subscribed, number)
        fault.clear()
        fault.arm(point, "kill")
        daemon.start()
        daemon.killed_by_fault()
        assert subscribed.state("big") == state, point
        assert daemon.said("copy goes on") == (number <= 2)
    change(subscribed, 5)
    fault.clear()
    daemon.start()
    subscribed.assert_equal(("a", "keyless", "big"))
    assert subscribed.relations()["big"].copy_generation == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "copies"),
    [
        ("copy planned public.big", 3),  # no chunk is finished: it starts over
        ("3 chunks of public.big", 2),
        ("copy committed public.big", 2),
    ],
)
def test_killed_while_a_copy_takes_a_column_away(
    subscribed: Subscribed, daemon: Daemon, fault: Faults, point: str, copies: int
) -> None:
    """The publisher dropped it before: that is remembered by the copy that goes on, and by the next one."""
    subscribed.database.execute(BIG.format(rows=8_000))
    subscribed.subscribe(dropped_columns="drop")
    subscribed.assert_equal(["big"])
    subscribed.database.execute("ALTER TABLE big DROP toasted")
    fault.arm(point, "kill")
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE big")
    daemon.killed_by_fault()
    subscribed.database.execute("UPDATE big SET n = n + 1 WHERE id % 20 < 3; UPDATE big SET id = -id WHERE id % 50 = 5")
    fault.clear()
    daemon.start()
    subscribed.assert_equal(("a", "keyless", "big"))
    assert read_schema(subscribed.relations()["big"].path).names == ["id", "n", "filler"]
    subscribed.database.execute("ALTER TABLE big ADD toasted int; UPDATE big SET toasted = id WHERE id % 7 = 0")
    subscribed.assert_equal(["big"])
    assert subscribed.relations()["big"].copy_generation == copies


@pytest.mark.full
def test_a_sync_slot_that_is_gone_within_a_copy(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """Without the slot the changes after the finished chunks are lost, so the chunks are dropped."""
    subscribed.database.execute(BIG.format(rows=8_000))
    fault.arm("3 chunks of public.big", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    before = subscribed.relations()["big"]
    subscribed.database.server.drop_slot(before.sync_slot)
    change(subscribed, 1)
    fault.clear()
    daemon.start()
    subscribed.assert_equal(("a", "keyless", "big"))
    assert subscribed.relations()["big"].copy_generation == before.copy_generation + 1
    assert not daemon.said("copy goes on")
    assert not unnamed_files(before.path)


@pytest.mark.full
def test_refreshed_after_a_kill(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """A table that leaves the publication takes its sync slot along, whichever worker made it."""
    fault.arm("slot created public.a", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    subscribed.database.execute("ALTER PUBLICATION p DROP TABLE a")
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} REFRESH PUBLICATION")
    assert set(subscribed.relations()) == {"keyless"}
    wait_until(
        lambda: not any("sync" in slot and str(a_oid(subscribed)) in slot for slot in subscribed.slots()),
        "no slot of a",
    )
    fault.clear()
    daemon.start()
    subscribed.assert_equal(["keyless"])


def a_oid(subscribed: Subscribed) -> int:
    return int(subscribed.database.query("SELECT 'a'::regclass::oid")[0][0])


@pytest.mark.full
@pytest.mark.parametrize(
    "point", ["slot created public.a", "copying public.a", "copy finished public.a", "sync done public.a"]
)
def test_dropped_after_a_kill(subscribed: Subscribed, daemon: Daemon, fault: Faults, point: str) -> None:
    """No daemon runs: the command itself drops the sync slots, and no origin stays."""
    if point.startswith("copying"):
        fault.arm(point)
        subscribed.subscribe()
        fault.wait(point)
        daemon.kill()
    else:
        fault.arm(point, "kill")
        subscribed.subscribe()
        daemon.killed_by_fault()
    assert len(subscribed.slots()) >= 2
    # A walsender takes a moment to notice that its client is gone.
    wait_until(
        lambda: (
            not subscribed.database.query(
                "SELECT FROM pg_replication_slots WHERE active AND database = current_database()"
            )
        ),
        "the slots to be free",
    )
    subscribed.drop()
    assert subscribed.slots() == []
    origins = daemon.client(lambda node: node.fetch("SELECT * FROM pg_replication_origin_status"))
    assert origins == []


@pytest.mark.soak
def test_killed_at_four_fifths_of_five_million_rows(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    subscribed.database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, n int, t text); INSERT INTO big SELECT g, g, repeat(md5(g::text), 2) "
        "FROM generate_series(1, 5000000) g; ALTER PUBLICATION p ADD TABLE big"
    )
    ((pages, size),) = subscribed.database.query("SELECT pg_relation_size('big') / 8192, pg_table_size('big')")
    chunks = len(choose_copier.edges(pages, size, 2))
    fault.arm(f"{chunks * 4 // 5} chunks of public.big", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    subscribed.database.execute("UPDATE big SET n = -n WHERE id % 100 = 0; UPDATE big SET id = -id WHERE id % 1000 = 0")
    fault.clear()
    daemon.start()
    subscribed.caught_up()
    assert daemon.said("copy goes on")
    relation = subscribed.relations()["big"]
    assert relation.copy_generation == 1
    difference = compare_tables(subscribed.database.conninfo, "public.big", relation.path)
    assert difference is None, str(difference)
