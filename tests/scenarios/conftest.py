"""One node for the tests of a module, and a database of its own for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database, usual_version
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import claim_target
from tests.support.publish import Publish, ServedReplica
from tests.support.replica import Faults, Replica, RunningNode, Stock, faults
from tests.support.stock_pairs import SETTINGS, Make, Pair, StockPairs


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with workers, in the test process."""
    with RunningNode(tmp_path_factory.mktemp("node"), spark) as node:
        yield node


@pytest.fixture(scope="session")
def served(publisher: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publish]:
    """Our own server before the shared PostgreSQL 18."""
    # Transactions are streamed early: its work_mem is its own, whatever a database's settings say.
    options = ("--max-replication-slots", "100", "--max-wal-senders", "100", "--work-mem", "64kB")
    publish = Publish(tmp_path_factory.mktemp("publish") / "node", publisher.conninfo(), *options)
    yield publish
    assert publish.terminate() == 0, publish.tail()


@pytest.fixture
def replica(request: pytest.FixtureRequest, node: RunningNode, database: Database) -> Iterator[Replica]:
    """An empty database on PostgreSQL 18; its subscription is dropped afterwards and must leave no slot behind.

    With PUBSUB_TEST_PUBLISHER=walsender the node subscribes by way of our own server.
    """
    if os.environ.get("PUBSUB_TEST_PUBLISHER") == "walsender":
        replica: Replica = ServedReplica(node, database, request.getfixturevalue("served"))
    else:
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
    with EmbeddedPostgres(usual_version(), settings=settings) as server:
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


@pytest.fixture(scope="session")
def stock_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockPairs]:
    """Stock publishers with our server before them, and stock subscribers, by version."""
    made = StockPairs(tmp_path_factory.mktemp("pairs"))
    yield made
    made.close()


@pytest.fixture
def pairs(stock_pairs: StockPairs) -> Iterator[Make]:
    """A function that makes a publisher's and a subscriber's database on shared servers of the given versions."""
    made: list[Pair] = []

    def make(*versions: str, **more: Any) -> Pair:
        made.append(stock_pairs.make(*versions, **more))
        return made[-1]

    yield make
    for pair in made:
        stock_pairs.discard(pair)


@pytest.fixture
def pair(pairs: Make) -> Pair:
    """A publisher's and a subscriber's database, both on PostgreSQL 18."""
    return pairs()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that starts servers of their own, with the versions, our server's options, and the publisher's settings."""
    made: list[Pair] = []

    def start(publisher: str = "18", subscriber: str = "18", *options: str, **settings: str | int) -> Pair:
        first = EmbeddedPostgres(publisher, settings={**SETTINGS, **settings}).start()
        second = EmbeddedPostgres(subscriber, settings=SETTINGS).start()
        made.append(Pair(Publish(tmp_path / f"node{len(made)}", first.conninfo(), *options), first, second, "s"))
        return made[-1]

    yield start
    for pair in made:
        try:
            pair.close()
            assert pair.publish.terminate() == 0, pair.publish.tail()
        finally:
            pair.publish.kill()
            pair.publisher.close()
            pair.subscriber.close()


@pytest.fixture
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """The fault points (pubsub.faults) of the test process."""
    with faults(tmp_path_factory.mktemp("faults")) as found:
        yield found
