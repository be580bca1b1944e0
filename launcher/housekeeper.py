"""Keep the node's Delta tables small: a task of the daemon for data files, and one for what is deleted.

    every two seconds   the tables that batches were staged for since (TableWriters.staged)
                        ─► after some batches, or a minute: merge small files, rewrite worn ones (housekeeping/rewrite.py),
                           or run OPTIMIZE (housekeeping/delta_optimize.py)
                        ─► a minute later, then as long as old files lie there, and when the table rests: a visit
                           (housekeeping/upkeep.py), which also writes the checkpoints

A table that rests costs nothing: it is neither opened nor listed, except once when the daemon starts, by a look at the
names in its log, since the last daemon may have been killed before it visited the table.  Only tables in state r are
touched: the files of a copy's finished chunks are named by no version yet, and may be older than any retention.  Of a table
of several sources, one of which is being copied, files are merged, but none is deleted.

Each task works on one table at a time, and pauses after each piece of work three times as long as that took: VACUUM may
take long, and small files must not wait for it.  A failure is logged, and the table left alone for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from catalog.figures import TableStorage
from catalog.records import State, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher.share import ALL, Share
from pubsub.delta import table as delta
from pubsub.delta.files.file_rows import rows_in
from pubsub.delta.housekeeping import inventory
from pubsub.delta.housekeeping.choose_files import choose_files
from pubsub.delta.housekeeping.delta_optimize import enough, is_due, optimize
from pubsub.delta.housekeeping.retention import follow_settings, retention_properties
from pubsub.delta.housekeeping.rewrite import can_be_rewritten, rewrite
from pubsub.delta.housekeeping.upkeep import CHECKPOINT, Upkeep, Visit
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.demands import managed_by_catalog
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import DELETING, Cleaning
from pubsub.delta.places import is_reached, place
from pubsub.delta.spark.engine import Engine
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.processor_time import spent_on
from pubsub.setting_tables import HousekeepingSettings
from pubsub.texts import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAP: Final = 2.0
# Files are looked at after so many batches, or so many seconds after the first one.
_BATCHES: Final = 4
_LOOK: Final = 60.0
# A table that has had no batch for so long rests.
_REST: Final = 300.0
# A table that is written is measured as often, in seconds.
_MEASURE: Final = 300.0
# How long a table is left alone after a failure.
_AFTER_FAILURE: Final = 300.0
# While a backlog is worked off, files are not rewritten, which takes processor time and memory from it: until no large batch
# has come for so many seconds, but at most for so many.
_BACKLOG: Final = 5.0
_LONGEST_WAIT: Final = 60.0
# A file that no version names may be a statement's that has begun within so many seconds.
_LONGEST_STATEMENT: Final = 86_400.0
# A pause after work is so many times as long as the work, up to a bound in seconds.
_PAUSE: Final = 3.0
_LONGEST_PAUSE: Final = 60.0

logger = structlog.get_logger()


@dataclass(slots=True)
class _Table:
    """What is known of a table.  Times are of time.time(); `staged` counts batches as Stage does, the others are earlier counts."""

    relation: SubscriptionRel
    staged: int = 0
    looked: int = 0
    optimized: int = 0
    visited: int = 0
    changed_at: float = 0.0
    look_at: float | None = None
    visit_at: float | None = None
    upkeep: Upkeep | None = None
    log: TableLog | None = None
    storage: TableStorage | None = None
    vain: bool = False
    """Whether the last OPTIMIZE found nothing to do."""
    copying: bool = False
    """Whether one of its sources is being copied, of whose files no version knows yet: none is deleted meanwhile."""


class Housekeeper:
    """One node's housekeeper: `run` lasts until it is cancelled, and then until the work under way has ended.

    `share`: the subscriptions whose tables it sees to.
    """

    def __init__(
        self,
        settings: HousekeepingSettings,
        catalog: Catalog,
        engine: Engine,
        writers: TableWriters,
        share: Share = ALL,
    ) -> None:
        self._settings = settings
        self._share = share
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._tables: dict[str, _Table] = {}
        self._seen = -1
        self._started = time.time()
        self._node_id = ""
        self._wanted = retention_properties(settings.deleted_file_retention, settings.log_retention)
        self._reading = asyncio.Lock()
        self._at_work: dict[bool, int] = {}
        self.nap = NAP

    async def run(self) -> None:
        """Work until cancelled.  Nothing is done while the catalog is another daemon's, or an earlier JVM lives."""
        if self._settings.enabled:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_working(visits=False))
                group.create_task(self._keep_working(visits=True))

    @property
    def busy(self) -> set[int]:
        """The oids of the subscriptions whose tables are being worked on."""
        return set(self._at_work.values())

    async def _keep_working(self, *, visits: bool) -> None:
        while True:
            await asyncio.sleep(self.nap)
            try:
                async with self._reading:
                    await self._read_tables()
                self._notice(time.time())
                await self._work(visits=visits)
            except Exception as error:
                logger.warning("housekeeping could not go on", reason=first_line(error))

    async def _read_tables(self) -> None:
        """Take over the catalog's tables if it has changed."""
        counter = await self._catalog.change_counter()
        if counter == self._seen:
            return
        state = await self._catalog.state()
        first = self._seen < 0
        storage = {(one.subid, one.relid): one for one in state.storage}
        # Without a definition a table has joined without a copy, and its Delta table is still to be made.
        ready: dict[str, SubscriptionRel] = {}
        for one in state.relations:
            if one.state is RelState.READY and one.definition is not None:
                ready.setdefault(one.path, one)
        copied = {one.path for one in state.relations if one.state is not RelState.READY}
        ready |= _tables_of_sequences(state)
        others = {one.oid for one in state.subscriptions if not self._share.runs(one)}
        ready = {path: one for path, one in ready.items() if one.subid not in others}
        self._node_id = state.node.node_id
        for path in self._tables.keys() - ready.keys():
            del self._tables[path]
        for path, relation in ready.items():
            known = self._tables.get(path)
            if known is not None:
                known.copying = path in copied
            if known is not None and known.relation.copy_generation == relation.copy_generation:
                known.relation = relation
                continue
            held = storage.get((relation.subid, relation.relid))
            if held is not None and held.generation != relation.copy_generation:
                held = None
            staged = self._writers.staged[path]
            table = self._tables[path] = _Table(relation, staged, staged, staged, staged, time.time(), storage=held)
            table.copying = path in copied
            if not first or held is None or await self._was_written(held, path):
                # Its copy has ended, or this daemon knows nothing of it, or it was written since it was visited.
                table.visit_at = table.look_at = time.time()
            elif held.due is not None:
                table.visit_at = held.due.timestamp()
        self._seen = counter

    async def _was_written(self, held: TableStorage, path: str) -> bool:
        if not is_reached(path):
            return False
        try:
            return (await asyncio.to_thread(inventory.newest_version, place(path))) != held.version
        except OSError:
            return False

    def _notice(self, now: float) -> None:
        """Note which tables were written since the last look."""
        for path, staged in self._writers.staged.items():
            table = self._tables.get(path)
            if table is None or table.staged == staged:
                continue
            table.staged, table.changed_at = staged, now
            if staged - table.looked >= _BATCHES:
                table.look_at = now if table.look_at is None else min(table.look_at, now)
            elif table.look_at is None:
                table.look_at = now + _LOOK
            if not is_reached(path):
                if table.visit_at is None:
                    table.visit_at = now + self._settings.deleted_file_retention + _LOOK
            elif staged - table.visited >= CHECKPOINT:
                table.visit_at = now
            elif table.visit_at is None or table.visit_at > now + _MEASURE:
                table.visit_at = now + (_LOOK if table.visit_at is None else _MEASURE)

    async def _work(self, *, visits: bool) -> None:
        """Do what is due, visits or looks, one table after the other, beginning with the one that is due for longest."""
        now = time.time()
        until = now
        if not visits and time.monotonic() - self._writers.large_at < _BACKLOG:
            until -= _LONGEST_WAIT
        times = ((table.visit_at if visits else table.look_at, path) for path, table in self._tables.items())
        for _, path in sorted((due, path) for due, path in times if due is not None and due <= until):
            await self._engine.fence()
            await self._catalog.prove()
            table = self._tables.get(path)
            if table is None or await self._catalog.change_counter() != self._seen:
                return  # a table may have been given to a copy
            if not self._share.may_begin(table.relation.subid):
                continue
            began = time.monotonic()
            self._at_work[visits] = table.relation.subid
            try:
                await self._work_on(table, visits=visits)
            finally:
                del self._at_work[visits]
            await asyncio.sleep(min(_PAUSE * (time.monotonic() - began), _LONGEST_PAUSE))

    async def _work_on(self, table: _Table, *, visits: bool) -> None:
        try:
            if is_reached(table.relation.path) and await self._engine.run_without_spark(_is_managed, self._log(table)):
                table.look_at = table.visit_at = None
                logger.info("housekeeping leaves a table to its catalog", relation=table.relation.qualified_name)
                return
            await (self._visit(table) if visits else self._look(table))
        except Exception as error:
            logger.warning(
                "housekeeping of a table failed", relation=table.relation.qualified_name, reason=first_line(error)
            )
            table.upkeep = None
            table.visit_at = time.time() + _AFTER_FAILURE
            if table.look_at is not None:
                table.look_at = table.visit_at

    def _log(self, table: _Table) -> TableLog:
        return self._writers.log_of(table.relation.path)

    async def _look(self, table: _Table) -> None:
        """Merge and rewrite files of a table if that is worth it; look again soon if it was."""
        path = table.relation.path
        table.looked = table.staged
        now = time.time()
        resting = table.changed_at + _REST <= now
        table.look_at = None if resting else max(table.changed_at, now - _REST) + _REST + 1.0
        if resting and is_reached(path):
            table.visit_at = now
        if not self._settings.merge_files:
            table.look_at = None
            return
        worn = self._window_opens() == 0
        relation = table.relation
        began = time.monotonic()
        if worn and await self._optimize_is_due(table, resting=resting):
            staged = table.staged
            rewritten = await self._engine.run(optimize, path)
            if rewritten is not None:
                table.optimized, table.vain = staged, not rewritten
            done = bool(rewritten)
        elif is_reached(path):
            found = self._log(table)
            load = partial(delta.load, path, relation.qualified_name, relation.definition)
            choose = partial(_chosen, found, worn=worn, resting=resting)
            done = await self._engine.run_without_spark(rewrite, found, load, choose)
        else:
            return
        if done:
            logger.info(
                "data files were merged", relation=relation.qualified_name, seconds=round(time.monotonic() - began, 1)
            )
            table.look_at = time.time()
            if table.visit_at is None:
                table.visit_at = time.time() + _LOOK

    async def _optimize_is_due(self, table: _Table, *, resting: bool) -> bool:
        """Return whether Delta's OPTIMIZE is to be run (delta_optimize.py)."""
        enough_batches = enough(table.staged - table.optimized, resting=resting)
        if not is_reached(table.relation.path):
            return enough_batches
        if table.vain and not enough_batches:
            return False
        return await self._engine.run_without_spark(_optimize_is_due, self._log(table), resting)

    async def _visit(self, table: _Table) -> None:
        """Visit a table, and store what was found."""
        relation = table.relation
        table.visited = table.staged
        opens = self._window_opens()
        if not is_reached(relation.path):
            again = await self._engine.run(
                _clean_elsewhere, relation.path, self._engine.transactions, opens, self._started
            )
            table.visit_at = None if again is None else time.time() + again
            return
        found = self._log(table)
        if table.upkeep is None or table.log is not found:
            table.log = found
            table.upkeep = Upkeep(found, self._engine.transactions, self._started, self._node_id)
            if await self._engine.run_without_spark(follow_settings, found, self._wanted):
                logger.info("a table's retention was set as the settings say", relation=relation.qualified_name)
        now = time.time()
        resting = table.changed_at + _REST <= now
        visit = await self._engine.run(_visited, table.upkeep, opens == 0 and not table.copying, resting)
        now = time.time()
        due = visit.due
        if due is not None and table.copying:
            due = max(due, now + _MEASURE)
        if due is not None and due < now + opens:
            due = now + opens
        vacuumed = datetime.now(UTC) if visit.vacuumed else table.storage.last_vacuum if table.storage else None
        usage = visit.usage
        table.storage = TableStorage(
            relation.subid,
            relation.relid,
            relation.copy_generation,
            usage.version,
            usage.files,
            usage.live,
            usage.retained,
            usage.log,
            vacuumed,
            None if due is None else datetime.fromtimestamp(due, UTC),
            usage.small_files,
            usage.deleted_rows,
        )
        await self._catalog.put_statistics(storage=[table.storage])
        table.visit_at = due
        if visit.vacuumed:
            logger.info("vacuumed", relation=relation.qualified_name, retained_bytes=usage.retained)

    def _window_opens(self) -> float:
        """Return the seconds until the window opens; 0 within it."""
        return self._settings.window.wait(datetime.now().astimezone())


