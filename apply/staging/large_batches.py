"""Stage a batch that is too large to decode at once: read it several times, a part at a time.

    survey          which relations the batch changes, how many bytes each, and which only insert
    key hashes      for tables of many bytes whose rows change: which changes belong to one key
    passes          tables that only insert: fold and stage each chunk as it is read, unless conflicts are looked for
                    tables in mode history: likewise
                    the others: fold all changes of some of their keys together

A key's changes must be folded together and in order, so a pass picks, by a hash of the key, as many keys as have `part_bytes` of
changes.  Keys between which rows move (an UPDATE of the key), directly or by way of others, go into one pass.  Without a key it is
the rows that are picked: an UPDATE is divided, and its new row is added in one pass, its old one removed in another.  Reading is
cheap: frames come from memory or sequentially from disk, and only the picked ones are decoded.

Memory is bounded by `part_bytes`, with these exceptions that are held whole: all changes of one key, or of one row of a table
without a key; rows that move in a long chain of keys; a table without a key whose rows are looked up; and images that wait for
unchanged values of the table's rows.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from apply.batch import Batch
from apply.conflicts import Conflicts, judge
from apply.staging.decode import Wanted, decode, locating, no_changes, no_relation, under_messages, wanted_by
from apply.staging.destination import Destination, blaming, folded_for, look_for_others
from apply.staging.history import history
from apply.staging.key_hash import key_hashes
from apply.staging.staged_table import Parts, StagedTable
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.delta.writers.present_rows import TablePresent
from pubsub.errors import ProgramLimitExceeded
from pubsub.protocol import rows
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.rows import DELETE, INSERT

_CHUNK: Final = 16 << 20
_MAX_PASSES: Final = 1 << 15

Numbers = npt.NDArray[np.uint16]
Hashes = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Partitions:
    """By seq, the number of the pass that takes a change, and of the one that takes the row before it.

    They are the same array as long as each change of a table with several passes is taken whole.
    """

    own: Numbers
    left: Numbers

    def take(self, seq: npt.NDArray[np.int64], number: int) -> npt.NDArray[np.bool_]:
        """Mark the changes of which the pass takes something."""
        own: npt.NDArray[np.bool_] = self.own[seq] == number
        return own if self.left is self.own else own | (self.left[seq] == number)


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
    divided: int = 0
    """How many UPDATEs were staged as an INSERT and a DELETE."""

    @property
    def by_row(self) -> bool:
        """Whether passes take rows, not keys."""
        return not self.wanted.destination.table.key


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
        elif work.wanted.emptied and work.wanted.destination.table.key:
            work.rewrites = True  # a key may be inserted again
        work.by_key = work.rewrites or work.wanted.destination.may_conflict
        if work.by_key and not (work.by_row and work.wanted.destination.may_conflict):
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
            table = work.wanted.destination.table
            if work.wanted.emptied and table.history is not None:
                work.parts.add(history(None, batch, table, work.wanted.emptied))
            elif work.wanted.empties:
                _fold(batch, work, [no_changes(table)], origin, full=False)  # perhaps there is no other part
            one = work.parts.finish(work.wanted.destination, batch, work.conflicts)
            undo.callback(discard, one.staged)
            divided = work.divided
            one = replace(
                one, inserts=one.inserts - divided, updates=one.updates + divided, deletes=one.deletes - divided
            )
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
    return [work for key, work in found.items() if key in changed or work.wanted.empties]


def _partitions(batch: Batch, works: Sequence[_Work], origin: str, chunk_bytes: int) -> _Partitions:
    """Return the numbers of the passes that take each change of these tables."""
    if not works:
        none = np.empty(0, np.uint16)
        return _Partitions(none, none)
    hashes = np.zeros(batch.rows, np.uint32)
    before = np.zeros(batch.rows, np.uint32) if any(work.by_row for work in works) else hashes
    seqs: list[list[npt.NDArray[np.int64]]] = [[] for _ in works]
    moved: list[list[tuple[Hashes, Hashes]]] = [[] for _ in works]
    with closing(batch.chunks(chunk_bytes)) as chunks:
        for first, blocks in chunks:
            frames = rows.split_by_relation(blocks, first)
            for index, work in enumerate(works):
                names = work.wanted.destination.table.key or work.wanted.destination.table.schema.names
                for changes in _keys(batch, work, frames, origin):
                    own, left = key_hashes(changes, names)
                    hashes[changes.seq] = own
                    if before is not hashes:
                        before[changes.seq] = left
                    seqs[index].append(changes.seq)
                    if not work.by_row:
                        leaving = left != own
                        moved[index].append((own[leaving], left[leaving]))
    own_numbers = np.zeros(batch.rows, np.uint16)
    left_numbers = np.zeros(batch.rows, np.uint16) if before is not hashes else own_numbers
    for work, of_work, keys in zip(works, seqs, moved, strict=True):
        together = _Together(keys)
        for some in of_work:
            own_numbers[some] = together.joined(hashes[some]) % np.uint32(work.passes)
            if left_numbers is not own_numbers:
                left_numbers[some] = before[some] % np.uint32(work.passes) if work.by_row else own_numbers[some]
    return _Partitions(own_numbers, left_numbers)


def _keys(batch: Batch, work: _Work, frames: dict[int, list[rows.RowFrames]], origin: str) -> Iterator[rows.Changes]:
    """Decode the keys of a table's changes; all columns, as the table has them, if there is no key."""
    wanted, table = work.wanted, work.wanted.destination.table
    with blaming(wanted.destination):
        if work.by_row:
            yield from decode(batch, wanted, frames, origin)[0]
            return
        for relation, chosen in under_messages(batch, wanted, frames):
            with locating(batch, relation, chosen, origin):
                only_key = [
                    field if field is not None and field.name in table.key else None
                    for field in wanted.destination.reading(relation).fields
                ]
                yield rows.decode_changes(
                    chosen,
                    relation,
                    only_key,
                    key=table.key,
                    types=wanted.destination.types,
                    hidden=table.masks.rules.keys(),
                )


