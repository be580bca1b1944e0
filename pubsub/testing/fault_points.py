"""The named fault points of a program (pubsub.faults), from a test's side: armed, waited for, released."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

#: How long a point is waited for, in seconds, on however slow a machine.
PATIENCE: Final = 300.0
_LOOK: Final = 0.01


class Faults:
    """A directory that a program was given as $PUBSUB_FAULT; made if it is not there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def arm(self, point: str, what: Literal["hold", "kill", "tell"] = "hold") -> None:
        """Say what happens when the program comes to a point: it is held, killed as by kill -9, or goes on."""
        (self.directory / f"{point}.reached").unlink(missing_ok=True)
        new = self.directory / f"{point}.new"
        new.write_text(what)
        new.replace(self.directory / point)

    def release(self, point: str) -> None:
        """Let the program go on; the point is armed no more."""
        (self.directory / point).unlink(missing_ok=True)

    def is_reached(self, point: str) -> bool:
        """Return whether the program came to the point since it was armed."""
        return (self.directory / f"{point}.reached").exists()

    def wait(self, point: str, timeout: float = PATIENCE) -> None:
        """Wait until the program comes to the point.  Raises TimeoutError."""
        wait_until(lambda: self.is_reached(point), f'the point "{point}"', timeout)

    def clear(self) -> None:
        """Release every point, and forget which were reached."""
        for path in self.directory.iterdir():
            path.unlink()


def wait_until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    """Wait until the condition holds.  Raises TimeoutError with `what` was waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(_LOOK)
