"""Named fault points, where a test kills this process or holds it, to examine the state it leaves.

The environment variable PUBSUB_FAULT names a directory.  A file there with a point's name arms that point; the file's
one word says what happens:

    kill    the process is killed as by kill -9
    hold    the caller waits until the file is removed
    tell    the caller continues

In each case the point first creates the file "<point>.reached".  Without the variable a point does nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "PUBSUB_FAULT"
_LOOK: Final = 0.005


def point(name: str) -> None:
    """Pass the point `name` in a thread or a Spark Python worker; blocks while the point is held."""
    directory = os.environ.get(VARIABLE)
    if directory is not None:
        _meet(Path(directory), name)


async def reached(name: str) -> None:
    """Pass the point `name` in a coroutine; other tasks continue while the point is held."""
    directory = os.environ.get(VARIABLE)
    if directory is not None and (Path(directory) / name).is_file():
        await asyncio.to_thread(_meet, Path(directory), name)


def _meet(directory: Path, name: str) -> None:
    armed = directory / name
    try:
        what = armed.read_text().strip()
    except OSError:
        return
    (directory / f"{name}.reached").touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "hold" and armed.exists():
        time.sleep(_LOOK)
