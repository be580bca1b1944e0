"""Every value of every type through copy and stream, on 15 to 18, compared as PostgreSQL's text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pubsub.protocol.contract import RULES
from pubsub.testing.fixtures import VERSIONS, Database, Servers
from tests import corpus
from tests.replica import Replica, RunningNode

TYPES = ", ".join(f"public.v.{name} text" for name in corpus.TEXT_COLUMNS)


@pytest.fixture
def any_replica(request: pytest.FixtureRequest, node: RunningNode, servers: Servers) -> Iterator[Replica]:
    """An empty database of the version that the test asks for."""
    name = f"types_{request.param}"
    servers[request.param].create_database(name)
    replica = Replica(node, Database(servers[request.param], name))
    yield replica
    if replica.created:
        replica.drop()
    servers[request.param].drop_database(name)


@pytest.mark.parametrize("any_replica", VERSIONS, indirect=True)
def test_corpus(any_replica: Replica) -> None:
    """Copied, inserted, updated from NULL, with and without the old row."""
    replica = any_replica
    version = int(replica.query("SHOW server_version_num")[0][0]) // 10000
    wanted = corpus.columns(version)
    replica.execute(corpus.SETUP, corpus.create("v", wanted), "CREATE PUBLICATION p FOR TABLE v")
    replica.execute(corpus.insert("v", wanted, 1))
    replica.subscribe(types=f"'{TYPES}'")
    replica.assert_equal("v")
    replica.execute(corpus.insert("v", wanted, 1001))
    replica.assert_equal("v")
    names = ", ".join(column.name for column in wanted)
    nulls = ", ".join("NULL" for _ in wanted)
    replica.execute(
        f"UPDATE v SET ({names}) = ROW ({nulls}) WHERE id < 1000",
        "ALTER TABLE v REPLICA IDENTITY FULL",
        f"UPDATE v SET ({names}) = (SELECT {names} FROM v o WHERE o.id = v.id + 1000) WHERE id < 1000",
        "DELETE FROM v WHERE id % 3 = 0",
    )
    replica.assert_equal("v")


def test_the_contract_has_every_type(servers: Servers) -> None:
    """Of 15 and 18; what is in pg_catalog and is no array, row type or pseudo-type."""
    known = {(rule.oid, rule.name) for rule in RULES}
    for version in ("15", "18"):
        found = servers[version].query(
            "SELECT oid::int8, typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace "
            "AND typtype IN ('b', 'r', 'm') AND typname !~ '^_'"
        )
        assert set(found) <= known
        if version == "18":
            assert set(found) == known
