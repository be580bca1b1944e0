"""Faults by name: places where a test kills this process or holds it, to look at what is left.

The environment variable PUBSUB_FAULT names a directory.  A file in it with the name of a point arms that point, and holds a
word that says what happens there:

    kill    this process ends as by kill -9
    hold    whoever came here waits until the file is gone
    tell    nothing

Whoever comes to an armed point first leaves the file "<point>.reached".  Without the variable a point does nothing.
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
    """For threads and Spark's Python workers; blocks while it is held."""
    directory = os.environ.get(VARIABLE)
    if directory is not None:
        _meet(Path(directory), name)


async def reached(name: str) -> None:
    """For coroutines: others go on while it is held."""
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
