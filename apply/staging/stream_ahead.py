"""Stage streamed transactions while they are in progress: streaming = parallel.

PostgreSQL's parallel apply workers apply a streamed transaction as it arrives and leave only its commit for the end
(applyparallelworker.c).  Delta has no transaction that could stay open meanwhile, but everything before the commit can be done
early:

    stream ──► every PART_BYTES a part (ReorderBuffer.take) ──► decoded, folded, staged in the tables' sinks ──┐
    Stream Commit: the rest is the last part ──► a batch of its own ◄── data files that no log names yet ──────┘

The parts stay in the reorder buffer until then, because early work may be in vain.  It is discarded, and the transaction is
staged from its parts like any other, when
    - a subtransaction with changes in a part, or with a Relation message, is aborted;
    - the transaction truncates, gives a table a new name, or changes rows of a table without a key, of one in mode history or with
      columns of its own, or of one that does not follow TRUNCATE;
    - two parts touch the same key (compared by hashes), unless all of the table's changes are inserts;
    - a part changes a row that it has removed, or inserts one twice;
    - a table has changed by the end (its definition or its copy), has rows of others, or stops alone;
    - anything fails: if the transaction commits, the failure recurs and is handled then.

One part is staged at a time, in a thread.
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
from apply.staging.destination import Destination, Destinations, WrittenByOthers, look_for_others
from apply.staging.fold import fold
from apply.staging.key_hash import Words, key_words
from apply.staging.own_columns import with_source
from apply.staging.staged_table import Parts, StagedTable
from catalog.beside import oid_of
from pubsub.concurrency import in_thread
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.errors import PubsubError
from pubsub.protocol import pgoutput, rows
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.transaction import Transaction

PART_BYTES: Final = 8 << 20
"""Bytes of a transaction's frames from which a part is made."""

# How many key hashes are kept for one table, 8 bytes each.  A table with more must have inserts alone.
_MAX_KEYS: Final = 4 << 20
_NEVER: Final = Lsn((1 << 64) - 1)

logger = structlog.get_logger()


class Tables(Protocol):
    """The part of interfaces.SubscriptionTables that is used here."""

    async def adapt_tables(self, batch: Batch, until_committed: None) -> Destinations: ...

    async def unchanged(self, batch: Batch, announced: Mapping[int, pgoutput.Relation]) -> bool: ...


@dataclass(slots=True)
class _Work:
    """One table of one transaction.  `keys`: hashes of the keys that each part touches; None if there are too many to keep."""

    destination: Destination
    parts: Parts
    keys: list[Words] | None = field(default_factory=list)
    inserts_only: bool = True


@dataclass(slots=True)
class _Streamed:
    """A transaction in progress.  `waiting`: parts not staged yet, each with the relation cache before it."""

    xid: int
    parts: list[Transaction] = field(default_factory=list)
    waiting: deque[tuple[Transaction, Mapping[int, pgoutput.Relation]]] = field(default_factory=deque)
    works: dict[tuple[str, str], _Work] = field(default_factory=dict)
    relations: dict[int, pgoutput.Relation] = field(default_factory=dict)
    names: set[tuple[str, str]] = field(default_factory=set)
    passed_over: set[tuple[str, str]] = field(default_factory=set)
    in_vain: str | None = None


