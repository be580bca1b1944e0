"""Make files and names durable: on a local disk by fsync; an object store's are so from the beginning.  Blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from pubsub import fsync
from pubsub.delta.places import Place, StorePath


def write(path: Place, data: bytes) -> None:
    """Write a new file.  Raises FileExistsError for a local one, OSError."""
    if isinstance(path, StorePath):
        path.write_bytes(data)
        return
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def create(path: Place) -> IO[bytes] | Any:
    """Open a new file for writing; its directory is made if need be."""
    if isinstance(path, StorePath):
        return path.open_output()
    try:
        return open(path, "xb")
    except FileNotFoundError:
        # The partition's first file, or VACUUM has just removed the empty directory.
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb")


def finish(file: IO[bytes] | Any) -> None:
    """Close a file that `create` opened, with its contents durable, though a local one's name is not yet."""
    if isinstance(file, pa.NativeFile):
        file.close()
        return
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync_file(path: Place) -> None:
    """Make the contents of a file durable that another process has written."""
    if isinstance(path, Path):
        fsync.sync_file(path)


def sync_directory(path: Place) -> None:
    """Make the names in a directory durable."""
    if isinstance(path, Path):
        fsync.sync_directory(path)
