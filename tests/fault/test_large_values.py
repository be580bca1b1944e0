"""The memory that single large values take: streamed, changed, left unchanged by an UPDATE, copied (docs/transactions.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from bench import machine
from tests.fault.daemon import Daemon, Subscribed

#: The bytes of a value as PostgreSQL sends it, and the number of values in a transaction.
SIZE = int(os.environ.get("PUBSUB_VALUE_MB", "64")) << 20
VALUES = 3
#: How many times the largest value a process may take beside what it takes when idle.
MOST = 5.5
#: What a process of Spark's takes before it has copied anything, with room to spare.
IDLE_WORKER = 160 << 20


@dataclass
class Peaks:
    """Of the daemon, and of the Python process among its descendants that took most: the peak resident memory, in bytes."""

    daemon: int = 0
    worker: int = 0


@contextmanager
def peaks(daemon: Daemon) -> Iterator[Peaks]:
    """Find the peaks of the time in which the body runs."""
    pid = daemon.process.pid
    found, end = Peaks(), threading.Event()

    def watch() -> None:
        while not end.wait(0.05):  # a worker ends some time after its work, and its peak with it
            for child, name in machine.descendants(pid).items():
                if name.startswith("python"):
                    found.worker = max(found.worker, machine.peak_memory(child))

    machine.forget_peak(pid)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        end.set()
        watching.join()
        found.daemon = machine.peak_memory(pid)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "bytea"])
def test_values_take_a_few_times_their_size(subscribed: Subscribed, daemon: Daemon, kind: str) -> None:
    """Whatever their number; zstd makes half of a text's bytes, and nothing less of a bytea's."""
    database = subscribed.database
    digest = "md5(i::text || g)" if kind == "text" else "decode(md5(i::text || g), 'hex')"
    database.execute(
        f"""
        CREATE TABLE big (id int PRIMARY KEY, n int, v {kind}, w text);
        ALTER TABLE big ALTER v SET STORAGE EXTERNAL;
        CREATE FUNCTION large(i int) RETURNS {kind} LANGUAGE sql AS
            $$ SELECT string_agg({digest}, '') FROM generate_series(1, {SIZE // 32}) g $$;
        INSERT INTO big VALUES (0, 0, '', repeat('w', 100000));
        ALTER PUBLICATION p ADD TABLE big
        """
    )
    subscribed.subscribe()
    subscribed.assert_equal()
    # Spark, whose session takes memory of this process, has started, and a commit has been made.
    database.execute("INSERT INTO a VALUES (-1, 0, '')")
    subscribed.caught_up()
    idle = machine.resident_memory(daemon.process.pid)
    taken: dict[str, float] = {}

    def follow(what: str, statement: str) -> None:
        with peaks(daemon) as found:
            database.execute(statement)
            subscribed.caught_up()
        taken[what] = (found.daemon - idle) / SIZE

    follow("streamed", f"INSERT INTO big SELECT i, 0, large(i), 'w' FROM generate_series(1, {VALUES}) i")
    follow("changed", "UPDATE big SET v = large(-id) WHERE id > 0")
    follow("unchanged", "UPDATE big SET n = 1")
    with peaks(daemon) as found:
        daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE big")
        subscribed.caught_up()
    taken["copied"] = max(found.daemon - idle, found.worker - IDLE_WORKER) / SIZE
    print(f"times the size of a {kind}:", {what: round(times, 1) for what, times in taken.items()})
    subscribed.assert_equal(["big"])
    assert max(taken.values()) < MOST, taken
