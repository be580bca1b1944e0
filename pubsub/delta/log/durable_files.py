"""Make files and names durable: on a local disk by fsync; an object store's are so from the beginning.  Blocks."""

from __future__ import annotations

import os
from pathlib import Path

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


def create(path: Place) -> pa.NativeFile:
    """Open a new file for writing by Arrow, which copies for a file of Python's; its directory is made if need be."""
    if isinstance(path, StorePath):
        return path.open_output()
    try:
        _create(path)
    except FileNotFoundError:
        # The partition's first file, or VACUUM has just removed the empty directory.
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path)
    try:
        return pa.OSFile(str(path), "wb")
    except BaseException:
        path.unlink()
        raise


def _create(path: Path) -> None:
    with open(path, "xb"):
        pass


def finish(file: pa.NativeFile, path: Place) -> None:
    """Close the file at `path` that `create` opened, with its contents durable, though a local one's name is not yet."""
    file.close()
    sync_file(path)


def sync_file(path: Place) -> None:
    """Make the contents of a file durable that another process has written."""
    if isinstance(path, Path):
        fsync.sync_file(path)


def sync_directory(path: Place) -> None:
    """Make the names in a directory durable."""
    if isinstance(path, Path):
        fsync.sync_directory(path)
