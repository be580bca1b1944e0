"""Make files, and the names in directories, durable.  Blocks; raises OSError."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path, *, follow: bool = True) -> None:
    """Make the contents of a file durable.  `follow`: `path` may be a symbolic link."""
    _sync(path, os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW)


def sync_directory(path: Path) -> None:
    """Make names added to or removed from a directory durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
