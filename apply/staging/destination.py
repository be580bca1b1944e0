"""Where a relation's rows go: one table of the node, up to where it holds the stream, and how rows become its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from apply.batch import Batch
from pubsub.delta.choose_writer import AnyStaged, Stage
from pubsub.delta.log import OtherCommit
from pubsub.delta.table import Commit, TargetTable
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol import pgoutput
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.lsn import Lsn


class Window(Protocol):
    """What a table needs that was copied under several snapshots, until the stream has passed the newest (tablesync.window)."""

    async def complete(self, staged: AnyStaged, commit: Commit) -> Commit:
        """Give the staged batch, just before its commit, the values that neither it nor the table has.

        Return what to record with the commit.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows that were sent under one Relation message become rows of the table as it is now.

    `fields`: for each column of the message the table's (None: one that the table never gets).  `missing`: by name, what rows
    of that time have in columns that were added later (pyarrow Scalars).
    """

    fields: tuple[pa.Field | None, ...]
    missing: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a relation's rows go: `after` is the LSN up to which the table holds everything already.

    `before`: the table stops, and gets only transactions that end before this LSN.  `contested`: its rows are not all this
    subscription's, so that changes may meet what they do not expect (conflicts).
    `readings`: for Relation messages whose columns are not simply the table's of the same names.

    With a `window` changes are upserts, and deletes of rows that may not be there.
    """

    relid: int
    table: TargetTable
    app_id: str
    after: Lsn
    types: BinaryTypes = field(default_factory=BinaryTypes)
    """How values of binary transfer are read."""
    before: Lsn | None = None
    contested: bool = False
    readings: Mapping[pgoutput.Relation, Reading] = field(default_factory=dict)
    window: Window | None = None

    def reading(self, relation: pgoutput.Relation) -> Reading:
        """How rows under this message are read.  Raises NotInPrerequisiteState."""
        known = self.readings.get(relation)
        return known if known is not None else Reading(tuple(targets(relation, self.table)), {})

    @property
    def may_conflict(self) -> bool:
        """Whether what the table holds is looked up.  In a window it holds later rows, too: no conflicts are those."""
        return self.contested and self.window is None

    def commit(self, batch: Batch) -> Commit:
        """What the table's part of the batch is recorded under."""
        last = batch.last_lsn
        if self.before is not None:
            last = max(t.end_lsn for t in batch.transactions if t.end_lsn < self.before)
        return Commit(self.app_id, batch.first_lsn, last)


class WrittenByOthers(Exception):
    """A table was found to have commits by others; nothing of the batch has been committed to it."""

    def __init__(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        super().__init__(destination.table.relation)
        self.destination = destination
        self.commits = commits


def look_for_others(stage: Stage, destination: Destination) -> None:
    """Raises WrittenByOthers when they have written the table since it was looked at, and what TableLog raises."""
    others = stage.written_by_others(destination.table, destination.app_id)
    if others:
        raise WrittenByOthers(destination, others)


@contextmanager
def blaming(destination: Destination) -> Iterator[None]:
    """What fails inside fails because of this table alone."""
    try:
        yield
    except PubsubError as error:
        error.relid = destination.relid
        raise


def targets(relation: pgoutput.Relation, table: TargetTable) -> list[pa.Field | None]:
    """The target's field for each of the relation's columns (relation.c: logicalrep_report_missing_attrs)."""
    indexes = {name: table.schema.get_field_index(name) for name in (column.name for column in relation.columns)}
    missing = [name for name, index in indexes.items() if index < 0]
    if missing:
        listed = ", ".join(f'"{name}"' for name in missing)
        raise NotInPrerequisiteState(
            f'logical replication target relation "{table.relation}" is missing replicated '
            f"column{'s' if len(missing) > 1 else ''}: {listed}",
            detail="The publisher's table has changed since it was copied.",
            hint=f'Add the column to the Delta table at "{table.path}", or drop and create the subscription.',
        )
    return [table.schema.field(indexes[column.name]) for column in relation.columns]
