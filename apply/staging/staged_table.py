"""One table's part of a batch: while it is staged, and when it is ready to be committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from apply.batch import Batch
from apply.conflicts import Conflicts
from apply.staging.destination import Destination
from pubsub.delta.table import Commit
from pubsub.delta.writers.changeset import Folded
from pubsub.delta.writers.choose_writer import AnyStaged
from pubsub.delta.writers.staged_parts import StagedParts


@dataclass(frozen=True, slots=True)
class StagedTable:
    """One table's part of a batch, staged and ready to be committed; the counts are of row changes."""

    destination: Destination
    staged: AnyStaged
    commit: Commit
    inserts: int
    updates: int
    deletes: int
    conflicts: Conflicts = field(default_factory=Conflicts)


@dataclass(slots=True)
class Parts:
    """One table's part of a batch, being staged piece by piece in `sink`; the counts are of row changes."""

    sink: StagedParts
    inserts: int = 0
    updates: int = 0
    deletes: int = 0

    def add(self, folded: Folded) -> None:
        """Stage the next piece.  Blocks."""
        self.sink.add(folded)
        self.inserts += folded.inserts
        self.updates += folded.updates
        self.deletes += folded.deletes

    def finish(self, destination: Destination, batch: Batch, conflicts: Conflicts | None = None) -> StagedTable:
        """Finish staging after the last piece.  Blocks."""
        return StagedTable(
            destination,
            self.sink.finish(),
            destination.commit(batch),
            self.inserts,
            self.updates,
            self.deletes,
            conflicts or Conflicts(),
        )
