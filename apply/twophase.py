"""Keep prepared transactions from PREPARE TRANSACTION to their outcome.

    b … P, S … p   assembled like any other ──► keep: one durable file, then the position moves past the prepare
    K              load ──► the batch, as a transaction that ends at the outcome
    r              forget
    K, r alone     nothing: the transaction changed nothing (it only locked rows, say), and its PREPARE was not sent

Delta has no prepared state, and PostgreSQL keeps its own on disk (twophase.c), so a prepared transaction waits in a file, for
weeks if need be.  The tables that it is applied to are decided at its outcome, as for a commit.  A file is removed only when the
origin is past the outcome, so that an outcome that is sent again after a crash finds it.  A prepare that is sent again before
then replaces the file.

Whether an outcome without a file is nothing, or a file was lost, the catalog's list tells: it has every transaction whose prepare
the stream is past and whose outcome it is not, and which home has the file.  The outcome of a lost one is nothing, too, once every
table was copied after it.

An outcome may never come: the publisher's slot was made anew, or its files were restored.  What the publisher no longer lists as
prepared when a worker begins, and what has no outcome up to the WAL's end of that moment, is forgotten.

    prepared/<subscription oid>/<xid>.prepared             waits
    prepared/<subscription oid>/<xid>.<end LSN>.done       its outcome is durable in every table; the origin may not be there yet
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from catalog.records import PreparedXact
from pubsub.errors import NotInPrerequisiteState, UndefinedObject
from pubsub.protocol import pgoutput
from pubsub.protocol.copyboth import pg_time_to_datetime
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import slots
from pubsub.publisher.connection import Connection
from pubsub.reorderbuffer import durable, files
from pubsub.reorderbuffer import transaction as reorderbuffer

_WAITING: Final = ".prepared"
_DONE: Final = ".done"

logger = structlog.get_logger()

Described = Sequence[tuple[int, pgoutput.Relation]]


@dataclass(frozen=True, slots=True)
class Preparation:
    """A transaction that has just been prepared.

    `relation_cache`: as it was when the transaction began.  `relations` and `truncations`: its messages, each with the
    number of the change that follows.  In a streamed transaction both are among its frames instead, and `announced` has
    the oids of its Relation messages.
    LSNs and time are those of Prepare.
    """

    transaction: reorderbuffer.Transaction
    gid: str
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    streamed: bool
    relation_cache: Mapping[int, pgoutput.Relation]
    relations: Described = ()
    truncations: Sequence[tuple[int, tuple[int, ...]]] = ()
    announced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A prepared transaction read back; `relations` hold for it, each from the change with the given number on.

    The first `cached` of them were known before it, when its own are not among them: they are of all tables, and as old as it is.
    """

    transaction: reorderbuffer.Transaction
    xid: int
    gid: str
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    streamed: bool
    relations: Described
    truncations: Sequence[tuple[int, tuple[int, ...]]]
    announced: tuple[int, ...]
    cached: int = 0


