"""Daemons that share a catalog (pubsub daemon --shared): one is killed, or stopped, or ends, or is started again, under load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import SETTINGS, Daemon, Subscribed
from tests.support.replica import wait_until

pytestmark = pytest.mark.full

CATALOG = "shared_catalog"


class Shared:
    """Two daemons, and a subscription for each."""

    def __init__(self, directory: Path, publisher: EmbeddedPostgres, databases: list[Database], settings: str) -> None:
        self.publisher = publisher
        url = f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/{CATALOG}"
        self.daemons: list[Daemon] = []
        (directory / "warehouse").mkdir()
        for name in ("first", "second"):
            home = directory / name
            home.mkdir()
            daemon = Daemon(home)
            (home / "pubsub.toml").write_text(
                f'warehouse = "{directory / "warehouse"}"\nwal_receiver_status_interval = "1s"\n'
                f'{settings}{SETTINGS}[catalog]\nurl = "{url}"\n'
            )
            self.daemons.append(daemon)
        self.daemons[0].start("--shared")
        self.both = [Subscribed(self.daemons[0], database) for database in databases]
        for one in self.both:
            one.subscribe()
        self.daemons[1].start("--shared")
        self.assert_equal()

    def divided(self, of: Daemon | None = None) -> dict[str, list[str]]:
        """Return the subscriptions that each daemon has, by the name of its home."""
        rows = (of or self.daemons[0]).fetch("SELECT home, subscriptions FROM pubsub_daemons")
        return {Path(row["home"]).name: list(row["subscriptions"]) for row in rows}

    def has(self, **wanted: int) -> bool:
        return {name: len(subscriptions) for name, subscriptions in self.divided().items()} == wanted

    def until(self, **wanted: int) -> None:
        """Wait until daemons have so many subscriptions."""
        wait_until(lambda: self.has(**wanted), f"{wanted}, and not {self.divided()}")

    def write(self, times: int = 3) -> None:
        for one in self.both:
            one.write(times)

    def assert_equal(self) -> None:
        for one in self.both:
            one.assert_equal()


@pytest.fixture(params=["", "worker_processes = 2\n"], ids=["a process each", "two processes each"])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, publisher: EmbeddedPostgres, databases: list[Database]
) -> Iterator[Shared]:
    publisher.create_database(CATALOG)
    daemons: list[Daemon] = []
    try:
        made = Shared(tmp_path, publisher, databases, request.param)
        daemons = made.daemons
        made.until(first=1, second=1)
        made.assert_equal()
        yield made
        made.write()
        made.assert_equal()
        for one in made.both:
            one.drop()
    finally:
        for daemon in daemons:
            daemon.kill()
        publisher.drop_database(CATALOG)


def test_one_is_killed_and_comes_back(shared: Shared) -> None:
    """The other has all of them within half a minute, and gives one back."""
    first, second = shared.daemons
    for killed, other, alone in ((second, first, "first"), (first, second, "second")):
        shared.write()
        killed.kill()
        shared.write()
        wait_until(
            lambda alone=alone: shared.divided() == {alone: shared.divided()[alone]}, "the other one to be expelled"
        )
        wait_until(lambda alone=alone: len(shared.divided()[alone]) == 2, "it to have both")
        for one in shared.both:
            one.daemon = other
        shared.assert_equal()
        killed.start("--shared")
        shared.until(first=1, second=1)
        shared.write()
        shared.assert_equal()


def test_one_is_killed_and_started_at_once(shared: Shared) -> None:
    """Whether it has counted as dead meanwhile, on a slow machine, or not."""
    first, second = shared.daemons
    for killed in (first, second):
        shared.write()
        killed.kill()
        shared.write()
        killed.start("--shared")
        shared.assert_equal()
        shared.until(first=1, second=1)


def test_one_ends_in_order(shared: Shared) -> None:
    """What it had moves at once, and it was all committed."""
    first, second = shared.daemons
    shared.write()
    assert second.terminate() == 0
    shared.until(first=2)
    shared.write()
    shared.assert_equal()
    assert not first.said("another daemon is gone")
    second.start("--shared")
    shared.until(first=1, second=1)


def test_one_that_was_cut_off_commits_nothing_more(shared: Shared) -> None:
    """It is stopped, and its sessions are gone, as a machine without network; then it goes on."""
    second = shared.daemons[1]
    shared.write()
    process = second.process
    others = process.children(recursive=True)
    for one in (process, *others):
        one.suspend()
    # What the server does by itself when a machine has not answered for twenty seconds.
    shared.publisher.query(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        f" WHERE datname = '{CATALOG}' AND application_name = 'pubsub daemon'"
    )
    for one in shared.both:
        one.database.query("SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active")
    shared.until(first=2)
    shared.write()
    shared.assert_equal()
    for one in (*others, process):
        one.resume()
    # It finds that it has been expelled, and ends.
    wait_until(lambda: not second.running, "the second daemon to end")
    assert second.said("another daemon has taken over the catalog")
    shared.write()
    shared.assert_equal()


def test_the_catalogs_server_ends_every_session(shared: Shared) -> None:
    """As when it starts again: nobody takes anybody for dead."""
    for _ in range(2):
        shared.write()
        shared.publisher.query(
            f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{CATALOG}'"
        )
        shared.write()
        shared.assert_equal()
    assert all(daemon.running for daemon in shared.daemons)
    assert not any(daemon.said("another daemon is gone") for daemon in shared.daemons)
    shared.until(first=1, second=1)
