"""A node's workers in this process: the lock, Spark and the launcher, started and ended together.

`pubsub daemon` adds signals to it; `pubsub.Node` runs it beside the caller's own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import structlog

from catalog.home_lock import DaemonLock
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import jars
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.settings import Settings

if TYPE_CHECKING:
    from launcher.launcher import Launcher
    from pubsub.delta.engine import Engine
    from pubsub.delta.spark_session import Spark

log = structlog.get_logger()


class Service:
    """The running workers, made by `start`.  The process holds the daemon locks of node and catalog until `stop`."""

    def __init__(
        self,
        catalog: Catalog,
        lock: DaemonLock,
        spill: SpillDirectory,
        spark: Spark,
        engine: Engine,
        launcher: Launcher,
    ) -> None:
        self.spark = spark
        self.engine = engine
        self.launcher = launcher
        self._catalog = catalog
        self._lock = lock
        self._spill = spill
        self._running = asyncio.create_task(launcher.run(), name="launcher")
        self._starting_spark: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, settings: Settings, catalog: Catalog) -> Self:
        """Take the locks and start the launcher; start Spark in the background if a subscription will need it.

        Raises ObjectInUse when another process is the daemon of the node or of its catalog, and a PubsubError when Java
        or a jar that Spark needs is missing, or the settings ask for a Spark that is not supported.
        """
        conf = settings.spark.session_conf()
        await asyncio.to_thread(_require_spark)
        lock = DaemonLock.acquire(settings.home)
        try:
            await catalog.hold()
            # Deletes what an earlier process spilled, which is of no use.
            spill = await asyncio.to_thread(SpillDirectory.at, settings.spill_directory)
            try:
                return await cls._start(settings, catalog, lock, spill, conf)
            except BaseException:
                spill.release()
                raise
        except BaseException:
            await catalog.let_go()
            lock.release()
            raise

    @classmethod
    async def _start(
        cls, settings: Settings, catalog: Catalog, lock: DaemonLock, spill: SpillDirectory, conf: Mapping[str, str]
    ) -> Self:
        # Imported here because the packages of Spark and Arrow take a second.
        from launcher.launcher import Launcher
        from pubsub import allocators
        from pubsub.delta.choose_writer import Stage
        from pubsub.delta.engine import Engine
        from pubsub.delta.spark_session import Spark

        allocators.limit_arenas()
        spark = Spark(settings.home, master=settings.spark.master, conf=conf)
        engine = Engine(spark)
        node = await catalog.node()
        await catalog.set_daemon()
        stage = Stage(
            settings.spill_directory / "stage",
            engine.transactions,
            statement_rows=settings.spark.least_statement_rows,
        )
        launcher = Launcher(settings, catalog, engine, stage, node.node_id)
        service = cls(catalog, lock, spill, spark, engine, launcher)
        service._starting_spark = asyncio.create_task(service._start_spark(), name="start Spark")
        return service

    def wake(self) -> None:
        """Make the launcher look at the catalog at once: this process has changed it."""
        self.launcher.wake()

    async def failed(self) -> None:
        """Wait until the launcher fails, and raise its error.  Without `stop` it ends in no other way."""
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Drain the workers within drain_timeout, end Spark and release the locks.  Raises the launcher's error."""
        self.launcher.stop()
        try:
            await self._running
        finally:
            if self._starting_spark is not None:
                await self._starting_spark
            await self.engine.stop()
            try:
                await self._catalog.clear_daemon()
            finally:
                try:
                    await asyncio.to_thread(self._spill.release)
                finally:
                    await self._catalog.let_go()
                    self._lock.release()

    async def _start_spark(self) -> None:
        try:
            started = await self.engine.start()
        except Exception as error:
            # Each worker that needs Spark starts it again and reports the error.
            log.warning("Spark did not start", reason=str(error))
            return
        if not started:
            return
        from pubsub.delta.warm_up import warm_up, warm_up_copies

        try:
            if self.spark.local and await self._expects_copies():
                await self.engine.run(warm_up_copies)
            # What waits for Spark to commit is served sooner without another's commits beside it.
            if not self.engine.transactions.called:
                await self.engine.run_without_spark(warm_up, self.engine.transactions, self._spill.path)
        except Exception as error:
            log.warning("Spark was not warmed up", reason=str(error))

    async def _expects_copies(self) -> bool:
        """Return whether tables wait to be copied, or there are none yet: then the next thing will be to copy some."""
        relations = (await self._catalog.state()).relations
        return not relations or any(relation.state is not RelState.READY for relation in relations)


def _require_spark() -> None:
    """Fail now if Java or a jar is missing: otherwise each worker would fail on it every few seconds."""
    jars.require_java()
    jars.class_path()
