"""A node's directory that is copied or moved."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import ObjectInUse
from pubsub.node.node import Node
from pubsub.testing.fixtures import Database
from tests.support import stores
from tests.support.replica import Replica, RunningNode


@stores.local_only
def test_a_moved_home_goes_on_and_a_copy_beside_it_is_refused(spark: Spark, database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION p FOR TABLE t"
    )
    home, copy, moved = tmp_path / "home", tmp_path / "copy", tmp_path / "moved"
    with RunningNode(home, spark) as node:
        replica = Replica(node, database)
        replica.subscribe()
        replica.assert_equal("t")
        shutil.copytree(home, copy)

        async def start() -> None:
            async with Node(copy):
                pass

        with pytest.raises(ObjectInUse, match="is a copy of"):
            asyncio.run(start())
        replica.execute("INSERT INTO t VALUES (2, 2)")
        replica.assert_equal("t")
    shutil.rmtree(copy)
    home.rename(moved)
    replica.execute("UPDATE t SET n = 3", "DELETE FROM t WHERE id = 1")
    with RunningNode(moved, spark) as node:
        replica.node = node
        replica.assert_equal("t")
        assert replica.path("t").startswith(str(moved))
        assert not home.exists()
        replica.drop()
