"""Run a history: the models are put in the places of what they stand for, and the clock is the loop's."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

import apply.last_commit
import apply.pipeline.dispatch
import apply.pipeline.pipeline
import apply.pipeline.trigger
import apply.staging.stage_batch
import apply.staging.stream_ahead
import launcher.launcher
import pubsub.delta.table
from pubsub import allocators, faults, object_stores
from pubsub.delta.files import data_files
from pubsub.delta.writers import spark_writer
from pubsub.publisher import copy_out, replication
from pubsub.publisher.connection import Connection
from tablesync import chunk_reader, copyjob
from tests.simulation import sessions
from tests.simulation.engine import InlineThreads, at_version, write_statement
from tests.simulation.history import History
from tests.simulation.lake import OpenedTable
from tests.simulation.life import Life
from tests.simulation.loop import SimulatedLoop, Stuck
from tests.simulation.settle import settle
from tests.simulation.steps import Steps
from tests.simulation.world import World

_EPOCH: Final = 1_700_000_000.0
#: How often the story tells the same.
_TIMES: Final = 3


class Outcome:
    """What a history has come to: the `violations`, and the `story`'s lines, those that come again and again only once.

    `trace`: the whole story, by which two runs can be compared.
    """

    def __init__(self, violations: Sequence[str], trace: Sequence[tuple[float, str]]) -> None:
        self.violations = list(violations)
        self.trace = list(trace)
        self.story: list[str] = []
        told: dict[str, int] = {}
        for at, what in trace:
            told[what] = told.get(what, 0) + 1
            if told[what] <= _TIMES:
                self.story.append(f"{at:10.3f}  {what}" + (" (and so on)" if told[what] == _TIMES else ""))


def simulate(history: History) -> Outcome:
    """Run a history.  `installed` must be in force."""
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="pubsub-sim-", dir=memory if memory.is_dir() else None))
    loop = SimulatedLoop()
    try:
        with _bounded(dict(history.setting.bounds)), _virtual(loop):
            asyncio.set_event_loop(loop)
            world = World(history, home)
            sessions.WORLD[:] = [world]
            structlog.configure(processors=[world.note_log], cache_logger_on_first_use=False)
            try:
                loop.run_until_complete(_run(history, world))
            except Stuck as error:
                world.oracle.violations.append(str(error))
            except Exception as error:
                world.oracle.violations.append(f"the simulation itself fails: {error!r}")
                world.chance.story.append((loop.time(), traceback.format_exc()))
            return Outcome(world.oracle.violations, world.chance.story)
    finally:
        structlog.reset_defaults()
        asyncio.set_event_loop(None)
        loop.close()
        shutil.rmtree(home, ignore_errors=True)


async def _run(history: History, world: World) -> None:
    world.begin()
    steps = Steps(world)
    orphans = asyncio.create_task(world.run_orphans())
    try:
        trouble, world.chance.trouble = world.chance.trouble, 0.0
        await world.create_subscription()
        world.chance.trouble = trouble
        for step in history.steps:
            await asyncio.sleep(step.after)
            if world.oracle.violations:
                return
            await steps.take(step)
        await settle(world, steps)
    finally:
        orphans.cancel()
        await world.supervisor.stop()


@contextmanager
def installed() -> Iterator[None]:
    """Put the models in the places of what they stand for, for all histories that are run meanwhile."""

    async def reached(name: str) -> None:
        life = Life.current()
        if life is not None:
            await life.wait()

    def point(name: str) -> None:
        life = Life.current()
        if life is not None:
            life.writes(f"at {name}")

    def batches(
        connection: Any, statement: str, schema: Any, _parse: Any, _longest: int | None, _max_rate: float
    ) -> Any:
        return connection.copy(statement, schema)

    def session(source: Any, cut: object = None) -> sessions.CopySession:
        life = Life.current()
        assert life is not None
        return sessions.CopySession(life, sessions.WORLD[0])

    @contextmanager
    def watching(_cut: Any, _connection: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "connect", sessions.Session.connect)
        patch.setattr(replication, "ReplicationStream", sessions.Stream)
        patch.setattr(apply.last_commit, "is_commit_at", sessions.is_commit_at)
        patch.setattr(chunk_reader, "session", session)
        patch.setattr(copy_out, "batches", batches)
        patch.setattr(copyjob, "ThreadPoolExecutor", InlineThreads)
        patch.setattr(copyjob.Cut, "watching", watching)
        patch.setattr(data_files, "_writers", InlineThreads())
        patch.setattr(spark_writer, "at_version", at_version)
        patch.setattr(spark_writer, "_commit", write_statement)
        patch.setattr(object_stores, "file_system", lambda _uri: sessions.WORLD[0].lake.files)
        patch.setattr(pubsub.delta.table, "ask", lambda path, question: question(OpenedTable(path)))
        patch.setattr(launcher.launcher, "Monitors", _NoMonitors)
        patch.setattr(launcher.launcher, "_STATISTICS_INTERVAL", 30.0)
        patch.setattr(allocators, "is_due", lambda: False)
        patch.setattr(allocators, "give_back", lambda: None)
        patch.setattr(faults, "reached", reached)
        patch.setattr(faults, "point", point)
        yield


class _NoMonitors:
    """launcher.monitor.Monitors: no decision depends on it."""

    def __init__(self, *_: Any) -> None: ...
    def watch(self, subscriptions: Any) -> None: ...

    def looks(self) -> dict[int, Any]:
        return {}

    def heard(self, oid: int) -> None: ...
    async def close(self) -> None: ...


@contextmanager
def _bounded(bounds: dict[str, int]) -> Iterator[None]:
    """Set the code's own bounds so low that small histories meet them."""
    places: dict[str, list[tuple[Any, str]]] = {
        "small transaction": [(apply.pipeline.dispatch, "_SMALL")],
        "part ahead": [(apply.pipeline.dispatch, "PART_BYTES"), (apply.staging.stream_ahead, "PART_BYTES")],
        "whole batch": [(apply.staging.stage_batch, "_WHOLE")],
        "worth staging ahead": [(apply.pipeline.trigger, "_WORTH_STAGING_AHEAD")],
        "memory": [(apply.pipeline.pipeline, "_LEAST_MEMORY")],
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            for module, attribute in places[name]:
                patch.setattr(module, attribute, value)
        yield


@contextmanager
def _virtual(loop: SimulatedLoop) -> Iterator[None]:
    """Let the time be the loop's, and names that are made up the same in every run."""
    numbers = iter(range(1, 1 << 60))

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=next(numbers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(time, "time", lambda: _EPOCH + loop.time())
        patch.setattr(uuid, "uuid4", uuid4)
        yield
