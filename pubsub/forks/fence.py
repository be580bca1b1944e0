"""A file's lock that lasts as long as this process, and those that it gives the descriptor to, however they end."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LOOK: Final = 0.05
"""Seconds between two attempts: flock(2) has no timeout."""


def acquire(path: Path, timeout: float, on_wait: Callable[[], None]) -> int:
    """Lock the file, which is made if need be, and return its descriptor.  Blocks.

    `on_wait` is called once if others hold it.  Raises TimeoutError if they still do after `timeout` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + timeout
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                waiting = True
                on_wait()
            if time.monotonic() < deadline:
                time.sleep(_LOOK)
                continue
            os.close(descriptor)
            raise TimeoutError from None
        return descriptor