class PreparedStore:
    """The files of one subscription, used by one worker.  All methods block, and raise FileFailure, DiskFull and DataCorrupted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def recover(self, origin: Lsn) -> None:
        """Remove files that a killed process left half written, and those that the origin has passed."""
        files.remove_all(self._directory, durable.TEMPORARY)
        self.remove_done(origin)

    def keep(self, preparation: Preparation) -> None:
        """Store the transaction durably.  A file of the same xid holds the same transaction, sent before, and is replaced."""
        p = preparation
        durable.persist(
            p.transaction,
            self._directory / f"{p.transaction.xid}{_WAITING}",
            {
                "gid": p.gid,
                "prepare_lsn": int(p.prepare_lsn),
                "end_lsn": int(p.end_lsn),
                "prepare_time": p.prepare_time,
                "streamed": p.streamed,
                "relations": [
                    [seq, pgoutput.write_message(relation).hex()]
                    for seq, relation in (*((0, known) for known in p.relation_cache.values()), *p.relations)
                ],
                "cached": len(p.relation_cache),
                "truncations": [[seq, list(oids)] for seq, oids in p.truncations],
                "told": list(p.announced),
            },
        )

    def load(self, xid: int, gid: str) -> Kept | None:
        """Read a transaction back; return None if it was not kept."""
        for path in (self._directory / f"{xid}{_WAITING}", *sorted(self._directory.glob(f"{xid}.*{_DONE}"))):
            if path.exists():
                kept = _read(path)
                if kept.gid == gid:
                    return kept
        return None

    @property
    def directory(self) -> str:
        """The absolute path of the files' directory."""
        return str(self._directory.absolute())

    def missing(self, listed: Sequence[PreparedXact]) -> list[PreparedXact]:
        """Return those of the listed transactions that have no file, not even one that is done."""
        kept = {path.name.split(".")[0] for end in (_WAITING, _DONE) for path in self._directory.glob(f"*{end}")}
        return [xact for xact in listed if str(xact.xid) not in kept]

    def lost(self, gid: str) -> UndefinedObject:
        """Return the error for a transaction whose file is missing, in PostgreSQL's words (twophase.c: LockGXact)."""
        return UndefinedObject(
            f'prepared transaction with identifier "{gid}" does not exist',
            detail=f"It is not in {self._directory}.",
            hint="Files in a node's prepared directory must not be removed.  What it changed is missing: ALTER SUBSCRIPTION ... "
            "RESYNC TABLE with every table of the subscription.",
        )

    def elsewhere(self, xact: PreparedXact) -> NotInPrerequisiteState:
        """Return the error for a transaction whose file is in another home."""
        return NotInPrerequisiteState(
            f'prepared transaction with identifier "{xact.gid}" is kept in another home',
            detail=f'Its file is in "{xact.directory}" on host "{xact.host}", not in "{self.directory}".',
            hint="Start the daemon in that home.  If it is lost: end the transaction on the publisher, then ALTER SUBSCRIPTION ... "
            "RESYNC TABLE with every table of the subscription.",
        )

    def drop(self, xid: int) -> None:
        """Remove a transaction whose outcome never comes; there may be none."""
        path = self._directory / f"{xid}{_WAITING}"
        if path.exists():
            durable.remove(path)

    def forget(self, xid: int, gid: str, prepare_end_lsn: Lsn, prepare_time: int) -> bool:
        """Remove a transaction that was rolled back.

        Return False if there is none: it was prepared before the stream began (worker.c: apply_handle_rollback_prepared,
        LookupGXact).
        """
        path = self._directory / f"{xid}{_WAITING}"
        if not path.exists():
            return False
        kept = _read(path)
        if (kept.gid, kept.end_lsn, kept.prepare_time) != (gid, prepare_end_lsn, prepare_time):
            return False
        durable.remove(path)
        return True

    def done(self, xid: int, end_lsn: Lsn) -> None:
        """Note that its outcome, which ends at `end_lsn`, is durable in every table."""
        path = self._directory / f"{xid}{_WAITING}"
        if path.exists():
            path.replace(self._directory / f"{xid}.{end_lsn:016X}{_DONE}")

    def remove_done(self, origin: Lsn) -> None:
        """Remove transactions whose outcome ends at or before `origin`, the stored origin: they are not sent again."""
        for path in self._directory.glob(f"*{_DONE}"):
            if int(path.name.split(".")[1], 16) <= origin:
                durable.remove(path)

    def greatest(self) -> Lsn:
        """Return the LSN of the last PREPARE without an outcome; 0 if there is none."""
        return max((_read(path).end_lsn for path in self._directory.glob(f"*{_WAITING}")), default=Lsn(0))

    def waiting(self) -> list[PreparedXact]:
        """List the transactions without an outcome, oldest prepare first."""
        found = sorted((_read(path) for path in self._directory.glob(f"*{_WAITING}")), key=lambda kept: kept.end_lsn)
        host = socket.gethostname()
        return [
            PreparedXact(kept.xid, kept.gid, pg_time_to_datetime(kept.prepare_time), host, self.directory)
            for kept in found
        ]


def _read(path: Path) -> Kept:
    stored = durable.load(path)
    m = stored.metadata
    relations = []
    for seq, data in m["relations"]:
        relation = pgoutput.read_message(bytes.fromhex(data))
        assert isinstance(relation, pgoutput.Relation)
        relations.append((int(seq), relation))
    return Kept(
        stored.transaction,
        stored.transaction.xid,
        m["gid"],
        Lsn(m["prepare_lsn"]),
        Lsn(m["end_lsn"]),
        m["prepare_time"],
        m["streamed"],
        relations,
        [(int(seq), tuple(oids)) for seq, oids in m["truncations"]],
        tuple(m["told"]),
        m.get("cached", 0),  # of an earlier version: its own are not told apart
    )


class PreparedList(Protocol):
    """The store of the list that pg_prepared_xacts shows: the catalog."""

    async def prepared(self, subid: int) -> list[PreparedXact]:
        """Return the subscription's list."""

    async def set_prepared(self, subid: int, xacts: Sequence[PreparedXact]) -> None:
        """Store the subscription's list."""


