"""The catalog in a PostgreSQL database: its own tests pass there as they do on SQLite, and a node lives on it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from apply.delta.session import Spark
from catalog.store import Catalog
from pubsub.errors import PubsubError
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.replica import Replica, RunningNode
from tests.unit import test_catalog

_numbers = itertools.count(1)
#: These look at a file of SQLite.
_OF_FILES = {"test_the_files_beside_it_are_private_too", "test_a_failed_statement_does_not_show_its_parameters"}

for _name, _test in vars(test_catalog).items():
    if (
        _name.startswith("test_")
        and _name not in _OF_FILES
        and {"catalog", "location"} & inspect.signature(_test).parameters.keys()
    ):
        globals()[_name] = _test


@pytest.fixture
def location(publisher: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database."""
    name = f"catalog_{next(_numbers)}"
    publisher.create_database(name)
    yield f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/{name}"
    publisher.drop_database(name)


@pytest.fixture
async def catalog(location: str) -> AsyncIterator[Catalog]:
    async with await Catalog.open(location) as opened:
        yield opened


async def test_what_can_not_be_reached_is_a_typed_error_without_the_password() -> None:
    with pytest.raises(PubsubError, match="could not access the catalog") as caught:
        await Catalog.open("postgresql://someone:geheim@127.0.0.1:1/nowhere")
    assert "geheim" not in caught.value.report(verbose=True)


async def test_a_refused_role_is_a_typed_error(publisher: EmbeddedPostgres) -> None:
    with pytest.raises(PubsubError, match="no-such-role"):
        await Catalog.open(f"postgresql://no-such-role@{publisher.host}:{publisher.port}/postgres")


def test_a_node_lives_on_it(spark: Spark, location: str, database: Database, tmp_path: Path) -> None:
    """Copy, apply, a restart, every view, and DROP: nothing of the node's state is in its directory."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION p FOR TABLE t"
    )
    with RunningNode(tmp_path / "node", spark, catalog={"url": location}) as node:
        replica = Replica(node, database)
        replica.subscribe()
        replica.execute("UPDATE t SET n = 2", "INSERT INTO t VALUES (2, 2)")
        replica.assert_equal("t")
    replica.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3, 3)")
    with RunningNode(tmp_path / "node", spark, catalog={"url": location}) as node:
        replica.node = node
        replica.assert_equal("t")
        for view in ("pg_subscription", "pg_subscription_rel", "pg_stat_subscription", "pg_stat_subscription_stats"):
            assert node.fetch(f"SELECT * FROM {view}")
        replica.drop()
        assert replica.slots() == []
    assert not (tmp_path / "node" / "catalog.db").exists()
