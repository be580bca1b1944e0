"""kill -9 of a real daemon while the gap that a lost slot left is filled from an archive."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import psutil
import pytest

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import Daemon, Subscribed
from tests.support.archived import archive_of, archived_server
from tests.support.replica import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with archived_server(logical_decoding_work_mem="64kB") as server:
        server.create_database("kill")
        server.execute("CHECKPOINT")  # decoding does not begin at one in the midst of CREATE DATABASE
        yield server


@pytest.fixture(scope="module")
def followed(home: Daemon, server: EmbeddedPostgres) -> Iterator[Subscribed]:
    home.ensure()
    one = Subscribed(home, Database(server, "kill"))
    one.subscribe()
    home.execute(f"ALTER SUBSCRIPTION {one.name} SET (wal_archive = '{archive_of(server)}')")
    yield one
    home.faults.clear()
    home.ensure()
    one.drop()
    assert one.slots() == []


def lose_the_slot(followed: Subscribed, first: int) -> None:
    """Drop the slot while the daemon is dead, and write: small transactions, large ones, and WAL segments."""
    database = followed.database
    followed.daemon.kill()
    database.server.drop_slot(followed.name)
    for number in range(5):
        database.execute(
            f"INSERT INTO a SELECT g, 0, repeat('k', 50) FROM generate_series({first + 1000 * number}, "
            f"{first + 1000 * number + 999}) g; UPDATE a SET n = n + 1 WHERE id <= 500"
        )
        database.execute(
            f"DELETE FROM a WHERE id = {first + 1000 * number}; INSERT INTO keyless VALUES ({number})",
        )
        database.query("SELECT pg_switch_wal()")
    database.execute("CHECKPOINT")


def decoders(server: EmbeddedPostgres) -> list[psutil.Process]:
    archive = str(archive_of(server))
    return [one for one in psutil.process_iter(["cmdline"]) if archive in (one.info["cmdline"] or ())]


@pytest.mark.full
@pytest.mark.parametrize("point", ["commit public.a", "committed public.a", "gap: caught up", "gap: slot made"])
def test_killed_while_a_gap_is_filled(daemon: Daemon, followed: Subscribed, point: str) -> None:
    """Nothing is lost or doubled, and the decoding process does not outlive the daemon."""
    first = 1_000_000 + 10_000 * len(followed.database.query("SELECT 1 FROM a WHERE id % 10000 = 1 AND id > 1000000"))
    followed.assert_equal()
    lose_the_slot(followed, first)
    daemon.faults.arm(point, "kill")
    daemon.start()
    daemon.killed_by_fault()
    wait_until(lambda: not decoders(followed.database.server), "the decoding process to end")
    daemon.faults.clear()
    followed.database.execute("UPDATE a SET n = n + 1 WHERE id <= 10")
    daemon.start()
    followed.assert_equal()
    wait_until(lambda: followed.slots() == [followed.name], "the slot to have been made anew")


@pytest.mark.full
def test_killed_at_random_moments_in_gaps(daemon: Daemon, followed: Subscribed) -> None:
    chance = random.Random(1)
    for turn in range(4):
        followed.assert_equal()
        lose_the_slot(followed, 5_000_000 + 100_000 * turn)
        daemon.start()
        moment = time.monotonic() + chance.random() * 8
        wait_until(lambda moment=moment: time.monotonic() >= moment, "the moment to kill")  # type: ignore[misc]
        daemon.kill()
        daemon.start()
    followed.assert_equal()
