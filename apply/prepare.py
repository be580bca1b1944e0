"""A closed batch becomes staged files: decoded per relation, filtered by what each table already has, folded by key.

All tables of a batch are prepared before the first is committed, so that a value that can not be stored stops the batch
while nothing of it is in Delta.  Blocks; runs in a thread; numpy and Arrow let the interpreter go while they work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from apply.batch import Batch
from apply.delta.stage import AnyStaged, Stage, discard
from apply.delta.table import Commit, TargetTable
from apply.fold import fold
from pubsub.errors import InvalidValue, NotInPrerequisiteState
from pubsub.protocol import pgoutput, rows
from pubsub.protocol.lsn import Lsn

_NO_END: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a relation's rows go: `after` is the LSN up to which the table holds everything already."""

    relid: int
    table: TargetTable
    app_id: str
    after: Lsn


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """One table's part of a batch, staged; the counts are of row changes."""

    destination: Destination
    staged: AnyStaged
    commit: Commit
    inserts: int
    updates: int
    deletes: int


def prepare(
    batch: Batch, destinations: Mapping[tuple[str, str], Destination], stage: Stage, origin: str
) -> list[PreparedTable]:
    """Stage `batch` for each destination (by the relation's schema and name) that has changes in it.

    `origin` names the replication origin in errors.  Raises InvalidValue and NotInPrerequisiteState with the transaction's
    finish LSN in the context; nothing stays staged then.
    """
    prepared: list[PreparedTable] = []
    try:
        frames = rows.split_by_relation(batch.log.blocks())
        truncated = {oid for truncation in batch.truncations for oid in truncation.relations}
        # One destination can have several publisher relations in a batch: a table dropped and made again.
        by_destination: dict[tuple[str, str], list[int]] = {}
        for oid in sorted(set(frames) | truncated):
            if oid not in batch.relations:
                raise _no_relation(oid)
            relation = batch.relations[oid][-1][1]
            by_destination.setdefault((relation.namespace, relation.name), []).append(oid)
        for name, oids in by_destination.items():
            destination = destinations.get(name)
            if destination is not None:
                one = _prepare_table(batch, destination, {oid: frames.get(oid, []) for oid in oids}, stage, origin)
                if one is not None:
                    prepared.append(one)
        return prepared
    except BaseException:
        for one in prepared:
            discard(one.staged)
        raise


def _prepare_table(
    batch: Batch,
    destination: Destination,
    frames: Mapping[int, Sequence[rows.RowFrames]],
    stage: Stage,
    origin: str,
) -> PreparedTable | None:
    table = destination.table
    truncations = [batch.kept_truncation(oid, destination.after) for oid in frames]
    truncate_before = max((seq for seq in truncations if seq is not None), default=None)
    kept = batch.kept_rows(destination.after)
    parts: list[rows.Changes] = []
    full = False
    for oid, of_relation in frames.items():
        for relation, some in _by_relation_message(batch.relations[oid], of_relation):
            wanted = _select(some, kept, truncate_before)
            if not wanted:
                continue
            full = full or (not table.key and relation.replica_identity == "f")
            try:
                changes = rows.decode_changes(wanted, relation, _targets(relation, table), key=table.key or None)
                _check_identity(relation, table, changes)
            except InvalidValue as error:
                raise _located(error, batch, relation, origin) from error
            parts.append(_as_in_target(changes, relation, table))
    # By oid so far: an older table of the name may have the greater one.
    parts.sort(key=lambda part: int(part.seq[0]))
    if not parts and truncate_before is None:
        return None
    if not parts:
        relation = batch.relations[next(iter(frames))][-1][1]
        parts.append(_as_in_target(rows.decode_changes([], relation, _targets(relation, table)), relation, table))
    changes = rows.concat_changes(parts)
    folded = fold(changes, table.key or None, full=full, truncate_before=truncate_before)
    staged = stage.write(table, folded, replace_all=truncate_before is not None)
    commit = Commit(destination.app_id, batch.first_lsn, batch.last_lsn)
    return PreparedTable(destination, staged, commit, folded.inserts, folded.updates, folded.deletes)


def _no_relation(oid: int) -> NotInPrerequisiteState:
    """relation.c: logicalrep_rel_open."""
    return NotInPrerequisiteState(f"no relation map entry for remote relation ID {oid}", sqlstate="08P01")