def _tables_of_sequences(state: State) -> dict[str, SubscriptionRel]:
    """Return the Delta tables of the subscriptions' sequences by path, those that exist, as if each were a ready table."""
    return {
        one.path: SubscriptionRel(
            one.subid,
            0,
            "pg_catalog",
            "pg_sequences",
            RelState.READY,
            one.lsn,
            0,
            None,
            one.path,
            None,
            None,
            None,
            None,
        )
        for one in state.sequences
        if one.lsn is not None
    }


@spent_on("housekeeping", whole=True)
def _optimize_is_due(log: TableLog, resting: bool) -> bool:
    with log.writing:
        log.refresh()
        return is_due(log, rewritten_here=can_be_rewritten(log), resting=resting)


@spent_on("housekeeping", whole=True)
def _is_managed(log: TableLog) -> bool:
    with log.writing:
        log.refresh()
        return managed_by_catalog(log.protocol)


def _chosen(log: TableLog, files: Sequence[AddFile], *, worn: bool, resting: bool) -> list[AddFile]:
    """Return the files to rewrite, but none that OPTIMIZE has clustered and that are whole."""
    loose = [file for file in files if not file.clustered or file.deleted]
    return choose_files(loose, partial(rows_in, log), worn=worn, resting=resting)


@spent_on("housekeeping", whole=True)
def _visited(session: SparkSession, upkeep: Upkeep, clean: bool, resting: bool) -> Visit:
    return upkeep.visit(clean=clean, resting=resting)


@spent_on("housekeeping", whole=True)
def _clean_elsewhere(
    session: SparkSession, path: str, cleaning: Cleaning, opens: float, started: float
) -> float | None:
    """Clean a table that only Spark reaches.

    `opens`: the seconds until the window opens; `started`: when this process did.  Returns in how many seconds to come
    again; None: not before it is written again.
    """
    if opens:
        return opens
    now = time.time()
    with DELETING:
        retention = cleaning.retention(path)
        if retention.managed:
            return None
        # A list of files has those of statements that are under way.
        cleaning.vacuum_elsewhere(path, int(max(started, now - _LONGEST_STATEMENT) * 1000))
        if retention.cleans_log:
            # VACUUM LITE has read the commits that are older than the files' retention, and needs the others.
            cleaning.clean_log(path, int((now - max(retention.log, retention.files)) * 1000))
    return None
