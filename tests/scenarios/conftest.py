"""One node for the tests of a module, and a database of its own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pubsub.delta.spark_session import Spark
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import claim_target
from tests.support.replica import Faults, Replica, RunningNode, Stock, faults


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with workers, in the test process."""
    with RunningNode(tmp_path_factory.mktemp("node"), spark) as node:
        yield node


@pytest.fixture
def replica(node: RunningNode, database: Database) -> Iterator[Replica]:
    """An empty database on PostgreSQL 18; its subscription is dropped afterwards and must leave no slot behind."""
    replica = Replica(node, database)
    yield replica
    if replica.created:
        replica.drop()
    assert [slot for slot in replica.slots() if not slot.startswith("stock_")] == []


@pytest.fixture
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Delta write a checkpoint of new tables after every third commit, so that later replays of the log start from one."""
    monkeypatch.setattr(claim_target, "_CHECKPOINT_INTERVAL", 3)


@pytest.fixture(scope="session")
def stock_server() -> Iterator[EmbeddedPostgres]:
    """A second server, whose own subscriptions follow the same publishers."""
    settings: dict[str, str | int] = {
        "wal_retrieve_retry_interval": "100ms",
        "max_sync_workers_per_subscription": 4,
        "max_logical_replication_workers": 20,
        "max_worker_processes": 30,
        "max_active_replication_origins": 30,
    }
    with EmbeddedPostgres("18", settings=settings) as server:
        yield server


@pytest.fixture
def stock(replica: Replica, stock_server: EmbeddedPostgres) -> Iterator[Callable[[str], Stock]]:
    """A function that makes a stock subscriber's database with the given tables."""
    made: list[Stock] = []

    def make(ddl: str) -> Stock:
        made.append(Stock(replica, stock_server, ddl))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """The fault points (pubsub.faults) of the test process."""
    with faults(tmp_path_factory.mktemp("faults")) as found:
        yield found
