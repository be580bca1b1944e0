"""Unix sockets in directories whose names are too long for a socket's address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = ".s.PGSQL.5432"
_LONGEST_PATH: Final = 107
"""Bytes of a Unix socket's path, sockaddr_un's."""


@contextmanager
def short_path(directory: Path) -> Iterator[Path]:
    """Give a way to a directory that fits into a Unix socket's address, as long as the context lasts."""
    if len(os.fsencode(directory / SOCKET_NAME)) <= _LONGEST_PATH:
        yield directory
        return
    number = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)
