"""The options that come before the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Common:
    """The options before the command."""

    home: Path
    verbose: bool