class Ahead:
    """The transactions of one stream that are staged ahead, at most `most` (max_parallel_apply_workers_per_subscription).

    The dispatcher's calls (`add`, `abort`, `forget`) only take notes; `run` does the work until it is cancelled.  The lock
    `giving_back` is held while a part is returned to the reorder buffer.
    """

    def __init__(
        self, tables: Tables, writers: TableWriters, origin: str, most: int, giving_back: asyncio.Lock
    ) -> None:
        self._giving_back = giving_back
        self._tables = tables
        self._writers = writers
        self._origin = origin
        self._most = most
        self._streamed: dict[int, _Streamed] = {}
        self._forgotten: list[_Streamed] = []
        self._changed = asyncio.Event()
        # Held to stage a part, and to take or discard what is staged.
        self._working = asyncio.Lock()

    # Calls of the dispatcher

    def accepts(self, xid: int) -> bool:
        """Return whether the transaction may be divided into parts."""
        known = self._streamed.get(xid)
        return len(self._streamed) < self._most if known is None else known.in_vain is None

    def add(self, xid: int, part: Transaction, known: Mapping[int, pgoutput.Relation]) -> None:
        """Add a part: the transaction's changes since its last part.  `known` is the relation cache before it."""
        streamed = self._streamed.setdefault(xid, _Streamed(xid))
        streamed.parts.append(part)
        if streamed.in_vain is None:
            streamed.waiting.append((part, known))
            self._changed.set()

    def parts(self, xid: int) -> Sequence[Transaction]:
        """Return the transaction's parts so far; none if it is not staged ahead."""
        streamed = self._streamed.get(xid)
        return streamed.parts if streamed is not None else ()

    def abort(self, xid: int, subxid: int, *, announced: bool) -> None:
        """Note that a subtransaction was rolled back; `announced`: it had sent a Relation message."""
        streamed = self._streamed.get(xid)
        if streamed is None:
            return
        for part in streamed.parts:
            if part.size_of(subxid)[0]:
                announced = True
            part.abort(subxid)
        if announced:
            self._give_up(streamed, "a subtransaction was rolled back")

    def forget(self, xid: int) -> None:
        """Note that the transaction was rolled back or is not wanted."""
        streamed = self._streamed.pop(xid, None)
        if streamed is not None:
            self._give_up(streamed, "the transaction was rolled back")
            self._forgotten.append(streamed)
            self._changed.set()

    def _give_up(self, streamed: _Streamed, reason: str) -> None:
        if streamed.in_vain is None:
            logger.debug("transaction will be staged at its commit", xid=streamed.xid, reason=reason)
            streamed.in_vain = reason
        streamed.waiting.clear()
        self._changed.set()

    # The work

    async def run(self) -> None:
        """Stage parts as they arrive, and discard work that was in vain."""
        while True:
            self._changed.clear()
            if not await self.step():
                await self._changed.wait()

    async def settle(self) -> None:
        """Return when every part that has been added is staged, or has turned out to be in vain."""
        while await self.step():
            pass

    async def step(self) -> bool:
        """Discard work in vain, and stage a part; return False if there is none."""
        async with self._working:
            await self._clean()
            streamed = next((one for one in self._streamed.values() if one.waiting), None)
            if streamed is None:
                return False
            await self._stage_next(streamed)
            return True

    async def finish(self, batch: Batch) -> list[StagedTable] | None:
        """Return the staged tables of `batch`, one transaction with parts; None if it must be staged like any other.

        From here on its parts belong to the batch.
        """
        streamed = self._streamed.pop(batch.transactions[0].xid, None)
        if streamed is None:
            return None
        async with self._working:
            try:
                while streamed.waiting:
                    await self._stage_next(streamed)
                if streamed.in_vain is None:
                    return await self._take(streamed, batch)
                return None
            finally:
                await in_thread(partial(_throw_away, streamed))

    async def close(self) -> None:
        """Discard everything staged.  The parts go with the reorder buffer."""
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

    async def _stage_next(self, streamed: _Streamed) -> None:
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
            destinations = await self._tables.adapt_tables(batch, None)
            streamed.relations.update((oid, messages[-1][1]) for oid, messages in batch.relations.items())
            reason = await in_thread(partial(self._stage_part, streamed, batch, destinations))
        except (PubsubError, OSError) as error:
            # The transaction may never commit; if it does, the failure recurs.
            reason = str(error)
        except BaseException:
            self._give_up(streamed, "staging a part was interrupted")
            raise
        if reason is not None:
            self._give_up(streamed, reason)

    def _stage_part(self, streamed: _Streamed, batch: Batch, to: Destinations) -> str | None:
        """Stage a part; return a reason if the work is in vain.  Blocks."""
        destinations, *besides = to
        frames = rows.split_by_relation(block for _, blocks in batch.chunks() for block in blocks)
        names = {(r.namespace, r.name) for oid in frames for _, r in batch.relations.get(oid, ())}
        if any(name in some for some in besides for name in names):
            return "a table stands beside a mirror"
        streamed.names |= names
        streamed.passed_over |= names - destinations.keys()
        decoded = [
            (wanted, *decode(batch, wanted, frames, self._origin))
            for wanted in wanted_by(batch, list(frames), destinations)
        ]
        frames.clear()  # a frame may take a gigabyte: it is gone before its row is written
        while decoded:
            wanted, parts, full = decoded.pop(0)
            if not parts:
                continue
            relation = batch.relations[wanted.oids[-1]][-1][1]
            name = (relation.namespace, relation.name)
            destination = wanted.destination
            table = destination.table
            changes = with_source(rows.concat_changes(parts), table)
            parts.clear()
            inserts_only = bool((changes.op == rows.INSERT).all())
            if table.history is not None:
                return "a table keeps the history, which names the commit"
            if table.mark is not None or table.metadata:
                return "a table has columns of its own, which name the commit"
            if table.gives_way:
                return "rows may stand where new ones arrive"
            if table.closed:
                return "columns of a table may be left out or renamed, which only the publisher's catalog tells apart"
            if not table.key and not inserts_only:
                return "rows of a table without a key change"
            work = streamed.works.get(name)
            if not _same(work.destination if work is not None else destination, destination):
                return "a table has changed, or is written by others"
            if work is None:
                sink = self._writers.parts(table, rewrites=bool(table.key), replace_all=False)
                work = streamed.works[name] = _Work(destination, Parts(sink))
            work.inserts_only &= inserts_only
            if table.key and not _note_keys(work, changes):
                return "a key is touched again"
            folded = fold(changes, table.key or None, full=full)
            if folded.collisions is not None or folded.missing is not None:
                return "a row is missing, or in the way"
            work.parts.add(folded)
        return None

    async def _take(self, streamed: _Streamed, batch: Batch) -> list[StagedTable] | None:
        """Return the staged tables, if they are still those that the parts were staged for."""
        try:
            destinations, *besides = await self._tables.adapt_tables(Batch(streamed.relations), None)
        except PubsubError as error:
            if error.relid is None:
                raise
            return None  # a table's own error, which recurs when the transaction is staged like any other
        end = batch.last_lsn
        if any(name in destinations and destinations[name].after < end for name in streamed.passed_over):
            return None
        if any(name in some and some[name].after < end for some in besides for name in streamed.names):
            return None  # one was being copied
        wanted = {}
        by_relid = {destination.relid: destination for destination in destinations.values()}
        for name, work in streamed.works.items():
            now = by_relid.get(work.destination.relid)
            if now is None or now.after >= end:
                continue  # the table has left, or has the transaction already
            if not _same(work.destination, now) or not await in_thread(partial(_keys_differ, work)):
                return None
            wanted[name] = now
        ours = {oid_of(destination.relid) for destination in wanted.values()}
        announced = {oid: message for oid, message in streamed.relations.items() if oid in ours}
        if not await self._tables.unchanged(batch, announced):
            return None
        try:
            return await in_thread(partial(_finish, streamed, wanted, batch, self._writers))
        except WrittenByOthers:
            return None


