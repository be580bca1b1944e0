"""Stage a closed batch: decode it per relation, drop what each table already holds, fold by key, and write durable files.

All tables of a batch are staged before the first is committed, so a value that cannot be stored stops the batch while nothing
of it is in Delta.  A batch of many bytes is staged in parts (large_batches).  Blocks: call it in a thread; numpy and Arrow
release the interpreter lock while they work.
"""

from __future__ import annotations

from typing import Final

from apply.batch import Batch
from apply.conflicts import judge
from apply.staging import large_batches
from apply.staging.decode import Wanted, decode, no_changes, wanted_by
from apply.staging.destination import Destinations, blaming, folded_for, look_for_others
from apply.staging.history import history
from apply.staging.staged_table import StagedTable
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Folded
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.protocol import rows

# A batch of more bytes is decoded in parts.
_WHOLE: Final = 48 << 20


def stage_batch(
    batch: Batch,
    destinations: Destinations,
    writers: TableWriters,
    origin: str,
    *,
    whole: int | None = None,
) -> list[StagedTable]:
    """Stage `batch` for each destination that has changes in it.

    `origin` names the replication origin in errors.  A batch of more than `whole` bytes (48 MB) is decoded in parts.

    Raises InvalidValue and NotInPrerequisiteState with the transaction's finish LSN in the context, and the errors of reading
    from disk.  Nothing stays staged then.
    """
    whole = _WHOLE if whole is None else whole
    staged: list[StagedTable] = []
    try:
        if batch.nbytes > whole:
            for some in destinations:
                staged += large_batches.stage_in_parts(batch, some, writers, origin, part_bytes=whole // 2)
            return staged
        frames = rows.split_by_relation(block for _, blocks in batch.chunks() for block in blocks)
        truncated = {oid for truncation in batch.truncations for oid in truncation.relations}
        changed = [*(set(frames) | truncated)]
        for wanted in [wanted for some in destinations for wanted in wanted_by(batch, changed, some)]:
            with blaming(wanted.destination):
                one = _stage_table(batch, wanted, frames, writers, origin)
            if one is not None:
                staged.append(one)
        return staged
    except BaseException:
        for one in staged:
            discard(one.staged)
        raise


def _stage_table(
    batch: Batch, wanted: Wanted, frames: dict[int, list[rows.RowFrames]], writers: TableWriters, origin: str
) -> StagedTable | None:
    table, truncate_before = wanted.destination.table, wanted.truncate_before
    parts, full = decode(batch, wanted, frames, origin)
    if not parts and not wanted.empties:
        return None
    look_for_others(writers, wanted.destination)
    if table.history is not None:
        changes = rows.concat_changes(parts) if parts else None
        return _as_history(batch, wanted, history(changes, batch, table, wanted.emptied), writers)
    changes = rows.concat_changes(parts or [no_changes(table)])
    present = writers.present(table, wanted.destination.app_id) if wanted.destination.may_conflict else None
    folded = folded_for(
        wanted.destination,
        changes,
        batch,
        full=full,
        truncate_before=truncate_before,
        emptied=wanted.emptied,
        present=present,
    )
    conflicts = judge(folded, batch, table.relation, origin)
    number = changes.count if wanted.destination.window is None else 0
    staged = writers.write(table, folded, replace_all=truncate_before is not None, rows=number)
    if present is not None and isinstance(staged, DirectStaged):
        staged.still_holds = present.still_holds
    return StagedTable(
        wanted.destination,
        staged,
        wanted.destination.commit(batch),
        folded.inserts,
        folded.updates,
        folded.deletes,
        conflicts,
    )


def _as_history(batch: Batch, wanted: Wanted, folded: Folded, writers: TableWriters) -> StagedTable:
    staged = writers.write(wanted.destination.table, folded, replace_all=False, rows=folded.images.num_rows)
    commit = wanted.destination.commit(batch)
    return StagedTable(wanted.destination, staged, commit, folded.inserts, folded.updates, folded.deletes)
