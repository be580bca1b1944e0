"""The stores of the scenarios that are about stores: a server, and what a node's settings name it by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pubsub.delta.places import StorePath
from pubsub.testing.hdfs_server import HdfsServer
from pubsub.testing.s3_server import S3Server


class Store(Protocol):
    """A running server."""

    #: How its connections may break (broken_store.py).
    ways: tuple[str, ...]

    @property
    def server(self) -> S3Server | HdfsServer: ...

    def warehouse(self, name: str, port: int | None = None) -> str:
        """Return the URI of a warehouse, on a proxy's port if that is given."""

    def conf(self, port: int | None = None) -> dict[str, str]:
        """Return Spark's settings for it."""


class S3:
    """A bucket."""

    ways = ("cut", "busy", "slow")

    def __init__(self, server: S3Server) -> None:
        self.server = server
        server.bucket("lake")

    def warehouse(self, name: str, port: int | None = None) -> str:
        return f"s3a://lake/{name}"

    def conf(self, port: int | None = None) -> dict[str, str]:
        return self.server.conf(f"http://127.0.0.1:{port}" if port is not None else None)


class Hdfs:
    """A directory; only the name node's port can be a proxy's."""

    ways = ("cut", "slow")

    def __init__(self, server: HdfsServer) -> None:
        self.server = server

    def warehouse(self, name: str, port: int | None = None) -> str:
        return f"hdfs://127.0.0.1:{port or self.server.port}/lake/{name}"

    def conf(self, port: int | None = None) -> dict[str, str]:
        return {}


def write_settings(home: Path, settings: str, warehouse: str, conf: Mapping[str, str]) -> None:
    """Write a node's settings: `settings`, which end with [spark.conf], a warehouse, and Spark's settings for it."""
    lines = "".join(f'"{name}" = "{value}"\n' for name, value in conf.items())
    (home / "pubsub.toml").write_text(f'warehouse = "{warehouse}"\n{settings}{lines}')


def commits(path: str) -> list[str]:
    """Return each commit's file of the table at `path`, by version; object_stores must have its settings."""
    found = sorted((StorePath(path) / "_delta_log").glob("*.json"), key=str)
    return [file.read_text("utf-8") for file in found]
