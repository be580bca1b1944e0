"""The source of all schedules and failures of one history, and its record."""

from __future__ import annotations

import asyncio
import random

from pubsub.errors import ConnectionFailure


class Chance:
    """Draws from `seed`.  `trouble`: how often a call to the outside fails.  `story`: what has happened, by virtual time."""

    def __init__(self, seed: str, *, calm: bool = False) -> None:
        self.random = random.Random(seed)
        self.trouble = 0.0 if calm else self.random.choice([0.0, 0.0, 0.003, 0.01, 0.03])
        self.seconds = 0.0 if calm else self.random.choice([0.0, 0.01, 0.3, 3.0])
        self.rounds = [0] if calm else self.random.choice([[0], [0, 1], [0, 0, 1, 3]])
        self.story: list[tuple[float, str]] = []

    async def wait(self) -> None:
        """Let other tasks run first, for a few steps or for some time."""
        for _ in range(self.random.choice(self.rounds)):
            await asyncio.sleep(0)
        if self.seconds and self.random.random() < 0.15:
            await asyncio.sleep(self.random.random() * self.seconds)

    def fail(self, what: str) -> None:
        """Raise ConnectionFailure, now and then."""
        if self.trouble and self.random.random() < self.trouble:
            self.tell(f"{what} fails")
            raise ConnectionFailure(f"something broke: {what}")

    def tell(self, what: str) -> None:
        """Write a line of the story."""
        self.story.append((asyncio.get_running_loop().time(), what))