class _Together:
    """Keys, by their hashes, between which rows move: all of those that are connected stand for one of them."""

    def __init__(self, moves: Sequence[tuple[Hashes, Hashes]]) -> None:
        none = np.empty(0, np.uint32)
        own = np.concatenate([none, *(own for own, _ in moves)])
        left = np.concatenate([none, *(left for _, left in moves)])
        self._keys, places = np.unique(np.concatenate([own, left]), return_inverse=True)
        self._stands = self._keys[_components(places[: len(own)], places[len(own) :], len(self._keys))]

    def joined(self, hashes: Hashes) -> Hashes:
        """Return for each hash the one that stands for it."""
        if not len(self._keys):
            return hashes
        places = np.minimum(np.searchsorted(self._keys, hashes), len(self._keys) - 1)
        return np.where(self._keys[places] == hashes, self._stands[places], hashes)


def _components(one: Indices, other: Indices, count: int) -> Indices:
    """Return for each of `count` nodes the least node that it is connected with; edges lead from `one` to `other`.

    In each round nodes take the least parent that a neighbour's has (FastSV), so that rounds are few, even for long chains.
    """
    parents = np.arange(count)
    while True:
        above = parents[parents]
        least = np.minimum(above[one], above[other])
        found = above.copy()
        for nodes in (parents[one], parents[other], one, other):
            np.minimum.at(found, nodes, least)
        if np.array_equal(found, parents):
            return parents
        parents = found


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


def _run(batch: Batch, picks: Sequence[_Pick], partitions: _Partitions, origin: str, chunk_bytes: int) -> None:
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
    batch: Batch, picks: Sequence[_Pick], partitions: _Partitions, origin: str, first: int, blocks: Sequence[rows.Block]
) -> list[tuple[list[rows.Changes], bool]]:
    """Decode, as `decode` does, what each pick takes of a chunk, whose first frame has the number `first`."""
    frames = rows.split_by_relation(blocks, first)
    decoded = []
    for pick in picks:
        with blaming(pick.work.wanted.destination):
            parts, full = decode(batch, pick.work.wanted, _picked(pick, frames, partitions), origin)
            if pick.partition is not None and pick.work.by_row:
                parts = [_divided(part, pick.work, partitions, pick.partition) for part in parts]
            decoded.append((parts, full))
    return decoded


def _divided(changes: rows.Changes, work: _Work, partitions: _Partitions, number: int) -> rows.Changes:
    """Make of each UPDATE of which the pass takes one row only the INSERT or the DELETE of that row."""
    updates = (changes.op != INSERT) & (changes.op != DELETE)
    added = updates & (partitions.left[changes.seq] != number)
    work.divided += int(added.sum())
    op = changes.op.copy()
    op[added] = INSERT
    op[updates & (partitions.own[changes.seq] != number)] = DELETE
    return replace(changes, op=op)


def _picked(
    pick: _Pick, frames: dict[int, list[rows.RowFrames]], partitions: _Partitions
) -> dict[int, list[rows.RowFrames]]:
    mine = {oid: frames[oid] for oid in pick.work.wanted.oids if oid in frames}
    if pick.partition is None:
        return mine
    found: dict[int, list[rows.RowFrames]] = {}
    for oid, pieces in mine.items():
        for piece in pieces:
            chosen = partitions.take(piece.seq, pick.partition)
            if chosen.any():
                found.setdefault(oid, []).append(
                    rows.RowFrames(piece.data, piece.starts[chosen], piece.ends[chosen], piece.seq[chosen])
                )
    return found


@contextmanager
def _telling_what_helps(destination: Destination) -> Iterator[None]:
    try:
        yield
    except ProgramLimitExceeded as error:
        relation = destination.table.relation
        raise ProgramLimitExceeded(
            f'the changes of table "{relation}" that must be applied together are too large',
            detail=f"Those of one row, and of keys between which rows move, are not divided. {error.detail or ''}".strip(),
            hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {relation} copies the table as it is after them.",
        ) from error


def _fold(batch: Batch, work: _Work, parts: list[rows.Changes], origin: str, *, full: bool) -> None:
    """Fold the parts, which are forgotten, and stage what remains."""
    assert work.parts is not None
    destination = work.wanted.destination
    with blaming(destination), _telling_what_helps(destination):
        changes = rows.concat_changes(parts)
        parts.clear()
        if destination.table.history is not None:
            work.parts.add(history(changes, batch, destination.table))
            return
        folded = folded_for(
            destination,
            changes,
            batch,
            full=full,
            truncate_before=work.wanted.truncate_before,
            emptied=work.wanted.emptied,
            present=work.present,
        )
        work.conflicts.add(judge(folded, batch, destination.table.relation, origin))
    work.parts.add(folded)
