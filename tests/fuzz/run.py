"""Give a reader one input, within bounds of time and memory; keep what it stumbled over."""

from __future__ import annotations

import hashlib
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from tests.fuzz.readers import READERS

CORPUS: Final = Path(__file__).parents[1] / "data" / "fuzz"
SECONDS: Final = 20
MEMORY: Final = 4 << 30


class Stuck(Exception):
    """An input took longer than SECONDS."""


def stumbles(name: str, data: bytes) -> Exception | None:
    """Return the error that a reader ought not to raise; None if it reads the input or refuses it."""
    reader = READERS[name]
    with tempfile.TemporaryDirectory(prefix="pubsub-fuzz-") as directory, _timed():
        try:
            reader.read(Path(directory), data)
        except reader.allowed:
            return None
        except Exception as error:
            return error
    return None


def keep(name: str, data: bytes) -> Path:
    """Add an input to the corpus."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@contextmanager
def bounded() -> Iterator[None]:
    """Let this process have MEMORY bytes of addresses more: a length that is believed raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _timed() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
