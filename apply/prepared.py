"""What preparing a batch leaves for one table: staged, and ready to be committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from apply.conflicts import Conflicts
from apply.decode import Destination
from apply.delta.stage import AnyStaged
from apply.delta.table import Commit


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """One table's part of a batch, staged; the counts are of row changes."""

    destination: Destination
    staged: AnyStaged
    commit: Commit
    inserts: int
    updates: int
    deletes: int
    conflicts: Conflicts = field(default_factory=Conflicts)
