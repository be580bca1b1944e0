"""A real daemon, which tests kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pubsub.testing.fixtures import Database
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A node with its daemon, which starts when a test asks for it and goes on running for the next test."""
    daemon = Daemon(tmp_path_factory.mktemp("node"))
    yield daemon
    daemon.kill()


@pytest.fixture
def daemon(home: Daemon) -> Iterator[Daemon]:
    """The daemon, running, with no fault armed."""
    home.faults.clear()
    home.ensure()
    yield home
    home.faults.clear()


@pytest.fixture
def subscribed(daemon: Daemon, database: Database) -> Iterator[Subscribed]:
    """A database with two tables; its subscription is dropped afterwards and must leave no slot behind."""
    one = Subscribed(daemon, database)
    yield one
    daemon.faults.clear()
    daemon.ensure()
    one.drop()
    assert one.slots() == []


@pytest.fixture
def fault(daemon: Daemon) -> Faults:
    return daemon.faults