def _by_relation_message(
    messages: Sequence[tuple[int, pgoutput.Relation]], frames: Sequence[rows.RowFrames]
) -> list[tuple[pgoutput.Relation, list[rows.RowFrames]]]:
    """The frames under the Relation message that each was sent under."""
    if any(len(some.seq) and some.seq[0] < messages[0][0] for some in frames):
        raise _no_relation(messages[0][1].oid)
    if len(messages) == 1:
        return [(messages[0][1], list(frames))]
    parts = []
    for index, (first, relation) in enumerate(messages):
        end = messages[index + 1][0] if index + 1 < len(messages) else None
        some = [_where(f, (f.seq >= first) & (f.seq < (end if end is not None else _NO_END))) for f in frames]
        parts.append((relation, [f for f in some if len(f.seq)]))
    return parts


def _select(
    frames: Sequence[rows.RowFrames],
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]] | None,
    truncate_before: int | None,
) -> list[rows.RowFrames]:
    """The frames that the table gets: not those it has, nor those that a later TRUNCATE removes anyway."""
    result = []
    for some in frames:
        if kept is not None:
            some = _where(some, kept[some.seq])
        if truncate_before is not None:
            some = _where(some, some.seq >= truncate_before)
        if len(some.seq):
            result.append(some)
    return result


def _where(frames: rows.RowFrames, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> rows.RowFrames:
    if wanted.all():
        return frames
    return rows.RowFrames(frames.data, frames.starts[wanted], frames.ends[wanted], frames.seq[wanted])


def _targets(relation: pgoutput.Relation, table: TargetTable) -> list[pa.Field | None]:
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


def _check_identity(relation: pgoutput.Relation, table: TargetTable, changes: rows.Changes) -> None:
    """Updates and deletes name their row by the key that the target has (relation.c: logicalrep_rel_mark_updatable)."""
    if not np.any(changes.op != ord("I")):
        return
    if relation.replica_identity == "f":
        return
    sent = {column.name for column in relation.columns if column.in_replica_identity}
    if not table.key or sent != set(table.key):
        raise NotInPrerequisiteState(
            f'logical replication target relation "{table.relation}" has neither REPLICA IDENTITY index nor PRIMARY KEY '
            "that matches the publisher's",
            detail=f"The publisher identifies rows by ({', '.join(sorted(sent))}), "
            f"the Delta table by ({', '.join(table.key)}).",
            hint="Drop the table from the publication, refresh, add it again and refresh: it is then copied anew.",
        )


def _as_in_target(changes: rows.Changes, relation: pgoutput.Relation, table: TargetTable) -> rows.Changes:
    """The target's columns in its order.  Those that only the target has: NULL in new rows, kept as they are by updates."""
    sent = {column.name for column in relation.columns}
    extra = [field for field in table.schema if field.name not in sent]
    nulls = {field.name: pa.nulls(changes.count, field.type) for field in extra}
    untouched = {field.name: changes.op == ord("U") for field in extra}
    new = changes.new | nulls
    return dataclasses.replace(
        changes,
        new={name: new[name] for name in table.schema.names},
        unchanged=changes.unchanged | untouched,
    )


def _located(error: InvalidValue, batch: Batch, relation: pgoutput.Relation, origin: str) -> InvalidValue:
    """The error with table, column and transaction; the context is PostgreSQL's (worker.c: apply_error_callback)."""
    qualified = f"{relation.namespace}.{relation.name}"
    where = f'processing remote data for replication origin "{origin}" for replication target relation "{qualified}"'
    if not isinstance(error, rows.InvalidField):
        return InvalidValue(error.message, sqlstate=error.sqlstate, hint=error.hint, context=where)
    transaction = batch.transaction_of(error.seq)
    where += f' column "{error.column}" in transaction {transaction.xid}, finished at {transaction.final_lsn}'
    return InvalidValue(
        f'column "{error.column}" of table "{qualified}": {error.message}',
        sqlstate=error.sqlstate,
        detail=f"The transaction finished at {transaction.final_lsn}; nothing of its batch has been applied.",
        hint="Take the column out by a column list, or the table out of the publication, and copy the table anew.",
        context=where,
    )
