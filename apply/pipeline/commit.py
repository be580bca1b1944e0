"""Commit a staged table, and decide what an exception from Spark means.

The table itself tells what happened, so its transaction version under the application id is read again.  If it is the
batch's end, the commit succeeded.  Unchanged, it did not, and a conflict is tried again.  Any other version, a later one
too, is another worker's doing: the worker was overtaken, and starts again from its origin.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Final

import structlog

from apply.staging.destination import WrittenByOthers
from apply.staging.staged_table import StagedTable
from pubsub.delta import table
from pubsub.delta.files import constraints
from pubsub.delta.log.other_commits import ConcurrentCommit
from pubsub.delta.log.row_count import count_rows
from pubsub.delta.log.transactions import ATTEMPTS, Conflict
from pubsub.delta.sources import own_rows
from pubsub.delta.spark.engine import Lane
from pubsub.delta.writers import arrow_writer, spark_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import NotAsExpected
from pubsub.delta.writers.choose_writer import AnyStaged, TableWriters
from pubsub.errors import DataCorrupted, NotInPrerequisiteState, Overtaken, PubsubError, UndefinedTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.texts import first_line

# Spark's errors for a table, or one of its files, that no longer exists.
_GONE: Final = re.compile(
    r"FILE_NOT_FOUND|FileNotFoundException|FILE_NOT_EXIST|TABLE_NOT_FOUND|PATH_DOES_NOT_EXIST|PATH_NOT_FOUND"
)

# Spark's messages end so (SparkThrowableHelper.scala: getMessage).
_SQLSTATE: Final = re.compile(r"SQLSTATE: ([0-9A-Z]{5})\b")
# What is not supported, values, constraints, names and types.
_LASTING: Final = frozenset({"0A", "22", "23", "42"})

logger = structlog.get_logger()


async def look_at_table(lane: Lane, writers: TableWriters, staged_table: StagedTable, position: Lsn) -> None:
    """Look whether one table is as its part of a batch expects, before any table's part is committed.

    `position`: as for `commit_table`.  Raises NotAsExpected, WrittenByOthers, and what the reading of the table raises.
    """
    destination = staged_table.destination
    record = replace(staged_table.commit, previous=position or None)
    try:
        await lane.run_without_spark(writers.look, staged_table.staged, record)
    except ConcurrentCommit as error:
        raise WrittenByOthers(destination, error.commits) from error
    except (UndefinedTable, DataCorrupted) as error:
        error.relid = destination.relid
        raise


async def commit_table(lane: Lane, staged_table: StagedTable, position: Lsn) -> int | None:
    """Commit one table's part of a batch in the worker's lane, and return when the commit is durable.

    `position`: the table's, before the batch (0: none), as this worker committed or read it.  Returns the number
    of rows that the table then holds, None if its log does not tell.  Raises PubsubError if the commit failed for good;
    WrittenByOthers, NotAsExpected or Overtaken if the batch must be staged again.
    """
    destination, staged = staged_table.destination, staged_table.staged
    target = staged.table
    record = replace(staged_table.commit, previous=position or None)
    if position >= record.first and position > destination.after:
        # A commit by another worker was read during staging; it holds some of this batch's transactions.
        raise Overtaken(target.relation, table.moved_on(position, replace(record, previous=destination.after)))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if isinstance(staged, DirectStaged):
                await lane.run_without_spark(arrow_writer.commit, staged, record)
            else:
                await lane.run(spark_writer.commit, staged, record)
            break
        except ConcurrentCommit as error:
            raise WrittenByOthers(destination, error.commits) from error
        except NotAsExpected:
            raise
        except Exception as error:
            if isinstance(error, PubsubError):
                if isinstance(error, UndefinedTable | DataCorrupted):
                    error.relid = destination.relid
                raise
            have = await asyncio.to_thread(table.committed_lsn, target.path, record.app_id) or INVALID_LSN
            if have == record.last:
                break
            violation = constraints.violated(error, target)
            if violation is not None:
                violation.relid = destination.relid
                raise violation from error
            text = first_line(error)
            gone = _GONE.search(text) is not None
            if have != position and not gone:
                raise table.not_at_version(target, have, record) from error
            if gone or not isinstance(error, Conflict) or attempt == ATTEMPTS:
                failure = NotInPrerequisiteState(
                    f'could not commit to the Delta table of "{target.relation}": {text}',
                    sqlstate=None if gone else _sqlstate(error),
                    detail=f"The batch ends at {record.last}; the table holds everything up to {have}.",
                    hint="ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew." if gone else None,
                    context=f'Delta table "{target.path}"',
                )
                failure.relid = destination.relid
                raise failure from error
            logger.warning("delta commit conflict", relation=target.relation, lsn=str(record.last), attempt=attempt)
    try:
        return await _rows(staged)
    except Exception as error:
        # The count is only shown to people; the commit stands without it.
        logger.warning("the rows of a table could not be counted", relation=target.relation, reason=first_line(error))
        return None


def _sqlstate(error: BaseException) -> str:
    """Return what Spark's error says of a cause that another attempt would meet, too; 58000 (system_error) for any other."""
    found = _SQLSTATE.search(str(error))
    return found[1] if found is not None and found[1][:2] in _LASTING else "58000"


async def _rows(staged: AnyStaged) -> int | None:
    if isinstance(staged, DirectStaged):
        return await asyncio.to_thread(own_rows, staged.log, staged.table)
    return await asyncio.to_thread(count_rows, staged.table.path)
