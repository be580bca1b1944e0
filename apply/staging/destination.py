"""Where a relation's rows go: one table of the node, up to where it holds the stream, and how rows become its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from apply.batch import Batch, Truncation
from apply.staging.emptied import Emptied, with_deletions
from apply.staging.fold import fold
from apply.staging.matching_rows import NotTold, settled, untold
from apply.staging.own_columns import with_own
from catalog.beside import published_name_of
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers.changeset import Conflicting, Folded, Present
from pubsub.delta.writers.choose_writer import AnyStaged, TableWriters
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, ProgramLimitExceeded, PubsubError
from pubsub.processor_time import spent_on
from pubsub.protocol import pgoutput
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.rows import Changes


class Window(Protocol):
    """Completes the batches of a table that was copied under several snapshots, until the stream has passed the newest
    (tablesync.window)."""

    async def complete(self, staged: AnyStaged, commit: Commit) -> Commit:
        """Give the staged batch, just before its commit, the values that neither it nor the table has.

        Return what to record with the commit.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """Maps rows sent under one Relation message to rows of the table as it is now.

    `fields`: for each column of the message the table's field (None: the table never gets it).  `missing`: by name, the value
    that rows of that time have in a column added later.
    """

    fields: tuple[pa.Field | None, ...]
    missing: Mapping[str, pa.Scalar]


@dataclass(frozen=True, slots=True)
class Destination:
    """The table that a relation's rows go to; it holds every transaction that ends at or before `after`.

    `stops_before`: the table stops, and gets only transactions that end before this LSN.  `contested`: some of its rows may be
    another writer's, or are known to be others than changes expect, so they are looked up (conflicts).  `readings`: for
    Relation messages whose columns do not simply map to the table's columns of the same names.

    With a `window`, changes are applied as upserts, and deletes tolerate missing rows.
    """

    relid: int
    table: TargetTable
    app_id: str
    after: Lsn
    types: BinaryTypes = field(default_factory=BinaryTypes)
    """The decoders for binary transfer."""
    stops_before: Lsn | None = None
    contested: bool = False
    readings: Mapping[pgoutput.Relation, Reading] = field(default_factory=dict)
    window: Window | None = None

    def reading(self, relation: pgoutput.Relation) -> Reading:
        """Return how to read rows sent under this message.  Raises NotInPrerequisiteState for a column that the table lacks."""
        known = self.readings.get(relation)
        if known is None and self.table.closed:
            raise NotInPrerequisiteState(
                f'which columns of table "{self.table.relation}" are which cannot be told, and some are left out or renamed',
                hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {self.table.relation}",
            )
        return known if known is not None else Reading(tuple(targets(relation, self.table)), {})

    @property
    def may_conflict(self) -> bool:
        """Whether to look up what the table holds.  Not in a window, where the table holds later rows, which are no conflicts.
        Nor in mode history, where rows are only added."""
        return self.looks_up and self.window is None and self.table.history is None

    @property
    def looks_up(self) -> bool:
        """Whether what the table holds decides what changes are, so that those before must be in it."""
        return self.contested or self.is_untold

    @property
    def is_untold(self) -> bool:
        """Whether changes may not tell if their rows met the condition of the table's rows before (the option where)."""
        where = self.table.where
        return where is not None and any(
            untold(where, relation, reading, self.table) is not None for relation, reading in self.readings.items()
        )

    def commit(self, batch: Batch) -> Commit:
        """Return the transaction identity under which the table's part of the batch is committed."""
        last = batch.last_lsn
        if self.stops_before is not None:
            last = max(t.end_lsn for t in batch.transactions if t.end_lsn < self.stops_before)
        return Commit(self.app_id, batch.first_lsn, last, source=self.table.whose)


Destinations = Sequence[Mapping[tuple[str, str], Destination]]
"""Where a batch's relations go, by schema and name: to the tables themselves, and to those that stand beside them, mode by mode."""


class WrittenByOthers(Exception):
    """The table has commits by others; nothing of the batch has been committed to it."""

    def __init__(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        super().__init__(destination.table.relation)
        self.destination = destination
        self.commits = commits


class RowInTheWay(Exception):
    """A row arrives where the batch itself has one; which row of the batch is the first in the way, the table must tell."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.table.relation)
        self.destination = destination


@spent_on("folding")
def folded_for(
    destination: Destination,
    changes: Changes,
    batch: Batch,
    *,
    full: bool,
    truncate_before: int | None,
    emptied: Sequence[Truncation],
    present: Present | None,
) -> Folded:
    """Fold the changes of one of the batch's tables.

    `truncate_before` and `emptied`: as decode.Wanted has them.
    `present`: what the table holds, if it is looked up; of one that only Spark reads nothing is looked up, nor expected.
    Raises RowInTheWay if the table is not looked up, and must be; ProgramLimitExceeded for columns that no array holds (2 GB).
    """

    if destination.is_untold:
        changes = _settled(destination, changes, batch, present)
    changes, leaving = with_own(changes, destination.table, batch)

    def folded_with(present: Present | None, marking: Emptied | None) -> Folded:
        return fold(
            changes,
            destination.table.key or None,
            full=full,
            truncate_before=truncate_before,
            present=present,
            upsert=destination.window is not None,
            leaving=leaving,
            gives_way=destination.table.gives_way,
            emptied=marking,
            versions=destination.table.versions,
        )

    try:
        marking = None
        if destination.table.marks_truncated and emptied:
            assert leaving is not None  # its deleted, or ended, rows stay
            changes, leaving, marking = with_deletions(changes, leaving, destination.table, batch, emptied)
        try:
            folded = folded_with(present, marking)
        except FeatureNotSupported:
            if present is None:
                raise
            folded = replace(folded_with(None, marking), expected=None)
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
        raise ProgramLimitExceeded("a column of the batch is too large", detail=str(error)) from error
    if folded.collisions is not None and folded.expected is not None:
        raise RowInTheWay(destination)
    names = destination.table.replicated
    return replace(
        folded,
        missing=_as_sent(folded.missing, names),
        collisions=_as_sent(folded.collisions, names),
        differing=_as_sent(folded.differing, names),
    )


def _settled(destination: Destination, changes: Changes, batch: Batch, present: Present | None) -> Changes:
    try:
        return settled(changes, destination.table, present)
    except NotTold as error:
        error.finish_lsn = batch.transaction_of(error.seq).final_lsn
        raise


def _as_sent(conflicting: Conflicting | None, names: Sequence[str]) -> Conflicting | None:
    """Leave out the columns that only the target has, which no message about a change should show."""
    return None if conflicting is None else replace(conflicting, rows=conflicting.rows.select(names))


def look_for_others(writers: TableWriters, destination: Destination) -> None:
    """Raise WrittenByOthers if others have written the table since it was last checked.  Raises TableLog's errors, too."""
    others = writers.written_by_others(destination.table, destination.app_id)
    if others:
        raise WrittenByOthers(destination, others)


@contextmanager
def blaming(destination: Destination) -> Iterator[None]:
    """Attribute errors raised inside to this table."""
    try:
        yield
    except PubsubError as error:
        error.relid = destination.relid
        if isinstance(error, NotTold):
            error.hint = error.hint_for(published_name_of(destination.relid, destination.table.relation))
        raise


def targets(relation: pgoutput.Relation, table: TargetTable) -> list[pa.Field | None]:
    """Return the target's field for each of the relation's columns (relation.c: logicalrep_report_missing_attrs)."""
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
