"""Streamed transactions prepared while they are in progress: streaming = parallel.

PostgreSQL's parallel apply workers apply a streamed transaction as it comes, and leave only its commit for the end
(applyparallelworker.c).  Delta has no transaction that could be open meanwhile; what can be done early is all that comes before
the commit:

    stream ──► every PART_BYTES a part (ReorderBuffer.take) ──► decoded, folded, staged in the tables' sinks ──┐
    Stream Commit: the rest is the last part ──► a batch of its own ◄── data files that no log names yet ──────┘

The parts stay in the reorder buffer until then, because early work may be in vain.  It is thrown away, and the transaction is
prepared from its parts like any other, when
    - a subtransaction with changes in a part, or that told of a definition, is aborted;
    - the transaction truncates, or changes rows of a table without a key;
    - two parts touch the same key (told by hashes), unless all of the table's changes are inserts;
    - a table is another at the end (its definition, its copy), or has rows of others, or stops alone;
    - anything fails: the failure comes again, and counts, if the transaction commits.

One part is prepared at a time, in a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
import structlog

from apply.batch import Batch
from apply.staging.decode import decode, wanted_by
from apply.staging.destination import Destination, WrittenByOthers, look_for_others
from apply.staging.fold import fold
from apply.staging.key_hash import Words, key_words
from apply.staging.staged_table import Parts, StagedTable
from pubsub.concurrency import in_thread
from pubsub.delta.choose_writer import Stage, discard
from pubsub.errors import PubsubError
from pubsub.protocol import pgoutput, rows
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.transaction import Transaction

PART_BYTES: Final = 8 << 20
"""Frames of a transaction that are worth a part."""

# Hashes of keys that are kept for one table, 8 bytes each; with more its changes must all be inserts.
_MAX_KEYS: Final = 4 << 20
_NEVER: Final = Lsn((1 << 64) - 1)

log = structlog.get_logger()


class Tables(Protocol):
    """Of around.Tables, what is asked here."""

    async def destinations(self, batch: Batch, quiet: None) -> Mapping[tuple[str, str], Destination]: ...

    async def unchanged(self, told: Mapping[int, pgoutput.Relation]) -> bool: ...


@dataclass(slots=True)
class _Work:
    """One table of one transaction.  `keys`: the keys that each part touches, None when they became too many."""

    destination: Destination
    parts: Parts
    keys: list[Words] | None = field(default_factory=list)
    inserts_only: bool = True


@dataclass(slots=True)
class _Streamed:
    """A transaction in progress.  `waiting` are parts not prepared yet, each with the definitions that hold before it."""

    xid: int
    parts: list[Transaction] = field(default_factory=list)
    waiting: deque[tuple[Transaction, Mapping[int, pgoutput.Relation]]] = field(default_factory=deque)
    works: dict[tuple[str, str], _Work] = field(default_factory=dict)
    relations: dict[int, pgoutput.Relation] = field(default_factory=dict)
    passed_over: set[tuple[str, str]] = field(default_factory=set)
    in_vain: str | None = None


class Ahead:
    """The transactions of one stream that are prepared ahead, `most` at a time (max_parallel_apply_workers_per_subscription).

    What the dispatcher says (`add`, `abort`, `forget`) is only noted; `run` does the work until it is cancelled.  `giving_back` is
    held while a part is given back to the reorder buffer.
    """

    def __init__(self, tables: Tables, stage: Stage, origin: str, most: int, giving_back: asyncio.Lock) -> None:
        self._giving_back = giving_back
        self._tables = tables
        self._stage = stage
        self._origin = origin
        self._most = most
        self._streamed: dict[int, _Streamed] = {}
        self._forgotten: list[_Streamed] = []
        self._changed = asyncio.Event()
        # A part is prepared, or what was staged is taken or thrown away: one at a time.
        self._working = asyncio.Lock()

    # What the dispatcher says.

    def accepts(self, xid: int) -> bool:
        """Whether the transaction may be divided into parts."""
        known = self._streamed.get(xid)
        return len(self._streamed) < self._most if known is None else known.in_vain is None

    def add(self, xid: int, part: Transaction, known: Mapping[int, pgoutput.Relation]) -> None:
        """What the transaction has changed since its last part; `known` are the definitions before it."""
        streamed = self._streamed.setdefault(xid, _Streamed(xid))
        streamed.parts.append(part)
        if streamed.in_vain is None:
            streamed.waiting.append((part, known))
            self._changed.set()

    def parts(self, xid: int) -> Sequence[Transaction]:
        """The transaction's parts so far; none for one that is not prepared ahead."""
        streamed = self._streamed.get(xid)
        return streamed.parts if streamed is not None else ()

    def abort(self, xid: int, subxid: int, *, told: bool) -> None:
        """A subtransaction of it is rolled back; `told`: it had told of a definition."""
        streamed = self._streamed.get(xid)
        if streamed is None:
            return
        for part in streamed.parts:
            if part.size_of(subxid)[0]:
                told = True
            part.abort(subxid)
        if told:
            self._give_up(streamed, "a subtransaction was rolled back")

    def forget(self, xid: int) -> None:
        """The transaction is rolled back, or nobody wants it."""
        streamed = self._streamed.pop(xid, None)
        if streamed is not None:
            self._give_up(streamed, "the transaction was rolled back")
            self._forgotten.append(streamed)
            self._changed.set()

    def _give_up(self, streamed: _Streamed, reason: str) -> None:
        if streamed.in_vain is None:
            log.debug("transaction will be prepared at its commit", xid=streamed.xid, reason=reason)
            streamed.in_vain = reason
        streamed.waiting.clear()
        self._changed.set()

    # The work.

    async def run(self) -> None:
        """Prepare parts as they come, and clean up after what was in vain."""
        while True:
            self._changed.clear()
            if not await self.step():
                await self._changed.wait()

    async def step(self) -> bool:
        """Clean up, and prepare a part; False if there is none."""
        async with self._working:
            await self._clean()
            streamed = next((one for one in self._streamed.values() if one.waiting), None)
            if streamed is None:
                return False
            await self._prepare_next(streamed)
            return True

    async def finish(self, batch: Batch) -> list[StagedTable] | None:
        """The tables of `batch`, which is one transaction with parts, staged; None if it must be prepared as others are.

        Its parts are the batch's from here on.
        """
        streamed = self._streamed.pop(batch.transactions[0].xid, None)
        if streamed is None:
            return None
        async with self._working:
            try:
                while streamed.waiting:
                    await self._prepare_next(streamed)
                if streamed.in_vain is None:
                    return await self._take(streamed, batch)
                return None
            finally:
                await in_thread(partial(_throw_away, streamed))

    async def close(self) -> None:
        """Nothing is prepared any more: what was staged goes.  The parts go with the buffer."""
        async with self._working:
            for streamed in [*self._streamed.values(), *self._forgotten]:
                await in_thread(partial(_throw_away, streamed))
            self._streamed.clear()
            self._forgotten.clear()

    async def _clean(self) -> None:
        for streamed in list(self._streamed.values()):
            if streamed.in_vain is not None and streamed.works:
                await in_thread(partial(_throw_away, streamed))
        while self._forgotten:
            streamed = self._forgotten.pop()
            await in_thread(partial(_throw_away, streamed))
            async with self._giving_back:
                for part in streamed.parts:
                    part.release()

    async def _prepare_next(self, streamed: _Streamed) -> None:
        if not streamed.waiting:
            return
        part, known = streamed.waiting.popleft()
        try:
            batch = Batch(dict(known))
            batch.add_streamed([part], _NEVER, _NEVER, 0, 0.0)
            await in_thread(batch.read_messages)
            if batch.truncations:
                self._give_up(streamed, "it truncates")
                return
            destinations = await self._tables.destinations(batch, None)
            streamed.relations.update((oid, messages[-1][1]) for oid, messages in batch.relations.items())
            reason = await in_thread(partial(self._stage_part, streamed, batch, destinations))
        except (PubsubError, OSError) as error:
            # It may never commit; if it does, this comes again.
            reason = str(error)
        except BaseException:
            self._give_up(streamed, "preparing a part was interrupted")
            raise
        if reason is not None:
            self._give_up(streamed, reason)

    def _stage_part(
        self, streamed: _Streamed, batch: Batch, destinations: Mapping[tuple[str, str], Destination]
    ) -> str | None:
        """Returns why it is in vain.  Blocks."""
        frames = rows.split_by_relation(block for _, blocks in batch.chunks() for block in blocks)
        names = {(r.namespace, r.name) for oid in frames for _, r in batch.relations.get(oid, ())}
        streamed.passed_over |= names - destinations.keys()
        for wanted in wanted_by(batch, list(frames), destinations):
            relation = batch.relations[wanted.oids[-1]][-1][1]
            name = (relation.namespace, relation.name)
            parts, full = decode(batch, wanted, frames, self._origin)
            if not parts:
                continue
            destination = wanted.destination
            table = destination.table
            changes = rows.concat_changes(parts)
            inserts_only = bool((changes.op == rows.INSERT).all())
            if not table.key and not inserts_only:
                return "rows of a table without a key change"
            work = streamed.works.get(name)
            if not _same(work.destination if work is not None else destination, destination):
                return "a table has changed, or is written by others"
            if work is None:
                sink = self._stage.parts(table, rewrites=bool(table.key), replace_all=False)
                work = streamed.works[name] = _Work(destination, Parts(sink))
            work.inserts_only &= inserts_only
            if table.key and not _note_keys(work, changes):
                return "a key is touched again"
            work.parts.add(fold(changes, table.key or None, full=full))
        return None

    async def _take(self, streamed: _Streamed, batch: Batch) -> list[StagedTable] | None:
        """What is staged, if the tables are still those that it was staged for."""
        try:
            destinations = await self._tables.destinations(Batch(streamed.relations), None)
        except PubsubError as error:
            if error.relid is None:
                raise
            return None  # one of the tables is to blame, which is found again
        end = batch.last_lsn
        if any(name in destinations and destinations[name].after < end for name in streamed.passed_over):
            return None
        wanted = {}
        by_relid = {destination.relid: destination for destination in destinations.values()}
        for name, work in streamed.works.items():
            now = by_relid.get(work.destination.relid)
            if now is None or now.after >= end:
                continue  # the table has left, or has the transaction already
            if not _same(work.destination, now) or not await in_thread(partial(_keys_differ, work)):
                return None
            wanted[name] = now
        ours = {destination.relid for destination in wanted.values()}
        if not await self._tables.unchanged({oid: told for oid, told in streamed.relations.items() if oid in ours}):
            return None
        try:
            return await in_thread(partial(_finish, streamed, wanted, batch, self._stage))
        except WrittenByOthers:
            return None


