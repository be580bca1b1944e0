"""Disks that fail under the reorder buffer's file layer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let the disk take `nbytes` more bytes; then it is full, even in the middle of a write."""
    write, left = os.pwrite, nbytes

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal left
        fits = min(len(data), left)
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= fits
        return write(file, bytes(data[:fits]), offset)

    with patch.object(os, "pwrite", pwrite):
        yield


@contextmanager
def unreadable() -> Iterator[None]:
    """Let every read fail."""

    def pread(file: int, length: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with patch.object(os, "pread", pread):
        yield
