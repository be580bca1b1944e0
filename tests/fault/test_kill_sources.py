"""kill -9 of a daemon whose subscriptions write one Delta table: each source's rows are its publisher's, once."""

from __future__ import annotations

import pytest

from pubsub.delta.table import query
from pubsub.testing.fixtures import Database
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults


@pytest.mark.full
def test_killed_while_two_sources_are_copied_and_change(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In the copy of one; when it is committed; in the commits of a batch of whichever comes first; before an origin is stored."""
    server = subscribed.database.server
    other = Database(server, f"{subscribed.database.name}_other")
    server.create_database(other.name)
    two = Subscribed(daemon, other)
    try:
        fault.arm("copying public.a")
        subscribed.subscribe(target="both", source="one")
        fault.wait("copying public.a")
        daemon.kill()
        subscribed.write()
        fault.clear()
        fault.arm("copy committed public.a", "kill")
        daemon.start()
        daemon.killed_by_fault()
        fault.clear()
        daemon.start()
        fault.arm("copy committed public.a", "kill")
        two.subscribe(target="both", source="two")
        daemon.killed_by_fault()

        def write() -> None:
            two.write()
            subscribed.write()

        subscribed.killed_at(fault, ("commit public.a", "committed public.a", "batch committed"), write)
        for one, source in ((subscribed, "one"), (two, "two")):
            one.write()
            one.caught_up()
            relations = one.relations()
            for table, columns in (("a", "id, n, t"), ("keyless", "n")):
                condition = f"WHERE _pubsub_source = '{source}'"
                found = query(relations[table].path, f"SELECT {columns} FROM t {condition}").read_all().to_pylist()
                rows = sorted((tuple(row.values()) for row in found), key=repr)
                assert rows == sorted(one.database.query(f"SELECT {columns} FROM {table}"), key=repr), source
    finally:
        daemon.faults.clear()
        daemon.ensure()
        two.drop()
        server.drop_database(other.name)
