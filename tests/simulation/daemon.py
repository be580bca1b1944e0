"""A daemon's process, and its supervisor, which starts another whenever one has ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.launcher import Launcher
from pubsub.delta.places import StorePath
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import PubsubError
from pubsub.reorderbuffer.directories import SpillDirectory
from tests.simulation.engine import SimulatedEngine
from tests.simulation.lake import ROOT
from tests.simulation.life import Killed, Life

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long the supervisor waits before it starts a daemon again, in seconds.
_PAUSE = 3.0


class Daemon(Life):
    """A daemon's process.  `main` is its main task, `launcher` its launcher, once it has one."""

    main: asyncio.Task[None]

    def __init__(self, number: int, world: World) -> None:
        super().__init__(f"daemon {number}", world.chance)
        self.launcher: Launcher | None = None
        self._world = world

    async def run(self) -> None:
        """As `pubsub daemon`: hold the catalog, and run the launcher."""
        world, settings = self._world, self._world.settings
        catalog = world.store.opened(self)
        await catalog.hold(Path("/node"))
        spill = SpillDirectory.at(settings.spill_directory)
        self.ends.append(lambda: os.close(spill._descriptor))
        engine = SimulatedEngine(self, world.lake)
        node = await catalog.node()
        stage = TableWriters(StorePath(f"{ROOT}/_stage/{node.node_id}"), engine.transactions, index=_NoIndex())  # type: ignore[arg-type]
        self.launcher = Launcher(settings, catalog, engine, stage, node.node_id)
        await self.launcher.run()
        await catalog.let_go()


class _NoIndex:
    """key_index.node_index.KeyIndex of a node that keeps none."""

    def of(self, path: str) -> None: ...
    def forget(self, path: str) -> None: ...
    def stop(self) -> None: ...


class Supervisor:
    """Keeps a daemon running.  `daemon` is the one that was started last."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._started = 0
        self.daemon: Daemon | None = None
        self._keeping = self._keep()

    def _keep(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self._start_again_and_again())

    @property
    def living(self) -> Daemon | None:
        """The daemon, if it lives."""
        return self.daemon if self.daemon is not None and self.daemon.alive else None

    async def _start_again_and_again(self) -> None:
        while True:
            self._started += 1
            self.daemon = daemon = Daemon(self._started, self._world)
            self._world.tell(f"{daemon.name} starts")
            daemon.main = daemon.begin(daemon.run())
            await asyncio.wait({daemon.main})
            if daemon.alive:
                error = None if daemon.main.cancelled() else daemon.main.exception()
                self._world.tell(f"{daemon.name} ends" + (f": {error}" if error is not None else ""))
                daemon.alive = False
                self._note_defects(error)
            await daemon.end()
            await asyncio.sleep(_PAUSE)

    def abandon(self) -> Daemon | None:
        """Take the daemon for dead, and start another; return the one that is left to itself."""
        abandoned = self.living
        self._keeping.cancel()
        self._keeping = self._keep()
        return abandoned

    async def stop(self) -> None:
        """End the daemon, and start no other."""
        self._keeping.cancel()
        if self.daemon is not None:
            await self.daemon.kill("the history is over")

    def _note_defects(self, error: Any) -> None:
        """Note errors that are none of the world's: a model lacks what the code has come to use, or the code is wrong."""
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                self._note_defects(one)
        elif error is not None and not isinstance(error, PubsubError | Killed):
            self._world.oracle.require(False, f"a daemon ends with {error!r}")
