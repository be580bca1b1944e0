"""The launcher (launcher.c: ApplyLauncherMain): polls the catalog and keeps a runner for each enabled subscription.

It reacts to a change in the catalog at once if the change comes from the same process (`wake`), and within
catalog_poll_interval if it comes from another.  Once a second it stores the workers' statistics, for the views and
status.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from typing import Final, cast

import structlog

from apply.handover import Handover
from apply.worker_statistics import Figures
from catalog.figures import OF_SEQUENCES, Counters, PublisherStatus, TableRows, WorkerFields
from catalog.records import Request, Subscription
from catalog.store import Catalog
from launcher import standing
from launcher.failures import traced, typed
from launcher.housekeeper import Housekeeper
from launcher.monitor import Monitors, combined
from launcher.new_tables import NewTables
from launcher.pin_requests import PinRequests
from launcher.point_requests import PointRequests
from launcher.registrar import Registrar
from launcher.repairs import RepairRequests
from launcher.runner import NodeServices, Runner
from launcher.share import ALL, Share
from launcher.slot_losses import SlotLosses
from launcher.table_comments import TableComments
from launcher.tenure import Tenure
from launcher.verifier import Verifier, Verify
from launcher.worker_slots import WorkerSlots
from pubsub.delta.spark.engine import Engine
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import ObjectInUse, PubsubError
from pubsub.protocol.lsn import INVALID_LSN
from pubsub.settings import Settings

_STATISTICS_INTERVAL = 1.0
#: How long cancelled workers may take before Spark, for which they may wait, is asked whether it lives, in seconds.
_CANCELLED: Final = 2.0
#: How soon one of several daemons looks at the catalog again, at the latest, in seconds.
_COMES_BACK: Final = 3.0
#: How often the pauses of commands are looked at, in seconds.
_PAUSE_LOOK: Final = 1.0
#: A publisher is polled every two seconds, and its stream brings messages: after so long without any it counts as away.
_SILENCE: Final = timedelta(seconds=10)

logger = structlog.get_logger()


class Launcher:
    """One node's launcher: `run` lasts until `stop`.  `share`: the subscriptions that it runs."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        engine: Engine,
        writers: TableWriters,
        node_id: str,
        verify: Verify | None = None,
        share: Share = ALL,
    ) -> None:
        self.runners: dict[int, Runner] = {}
        self._share = share
        self._settings = settings
        self._catalog = catalog
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # The runners that are ending, by oid.
        self._ends: dict[int, asyncio.Task[None]] = {}
        self._handovers: dict[int, Handover] = {}
        self._engine = engine
        self._monitors = Monitors(node_id, catalog)
        self._housekeeper = Housekeeper(settings.housekeeping, catalog, engine, writers, share)
        self._pin_requests = PinRequests(catalog, engine)
        self._point_requests = PointRequests(catalog, self.runners)
        self._repair_requests = RepairRequests(catalog, engine, self.runners)
        self._verifier = Verifier(settings.verify, catalog, verify)
        self._registrar = Registrar(settings.spark, catalog, engine)
        self._comments = TableComments(node_id, catalog, engine, writers, share)
        self._slot_losses = SlotLosses(settings, catalog, self.wake)
        self._new_tables = NewTables(settings, catalog, self.wake)
        self._tenure = Tenure(catalog, share, self._busy) if catalog.is_sharing else None
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._counted: dict[int, tuple[Figures, dict[str, int]]] = {}
        self._logged = standing.WaitLog()
        self._rest_until: dict[int, float] = {}
        # Names of subscriptions that commands pause, by oid; when their pauses are looked at again.
        self._paused: dict[int, str] = {}
        self._look_at_pauses = 0.0
        self._node = NodeServices(
            node_id,
            catalog,
            engine,
            writers,
            settings,
            WorkerSlots(share.part_of(settings.max_logical_replication_workers)),
            self._slot_losses,
            self._new_tables,
        )

    async def run(self) -> None:
        """Run until `stop`, then return once every worker has drained or, after drain_timeout, was cancelled.

        A catalog that cannot be reached is tried again.  Cancels the workers and raises ObjectInUse when another daemon
        has taken over the catalog.
        """
        await self._clear_worker_stats()
        async with asyncio.TaskGroup() as group:
            statistics = group.create_task(self._write_statistics())
            chores = [
                group.create_task(self._housekeeper.run(), name="housekeeping"),
                group.create_task(self._comments.run(), name="comments"),
            ]
            of_node: list[asyncio.Task[None]] = []
            seen = -1
            while not self._stopping.is_set():
                self._wake.clear()
                rest = self._settings.catalog_poll_interval
                try:
                    await self._catalog.prove()
                    await self._end_abandoned_pauses()
                    counter = await self._catalog.change_counter()
                    if self._tenure is not None:
                        counter = await self._see_to_leases(self._tenure, counter)
                    if self._share.is_first and not of_node:
                        of_node += [
                            group.create_task(self._verifier.run(), name="verifications"),
                            group.create_task(self._registrar.run(), name="registrations"),
                        ]
                    if counter != seen and self._share.is_first:
                        await self._log_commands()
                    if counter != seen or any(task.done() for task in self._tasks.values()) or self._resting_is_over():
                        await self._reconcile()
                        await self._answer_requests()
                        seen = counter
                except ObjectInUse:
                    await self._cancel()
                    raise
                except PubsubError as error:
                    logger.error("catalog could not be read", reason=error.message, hint=error.hint)
                    rest = max(rest, self._settings.wal_retrieve_retry_interval)
                if self._tenure is not None:
                    # A lost session is to be noticed, and taken again, before the others take this daemon for dead.
                    rest = min(rest, _COMES_BACK)
                try:
                    async with asyncio.timeout(rest):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            for chore in chores + of_node:
                chore.cancel()
            await self._new_tables.close()
            await self._slot_losses.close()
            await self._point_requests.close()
            await self._repair_requests.close()
            await self._end_all()
            await self._pin_requests.close()
            statistics.cancel()
            await self._monitors.close()
        await self._put_statistics()
        await self._clear_worker_stats()

    def wake(self) -> None:
        """Look at the catalog at once: this process has changed it."""
        self._wake.set()

    def figures(self) -> dict[int, Figures]:
        """Return the figures of the apply workers that run, by subscription's oid."""
        return {oid: runner.apply.figures for oid, runner in self.runners.items() if runner.apply is not None}

    @property
    def leased(self) -> frozenset[int] | None:
        """The oids of the subscriptions that this process's daemon has, where several share the catalog; None: all."""
        return self._share.leased

    def stop(self) -> None:
        """Begin to drain; `run` returns when it is done."""
        self._stopping.set()
        self._wake.set()

    async def _reconcile(self) -> None:
        """Start runners, and begin to end them, as the catalog says.  One that takes long to end does not hold up the others."""
        subscriptions = self._share.of(await self._catalog.subscriptions())
        self._monitors.watch(subscriptions)
        wanted = {s.oid: s for s in subscriptions if s.enabled and s.paused is None}
        self._new_tables.watch(wanted.values())
        self._paused = {s.oid: s.name for s in subscriptions if s.paused is not None}
        self._rest_until = {oid: until for oid, until in self._rest_until.items() if oid in wanted}
        for oid, runner in self.runners.items():
            if oid not in wanted or wanted[oid].generation != runner.subscription.generation:
                self._begin_to_end(oid)
        ended = [oid for oid, task in self._tasks.items() if task.done()]
        asked = self._ends.keys() & ended
        for oid in ended:
            await self._forget(oid)
        for oid, subscription in wanted.items():
            if oid in asked:
                # Who waits for its end is answered first; it starts again in the next pass.
                self._rest_until.setdefault(oid, time.monotonic())
                self.wake()
            elif oid in self.runners:
                if oid not in self._ends:
                    self.runners[oid].tables_changed()
            elif self._rest_until.get(oid, -1e9) <= time.monotonic():
                self._rest_until.pop(oid, None)
                self._start(subscription)

    async def _see_to_leases(self, tenure: Tenure, counter: int) -> int:
        """Take and give up subscriptions that daemons share; return the change counter."""
        if await tenure.see_to(counter):
            counter = await self._catalog.change_counter()
        # What another daemon's workers do meanwhile keeps no promise of this one's.
        self._handovers = {oid: one for oid, one in self._handovers.items() if self._share.may_begin(oid)}
        return counter

    def _busy(self) -> set[int]:
        """Return the oids of the subscriptions of which something runs."""
        chores = (
            self._housekeeper, self._comments, self._pin_requests, self._repair_requests, self._slot_losses,
        )  # fmt: skip
        return self._tasks.keys() | {oid for chore in chores for oid in chore.busy}

    async def _log_commands(self) -> None:
        """Log the commands that this or another process has executed (PostgreSQL: log_statement = ddl)."""
        for command in await self._catalog.take_commands():
            logger.info(
                "statement was executed",
                command=command.tag,
                statement=command.statement,
                executed=command.executed.isoformat(),
            )

    async def _end_abandoned_pauses(self) -> None:
        """End the pauses of commands that were killed."""
        if not self._paused or time.monotonic() < self._look_at_pauses:
            return
        self._look_at_pauses = time.monotonic() + _PAUSE_LOOK
        for oid, name in list(self._paused.items()):
            ended = await self._catalog.end_abandoned_pause(oid)
            if ended is not None:
                logger.warning(
                    "a command has ended half-way: its subscription goes on", subscription=name, command=ended
                )

    def _resting_is_over(self) -> bool:
        """Return whether a subscription whose runner failed may start again."""
        return any(until <= time.monotonic() for until in self._rest_until.values())

    def _start(self, subscription: Subscription) -> None:
        # The hand-over's promises between apply and sync workers outlive a runner: they hold as long as the process.
        handover = self._handovers.setdefault(subscription.oid, Handover())
        runner = self.runners[subscription.oid] = Runner(subscription, self._node, handover)
        self._tasks[subscription.oid] = asyncio.create_task(runner.run(), name=f"subscription {subscription.name}")
        self._tasks[subscription.oid].add_done_callback(lambda _: self.wake())
        logger.info("subscription has started", subscription=subscription.name)

    def _begin_to_end(self, oid: int) -> None:
        if oid not in self._ends:
            ending = self._end(self._tasks[oid], self.runners[oid])
            self._ends[oid] = asyncio.create_task(ending, name=f"end of subscription {oid}")

    async def _end(self, task: asyncio.Task[None], runner: Runner) -> None:
        """Drain a runner; after drain_timeout cancel it, so that the rest is redone later.

        `_forget` comes after it, or before it begins, of a runner that has ended by itself.
        """
        runner.drain()
        _, late = await asyncio.wait({task}, timeout=self._settings.drain_timeout)
        if late:
            task.cancel()
            logger.warning(
                "workers did not drain in time: what they had not committed will be received again",
                subscription=runner.subscription.name,
            )
            await self._have_ended(late)

    async def _end_all(self) -> None:
        for oid in self._tasks:
            self._begin_to_end(oid)
        await asyncio.gather(*self._ends.values())
        for oid in list(self._tasks):
            await self._forget(oid)

    async def _cancel(self) -> None:
        """Cancel every worker at once: none may commit any more."""
        for task in self._tasks.values():
            task.cancel()
        await self._have_ended(set(self._tasks.values()))
        await asyncio.gather(*self._ends.values())
        await self._new_tables.close()
        await self._monitors.close()

    async def _have_ended(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait until cancelled workers have ended.

        They wait for their commits, which may still happen (pubsub/delta/spark/engine.py); so a JVM that hangs is killed, and
        these then fail.  What a file system never answers has no such end.
        """
        while tasks:
            _, tasks = await asyncio.wait(tasks, timeout=_CANCELLED)
            if tasks:
                await self._engine.kill_if_hung()

    async def _forget(self, oid: int) -> None:
        task = self._tasks.pop(oid)
        self._ends.pop(oid, None)
        runner = self.runners.pop(oid)
        self._counted.pop(oid, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            logger.info("subscription has stopped", subscription=runner.subscription.name)
        else:
            known = typed(error)
            logger.error(
                "subscription ended",
                subscription=runner.subscription.name,
                reason=known.message,
                detail=known.detail,
                hint=known.hint,
                exception=traced(error),
            )
            self._rest_until[oid] = time.monotonic() + self._settings.wal_retrieve_retry_interval

    async def _answer_requests(self) -> None:
        """Answer the commands that wait until workers have ended; `_reconcile` has begun to end them."""
        requests = await self._catalog.pending_requests()
        if not requests:
            return
        subscriptions = {s.oid: s for s in await self._catalog.subscriptions()}
        ending = {s.oid for s in subscriptions.values() if not s.enabled or s.paused is not None}
        for request in requests:
            of = subscriptions.get(request.subid) if request.subid is not None else None
            if not (self._share.is_first if of is None else self._share.has(of)):
                continue
            if request.subid in self._ends or (request.subid in self.runners and request.subid in ending):
                # A later pass finds it ended; one that started from an older state of the catalog ends with the next pass, since
                # the change counter has moved.
                continue
            if any(each.takes(request) for each in (self._pin_requests, self._repair_requests, self._point_requests)):
                continue
            if await self._point_requests.frees(request):
                continue
            await self._catalog.answer(request.id, self._refusal(request))

    def _refusal(self, request: Request) -> PubsubError | None:
        if request.kind == "stop" and request.subid not in self.runners:
            if request.subid is not None:
                self._handovers.pop(request.subid, None)
            return None
        if request.kind == "stop":
            return PubsubError("the subscription is enabled: its workers go on", sqlstate="55000")
        return PubsubError(f'the daemon does not know the request "{request.kind}"', sqlstate="0A000")

    # statistics

    async def _clear_worker_stats(self) -> None:
        """Remove what an earlier process, or this one, has stored of the workers that this one runs."""
        if self._share.count == 1 and self._share.leased is None:
            await self._catalog.clear_worker_stats()
        else:
            subscriptions = self._share.of(await self._catalog.subscriptions())
            await self._catalog.clear_worker_stats_of({s.oid for s in subscriptions})

    async def _write_statistics(self) -> None:
        while True:
            await asyncio.sleep(_STATISTICS_INTERVAL)
            try:
                await self._put_statistics()
            except PubsubError as error:
                # Statistics are for people: replication goes on without them.
                logger.warning("statistics could not be stored", reason=error.message)

    async def _put_statistics(self) -> None:
        workers: list[tuple[int, int | None, WorkerFields]] = []
        counters: list[tuple[int, Counters]] = []
        rows: list[TableRows] = []
        looks = self._monitors.looks()
        publishers = {oid: combined(look, (), {}, self._away_since(oid, look, None)) for oid, look in looks.items()}
        for oid, runner in list(self.runners.items()):
            warnings = dict(runner.lasting)
            warnings |= {warning.message: warning for warning in self._new_tables.warnings(oid)}
            figures = runner.apply.figures if runner.apply is not None else None
            if figures is not None:
                warnings |= {warning.message: warning for warning in figures.warnings(time.monotonic())}
            streaming = figures if runner.apply is not None and runner.apply.streaming else None
            away_since = self._away_since(oid, looks.get(oid), streaming)
            publisher = combined(looks.get(oid), list(warnings.values()), runner.waits(), away_since)
            publishers[oid] = publisher
            self._logged.tell(runner.subscription.name, publisher.waits.values())
            known = max(publisher.current_lsn or INVALID_LSN, figures.publisher_lsn if figures else INVALID_LSN)
            position: WorkerFields = {"publisher_lsn": known or None, "lag_seconds": None}
            if away_since is not None:
                position["publisher_lsn"] = None
            elif streaming is not None:
                position["lag_seconds"] = standing.lag(streaming, time.monotonic())
            if figures is not None:
                workers.append((oid, None, _fields(figures) | position))
                counters.append((oid, self._new_counts(oid, figures)))
                if figures.caught_up or figures.batches:
                    await self._clear_error(oid, runner)
            elif runner.applies:
                # Between two attempts: the last worker's figures stay, except those that are unknown now.
                workers.append((oid, None, position))
            rows += runner.take_rows()
            for relid, worker in runner.syncing.items():
                fields = _fields(worker.figures)
                fields["lag_seconds"] = standing.lag(worker.figures, time.monotonic())
                fields["sync_state"], fields["sync_lsn"] = runner.handover.state(relid) or (None, None)
                workers.append((oid, relid, fields))
            if runner.sequences is not None:
                workers.append((oid, OF_SEQUENCES, {"worker_type": "sequence synchronization", "pid": os.getpid()}))
        await self._catalog.put_statistics(workers=workers, counters=counters, publishers=publishers, rows=rows)

    def _away_since(self, oid: int, look: PublisherStatus | None, streaming: Figures | None) -> datetime | None:
        """Return when the publisher was last heard, if it does not answer now; None if it does, or is not asked.

        `look` is the monitor's last result, None if its last attempt failed; `streaming` holds the figures of an apply
        worker that streams from the publisher.
        """
        heard = [self._monitors.heard(oid)]
        if streaming is not None:
            heard.append(streaming.last_msg_receipt_time)
        times = [at for at in heard if at is not None]
        if not times:
            return None
        silent = datetime.now(UTC) - max(times) > _SILENCE
        return max(times) if silent or (look is None and streaming is None) else None

    async def _clear_error(self, oid: int, runner: Runner) -> None:
        if not runner.error_cleared and not runner.failing:
            runner.error_cleared = True
            await self._catalog.clear_subscription_error(oid)

    def _new_counts(self, oid: int, figures: Figures) -> Counters:
        """Return what the apply worker of `oid` has counted since the last call; a new worker starts at zero."""
        now = {
            "transactions": figures.transactions,
            "batches": figures.batches,
            "commits": figures.commits,
            "rows_inserted": figures.inserts,
            "rows_updated": figures.updates,
            "rows_deleted": figures.deletes,
            "truncates": figures.truncates,
            "bytes_received": figures.bytes_received,
            "spill_txns": figures.spill_txns,
            "spill_count": figures.spill_count,
            "spill_bytes": figures.spill_bytes,
            "stream_txns": figures.stream_txns,
            "stream_count": figures.stream_count,
            "stream_bytes": figures.stream_bytes,
        }
        known, before = self._counted.get(oid, (None, now))
        self._counted[oid] = (figures, now)
        if known is not figures:
            return cast(Counters, now)
        return cast(Counters, {name: value - before[name] for name, value in now.items()})


def _fields(figures: Figures) -> WorkerFields:
    return {
        "pid": os.getpid(),
        "received_lsn": figures.received_lsn or None,
        "last_msg_send_time": figures.last_msg_send_time,
        "last_msg_receipt_time": figures.last_msg_receipt_time,
        "latest_end_lsn": figures.latest_end_lsn or None,
        "latest_end_time": figures.latest_end_time,
        "publisher_lsn": figures.publisher_lsn or None,
        "flush_lsn": figures.flush_lsn or None,
    }
