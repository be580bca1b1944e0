"""pytest fixtures: servers shared by a whole run, a database for each test, one Spark for the process.

Import the fixtures that a conftest.py needs; each works without the others:

    from pubsub.testing.fixtures import database  # noqa: F401

A server starts when a test first asks for it.  A test gets a database of its own, dropped with its slots when the test
ends.  A test that restarts or kills a server, or changes its settings, should start an EmbeddedPostgres of its own.
docs/testing.md shows a whole project.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

VERSIONS: Final = binaries.VERSIONS

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Database:
    """A database of a shared server."""

    server: EmbeddedPostgres
    name: str

    @property
    def conninfo(self) -> str:
        """A libpq connection string."""
        return self.server.conninfo(self.name)

    def execute(self, statements: str) -> None:
        """Run statements; several run in one transaction."""
        self.server.execute(statements, self.name)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self.server.query(statement, self.name)


class Servers:
    """The shared servers of a test run; each starts when it is first asked for."""

    def __init__(self) -> None:
        self._running: dict[str, EmbeddedPostgres] = {}

    def __getitem__(self, version: str) -> EmbeddedPostgres:
        """Return the server of a version; skip the test if this machine can have none."""
        if version not in self._running:
            if reason := binaries.obstacle(version):
                pytest.skip(reason)
            self._running[version] = EmbeddedPostgres(version).start()
        return self._running[version]

    def close(self) -> None:
        """Stop every server."""
        for server in self._running.values():
            server.close()


_SERVERS: Final = pytest.StashKey[Servers]()


def usual_version() -> str:
    """Return the version of the servers that tests use if they name none."""
    return os.environ.get("PUBSUB_TEST_VERSION", "18")


def shared(request: pytest.FixtureRequest) -> Servers:
    """Return the run's servers.

    Fixtures call this instead of depending on `servers`, so that a conftest.py need not import that fixture too.
    """
    found = request.config.stash.get(_SERVERS, None)
    if found is None:
        found = request.config.stash[_SERVERS] = Servers()
        request.config.add_cleanup(found.close)
    return found


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    """The shared servers by major version: `servers["17"]`."""
    return shared(request)


@pytest.fixture(scope="session")
def publisher(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The shared PostgreSQL 18, or the version that $PUBSUB_TEST_VERSION says."""
    return shared(request)[usual_version()]


@pytest.fixture(scope="session")
def publisher15(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The shared PostgreSQL 15."""
    return shared(request)["15"]


@pytest.fixture(scope="session")
def publisher16(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The shared PostgreSQL 16."""
    return shared(request)["16"]


@pytest.fixture(scope="session")
def publisher17(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The shared PostgreSQL 17."""
    return shared(request)["17"]


@pytest.fixture(scope="session")
def publisher19(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The shared PostgreSQL 19."""
    return shared(request)["19"]


@pytest.fixture(scope="session", params=VERSIONS)
def any_publisher(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """A shared server of each version in turn."""
    return shared(request)[request.param]


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database on the server of `publisher`."""
    yield from fresh(shared(request)[usual_version()])


@pytest.fixture(params=VERSIONS)
def any_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database on each version in turn."""
    yield from fresh(shared(request)[request.param])


@pytest.fixture(scope="session")
def spark() -> Iterator[Spark]:
    """The one Spark of the test process; its JVM compiles quickly rather than well.

    $PUBSUB_TEST_WAREHOUSE: a store that it must reach, such as s3a://bucket; by default none.
    """
    warehouse = os.environ.get("PUBSUB_TEST_WAREHOUSE", "")
    with tempfile.TemporaryDirectory(prefix="pubsub-spark-") as home:
        spark = Spark(
            Path(home), conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}, warehouse=warehouse
        )
        spark.running()
        yield spark
        spark.stop()


def fresh(server: EmbeddedPostgres) -> Iterator[Database]:
    """Yield an empty database of the server, and drop it afterwards: the body of a fixture."""
    name = f"test_{next(_numbers)}"
    server.create_database(name)
    yield Database(server, name)
    server.drop_database(name)
