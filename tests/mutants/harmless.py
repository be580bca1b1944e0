"""Faults that no test can see, or need not: the reason of each, by the fault's name."""

from __future__ import annotations

from typing import Final

HARMLESS: Final[dict[str, str]] = {}
