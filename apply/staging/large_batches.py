"""Stage a batch that is too large to decode at once: read it several times, a part at a time.

    survey          which relations the batch changes, how many bytes each, and which only insert
    key hashes      for tables of many bytes whose rows change: which changes belong to one key
    passes          tables that only insert: fold and stage each chunk as it is read, unless conflicts are looked for
                    tables in mode history: likewise
                    the others: fold all changes of some of their keys together

A key's changes must be folded together and in order, so a pass picks, by a hash of the key, as many keys as have `part_bytes` of
changes.  Keys between which rows move (an UPDATE of the key) all go into the first pass.  Reading is cheap: frames come from
memory or sequentially from disk, and only the picked ones are decoded.

Memory is bounded by `part_bytes`, with three exceptions that are held whole: a table without a key whose rows change, rows that
move between keys, and images that wait for unchanged values of the table's rows.  Blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from apply.batch import Batch
from apply.conflicts import Conflicts, judge
from apply.staging.decode import Wanted, decode, locating, no_relation, under_messages, wanted_by
from apply.staging.destination import Destination, blaming, folded_for, look_for_others
from apply.staging.history import history
from apply.staging.key_hash import key_hashes
from apply.staging.staged_table import Parts, StagedTable
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.delta.writers.present_rows import TablePresent
from pubsub.protocol import rows

_CHUNK: Final = 16 << 20
_MAX_PASSES: Final = 1 << 15

Partitions = npt.NDArray[np.uint16]


@dataclass(slots=True)
class _Work:
    """One table: the bytes and the number of its changes, and whether any of them is not an INSERT (`rewrites`).

    `by_key`: all changes of a key are folded together, as they must be where rows change or conflicts are looked for.
    """

    wanted: Wanted
    nbytes: int = 0
    rows: int = 0
    rewrites: bool = False
    by_key: bool = False
    passes: int = 1
    parts: Parts | None = None
    present: TablePresent | None = None
    conflicts: Conflicts = field(default_factory=Conflicts)


@dataclass(frozen=True, slots=True)
class _Pick:
    """The part of a table that a pass takes: everything, or the keys with this partition number."""

    work: _Work
    partition: int | None = None


def stage_in_parts(
    batch: Batch,
    destinations: Mapping[tuple[str, str], Destination],
    writers: TableWriters,
    origin: str,
    *,
    part_bytes: int,
) -> list[StagedTable]:
    """Stage the batch as stage_batch does, decoding about `part_bytes` of frames at a time."""
    chunk_bytes = min(_CHUNK, part_bytes)
    works = _survey(batch, destinations, chunk_bytes)
    for work in works:
        if work.wanted.destination.table.history is not None:
            work.rewrites = False  # rows are only added
        work.by_key = work.rewrites or work.wanted.destination.may_conflict
        if work.by_key and work.wanted.destination.table.key:
            work.passes = min(-(-work.nbytes // part_bytes), _MAX_PASSES)
    partitions = _partitions(batch, [work for work in works if work.passes > 1], origin, chunk_bytes)
    staged: list[StagedTable] = []
    with ExitStack() as undo:
        for work in works:
            truncated = work.wanted.truncate_before is not None
            rewrites = work.rewrites or work.wanted.destination.window is not None
            with blaming(work.wanted.destination):
                look_for_others(writers, work.wanted.destination)
                if work.wanted.destination.may_conflict:
                    work.present = writers.present(work.wanted.destination.table, work.wanted.destination.app_id)
                sink = writers.parts(
                    work.wanted.destination.table,
                    rewrites=rewrites,
                    replace_all=truncated,
                    rows=work.rows if work.wanted.destination.window is None else 0,
                )
            undo.callback(sink.abort)
            work.parts = Parts(sink)
        for picks in _passes(works, part_bytes):
            _run(batch, picks, partitions, origin, chunk_bytes)
        for work in works:
            assert work.parts is not None
            if work.wanted.emptied:
                work.parts.add(history(None, batch, work.wanted.destination.table, work.wanted.emptied))
            one = work.parts.finish(work.wanted.destination, batch, work.conflicts)
            undo.callback(discard, one.staged)
            if work.present is not None and isinstance(one.staged, DirectStaged):
                one.staged.still_holds = work.present.still_holds
            staged.append(one)
        undo.pop_all()
    return staged


def _survey(batch: Batch, destinations: Mapping[tuple[str, str], Destination], chunk_bytes: int) -> list[_Work]:
    """Return the tables that the batch changes."""
    works: dict[int, _Work] = {}
    for wanted in wanted_by(batch, list(batch.relations), destinations):
        works.update(dict.fromkeys(wanted.oids, _Work(wanted)))
    changed: dict[int, _Work] = {}
    with closing(batch.chunks(chunk_bytes)) as chunks:
        for first, blocks in chunks:
            for oid, pieces in rows.split_by_relation(blocks, first).items():
                if oid not in batch.relations:
                    raise no_relation(oid)
                if oid not in works:
                    continue
                work = works[oid]
                for piece in work.wanted.select(pieces):
                    changed[id(work)] = work
                    work.nbytes += int((piece.ends - piece.starts).sum())
                    work.rows += len(piece.starts)
                    work.rewrites |= bool((piece.data[piece.starts] != rows.INSERT).any())
    found = {id(work): work for work in works.values()}
    return [
        work
        for key, work in found.items()
        if key in changed or work.wanted.truncate_before is not None or work.wanted.emptied
    ]


def _partitions(batch: Batch, works: Sequence[_Work], origin: str, chunk_bytes: int) -> Partitions:
    """Return, by seq, the number of the pass that takes each change of these tables."""
    if not works:
        return np.empty(0, np.uint16)
    hashes = np.zeros(batch.rows, np.uint32)
    seqs: list[list[npt.NDArray[np.int64]]] = [[] for _ in works]
    moved: list[list[npt.NDArray[np.uint32]]] = [[] for _ in works]
    with closing(batch.chunks(chunk_bytes)) as chunks:
        for first, blocks in chunks:
            frames = rows.split_by_relation(blocks, first)
            for index, work in enumerate(works):
                table = work.wanted.destination.table
                for relation, chosen in under_messages(batch, work.wanted, frames):
                    with blaming(work.wanted.destination), locating(batch, relation, chosen, origin):
                        only_key = [
                            field if field is not None and field.name in table.key else None
                            for field in work.wanted.destination.reading(relation).fields
                        ]
                        changes = rows.decode_changes(
                            chosen,
                            relation,
                            only_key,
                            key=table.key,
                            types=work.wanted.destination.types,
                            hidden=table.masks.rules.keys(),
                        )
                        own, left = key_hashes(changes, table.key)
                    hashes[changes.seq] = own
                    seqs[index].append(changes.seq)
                    leaving = left != own
                    moved[index] += [own[leaving], left[leaving]]
    result = np.zeros(batch.rows, np.uint16)
    for work, of_work, keys in zip(works, seqs, moved, strict=True):
        together = np.unique(np.concatenate(keys))
        for some in of_work:
            own = hashes[some]
            number = own % np.uint32(work.passes)
            if len(together):
                number[np.isin(own, together)] = 0
            result[some] = number
    return result


def _passes(works: Sequence[_Work], part_bytes: int) -> list[list[_Pick]]:
    """Plan the passes.  Tables that only insert are all in the first; others share one up to `part_bytes`, or have several."""
    found = [[_Pick(work) for work in works if not work.by_key]]
    load = 0
    for work in works:
        if work.by_key and work.passes == 1:
            if load and load + work.nbytes > part_bytes:
                found.append([])
                load = 0
            found[-1].append(_Pick(work))
            load += work.nbytes
    for work in works:
        if work.passes > 1:
            found += [[_Pick(work, number)] for number in range(work.passes)]
    return [picks for picks in found if picks]


def _run(batch: Batch, picks: Sequence[_Pick], partitions: Partitions, origin: str, chunk_bytes: int) -> None:
    """Run one pass."""
    held: list[list[rows.Changes]] = [[] for _ in picks]
    whole = [False] * len(picks)
    with closing(batch.chunks(chunk_bytes)) as chunks:
        for first, blocks in chunks:
            decoded = _decode(batch, picks, partitions, origin, first, blocks)
            # A frame may take a gigabyte: it is gone before its row is written, and the row before the next frame is read.
            blocks.clear()
            for index, pick in enumerate(picks):
                parts, full = decoded[index]
                whole[index] |= full
                if pick.work.by_key:
                    held[index] += parts
                elif parts:
                    _fold(batch, pick.work, parts, origin, full=full)
                parts.clear()
    for index, pick in enumerate(picks):
        if held[index]:
            _fold(batch, pick.work, held[index], origin, full=whole[index])
            held[index].clear()


def _decode(
    batch: Batch, picks: Sequence[_Pick], partitions: Partitions, origin: str, first: int, blocks: Sequence[rows.Block]
) -> list[tuple[list[rows.Changes], bool]]:
    """Decode, as `decode` does, what each pick takes of a chunk, whose first frame has the number `first`."""
    frames = rows.split_by_relation(blocks, first)
    decoded = []
    for pick in picks:
        with blaming(pick.work.wanted.destination):
            decoded.append(decode(batch, pick.work.wanted, _picked(pick, frames, partitions), origin))
    return decoded


def _picked(
    pick: _Pick, frames: dict[int, list[rows.RowFrames]], partitions: Partitions
) -> dict[int, list[rows.RowFrames]]:
    mine = {oid: frames[oid] for oid in pick.work.wanted.oids if oid in frames}
    if pick.partition is None:
        return mine
    found: dict[int, list[rows.RowFrames]] = {}
    for oid, pieces in mine.items():
        for piece in pieces:
            chosen = partitions[piece.seq] == pick.partition
            if chosen.any():
                found.setdefault(oid, []).append(
                    rows.RowFrames(piece.data, piece.starts[chosen], piece.ends[chosen], piece.seq[chosen])
                )
    return found


def _fold(batch: Batch, work: _Work, parts: list[rows.Changes], origin: str, *, full: bool) -> None:
    """Fold the parts, which are forgotten, and stage what remains."""
    assert work.parts is not None
    destination = work.wanted.destination
    with blaming(destination):
        changes = rows.concat_changes(parts)
        parts.clear()
        if destination.table.history is not None:
            work.parts.add(history(changes, batch, destination.table))
            return
        folded = folded_for(
            destination,
            changes,
            full=full,
            truncate_before=work.wanted.truncate_before,
            present=work.present,
        )
        work.conflicts.add(judge(folded, batch, destination.table.relation, origin))
    work.parts.add(folded)
