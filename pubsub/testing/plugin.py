"""A pytest plugin: a publisher, a node, a subscriber and faults, as fixtures of any project that has pubsub installed.

pytest loads it by itself (the entry point pytest11), so that it imports nothing but pytest until a fixture is asked
for.  docs/testing.md has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pubsub.testing.bad_network import BadNetwork
    from pubsub.testing.daemon import Daemon
    from pubsub.testing.fault_points import Faults
    from pubsub.testing.fixtures import Database
    from pubsub.testing.subscriber import Subscriber

_MARK = (
    'pubsub_postgres(version): the major version of PostgreSQL that pubsub_publisher is, such as "17"; by default 18'
)


class Fault:
    """What a test may do to its subscription: to the network, and to the daemon at a named point."""

    def __init__(self, network: BadNetwork, points: Faults) -> None:
        self.network, self.points = network, points


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def pubsub_publisher(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database of an embedded PostgreSQL: `execute`, `query`, `conninfo`.  Its slots end with it."""
    from pubsub.testing.fixtures import fresh, shared

    mark = request.node.get_closest_marker("pubsub_postgres")
    yield from fresh(shared(request)[str(mark.args[0]) if mark else "18"])


@pytest.fixture
def pubsub_node(tmp_path: Path) -> Iterator[Daemon]:
    """A node in a directory of the test's, whose daemon runs: `execute`, `fetch`, `kill`, `start`, `log`."""
    from pubsub.testing.daemon import Daemon

    daemon = Daemon(tmp_path / "pubsub-node")
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.faults.clear()
        if daemon.running:
            daemon.terminate()


@pytest.fixture
def pubsub_fault(pubsub_publisher: Database, pubsub_node: Daemon) -> Iterator[Fault]:
    """Faults: `network`, through which the subscription then goes, and `points`, where the daemon is held or killed."""
    from pubsub.testing.bad_network import BadNetwork

    with BadNetwork(pubsub_publisher.server.port) as network:
        yield Fault(network, pubsub_node.faults)


@pytest.fixture
def pubsub_subscriber(
    request: pytest.FixtureRequest, pubsub_publisher: Database, pubsub_node: Daemon
) -> Callable[..., Subscriber]:
    """A function that subscribes pubsub_node to tables of pubsub_publisher: `pubsub_subscriber("orders", options="…")`.

    Without tables all of the database's are published.
    """
    from psycopg import conninfo as libpq_conninfo

    from pubsub.testing.subscriber import Subscriber

    def subscribe(*tables: str, options: str = "") -> Subscriber:
        conninfo = pubsub_publisher.conninfo
        if "pubsub_fault" in request.fixturenames:
            network = request.getfixturevalue("pubsub_fault").network
            conninfo = libpq_conninfo.make_conninfo(conninfo, host="127.0.0.1", port=network.port)
        subscriber = Subscriber(pubsub_node, pubsub_publisher.conninfo)
        subscriber.create(tables, conninfo, options)
        return subscriber

    return subscribe
