"""A pipeline from a stream to Delta tables, both in memory, for tests in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

import apply.pipeline.feedback
import apply.pipeline.pipeline
import apply.pipeline.receiver
from apply.batch import Batch
from apply.conflicts import Conflicts
from apply.isolation import Failure
from apply.pipeline.dispatch import PassedSkip
from apply.pipeline.interfaces import Course, Limits
from apply.pipeline.pipeline import Pipeline
from apply.staging.destination import Destination, Destinations
from apply.worker_statistics import Figures
from catalog.records import LastCommit
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.delta.table import TargetTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation
from tests.support.frames import relation
from tests.support.memory import MemoryDelta, MemoryEngine, MemoryStream, target
from tests.support.virtual_time import run

A = relation(16384, "a")
B = relation(16385, "b")
LIMITS = Limits(rows=1000, nbytes=1 << 20, age=1.0, status_interval=10.0, receiver_timeout=60.0, early=0)


class MemoryTables:
    """interfaces.Tables, with tables named like their relations; `gates` hold back commits.

    While `alters`, a batch waits as for an ALTER TABLE; `altered_at` has what the table a held then.
    """

    origin = "pg_1"

    def __init__(self, delta: MemoryDelta) -> None:
        self.delta = delta
        self.isolates = False
        self.contested: set[int] = set()
        self.conflicts: Counter[str] = Counter()
        self.failures: dict[int, Failure] = {}
        self.stopped: dict[int, Lsn] = {}
        self.after: dict[str, Lsn] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.gone: set[int] = set()
        self.alters = False
        self.altered_at: list[Lsn] = []
        self.durables: list[Lsn] = []
        self.last: LastCommit | None = None
        # Where a table in s waits for the position.
        self.synced: Lsn | None = None
        self.store: Callable[[Lsn], Coroutine[Any, Any, None]] | None = None
        self._versions: dict[int, Lsn] = {}
        self._targets: dict[int, TargetTable] = dict(enumerate(delta.targets.values(), A.oid))

    async def adapt_tables(self, batch: Batch, until_committed: Any) -> Destinations:
        if self.alters:
            await until_committed()
            self.altered_at.append(self.version(A.oid))
        to = {
            ("public", t.path): Destination(
                relid, t, "app", self.after.get(t.path, INVALID_LSN), contested=relid in self.contested
            )
            for relid, t in self._targets.items()
            if relid not in self.failures
        }
        return [to]

    def failed(self, failures: Sequence[Failure]) -> None:
        self.failures.update((one.relid, one) for one in failures)

    async def stop(self, failures: Sequence[Failure]) -> None:
        self.stopped.update((one.relid, one.lsn) for one in failures)

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        self.contested.add(destination.relid)

    def look_up(self, destination: Destination) -> None:
        self.contested.add(destination.relid)

    async def conflicts_found(self, relation: str, conflicts: Conflicts) -> None:
        self.conflicts += conflicts.counts

    refresh_pending = False

    def waits_for(self, position: Lsn) -> bool:
        return self.synced is not None and position >= self.synced

    async def refresh_columns(self, at: Lsn) -> None: ...

    async def unchanged(self, announced: Mapping[int, Relation]) -> bool:
        return True

    async def may_write(self, destination: Destination) -> bool:
        if destination.relid in self.gates:
            await self.gates[destination.relid].wait()
        return destination.relid not in self.gone

    def version(self, relid: int) -> Lsn:
        return self._versions.get(relid, INVALID_LSN)

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        self._versions[destination.relid] = lsn

    async def before_commit(self) -> None:
        """It may."""

    async def durable(self, lsn: Lsn, last: LastCommit | None) -> None:
        if self.store is not None:
            await self.store(lsn)
        if self.waits_for(lsn):
            self.synced = None
        self.durables.append(lsn)
        self.last = last

    async def skip_passed(self, passed: PassedSkip) -> None:
        """Nobody here gives SKIP."""


class MemoryPipeline:
    """A pipeline for the tables a and b, and its effects."""

    def __init__(self, frames: list[bytes] | None = None, limits: Limits = LIMITS, **options: Any) -> None:
        self.delta = MemoryDelta(target("a"), target("b"))
        self.engine = MemoryEngine(self.delta)
        self.tables = MemoryTables(self.delta)
        self.stream = MemoryStream(frames, limit=options.pop("reads", 1_000_000))
        self.figures = Figures()
        bounds = {name: options.pop(name) for name in ("align_at", "stop_at", "skip") if name in options}
        self.pipeline = Pipeline(
            self.stream,  # type: ignore[arg-type]
            Course(options.pop("start", Lsn(10)), **bounds),
            self.tables,
            self.engine,  # type: ignore[arg-type]
            self.delta,  # type: ignore[arg-type]
            limits,
            self.figures,
            whole=self.tables,
            **options,
        )

    def rows(self, path: str) -> list[tuple[Any, ...]]:
        return self.delta.rows(path)

    def commits(self, path: str) -> list[tuple[int, int]]:
        return [(commit.first, commit.last) for commit in self.delta.tables[path].log]

    async def run(self) -> None:
        with self.delta.installed():
            try:
                await self.pipeline.run()
            finally:
                assert not self.delta.staged, "staged files stay behind"
                assert not self.engine.running, "a commit goes on"


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test in virtual time, where a wait that nothing can end is an error.  By the wall clock it is always 1 s."""

    def wrapper() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apply.pipeline.pipeline, "pg_now", lambda: 1_000_000)
            run(test(), apply.pipeline.pipeline, apply.pipeline.feedback, apply.pipeline.receiver)

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


def cause(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
