"""The sides of a comparison: PostgreSQL's own subscriber, and ours with its tables and Spark's tasks in one place or another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.subscribers import Ours, Stock, Subscriber
from pubsub.testing.s3_server import S3Server
from pubsub.testing.servers import EmbeddedPostgres
from pubsub.testing.spark_cluster import SparkCluster

#: Ours: tables on local disk; on an S3 server of this machine; on local disk, with a Spark cluster of two workers with a
#: core each, on this machine.
PLACES: Final = ("local", "s3", "cluster")
#: What ours can be measured beside.
REFERENCES: Final = ("stock", "local")

#: The goals beside local disk, as rates.
GOALS: Final[dict[str, dict[str, float]]] = {
    "s3": dict.fromkeys(("inserts", "updates", "random", "deletes", "pgbench"), 0.7),
    "cluster": {"copy": 1.0},
}


@contextmanager
def side(name: str, publisher: EmbeddedPostgres, version: str, settings: dict[str, str | int]) -> Iterator[Subscriber]:
    """Start a side: one of PLACES, or "stock", a server of this version with these settings."""
    with TemporaryDirectory(prefix=f"pubsub-bench-{name}-") as temporary:
        directory = Path(temporary)
        match name:
            case "stock":
                with EmbeddedPostgres(version, wheel=True, settings=settings) as server:
                    yield Stock(publisher, server)
            case "s3":
                with S3Server(directory / "server") as store:
                    store.bucket("lake")
                    # For this process's readers of tables, too.
                    os.environ |= store.environment()
                    with Ours(publisher, _home(directory), name, 'warehouse = "s3a://lake/tables"\n') as ours:
                        yield ours
            case "cluster":
                with (
                    SparkCluster(directory / "cluster", workers=2) as cluster,
                    Ours(publisher, _home(directory), name, f'[spark]\nmaster = "{cluster.url}"\n') as ours,
                ):
                    yield ours
            case _:
                with Ours(publisher, _home(directory), name) as ours:
                    yield ours


def _home(directory: Path) -> Path:
    home = directory / "node"
    home.mkdir()
    return home
