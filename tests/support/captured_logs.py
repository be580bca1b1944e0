"""Log entries of every level, whatever configuration a node of this process has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


@contextmanager
def captured_logs() -> Iterator[list[Any]]:
    """Collect the entries that are logged inside, as dicts; give the configuration back afterwards."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    try:
        with structlog.testing.capture_logs() as entries:
            yield entries
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)