def _same(before: Destination, now: Destination) -> bool:
    """Whether it gets the whole transaction, as was thought."""
    if now.contested or now.before is not None:
        return False
    return (before.relid, before.app_id, before.table) == (now.relid, now.app_id, now.table)


def _note_keys(work: _Work, changes: rows.Changes) -> bool:
    """Remember which keys a part touches; False when it is plain already that parts share some."""
    if work.keys is not None:
        own, left = key_words(changes, work.destination.table.key)
        touched = np.unique(np.concatenate([own, left[left != own]]))
        shared = bool(work.keys) and bool(np.isin(touched, work.keys[-1], assume_unique=True).any())
        work.keys.append(touched)
        if sum(map(len, work.keys)) > _MAX_KEYS:
            work.keys = None
        elif shared:
            return False
    return work.inserts_only or work.keys is not None


def _keys_differ(work: _Work) -> bool:
    """Whether the parts may be applied side by side.  The keys are given back."""
    if work.inserts_only:
        return True
    if work.keys is None:
        return False
    every = np.concatenate(work.keys)
    work.keys = None
    every.sort()
    return not bool((every[1:] == every[:-1]).any())


def _finish(
    streamed: _Streamed, wanted: Mapping[tuple[str, str], Destination], batch: Batch, stage: Stage
) -> list[StagedTable]:
    for destination in wanted.values():
        look_for_others(stage, destination)
    prepared: list[StagedTable] = []
    try:
        for name, destination in wanted.items():
            # It stays among the works: to abort a sink that has finished is harmless, and one that could not is left to it.
            prepared.append(streamed.works[name].parts.finish(destination, batch))
    except BaseException:
        for one in prepared:
            discard(one.staged)
        raise
    return prepared


def _throw_away(streamed: _Streamed) -> None:
    while streamed.works:
        streamed.works.popitem()[1].parts.sink.abort()