def _same(then: Destination, now: Destination) -> bool:
    """Return whether the table still gets the whole transaction."""
    if now.looks_up or now.stops_before is not None:
        return False
    return (then.relid, then.app_id, then.table) == (now.relid, now.app_id, now.table)


def _note_keys(work: _Work, changes: rows.Changes) -> bool:
    """Keep the hashes of a part's keys; return False if parts are already known to share one."""
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
    """Return whether no two parts share a key.  Releases the hashes."""
    if work.inserts_only:
        return True
    if work.keys is None:
        return False
    every = np.concatenate(work.keys)
    work.keys = None
    every.sort()
    return not bool((every[1:] == every[:-1]).any())


def _finish(
    streamed: _Streamed, wanted: Mapping[tuple[str, str], Destination], batch: Batch, writers: TableWriters
) -> list[StagedTable]:
    for destination in wanted.values():
        look_for_others(writers, destination)
    staged: list[StagedTable] = []
    try:
        for name, destination in wanted.items():
            # It stays in `works`: _throw_away aborts a sink that could not finish, and does nothing to one that has.
            staged.append(streamed.works[name].parts.finish(destination, batch))
    except BaseException:
        for one in staged:
            discard(one.staged)
        raise
    return staged


def _throw_away(streamed: _Streamed) -> None:
    while streamed.works:
        streamed.works.popitem()[1].parts.sink.abort()
