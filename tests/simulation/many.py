"""Runs histories in a process of their own."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Final

from tests.simulation import catalog
from tests.simulation.history import generate
from tests.simulation.run import installed, simulate

#: How many a process runs at a time.
CHUNK: Final = 25


def prepare() -> None:
    """Make what all histories of this process share."""
    catalog.prepare()
    gc.freeze()


def run(seeds: range) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Run some; return those that fail, with their first violations, and how many histories had which things in them."""
    failed = []
    flavours: Counter[str] = Counter()
    with installed():
        for seed in seeds:
            history = generate(seed)
            flavours.update(history.flavour.split(" and "))
            outcome = simulate(history)
            if outcome.violations:
                failed.append((seed, outcome.violations[0]))
    return failed, flavours
