"""Detect changes that do not find the table as they expect it: PostgreSQL 18's conflicts (conflict.c).

    update_missing, delete_missing    there is no row to change: the change is left out, counted and logged
    insert_exists, update_exists      a row exists where one arrives: an error, as in PostgreSQL
    update_origin_differs,            another writer wrote the row last: the change is applied, counted and logged
    delete_origin_differs

A batch is staged without a look at its table, and committed only if the table has the rows that the batch takes for granted
(pubsub.delta.writers.expectations).  If it does not, and in a table whose rows are not all this subscription's, rows are
looked up while a batch is staged.  A Delta table has one key, so there are no multiple_unique_conflicts.  The last writer of a
row is known (in PostgreSQL: by track_commit_timestamp) only while its data file is one that another writer's commit made in
full: not after files were merged, and not for a file that such a commit rewrote together with rows that it did not change.

`judge` finds the conflicts while a batch is staged.  Once the batch is committed, or a conflict has ended a worker or stopped a
table, they are logged and counted in the catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from apply.batch import Batch
from catalog.figures import Counters
from catalog.records import ForeignCommit
from catalog.store import Catalog
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.delta.writers.changeset import Conflicting, Folded
from pubsub.errors import PubsubError
from pubsub.protocol.rows import INSERT, UPDATE

if TYPE_CHECKING:
    import pyarrow as pa

logger = structlog.get_logger()

_NAMES: Final = {INSERT: "INSERT", UPDATE: "UPDATE"}


class ConflictType(StrEnum):
    """conflict.c: ConflictTypeNames."""

    INSERT_EXISTS = "insert_exists"
    UPDATE_EXISTS = "update_exists"
    UPDATE_MISSING = "update_missing"
    DELETE_MISSING = "delete_missing"
    UPDATE_ORIGIN_DIFFERS = "update_origin_differs"
    DELETE_ORIGIN_DIFFERS = "delete_origin_differs"


class UniqueViolation(PubsubError):
    """insert_exists or update_exists: recurs until the existing row is deleted or the transaction is skipped."""

    default_sqlstate = "23505"
    conflict: ConflictType


@dataclass(slots=True)
class Conflicts:
    """The conflicts of one table's part of a batch: all are counted, the first ones have a text to log."""

    counts: Counter[ConflictType] = field(default_factory=Counter)
    texts: list[Mapping[str, str]] = field(default_factory=list)

    def add(self, other: Conflicts) -> None:
        self.counts += other.counts
        self.texts += other.texts

    def report(self, relation: str) -> None:
        """Log the first conflicts one by one, and the number of the others."""
        for text in self.texts:
            logger.warning("conflict was detected", relation=relation, **text)
        left = sum(self.counts.values()) - len(self.texts)
        if left > 0:
            logger.warning("more conflicts were detected", relation=relation, count=left)


def judge(folded: Folded, batch: Batch, relation: str, origin: str) -> Conflicts:
    """Return what to count and log once the change set is committed.  Raises UniqueViolation for the first collision."""
    if folded.collisions is not None:
        _refuse(folded.collisions, batch, relation, origin)
    found = Conflicts()
    if folded.missing is not None:
        done = "Could not find the row to be {}."
        types = ConflictType.UPDATE_MISSING, ConflictType.DELETE_MISSING
        _note(found, folded.missing, types, (done.format("updated"), done.format("deleted")), batch, relation, origin)
    if folded.differing is not None:
        done = "{} the row that was modified by another writer of the Delta table."
        types = ConflictType.UPDATE_ORIGIN_DIFFERS, ConflictType.DELETE_ORIGIN_DIFFERS
        _note(
            found, folded.differing, types, (done.format("Updating"), done.format("Deleting")), batch, relation, origin
        )
    return found


def _note(
    found: Conflicts,
    conflicting: Conflicting,
    types: tuple[ConflictType, ConflictType],
    done: tuple[str, str],
    batch: Batch,
    relation: str,
    origin: str,
) -> None:
    """Count the updates as the first type and the deletes as the second, with texts for the ones that carry values."""
    updates = int((conflicting.op == UPDATE).sum())
    found.counts += Counter({types[0]: updates, types[1]: len(conflicting.op) - updates})
    for index in range(conflicting.keys.num_rows):
        identity = f"eplica identity {_identity(conflicting, index)}"
        updated = conflicting.op[index] == UPDATE
        what = f"Remote row {_values(conflicting.rows, index)}; r{identity}" if updated else f"R{identity}"
        found.texts.append(
            {
                "reason": _message(relation, types[0] if updated else types[1]),
                "detail": f"{done[0] if updated else done[1]}\n{what}.",
                "context": _context(conflicting, index, batch, relation, origin),
                "lsn": str(batch.transaction_of(int(conflicting.seq[index])).final_lsn),
            }
        )


