"""Run one subscription's workers, the apply worker and the tables' sync workers, and decide about their failures.

In PostgreSQL the apply worker launches the sync workers (tablesync.c: process_syncing_tables_for_apply).  Here the
launcher's process runs both, so that a failing apply worker does not hold back copies.

A worker that failed starts again after wal_retrieve_retry_interval, unless the subscription says disable_on_error or,
for a single table's lasting failure, on_table_error = isolate.  launcher.copies_at_once chooses the tables that get a
sync worker.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog

from apply.conflicts import count_conflict_of
from apply.handover import Handover
from apply.identity_missing import explain
from apply.isolation import hint_to_resync, will_last
from apply.publisher_identity import SlotLost
from apply.worker import ApplyWorker
from apply.worker_statistics import Figures
from catalog.figures import OF_SEQUENCES, TableRows, Warned
from catalog.records import Subscription, SubscriptionRel
from catalog.store import Catalog
from launcher.copies_at_once import CopiesAtOnce
from launcher.failures import cause_of, foreseen, is_absence, traced, typed
from launcher.new_tables import NewTables
from launcher.slot_losses import SlotLosses
from launcher.worker_slots import WorkerName, WorkerSlots
from pubsub import tracing
from pubsub.delta.spark.engine import Engine
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import Overtaken, PubsubError, SerializationFailure, StartAgain, UndefinedObject
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.replication import StreamEnded
from pubsub.settings import Settings
from pubsub.sql.layout_rules import patterns_of
from tablesync.sequence_worker import SequenceWorker, is_pending
from tablesync.worker import SyncWorker

logger = structlog.get_logger()


#: How often in a row a worker may be overtaken before that is a failure: nobody else commits that often by chance.
_OVERTAKEN_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class NodeServices:
    """Everything that the workers of a node share."""

    node_id: str
    catalog: Catalog
    engine: Engine
    writers: TableWriters
    settings: Settings
    workers: WorkerSlots
    slot_losses: SlotLosses
    new_tables: NewTables


class Runner:
    """Runs one subscription until told to end.  `subscription` does not change: an altered one gets a new runner."""

    def __init__(self, subscription: Subscription, node: NodeServices, handover: Handover) -> None:
        self.subscription = subscription
        self.apply: ApplyWorker | None = None
        self.syncing: dict[int, SyncWorker] = {}
        self.sequences: SequenceWorker | None = None
        self.handover = handover
        self.error_cleared = False
        """Whether the last failure has been cleared from the catalog."""
        self.lasting: dict[str, Warned] = {}
        """The publisher's warnings, by text, that still hold after the apply worker that received them has ended."""
        self._node = node
        self._changed = asyncio.Event()
        self._sequences_changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._copies = CopiesAtOnce(
            node.settings.max_sync_workers_per_subscription,
            node.settings.wal_retrieve_retry_interval,
            node.settings.copies.window,
            patterns_of("copy_first", subscription.options.copy_first),
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Tables that had stopped when their worker began: it only drops the slot.
        self._stopped: set[int] = set()
        # Tables that need a worker and have none, except those that pause after a failure: there the error tells why.
        self._without: frozenset[int] = frozenset()
        # Tables whose sync workers wait for a worker slot.
        self._asking: set[int] = set()
        # Row counts from commits, also of workers that have ended, which are not yet stored in the catalog.
        self._rows: dict[int, TableRows] = {}
        # How often in a row the workers were overtaken, without a batch in between, by table (None: the apply worker).
        self._overtaken: dict[int | None, int] = {}
        self._applying: asyncio.Task[None] | None = None
        # The task of the worker that synchronizes sequences, also while that waits for its slot; whether the last one failed.
        self._sequencing: asyncio.Task[bool] | None = None
        self._sequences_failed = False
        self._may_begin = False

    @property
    def failing(self) -> bool:
        """Whether a sync worker failed and no later one of that table, or of the sequences, has succeeded."""
        return self._copies.failing or self._sequences_failed

    async def run(self) -> None:
        """Run until `drain`, or until disable_on_error has disabled the subscription."""
        try:
            with tracing.of_subscription(self.subscription.name):
                await self._run()
        finally:
            await self._node.catalog.clear_worker_stats(self.subscription.oid)
            await self._node.catalog.put_statistics(rows=self.take_rows())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._applying = group.create_task(self._keep_applying())
            group.create_task(self._keep_syncing(group))
            group.create_task(self._keep_sequences(group))

    def drain(self) -> None:
        """End the workers; `run` returns when they have ended.

        The apply worker first commits what it has received.  Sync workers are cancelled: later ones do the rest.
        """
        self._ending.set()
        self._look_again()
        if self.apply is not None:
            self.apply.drain()
        for worker in self.syncing.values():
            worker.drain()
        # Also ends those that wait for a worker slot.
        for task in self._tasks.values():
            task.cancel()
        if self._sequencing is not None:
            self._sequencing.cancel()
        if self._applying is not None and not self._may_begin:
            self._applying.cancel()

    def tables_changed(self) -> None:
        """Read the subscription's tables and sequences again: the catalog has changed."""
        self._look_again()
        if self.apply is not None:
            self.apply.tables_changed()

    def _look_again(self) -> None:
        self._changed.set()
        self._sequences_changed.set()

    @property
    def applies(self) -> bool:
        """Whether the apply worker runs, or pauses between two attempts."""
        return self._may_begin and not self._ending.is_set()

    def take_rows(self) -> list[TableRows]:
        """Return the row counts of the tables that were committed to since the last call."""
        for worker in (self.apply, *self.syncing.values()):
            if worker is not None:
                self._keep_rows(worker.figures)
        taken, self._rows = self._rows, {}
        return list(taken.values())

    def _keep_rows(self, figures: Figures) -> None:
        for relid, (app_id, count, lsn) in figures.rows.items():
            generation = int(app_id.rpartition("/")[2])
            known = self._rows.get(relid)
            if known is None or (known.generation, known.lsn) <= (generation, lsn):
                self._rows[relid] = TableRows(self.subscription.oid, relid, generation, count, lsn)
        figures.rows.clear()

    def waits(self) -> dict[int, Warned]:
        """Return what the workers wait for, by table; 0 stands for the apply worker."""
        slots = self._node.workers
        if (shortage := slots.wait(self._name(None))) is not None:
            return dict.fromkeys((0, *self._without), shortage)
        at_work = [worker.relation.qualified_name for worker in self.syncing.values()]
        found = dict.fromkeys(self._without, self._copies.turn(at_work))
        found |= dict.fromkeys(self._asking, slots.shortage())
        now = time.monotonic()
        found |= {relid: wait for relid, w in self.syncing.items() if (wait := w.figures.wait(now)) is not None}
        if self.apply is not None and (wait := self.apply.wait(now)) is not None:
            found[0] = wait
        return found

    def _name(self, relation: SubscriptionRel | None) -> WorkerName:
        name = relation.qualified_name if relation is not None else None
        return WorkerName(self.subscription.oid, self.subscription.name, name)

    async def _keep_applying(self) -> None:
        # Keeps the slot while it pauses: otherwise sync workers would take it and then wait for apply.
        async with self._node.workers.held(self._name(None)):
            self._may_begin = True
            self._look_again()
            while not self._ending.is_set():
                worker = self.apply = ApplyWorker(
                    self.subscription,
                    node_id=self._node.node_id,
                    catalog=self._node.catalog,
                    engine=self._node.engine,
                    writers=self._node.writers,
                    handover=self.handover,
                    settings=self._node.settings,
                    on_unknown_tables=lambda names: self._node.new_tables.seen(self.subscription.oid, names),
                )
                try:
                    await worker.run()
                except Exception as error:
                    _go_on_unless_cancelled()
                    cause = cause_of(error)
                    if isinstance(cause, Overtaken):
                        if self._overtaken_again(cause, None, worker.figures):
                            self.apply = None
                            await self._report(error, None, count=True)
                    elif isinstance(cause, StartAgain):
                        logger.info(
                            "apply worker starts again", subscription=self.subscription.name, reason=cause.message
                        )
                        continue
                    else:
                        # A failure before the stream begins, or the publisher's shutdown, is no apply error and does
                        # not disable the subscription (worker.c: run_apply_worker, start_apply).  That of a table is
                        # one whenever it is found: PostgreSQL finds it in the stream.
                        known = typed(error)
                        applying = not isinstance(cause, StreamEnded) and (worker.streaming or known.relid is not None)
                        # What it did before must not be taken for a success since: that would clear the error.
                        self.apply = None
                        await self._report(error, None, count=applying)
                        if isinstance(cause, SlotLost):
                            self._node.slot_losses.lost(self.subscription, cause)
                        if applying and self._disables(known):
                            await self._disable()
                            return
                finally:
                    self.lasting |= {w.message: w for at, w in worker.figures.warned.values() if at == math.inf}
                    self._keep_rows(worker.figures)
                    self.apply = None
                await self._pause(self._node.settings.wal_retrieve_retry_interval)

    async def _keep_syncing(self, group: asyncio.TaskGroup) -> None:
        while not self._ending.is_set():
            self._changed.clear()
            settings = self._node.settings
            self._copies.adjust(settings.max_sync_workers_per_subscription, settings.wal_retrieve_retry_interval)
            relations = await self._node.catalog.relations(self.subscription.oid)
            if self._ending.is_set():
                break
            here = {relation.relid for relation in relations}
            for relid in self._tasks.keys() - here:
                self._tasks[relid].cancel()
            self._copies.keep(here)
            for relation in relations:
                # The table stopped while its sync worker ran; the next worker only drops the slot.
                if relation.stopped and relation.relid in self._tasks and relation.relid not in self._stopped:
                    self._tasks[relation.relid].cancel()
            chosen = self._copies.choose(
                relations,
                # The sequences' worker is one of those that max_sync_workers_per_subscription counts.
                [*self._tasks, *([OF_SEQUENCES] if self._sequencing is not None else [])],
                promised=self.handover.promised.keys(),
                applies=self._may_begin,
                now=time.monotonic(),
                today=datetime.now().astimezone(),
            )
            self._without = chosen.without
            for relation in chosen.begin:
                if relation.stopped:
                    self._stopped.add(relation.relid)
                self._tasks[relation.relid] = group.create_task(self._sync(relation))
            polled = self._node.settings.catalog_poll_interval * 10
            await _first(self._changed.wait, min((polled, *chosen.pauses)))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _sync(self, relation: SubscriptionRel) -> None:
        relid = relation.relid
        worker = SyncWorker(
            self.subscription,
            relation,
            node_id=self._node.node_id,
            catalog=self._node.catalog,
            engine=self._node.engine,
            writers=self._node.writers,
            handover=self.handover,
            settings=self._node.settings,
            may_begin=lambda: self._copies.may_begin(datetime.now().astimezone()),
        )
        self._asking.add(relid)
        try:
            async with self._node.workers.held(self._name(relation), at_once=relid in self.handover.promised):
                self._asking.remove(relid)
                self.syncing[relid] = worker
                await worker.run()
            self._copies.succeeded(relid)
            self._overtaken.pop(relid, None)
        except Exception as error:
            _go_on_unless_cancelled()
            cause = cause_of(error)
            if isinstance(cause, Overtaken):
                self._copies.failed(relid, time.monotonic())
                if self._overtaken_again(cause, relid, worker.figures):
                    await self._report(error, relation)
                return
            if isinstance(cause, StartAgain) or await self._isolate(error, relation, worker):
                return
            self._copies.failed(relid, time.monotonic())
            await self._report(error, relation)
            # PostgreSQL launches no such worker while the publisher is away; apply's own error tells of a connection that breaks.
            if self._disables(known := typed(error)) and not is_absence(known):
                await self._disable()
        finally:
            self._asking.discard(relid)
            self.syncing.pop(relid, None)
            self._keep_rows(worker.figures)
            self._tasks.pop(relid, None)
            self._look_again()
            await self._node.catalog.clear_worker_stats(self.subscription.oid, relid)

    async def _keep_sequences(self, group: asyncio.TaskGroup) -> None:
        """Run a worker whenever sequences are to be synchronized (sequencesync.c: ProcessSequencesForSync)."""
        settings = self._node.settings
        while not self._ending.is_set():
            self._sequences_changed.clear()
            pending = any(map(is_pending, await self._node.catalog.sequences(self.subscription.oid)))
            room = len(self._tasks) < settings.max_sync_workers_per_subscription
            if pending and room and self._may_begin and not self._ending.is_set():
                self._sequencing = group.create_task(self._synchronize_sequences())
                await asyncio.wait({self._sequencing})
                done = not self._sequencing.cancelled() and self._sequencing.result()
                self._sequencing = None
                self._changed.set()
                if not done:
                    await self._pause(settings.wal_retrieve_retry_interval)
                continue
            await _first(self._sequences_changed.wait, settings.catalog_poll_interval * 10)

    async def _synchronize_sequences(self) -> bool:
        """Run one worker for the sequences; return whether nothing has kept it from its work."""
        worker = SequenceWorker(
            self.subscription,
            node_id=self._node.node_id,
            catalog=self._node.catalog,
            engine=self._node.engine,
            writers=self._node.writers,
            settings=self._node.settings,
        )
        name = WorkerName(self.subscription.oid, self.subscription.name, "its sequences")
        try:
            async with self._node.workers.held(name):
                self.sequences = worker
                done = await worker.run()
            self._sequences_failed = False
            return done
        except Exception as error:
            _go_on_unless_cancelled()
            self._sequences_failed = True
            await self._report(error, None, of="sync_seq")
            if self._disables(known := typed(error)) and not is_absence(known):
                await self._disable()
            return False
        finally:
            self.sequences = None
            await self._node.catalog.clear_worker_stats(self.subscription.oid, OF_SEQUENCES)

    def _overtaken_again(self, error: Overtaken, relid: int | None, figures: Figures) -> bool:
        """Count that a worker was overtaken; tell whether it was so too often in a row.  If not, log it."""
        count = self._overtaken[relid] = 1 if figures.batches else self._overtaken.get(relid, 0) + 1
        if count > _OVERTAKEN_AT_MOST:
            return True
        logger.warning(
            "worker starts again", subscription=self.subscription.name, reason=error.message, detail=error.detail
        )
        return False

    async def _isolate(self, error: BaseException, relation: SubscriptionRel, worker: SyncWorker) -> bool:
        """Stop this table alone if the failure is its own and will last, and on_table_error is isolate.

        Returns whether it did.
        """
        known = typed(error)
        own = (worker.to_blame or known.relid == relation.relid) and will_last(known)
        if not own or self._ending.is_set() or self.subscription.options.on_table_error != "isolate":
            return False
        await explain(known, self.subscription)
        logger.error(
            "table has stopped",
            subscription=self.subscription.name,
            relation=relation.qualified_name,
            reason=known.message,
            detail=known.detail,
            context=known.context,
        )
        hint = hint_to_resync(known, self.subscription.name, relation)
        lsn = worker.snapshot_lsn if known.finish_lsn is None else Lsn(known.finish_lsn)
        await self._node.catalog.stop_relation(
            self.subscription.oid, relation.relid, known.message, hint, lsn, count="sync"
        )
        await count_conflict_of(self._node.catalog, self.subscription.oid, known)
        if self.apply is not None:
            self.apply.tables_changed()
        return True

    async def _report(
        self,
        error: BaseException,
        relation: SubscriptionRel | None,
        *,
        count: bool = True,
        of: Literal["apply", "sync_seq"] = "apply",
    ) -> None:
        """Log a worker's failure, store it for status, and count it if `count`; only log it while the runner ends.

        `of`: which worker failed, if it is not a table's sync worker.
        """
        known = typed(error)
        if self._ending.is_set():
            logger.info(
                "worker was ended before it was done", subscription=self.subscription.name, reason=known.message
            )
            return
        await explain(known, self.subscription)
        # An unforeseen error needs its traceback.
        trace = {} if foreseen(error) else {"exception": traced(error)}
        catalog, subscription = self._node.catalog, self.subscription
        logger.error(
            "worker failed",
            subscription=subscription.name,
            relation=relation.qualified_name if relation is not None else None,
            reason=known.message,
            detail=known.detail,
            hint=known.hint,
            context=known.context,
            **trace,
        )
        self.error_cleared = False
        await count_conflict_of(catalog, subscription.oid, known)
        counter: Literal["apply", "sync", "sync_seq"] = of if relation is None else "sync"
        await catalog.set_subscription_error(subscription.oid, known, count=counter if count else None)
        relid = relation.relid if relation is not None else known.relid
        if relid is not None:
            await catalog.set_relation_error(subscription.oid, relid, known.message, known.hint)

    def _disables(self, error: PubsubError) -> bool:
        """Return whether a worker's error disables the subscription.

        None does while the workers end, which may fail what they do; nor does a SerializationFailure of ours, which
        another attempt gets over: PostgreSQL has no such error.
        """
        passing = isinstance(error, SerializationFailure)
        return self.subscription.options.disable_on_error and not passing and not self._ending.is_set()

    async def _disable(self) -> None:
        with suppress(UndefinedObject):  # it was dropped meanwhile
            await self._node.catalog.set_enabled(self.subscription.oid, False)
            logger.warning("subscription has been disabled because of an error", subscription=self.subscription.name)
        self.drain()

    async def _pause(self, seconds: float) -> None:
        await _first(self._ending.wait, seconds)


def _go_on_unless_cancelled() -> None:
    """Raise CancelledError if the current task is being cancelled.

    A TaskGroup that is cancelled while one of its tasks fails raises only the failure: the cancellation would be lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _first(event: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Wait for the event, `seconds` at most."""
    try:
        async with asyncio.timeout(seconds):
            await event()
    except TimeoutError:
        return
