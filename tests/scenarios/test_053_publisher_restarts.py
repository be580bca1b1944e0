"""The publisher goes down while it streams transactions: they are lost there and leave nothing here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psycopg
import pytest
from deltalake import DeltaTable

import apply.pipeline.dispatch
from pubsub.delta.places import place
from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.scenarios import test_050_streaming as streaming
from tests.scenarios.test_050_streaming import TABLES
from tests.support.replica import Replica, RunningNode, wait_until
from tests.support.unnamed_files import unnamed_files

MODES: tuple[Literal["fast", "immediate"], ...] = ("fast", "immediate")


@pytest.mark.full
def test_the_publisher_restarts_inside_a_stream(spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply.pipeline.dispatch, "PART_BYTES", 100_000)
    with EmbeddedPostgres("18") as server, RunningNode(tmp_path, spark, logical_decoding_work_mem="64kB") as node:
        server.create_database("restarts")
        database = Database(server, "restarts")
        streaming.prepare(database)
        replica = Replica(node, database)
        replica.subscribe("p, q", streaming="parallel")
        replica.assert_equal(*TABLES)
        for number, mode in enumerate(MODES):
            lost = psycopg.connect(replica.conninfo)
            for step in range(3):
                first = 100_000 * (number + 1) + 3000 * step
                lost.execute(
                    f"INSERT INTO a SELECT g, 1, repeat('l', 40) FROM generate_series({first}, {first + 2999}) g"
                )
                lost.execute("UPDATE big SET n = n + 1")
            wait_until(lambda: received(replica) > 500_000, "a good part of it to be sent")
            server.restart(mode)
            lost.close()
            replica.database.execute(
                streaming.SIMPLE.replace("3000, 6000", f"{number * 4000 + 3000}, {number * 4000 + 6000}")
            )
            replica.assert_equal(*TABLES)
            replica.database.execute("DELETE FROM a WHERE id > 2000; DELETE FROM b")
        replica.assert_equal(*TABLES)
        path = place(replica.path("a"))
        wait_until(lambda: not unnamed_files(path), "no file is left")
        assert DeltaTable(str(path)).version() > 0
        assert not list((tmp_path / "spill").rglob("*.arrows"))
        replica.drop()


def received(replica: Replica) -> int:
    """Return how many bytes the publisher has streamed."""
    query = f"SELECT coalesce(max(stream_bytes), 0) FROM pg_stat_replication_slots WHERE slot_name = '{replica.name}'"
    return int(replica.query(query)[0][0])
