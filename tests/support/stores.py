"""Where nodes of the tests keep their Delta tables.

By default that is the node's directory.  With $PUBSUB_TEST_STORE = s3 or hdfs, each test process starts such a
server, and the same tests run on tables that lie there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from pyarrow import fs

from pubsub import object_stores
from pubsub.delta.places import Place, StorePath, place

_STORE: Final = os.environ.get("PUBSUB_TEST_STORE", "local")
_BUCKET: Final = "lake"

#: For tests of what only a local directory has: its durability, its locks, its files' names as another program sees them.
local_only: Final = pytest.mark.skipif(_STORE != "local", reason="about tables in a local directory")


def start(config: pytest.Config) -> None:
    """Start the store's server for this process, and let everything in it find the store by the environment."""
    match _STORE:
        case "local":
            return
        case "s3":
            environment = _start_s3(config)
        case "hdfs":
            environment = _start_hdfs(config)
        case _:
            raise pytest.UsageError(f"PUBSUB_TEST_STORE is {_STORE!r}; there are local, s3 and hdfs")
    os.environ |= environment


def _start_s3(config: pytest.Config) -> dict[str, str]:
    from pubsub.testing.s3_server import S3Server

    server = S3Server(_directory(config))
    server.__enter__()
    config.add_cleanup(server.kill)
    files = server.bucket(_BUCKET)
    return {
        **server.environment(),
        "PUBSUB_TEST_WAREHOUSE": f"s3a://{_BUCKET}",
        "PUBSUB_TEST_FILES": str(files),
    }


def _start_hdfs(config: pytest.Config) -> dict[str, str]:
    from pubsub.testing.hdfs_server import HdfsServer

    server = HdfsServer(_directory(config))
    server.__enter__()
    config.add_cleanup(server.kill)
    return {"PUBSUB_TEST_WAREHOUSE": f"hdfs://127.0.0.1:{server.port}/lake"}


def _directory(config: pytest.Config) -> Path:
    directory = tempfile.TemporaryDirectory(prefix="pubsub-store-")
    config.add_cleanup(directory.cleanup)
    return Path(directory.name)


def warehouse(home: Path) -> Place:
    """Return the warehouse of a test's node."""
    root = os.environ.get("PUBSUB_TEST_WAREHOUSE")
    return place(f"{root}{home}/warehouse") if root else home / "warehouse"


def settings(home: Path) -> dict[str, str]:
    """Return the settings of a test's node that say where its warehouse is, if it is not in its directory."""
    return {"warehouse": str(warehouse(home))} if "PUBSUB_TEST_WAREHOUSE" in os.environ else {}


def local_files(path: str | Place) -> Path:
    """Return the directory in which a table's files lie, for readers that know no store."""
    root, files = os.environ.get("PUBSUB_TEST_WAREHOUSE"), os.environ.get("PUBSUB_TEST_FILES")
    if root and files and str(path).startswith(root):
        return Path(f"{files}{str(path).removeprefix(root)}")
    return Path(str(path))


@contextmanager
def readable(path: str | Place) -> Iterator[Path]:
    """Give a directory with a table's files, for readers that know no store."""
    found = place(str(path))
    if not isinstance(found, StorePath) or "PUBSUB_TEST_FILES" in os.environ:
        yield local_files(path)
        return
    with tempfile.TemporaryDirectory() as copy:
        fs.copy_files(str(path).partition("://")[2], copy, source_filesystem=object_stores.file_system(str(path)))
        yield Path(copy)
