"""Count the batches of one stream that were taken and are not finished, by how far each has come.

    taken ─► staged ─► committed ─► stored

    staged      its tables are staged, and the commit task has it
    committed   it is in Delta
    stored      the origin is past it, and was reported

Batches pass each milestone in the order in which they were taken.  At most one is being staged, and one committing.
"""

from __future__ import annotations


class InFlight:
    """How many batches have come to each milestone."""

    def __init__(self) -> None:
        self.taken = self.staged = self.committed = self.stored = 0

    def __bool__(self) -> bool:
        """Return whether a batch was taken that is not in Delta."""
        return self.committed < self.taken

    @property
    def staging(self) -> bool:
        """Whether a batch is being staged, or is staged and waits for the one before it."""
        return self.staged < self.taken

    @property
    def committing(self) -> bool:
        """Whether the commit task has a batch: it is being committed, or its origin stored."""
        return self.stored < self.staged

    @property
    def last_alone(self) -> bool:
        """Whether every batch before the one taken last is in Delta."""
        return self.taken - self.committed <= 1
