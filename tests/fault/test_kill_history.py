"""kill -9 of a daemon whose tables keep the history: every change is there once, and every moment can be read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pubsub.delta.table import query
from pubsub.protocol.lsn import Lsn
from tests.fault.daemon import Daemon, Subscribed
from tests.fault.test_kill import origin_passes
from tests.support.history import as_of
from tests.support.replica import Faults

COLUMNS = {"a": ["id", "n", "t"], "keyless": ["n"]}


@pytest.mark.full
def test_killed_from_the_copy_to_the_feedback(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """In a copy, which begins anew; in the hand-over; between the commits of a batch; before the origin is stored."""
    moments: list[tuple[Lsn, dict[str, Counter[Any]]]] = []

    def write() -> None:
        subscribed.write()
        (at,) = subscribed.database.query("SELECT pg_current_wal_insert_lsn()::text")[0]
        state = {
            name: Counter(subscribed.database.query(f"SELECT {', '.join(columns)} FROM {name}"))
            for name, columns in COLUMNS.items()
        }
        moments.append((Lsn.parse(at), state))

    subscribed.grow()
    fault.arm("copying public.a")
    subscribed.subscribe(mode="history")
    fault.wait("copying public.a")
    daemon.kill()
    write()
    fault.clear()
    fault.arm("1 chunks of public.a", "kill")
    daemon.start()
    daemon.killed_by_fault()
    write()
    # Apply passes these transactions, so the sync worker must catch up with them.
    fault.clear()
    fault.arm("copy committed public.a")
    fault.arm("committed public.a", "kill")
    daemon.start()
    fault.wait("copy committed public.a")
    for _ in range(3):
        write()
    origin_passes(subscribed)
    fault.release("copy committed public.a")
    daemon.killed_by_fault()
    points = ("commit public.a", "committed public.a", "committed public.keyless", "batch committed")
    subscribed.killed_at(fault, points, write, before=3)
    for name, relation in subscribed.relations().items():
        rows = query(relation.path, "SELECT * FROM t").read_all().to_pylist()
        changes = [(row["_pubsub_lsn"], row["_pubsub_seq"]) for row in rows if row["_pubsub_op"] != "R"]
        assert len(set(changes)) == len(changes), "a change is there twice"
        copied = {row["_pubsub_lsn"] for row in rows if row["_pubsub_op"] == "R"}
        assert len(copied) == 1, "parts of two copies"
        known = [(at, state) for at, state in moments if at >= min(copied)]
        assert len(known) > 10
        for at, state in known:
            assert as_of(rows, at, COLUMNS[name], ["id"] if name == "a" else []) == state[name], (name, at)
