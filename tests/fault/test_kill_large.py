"""kill -9 of a real daemon around streamed and prepared transactions and their outcomes, at points and at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import psycopg
import pytest

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults, wait_until

#: The changes of Subscribed.write, but large: each transaction is streamed in many blocks.
LARGE = """
INSERT INTO a SELECT g, 0, repeat('k', 50) FROM generate_series({first}, {first} + 3000) g;
SAVEPOINT s;
UPDATE a SET n = n + 100;
ROLLBACK TO SAVEPOINT s;
UPDATE a SET n = n + 1 WHERE id <= 2000;
INSERT INTO keyless SELECT g FROM generate_series(1, 2000) g;
"""


@pytest.fixture(scope="module")
def publisher() -> Iterator[Database]:
    """A server that streams early and allows prepared transactions."""
    with EmbeddedPostgres("18", settings={"max_prepared_transactions": 20}) as server:
        server.create_database("kill")
        server.execute("ALTER DATABASE kill SET logical_decoding_work_mem = '64kB'", "kill")
        yield Database(server, "kill")


@pytest.fixture(scope="module")
def followed(home: Daemon, publisher: Database) -> Iterator[Subscribed]:
    """A subscription whose two-phase commit is enabled."""
    home.ensure()
    one = Subscribed(home, publisher)
    home.execute(
        f"CREATE SUBSCRIPTION {one.name} CONNECTION '{publisher.conninfo}' PUBLICATION p "
        "WITH (batch_age = '20ms', two_phase = true)"
    )
    one._created = True
    wait_until(
        lambda: publisher.query("SELECT 1 FROM pg_replication_slots WHERE two_phase"), "two-phase commit to be enabled"
    )
    yield one
    home.faults.clear()
    home.ensure()
    one.drop()
    assert one.slots() == []


def restart(daemon: Daemon, faults: Faults) -> None:
    faults.clear()
    daemon.start()


def prepared_files(daemon: Daemon) -> list[str]:
    return sorted(path.name for path in (daemon.home / "prepared").rglob("*.*"))


@pytest.mark.full
@pytest.mark.parametrize("point", ["prepare", "prepared", "commit public.a", "committed public.a", "outcome durable"])
def test_killed_around_a_prepared_transaction(daemon: Daemon, followed: Subscribed, point: str) -> None:
    """Wherever the daemon is killed, the transaction is applied once, and its file is removed in the end."""
    database = followed.database
    followed.caught_up()
    before = point in ("prepare", "prepared")
    if before:
        daemon.faults.arm(point, "kill")
    first = 1_000_000 + 10_000 * len(database.query("SELECT 1 FROM a WHERE id >= 1000000 AND id % 10000 = 0"))
    database.execute(f"BEGIN; {LARGE.format(first=first)} PREPARE TRANSACTION 'killed'")
    if before:
        daemon.killed_by_fault()
        restart(daemon, daemon.faults)
    followed.caught_up()
    daemon.faults.arm(point, "kill")
    database.execute("COMMIT PREPARED 'killed'")
    if not before:
        daemon.killed_by_fault()
        assert [name.split(".", 1)[1] for name in prepared_files(daemon)] != []
    restart(daemon, daemon.faults) if not before else daemon.faults.clear()
    followed.assert_equal()
    wait_until(lambda: prepared_files(daemon) == [], "the prepared file to be removed")


@pytest.mark.full
def test_killed_at_random_moments(daemon: Daemon, followed: Subscribed) -> None:
    """Run large transactions, streamed and prepared, against a daemon that is killed again and again."""
    rounds(daemon, followed, seed=1, count=5)


@pytest.mark.soak
def test_killed_at_many_random_moments(daemon: Daemon, followed: Subscribed) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rounds(daemon, followed, seed=seed, count=100)


def rounds(daemon: Daemon, followed: Subscribed, *, seed: int, count: int) -> None:
    chance = random.Random(seed)
    database = followed.database
    first = 5_000_000
    for _ in range(count):
        daemon.ensure()
        with psycopg.connect(database.conninfo) as one, psycopg.connect(database.conninfo, autocommit=True) as other:
            for step in range(3):
                low = first + 10_000 * step
                one.execute(f"INSERT INTO a SELECT g, 0, repeat('r', 40) FROM generate_series({low}, {low} + 1500) g")
            other.execute(f"BEGIN; {LARGE.format(first=first + 50_000)} PREPARE TRANSACTION 'round'".encode())
            one.commit()
            moment = time.monotonic() + chance.random() * 3
            other.execute(f"{chance.choice(['COMMIT', 'ROLLBACK'])} PREPARED 'round'".encode())
        wait_until(lambda moment=moment: time.monotonic() >= moment, "the moment to kill")  # type: ignore[misc]
        daemon.kill()
        first += 100_000
    daemon.start()
    followed.assert_equal()
    wait_until(lambda: prepared_files(daemon) == [], "the prepared files to be removed")
