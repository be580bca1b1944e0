"""A node's workers in this process: the lock, Spark and the launcher, started and ended together.

`pubsub daemon` is this with signals; `pubsub.Node` is this beside the caller's own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import structlog

from catalog.daemon import DaemonLock
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
    """Made by `start`; whoever has it holds the daemon locks of node and catalog until `stop`."""

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
        """Take the lock and start the launcher; Spark starts in the background if a subscription will need it.

        Raises ObjectInUse when another process is the node's daemon, or its catalog's, and what is missing to run Spark, or not
        supported.
        """
        conf = settings.spark.session_conf()
        await asyncio.to_thread(_require_spark)
        lock = DaemonLock.acquire(settings.home)
        try:
            await catalog.hold()
            # What an earlier process spilled is of no use.
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
        # Spark's and Arrow's packages take a second to import.
        from launcher.launcher import Launcher
        from pubsub import allocators
        from pubsub.delta.choose_writer import Stage
        from pubsub.delta.engine import Engine
        from pubsub.delta.spark_session import Spark

        allocators.limit_arenas()
        spark = Spark(settings.home, master=settings.spark.master, conf=conf)
        engine = Engine(spark)
        node = await catalog.node()
        copies = await _has_copies_to_make(catalog)
        await catalog.set_daemon()
        launcher = Launcher(settings, catalog, engine, Stage(settings.spill_directory / "stage"), node.node_id)
        service = cls(catalog, lock, spill, spark, engine, launcher)
        if copies:
            service._starting_spark = asyncio.create_task(service._start_spark(), name="start Spark")
        return service

    def wake(self) -> None:
        """The catalog was changed by this process."""
        self.launcher.wake()

    async def failed(self) -> None:
        """Wait for the launcher to end, and raise what it died of.  It ends by itself only by failing."""
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Drain the workers within drain_timeout, end Spark, and let the node go.  Raises what the launcher died of."""
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
            await self.engine.start()
        except Exception as error:
            # Each worker that needs it starts it again, and reports what it then says.
            log.warning("Spark did not start", reason=str(error))


async def _has_copies_to_make(catalog: Catalog) -> bool:
    """Whether Spark is wanted soon: tables that are copied already seldom need it."""
    for subscription in await catalog.subscriptions():
        if subscription.enabled and not subscription.dropping:
            relations = await catalog.relations(subscription.oid)
            if any(relation.state not in (RelState.SYNCDONE, RelState.READY) for relation in relations):
                return True
    return False


def _require_spark() -> None:
    """A worker would find out too, and again every few seconds."""
    jars.require_java()
    jars.class_path()