class TwoPhase:
    """One subscription's prepared transactions, for its apply worker.

    `holds`: tells whether every table has what a transaction changed that ends at an LSN.
    """

    def __init__(
        self, store: PreparedStore, shown: PreparedList, subid: int, holds: Callable[[Lsn], bool] = lambda _: False
    ) -> None:
        self._store = store
        self._shown = shown
        self._subid = subid
        self._holds = holds
        # The ends of outcomes whose files are there until the origin is past them.
        self._finished: set[Lsn] = set()
        # Listed transactions whose files are missing.
        self._lost: list[PreparedXact] = []
        # Those that the publisher did not list as prepared when its WAL ended at `_ended_by`.
        self._ended: set[tuple[int, str]] = set()
        self._ended_by = INVALID_LSN

    async def recover(self, origin: Lsn, *, anew: bool = False) -> None:
        """Clean up before the stream begins at `origin`.  `anew`: every table is copied anew.

        Raises NotInPrerequisiteState if another home has the file of a transaction, unless `anew`.
        """
        self._lost = await asyncio.to_thread(self._store.missing, await self._shown.prepared(self._subid))
        here = (socket.gethostname(), self._store.directory)
        for xact in self._lost:
            if not anew and xact.directory is not None and (xact.host, xact.directory) != here:
                raise self._store.elsewhere(xact)
        await self._show()
        await asyncio.to_thread(self._store.recover, origin)

    async def compare(self, connection: Connection) -> None:
        """Note which transactions the publisher, no standby, has no longer prepared: if they have outcomes, those come soon."""
        known = [*await asyncio.to_thread(self._store.waiting), *self._lost]
        if not known:
            return
        prepared = await slots.prepared_transactions(connection)
        self._ended = {(xact.xid, xact.gid) for xact in known} - prepared
        # Asked afterwards: the outcome is in the WAL before the list is without the transaction (twophase.c:
        # FinishPreparedTransaction).
        self._ended_by = await slots.current_wal_lsn(connection)

    async def greatest(self) -> Lsn:
        """Return what PreparedStore.greatest does, without blocking."""
        return await asyncio.to_thread(self._store.greatest)

    async def keep(self, preparation: Preparation) -> None:
        await asyncio.to_thread(self._store.keep, preparation)
        self._found(preparation.transaction.xid)
        await self._show()

    async def load(self, message: pgoutput.CommitPrepared) -> Kept | None:
        """Return the transaction of this outcome; None if it changed nothing.  Raises UndefinedObject if its file was lost."""
        kept = await asyncio.to_thread(self._store.load, int(message.xid), message.gid)
        if kept is None and any((xact.xid, xact.gid) == (message.xid, message.gid) for xact in self._lost):
            if not self._holds(message.end_lsn):
                raise self._store.lost(message.gid)
            self._found(int(message.xid))
            await self._show()
        return kept

    async def roll_back(self, message: pgoutput.RollbackPrepared) -> None:
        await asyncio.to_thread(
            self._store.forget, int(message.xid), message.gid, message.prepare_end_lsn, message.prepare_time
        )
        self._found(int(message.xid))
        await self._show()

    async def durable(self, outcomes: Sequence[tuple[int, Lsn]]) -> None:
        """Note that these transactions, given with the end LSNs of their outcomes, are durable in every table.

        The origin is not stored yet.
        """
        for xid, end_lsn in outcomes:
            await asyncio.to_thread(self._store.done, xid, end_lsn)
            self._finished.add(end_lsn)

    async def origin_stored(self, origin: Lsn) -> None:
        passed = {end_lsn for end_lsn in self._finished if end_lsn <= origin}
        if passed:
            self._finished -= passed
            # The list first: a transaction that is listed and has no file would be a lost one.
            await self._show()
            await asyncio.to_thread(self._store.remove_done, origin)
        if self._ended and origin >= self._ended_by:
            await self._forget_ended()

    async def _forget_ended(self) -> None:
        """Forget the transactions whose outcomes have not come, and never will."""
        waiting = await asyncio.to_thread(self._store.waiting)
        over = [xact for xact in (*waiting, *self._lost) if (xact.xid, xact.gid) in self._ended]
        self._ended.clear()
        for xact in over:
            logger.warning(
                "a prepared transaction that the publisher no longer has is forgotten", gid=xact.gid, xid=xact.xid
            )
            self._found(xact.xid)
        await self._show(without={xact.xid for xact in over})
        for xact in over:
            await asyncio.to_thread(self._store.drop, xact.xid)

    def _found(self, xid: int) -> None:
        """Note that the transaction was sent again, or rolled back: it is not missed any more."""
        self._lost = [xact for xact in self._lost if xact.xid != xid]

    async def _show(self, without: Set[int] = frozenset()) -> None:
        waiting = [xact for xact in await asyncio.to_thread(self._store.waiting) if xact.xid not in without]
        await self._shown.set_prepared(self._subid, [*waiting, *self._lost])
