"""Stage batches until their commit, and decide whether a batch is committed directly or by Spark."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from dataclasses import replace
from typing import Final

from pubsub.delta.files import file_rows, key_set
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.key_index.node_index import KeyIndex
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Transactions
from pubsub.delta.places import Place, is_reached, remove_tree
from pubsub.delta.sources import part_of
from pubsub.delta.table import Commit, TargetTable, committed_lsn, partition_fields
from pubsub.delta.writers import arrow_writer, spark_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Folded, NotAsExpected
from pubsub.delta.writers.present_rows import TablePresent
from pubsub.delta.writers.spark_writer import Staged
from pubsub.delta.writers.staged_parts import DirectParts, SparkParts, StagedParts
from pubsub.errors import FeatureNotSupported

AnyStaged = Staged | DirectStaged

# Batches of so many changes come of a backlog.
_LARGE: Final = 50_000


class TableWriters:
    """The node's directory of staged batches, emptied when a process starts, and the logs of the tables it writes.

    With `direct` false Spark commits every batch.  With `statement_rows`, not 0, it commits a batch of so many changes to
    a table.  A table has one writer at a time; tables are staged concurrently.  `index`: where keys are sought.
    """

    def __init__(
        self,
        directory: Place,
        transactions: Transactions,
        *,
        direct: bool = True,
        statement_rows: int = 0,
        index: KeyIndex | None = None,
    ) -> None:
        self._directory = directory
        self._transactions = transactions
        self._direct = direct
        self._statement_rows = statement_rows
        self._logs: dict[str, TableLog] = {}
        # The partition columns of tables that only Spark reaches.
        self._partitioned_by: dict[str, tuple[str, ...]] = {}
        self._index = KeyIndex() if index is None else index
        #: How many batches, or parts of them, were staged for the table at a path: a hint that it is being written.
        self.staged: Counter[str] = Counter()
        #: When a large batch was staged last, in monotonic seconds: while a backlog is worked off, other work had better wait.
        self.large_at = -math.inf
        remove_tree(directory)
        directory.mkdir(parents=True, mode=0o700)

    def parts(self, table: TargetTable, *, rewrites: bool, replace_all: bool, rows: int = 0) -> StagedParts:
        """Begin to stage a batch a part at a time; `rewrites`: the batch deletes or changes rows of the table.

        `rows`: the number of changes; 0 if it is not known, or if a window completes the batch, which takes our files.
        """
        self.staged[table.path] += 1
        self.large_at = time.monotonic()
        log, table = self._laid_out(table)
        rewrites = rewrites and not replace_all
        if log is not None and self._takes_files(table, rows) and arrow_writer.accepts(log, table, rewrites=rewrites):
            return DirectParts(log, table, replace_all=replace_all)
        refuse_statement(table)
        return SparkParts(self._directory / uuid.uuid4().hex, table, replace_all=replace_all)

    def write(self, table: TargetTable, folded: Folded, *, replace_all: bool, rows: int = 0) -> AnyStaged:
        """Stage one table's folded batch; `rows` as in `parts`.  A failure leaves nothing behind."""
        self.staged[table.path] += 1
        if folded.inserts + folded.updates + folded.deletes >= _LARGE:
            self.large_at = time.monotonic()
        log, table = self._laid_out(table)
        if log is not None and self._takes_files(table, rows) and arrow_writer.suits(log, table, folded):
            return arrow_writer.stage(log, table, folded, replace_all=replace_all)
        refuse_statement(table)
        return spark_writer.stage(self._directory / uuid.uuid4().hex, table, folded, replace_all=replace_all)

    def _takes_files(self, table: TargetTable, rows: int) -> bool:
        """Return whether our files may take a batch of so many changes."""
        ours = table.mark is not None or table.source is not None
        return ours or (self._direct and not 0 < self._statement_rows <= rows)

    def _laid_out(self, table: TargetTable) -> tuple[TableLog | None, TargetTable]:
        """Return the table's log, refreshed, and the table as it is laid out; without a log if only Spark reaches it."""
        if not is_reached(table.path):
            if table.path not in self._partitioned_by:
                self._partitioned_by[table.path] = tuple(field.name for field in partition_fields(table.path))
            return None, replace(table, partitioned_by=self._partitioned_by[table.path])
        log = self._log(table)
        return log, file_rows.laid_out(log, table)

    def written_by_others(self, table: TargetTable, app_id: str) -> list[OtherCommit]:
        """Return TableLog.written_by_others; [] for a table that only Spark reaches.

        Also [] while another batch is being committed, since the commit of this one looks itself.
        """
        if not is_reached(table.path):
            return []
        log = self._log(table)
        # Another source's commit may begin at this moment.
        if not log.writing.acquire(blocking=False):
            return []
        try:
            return log.written_by_others(app_id, part_of(table))
        finally:
            log.writing.release()

    def present(self, table: TargetTable, app_id: str) -> TablePresent | None:
        """Return which rows the table holds now, or None if its rows cannot be compared.

        No commit to the table may be under way.
        """
        if not table.key and not key_set.can_match_whole(table.schema):
            return None
        if is_reached(table.path):
            log = self._log(table)
            if log.unsupported() is None:
                return TablePresent(table, app_id, log)
        return TablePresent(table, app_id, None)

    def look(self, staged: AnyStaged, record: Commit) -> None:
        """Look whether the table is as the staged batch expects, before any table's part of the batch is committed.

        Raises NotAsExpected, and ConcurrentCommit if others have written the table meanwhile.  Does nothing if it holds another
        version than `record.previous`, of which the commit will tell, and for a table that only Spark reads.
        """
        if isinstance(staged, DirectStaged):
            arrow_writer.look(staged, record)
            return
        expected, table = staged.expected, staged.table
        if expected is None or (committed_lsn(table.path, record.app_id) or 0) != (record.previous or 0):
            return
        if is_reached(table.path):
            self._log(table)
        present = self.present(table, record.app_id)
        assert present is not None  # the table has a key
        if not KeySet(expected.free).distinct:
            raise NotAsExpected("two rows have one key")
        try:
            met = present.keys(expected.standing).all() and not present.keys(expected.free).any()
        except FeatureNotSupported:
            return
        if not met:
            raise NotAsExpected("a row is missing, or in the way")

    def forget_others(self, path: str, app_id: str, version: int) -> None:
        """Forget the commits up to `version`, which `written_by_others` returned: they have been recorded durably."""
        if path in self._logs:
            self._logs[path].forget_others(app_id, version)

    def forget(self, path: str, *, shared: bool = False) -> None:
        """Drop the table's log and its keys' index: the table is being created anew.

        `shared`: only a part of it is, by one of its sources; the index has the others' keys, and knows files that are gone.
        """
        self._logs.pop(path, None)
        self._partitioned_by.pop(path, None)
        if not shared:
            self._index.forget(path)

    def log_of(self, path: str) -> TableLog:
        """Return the log of the table at `path`, not refreshed; batches are committed to it, too."""
        log = self._logs.get(path)
        if log is None:
            log = self._logs[path] = TableLog(path, self._transactions)
            log.index = self._index.of(path)
        return log

    def stop(self) -> None:
        """End the work on the key indexes."""
        self._index.stop()

    def _log(self, table: TargetTable) -> TableLog:
        """Return the table's log, refreshed unless another thread is working on it, which refreshes it itself."""
        log = self.log_of(table.path)
        if log.writing.acquire(blocking=log.version < 0):
            try:
                log.refresh()
            finally:
                log.writing.release()
        return log


def refuse_statement(table: TargetTable) -> None:
    """Raise FeatureNotSupported for a table with marked rows (TargetTable.mark), or a source, that only a statement of Spark's can
    write.
    """
    if table.source is not None:
        raise FeatureNotSupported(
            f'the Delta table of "{table.relation}", which has several sources, can be written by Spark\'s statement alone',
            detail=f'It lies at "{table.path}".',
            hint="Take away what our files do not serve: constraints, generated columns, the change data feed.",
        )
    if table.mark is None:
        return
    what, other = ("deleted rows", "deletes = hard") if table.soft_deletes else ("earlier rows", "mode = mirror")
    raise FeatureNotSupported(
        f'the Delta table of "{table.relation}", whose {what} stay, can be written by Spark\'s statement alone',
        detail=f'It lies at "{table.path}".',
        hint=f"ALTER SUBSCRIPTION … SET ({other}), and RESYNC TABLE {table.relation}.",
    )


def discard(staged: AnyStaged) -> None:
    """Remove what was staged, after the commit or when the batch is abandoned."""
    if isinstance(staged, DirectStaged):
        arrow_writer.discard(staged)
    else:
        spark_writer.discard(staged)
