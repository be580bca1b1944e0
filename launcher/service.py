"""A node's workers in this process: the lock, Spark and the launcher, started and ended together.

`pubsub daemon` adds signals to it; `pubsub.Node` runs it beside the caller's own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import structlog

from catalog.home_lock import DaemonLock
from catalog.states import RelState
from catalog.store import Catalog
from launcher.share import Share
from launcher.stage_directory import stage_directory
from pubsub import jars, object_stores, tracing
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, PubsubError
from pubsub.processor_time import spent, together
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.settings import Settings

if TYPE_CHECKING:
    from apply.worker_statistics import Figures
    from launcher.launcher import Launcher
    from launcher.verifier import Verify
    from launcher.worker_processes import WorkerProcesses
    from pubsub.delta.spark.engine import Engine
    from pubsub.delta.spark.spark_session import Spark
    from pubsub.delta.writers.choose_writer import TableWriters

#: Seconds.
_MEASURED_EVERY: Final = 5.0

logger = structlog.get_logger()


class Service:
    """The running workers, made by `start`.  The process holds the daemon locks of node and catalog until `stop`.

    `lock`: the node's, to be released by `stop`; None if the caller holds it.
    """

    def __init__(
        self,
        catalog: Catalog,
        lock: DaemonLock | None,
        spill: SpillDirectory,
        spark: Spark,
        engine: Engine,
        writers: TableWriters,
        launcher: Launcher,
        processes: WorkerProcesses,
        settings: Settings,
    ) -> None:
        self.spark = spark
        self._processes = processes
        self.engine = engine
        self._writers = writers
        self.launcher = launcher
        self._catalog = catalog
        self._lock = lock
        self._settings = settings
        self._spill = spill
        self._running = asyncio.create_task(self._run(), name="launcher")
        self._starting_spark: asyncio.Task[None] | None = None
        self._measuring = asyncio.create_task(self._measure(), name="memory")

    @classmethod
    async def start(
        cls,
        settings: Settings,
        catalog: Catalog,
        verify: Verify | None = None,
        held: DaemonLock | None = None,
        *,
        sharing: bool = False,
    ) -> Self:
        """Take the locks and start the launcher; start Spark in the background if a subscription will need it.

        `verify`: how scheduled verifications are done (launcher.verifier); None: not at all.  `held`: the node's lock, if the
        caller holds it, and goes on holding it after `stop`.  `sharing`: be one of several daemons that share the catalog.
        Raises ObjectInUse when another process is the daemon of the node or of its catalog, and a PubsubError when Java
        or a jar that Spark needs is missing.
        """
        if sharing:
            require_shared(settings, catalog, "that shares its catalog")
        conf = settings.spark.session_conf()
        object_stores.configure(conf)
        await asyncio.to_thread(_require_spark)
        lock = None if held is not None else DaemonLock.acquire(settings.home)
        try:
            await (catalog.join if sharing else catalog.hold)(settings.home)
            # Deletes what an earlier process spilled, which is of no use.
            spill = await asyncio.to_thread(SpillDirectory.at, settings.spill_directory)
            try:
                return await cls._start(settings, catalog, lock, spill, conf, verify)
            except BaseException:
                spill.release()
                raise
        except BaseException:
            await catalog.let_go()
            if lock is not None:
                lock.release()
            raise

    @classmethod
    async def _start(
        cls,
        settings: Settings,
        catalog: Catalog,
        lock: DaemonLock | None,
        spill: SpillDirectory,
        conf: Mapping[str, str],
        verify: Verify | None,
    ) -> Self:
        # Imported here because the packages of Spark and Arrow take a second.
        from launcher.launcher import Launcher
        from launcher.process_messages import DELETING_LOCK
        from launcher.worker_processes import WorkerProcesses
        from pubsub import allocators
        from pubsub.delta.key_index.node_index import KeyIndex
        from pubsub.delta.log.transactions import DELETING
        from pubsub.delta.spark.engine import Engine
        from pubsub.delta.spark.spark_session import Spark
        from pubsub.delta.writers.choose_writer import TableWriters

        allocators.limit_arenas()
        spark = Spark(settings.home, master=settings.spark.master, conf=conf, warehouse=settings.warehouse_uri)
        engine = Engine(spark)
        node = await catalog.node()
        await asyncio.to_thread(tracing.configure, settings.tracing.endpoint, node.node_id)
        index = KeyIndex(settings.home / "key_index")
        index.keep_only(frozenset(relation.path for relation in (await catalog.state()).relations))
        writers = TableWriters(
            stage_directory(settings, node.node_id, sharing=catalog.is_sharing),
            engine.transactions,
            statement_rows=settings.spark.least_statement_rows,
            index=index,
        )
        share = Share(count=settings.worker_processes, leased=frozenset() if catalog.is_sharing else None)
        DELETING.between_processes(settings.home / DELETING_LOCK if share.count > 1 else None)
        launcher = Launcher(settings, catalog, engine, writers, node.node_id, verify, share)
        processes = await WorkerProcesses.open(settings, catalog, spark)
        service = cls(catalog, lock, spill, spark, engine, writers, launcher, processes, settings)
        service._starting_spark = asyncio.create_task(service._start_spark(), name="start Spark")
        return service

    def wake(self) -> None:
        """Make the launchers look at the catalog at once: this process has changed it."""
        self.launcher.wake()
        self._processes.wake()

    def reloaded(self) -> None:
        """Go on with the settings, which have changed in place."""
        self._processes.reload()
        self.launcher.wake()

    def figures(self) -> dict[int, Figures]:
        """Return the figures of the apply workers that run, by subscription's oid."""
        return self.launcher.figures() | self._processes.figures()

    def spent(self) -> dict[str, float]:
        """Return the seconds of processor time that this process and its worker processes have had, by part (processor_time)."""
        return together(spent(), self._processes.spent())

    @property
    def leased(self) -> frozenset[int] | None:
        """The oids of the subscriptions that this daemon has, where several share the catalog; None: all."""
        return self.launcher.leased

    async def _run(self) -> None:
        """Run the launcher, and those of the worker processes, until all have drained; none goes on when this one may not."""
        others = asyncio.create_task(self._processes.run(), name="worker processes")
        try:
            await self.launcher.run()
        except BaseException:
            self._processes.kill()
            raise
        finally:
            await others

    async def failed(self) -> None:
        """Wait until the launcher fails, and raise its error.  Without `stop` it ends in no other way."""
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Drain the workers within drain_timeout, end Spark and release the locks.  Raises the launcher's error."""
        self.launcher.stop()
        self._processes.stop()
        self._catalog.end_within(self._settings.drain_timeout + self._catalog.timeout)
        self._measuring.cancel()
        # Work that waits for a JVM which hangs would otherwise never end.
        with self.spark.killed_if_hung():
            try:
                await self._running
            finally:
                await asyncio.wait({self._measuring})
                if self._starting_spark is not None:
                    await self._starting_spark
                try:
                    await self.engine.stop()
                finally:
                    await asyncio.to_thread(self._writers.stop)
                    await asyncio.to_thread(tracing.close)
                try:
                    await self._catalog.clear_daemon()
                finally:
                    try:
                        await asyncio.to_thread(self._spill.release)
                    finally:
                        self._processes.close()
                        await self._catalog.let_go()
                        if self._lock is not None:
                            self._lock.release()
        if not self._measuring.cancelled():
            self._measuring.result()

    async def _measure(self) -> None:
        """Store what the daemon takes of the memory, for status and metrics."""
        while True:
            await self._measure_once()
            await asyncio.sleep(_MEASURED_EVERY)

    async def _measure_once(self) -> None:
        memory = await self.engine.memory()
        if memory.python is not None:
            memory = replace(memory, python=memory.python + self._processes.memory())
        try:
            await self._catalog.put_memory(memory)
        except PubsubError as error:
            logger.warning("statistics could not be stored", reason=error.message)

    async def _start_spark(self) -> None:
        try:
            started = await self.engine.start()
        except Exception as error:
            # Each worker that needs Spark starts it again and reports the error.
            logger.warning("Spark did not start", reason=str(error))
            return
        if not started:
            return
        if self._catalog.is_sharing:
            # The others see by it that this daemon can take subscriptions over (catalog.leases: Fleet.ready).
            await self._measure_once()
        from pubsub.delta.spark.warm_up import warm_up, warm_up_copies

        try:
            if self.spark.local and await self._expects_copies():
                await self.engine.run(warm_up_copies)
            # What waits for Spark to commit is served sooner without another's commits beside it.
            if not self.engine.transactions.called:
                await self.engine.run_without_spark(warm_up, self.engine.transactions, self._spill.path)
        except Exception as error:
            logger.warning("Spark was not warmed up", reason=str(error))

    async def _expects_copies(self) -> bool:
        """Return whether tables wait to be copied, or there are none yet: then the next thing will be to copy some."""
        relations = (await self._catalog.state()).relations
        return not relations or any(relation.state is not RelState.READY for relation in relations)


def require_shared(settings: Settings, catalog: Catalog, which: str) -> None:
    """Raise PubsubError if a daemon on another machine could not do what this one does; `which` daemon needs that it can."""
    if settings.warehouse is None:
        raise NotInPrerequisiteState(
            f'a daemon {which} needs a warehouse, and parameter "warehouse" is not set',
            detail=f'It would look for the tables in "{settings.warehouse_uri}", which is its home\'s own.',
            hint="Set it in pubsub.toml to a store or a directory that all of these daemons reach, under the same name.",
        )
    if not catalog.is_shared:
        raise FeatureNotSupported(
            f"a daemon {which} needs a catalog on PostgreSQL",
            detail="A catalog in a file, and the lock on it, are one machine's.",
            hint='Name the catalog\'s database in pubsub.toml: url = "postgresql://…" in the table [catalog].',
        )


def _require_spark() -> None:
    """Fail now if Java or a jar is missing: otherwise each worker would fail on it every few seconds."""
    jars.require_java()
    jars.class_path()