def _refuse(conflicting: Conflicting, batch: Batch, relation: str, origin: str) -> None:
    inserted = conflicting.op[0] == INSERT
    conflict = ConflictType.INSERT_EXISTS if inserted else ConflictType.UPDATE_EXISTS
    names = conflicting.keys.column_names
    key = _pairs(conflicting.rows.select(names), 0)
    detail = f"Key already exists in the Delta table.\nKey {key}; remote row {_values(conflicting.rows, 0)}"
    if not inserted:
        detail += f"; replica identity {_identity(conflicting, 0)}"
    lsn = batch.transaction_of(int(conflicting.seq[0])).final_lsn
    error = UniqueViolation(
        _message(relation, conflict),
        detail=f"{detail}.",
        hint=f"Delete the row from the Delta table, or skip the transaction with ALTER SUBSCRIPTION … SKIP (lsn = '{lsn}').",
        context=_context(conflicting, 0, batch, relation, origin),
    )
    error.conflict = conflict
    error.finish_lsn = lsn
    raise error


def _message(relation: str, conflict: ConflictType) -> str:
    return f'conflict detected on relation "{relation}": conflict={conflict.value}'


def _context(conflicting: Conflicting, index: int, batch: Batch, relation: str, origin: str) -> str:
    """Return the error's context (worker.c: apply_error_callback)."""
    transaction = batch.transaction_of(int(conflicting.seq[index]))
    return (
        f'processing remote data for replication origin "{origin}" during message type '
        f'"{_NAMES.get(int(conflicting.op[index]), "DELETE")}" for replication target relation "{relation}" in transaction '
        f"{transaction.xid}, finished at {transaction.final_lsn}"
    )


def _identity(conflicting: Conflicting, index: int) -> str:
    if len(conflicting.keys.column_names) == len(conflicting.rows.column_names):
        return f"full {_values(conflicting.keys, index)}"
    return _pairs(conflicting.keys, index)


def _pairs(table: pa.Table, index: int) -> str:
    """Format columns and values as (a, b)=(1, 2) (genam.c: BuildIndexValueDescription)."""
    return f"({', '.join(table.column_names)})={_values(table, index)}"


def _values(table: pa.Table, index: int) -> str:
    values: Sequence[Any] = [column[index].as_py() for column in table.columns]
    return "(" + ", ".join("null" if value is None else str(value) for value in values) + ")"


# After the commit, or the failure


async def count_conflicts(catalog: Catalog, subid: int, relation: str, conflicts: Conflicts) -> None:
    """Log and store conflicts at once: a worker that ends before the next statistics report must not lose them."""
    conflicts.report(relation)
    counts = {f"confl_{conflict.value}": count for conflict, count in conflicts.counts.items()}
    await catalog.add_counters(subid, **cast(Counters, counts))


async def count_conflict_of(catalog: Catalog, subid: int, error: PubsubError) -> None:
    """Count the conflict that ended a worker or stopped a table, if `error` is one."""
    if isinstance(error, UniqueViolation):
        await catalog.add_counters(subid, **cast(Counters, {f"confl_{error.conflict.value}": 1}))


def note_look_ups(relation: str) -> None:
    """Log that a table's rows are looked up from now on."""
    logger.info("rows of a table are not as its changes expect, and are looked up", relation=relation)


async def record_other_commits(
    catalog: Catalog, subid: int, relid: int, relation: str, commits: Sequence[OtherCommit]
) -> None:
    """Log other writers' commits to a table, and store the last one: from then on its changes may conflict."""
    for commit in commits:
        logger.warning(
            "the Delta table was written by others",
            relation=relation,
            version=commit.version,
            operation=commit.operation,
            engine=commit.engine,
        )
    last = commits[-1]
    await catalog.set_foreign_commit(subid, relid, ForeignCommit(last.version, last.operation, last.engine))
