"""Changes that do not find the table as they expect it: PostgreSQL 18's conflicts (conflict.c).

    update_missing, delete_missing    there is no row to change: the change is left out, counted and logged
    insert_exists, update_exists      a row stands where one is to come: an error, as in PostgreSQL

    update_, delete_origin_differs    others wrote the row last: the change is applied, counted and logged

They are looked for where they can be: in a table whose rows are not all this subscription's.  A Delta table knows only one
key, so there are no multiple_unique_conflicts.  Who wrote a row last is known as long as its data file is one that a commit of
others made in full (in PostgreSQL: with track_commit_timestamp): not after files were merged, and not for a file that a commit of
theirs wrote anew with the rows that it left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import structlog

from apply.batch import Batch
from pubsub.delta.changeset import Folded, Unmet
from pubsub.errors import PubsubError
from pubsub.protocol.rows import INSERT, UPDATE

log = structlog.get_logger()

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
    """insert_exists or update_exists: it comes again until the row that is in the way is gone, or the transaction is skipped."""

    default_sqlstate = "23505"
    conflict: ConflictType


@dataclass(slots=True)
class Conflicts:
    """Of one table's part of a batch: all are counted, of the first there is a text to log."""

    counts: Counter[ConflictType] = field(default_factory=Counter)
    texts: list[Mapping[str, str]] = field(default_factory=list)

    def add(self, other: Conflicts) -> None:
        self.counts += other.counts
        self.texts += other.texts

    def report(self, relation: str) -> None:
        """Log them: the first of them one by one, the others as a number."""
        for text in self.texts:
            log.warning(**text)
        left = sum(self.counts.values()) - len(self.texts)
        if left > 0:
            log.warning(f'more conflicts detected on relation "{relation}"', count=left)


def judge(folded: Folded, batch: Batch, relation: str, origin: str) -> Conflicts:
    """What is to be counted and logged once the fold is committed.  Raises UniqueViolation for the first collision."""
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
    unmet: Unmet,
    types: tuple[ConflictType, ConflictType],
    done: tuple[str, str],
    batch: Batch,
    relation: str,
    origin: str,
) -> None:
    """Count these, the updates as the first type and the deletes as the second; texts for those that are shown."""
    updates = int((unmet.op == UPDATE).sum())
    found.counts += Counter({types[0]: updates, types[1]: len(unmet.op) - updates})
    for index in range(unmet.keys.num_rows):
        identity = f"eplica identity {_identity(unmet, index)}"
        updated = unmet.op[index] == UPDATE
        what = f"Remote row {_values(unmet.rows, index)}; r{identity}" if updated else f"R{identity}"
        found.texts.append(
            {
                "event": _message(relation, types[0] if updated else types[1]),
                "detail": f"{done[0] if updated else done[1]}\n{what}.",
                "context": _context(unmet, index, batch, relation, origin),
                "lsn": str(batch.transaction_of(int(unmet.seq[index])).final_lsn),
            }
        )


def _refuse(met: Unmet, batch: Batch, relation: str, origin: str) -> None:
    inserted = met.op[0] == INSERT
    conflict = ConflictType.INSERT_EXISTS if inserted else ConflictType.UPDATE_EXISTS
    names = met.keys.column_names
    key = _pairs(met.rows.select(names), 0)
    detail = f"Key already exists in the Delta table.\nKey {key}; remote row {_values(met.rows, 0)}"
    if not inserted:
        detail += f"; replica identity {_identity(met, 0)}"
    lsn = batch.transaction_of(int(met.seq[0])).final_lsn
    error = UniqueViolation(
        _message(relation, conflict),
        detail=f"{detail}.",
        hint=f"Delete the row from the Delta table, or skip the transaction with ALTER SUBSCRIPTION … SKIP (lsn = '{lsn}').",
        context=_context(met, 0, batch, relation, origin),
    )
    error.conflict = conflict
    error.finish_lsn = lsn
    raise error


def _message(relation: str, conflict: ConflictType) -> str:
    return f'conflict detected on relation "{relation}": conflict={conflict.value}'


def _context(unmet: Unmet, index: int, batch: Batch, relation: str, origin: str) -> str:
    """worker.c: apply_error_callback."""
    transaction = batch.transaction_of(int(unmet.seq[index]))
    return (
        f'processing remote data for replication origin "{origin}" during message type '
        f'"{_NAMES.get(int(unmet.op[index]), "DELETE")}" for replication target relation "{relation}" in transaction '
        f"{transaction.xid}, finished at {transaction.final_lsn}"
    )


def _identity(unmet: Unmet, index: int) -> str:
    if len(unmet.keys.column_names) == len(unmet.rows.column_names):
        return f"full {_values(unmet.keys, index)}"
    return _pairs(unmet.keys, index)


def _pairs(table: Any, index: int) -> str:
    """(a, b)=(1, 2), as BuildIndexValueDescription has it."""
    return f"({', '.join(table.column_names)})={_values(table, index)}"


def _values(table: Any, index: int) -> str:
    values: Sequence[Any] = [column[index].as_py() for column in table.columns]
    return "(" + ", ".join("null" if value is None else str(value) for value in values) + ")"
