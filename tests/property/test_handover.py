"""Copy, catch-up, hand-over and apply together, with failures and kills anywhere: every row arrives once.

The workers, the pipeline and the runner are the real ones.  The publisher, the catalog and Delta are models in memory,
in virtual time.  Each call of a worker to one of them may take long, fail, or succeed and then fail.  The whole process
may be killed, which loses the hand-over's memory.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import apply.pipeline.pipeline
import apply.publisher_identity
import apply.worker
import launcher.runner
import tablesync.worker
from apply.handover import Handover
from catalog.records import CopyPlan, Subscription, SubscriptionRel
from catalog.states import RelState, may_store
from launcher.runner import Runner, Surroundings
from launcher.worker_slots import WorkerSlots
from pubsub import faults
from pubsub.delta import spark_writer
from pubsub.delta.table import application_id
from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher.replication import CreatedSlot
from pubsub.settings import Settings
from pubsub.sql.options import SubscriptionOptions
from tablesync import copyjob
from tests.support.frames import insert, keepalive, relation, transaction
from tests.support.memory import MemoryDelta, apply_folded, target
from tests.support.virtual_time import run

TABLES = {16384 + i: relation(16384 + i, name) for i, name in enumerate("abc")}
MAIN = "s"
CHUNKS = 3


class Chance:
    """The source of all schedules and failures; `trouble` is how often something goes wrong."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.trouble = self.random.choice([0.0, 0.01, 0.03, 0.1])
        self.seconds = self.random.choice([0.01, 0.3, 3.0])

    async def wait(self) -> None:
        """Let other tasks run first, for a few steps or for some time."""
        for _ in range(self.random.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() * self.seconds)

    async def step(self) -> None:
        await self.wait()
        if self.random.random() < self.trouble:
            raise ConnectionFailure("something broke")


class World:
    """Everything that outlives a process: the publisher with its slots, the catalog's rows, and Delta."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        # max_logical_replication_workers: the apply worker's slot is enough for a sync worker, too.
        self.places = chance.random.choice([1, 2, 4])
        self.delta = MemoryDelta(*(target(r.name, relation=r.name) for r in TABLES.values()))
        self.wal = Lsn(1000)
        self.grown = asyncio.Event()
        self.transactions: list[tuple[Lsn, list[tuple[int, int]]]] = []
        self.expected: dict[str, Counter[Any]] = {r.name: Counter() for r in TABLES.values()}
        self.slots: dict[str, Lsn] = {MAIN: Lsn(1000)}
        self.users: dict[str, object] = {}
        self.relations = {
            oid: SubscriptionRel(1, oid, "public", r.name, RelState.INIT, None, 0, None, r.name, None, None, None, 1)
            for oid, r in TABLES.items()
        }
        self.origin = INVALID_LSN
        self.plans: dict[int, CopyPlan] = {}
        # Finished chunks: rows by the copy's application id and the chunk's number.
        self.chunks: dict[str, dict[int, Counter[Any]]] = {}
        self.counter = 0
        self.violations: list[str] = []
        self._row = 0

    def require(self, holds: bool, what: str) -> None:
        """Record a violation if `holds` is false.  An exception would only make the runner restart the worker."""
        if not holds:
            self.violations.append(what)

    def write(self) -> None:
        """Commit a transaction at the publisher, or let unpublished WAL pass."""
        chance = self.chance.random
        begins = Lsn(self.wal + chance.choice([0, 0, 40]))
        self.wal = Lsn(begins + 10)
        if chance.random() < 0.85:
            rows = []
            for oid in chance.sample(sorted(TABLES), chance.randint(0, 3)):
                self._row += 1
                rows.append((oid, self._row))
                self.expected[TABLES[oid].name][self._row, "x"] += 1
            self.transactions.append((self.wal, rows))
        self.grown.set()
        self.grown = asyncio.Event()

    def frames(self, after: Lsn) -> list[tuple[Lsn, list[bytes]]]:
        return [
            (
                end,
                transaction(
                    end,
                    *(m for oid, row in rows for m in (TABLES[oid], insert(oid, row, "x"))),
                    final=end - 10,
                ),
            )
            for end, rows in self.transactions
            if end > after
        ]

    def snapshot(self, oid: int, at: Lsn, chunk: int) -> Counter[Any]:
        """Return the rows of one of CHUNKS chunks as they were at `at`."""
        return Counter(
            (row, "x")
            for end, rows in self.transactions
            if end <= at
            for o, row in rows
            if o == oid and row % CHUNKS == chunk
        )


class Stream:
    """START_REPLICATION on a slot of the model."""

    def __init__(self, world: World, slot: str, start: Lsn) -> None:
        self.world, self.slot = world, slot
        self.sent = max(start, world.slots[slot])
        self.pending: list[bytes] = []
        self.ping = asyncio.Event()
        self.last_receive = 0.0

    async def receive(self, max_bytes: int = 0) -> list[bytes]:
        world = self.world
        await world.chance.step()
        while not self.pending:
            self.check()
            for end, frames in world.frames(self.sent):
                self.pending += frames
                self.sent = end
            if self.sent < world.wal or self.ping.is_set():
                self.sent = world.wal
                self.pending.append(keepalive(world.wal, reply=world.chance.random.random() < 0.3))
                self.ping.clear()
            if not self.pending:
                waits = {asyncio.ensure_future(world.grown.wait()), asyncio.ensure_future(self.ping.wait())}
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        count = world.chance.random.choice([1, 2, 5, 100])
        taken, self.pending = self.pending[:count], self.pending[count:]
        self.last_receive = asyncio.get_running_loop().time()
        return taken

    async def send_status(self, written: Lsn, flushed: Lsn, applied: Lsn, *, reply: bool = False) -> None:
        self.check()
        if self.slot == MAIN:
            self.world.require(flushed <= self.world.origin, "feedback passes the stored origin")
        self.world.slots[self.slot] = max(self.world.slots[self.slot], flushed)
        if reply:
            self.ping.set()
        await self.world.chance.step()

    async def close(self) -> None:
        await self.world.chance.step()

    def check(self) -> None:
        if self.world.users.get(self.slot) is None:
            raise ConnectionFailure("the connection is closed")


@dataclass(frozen=True)
class Source:
    """copyjob.CopySource: a table as it was at an LSN."""

    oid: int
    at: Lsn
    bytes: int
    only: bool = True


class Connection:
    """publisher.connection.Connection; closing it frees the slot that it used."""

    world: World
    server_version = 180000

    def __init__(self) -> None:
        self.using: str | None = None

    @classmethod
    async def connect(cls, conninfo: str, **_: Any) -> Self:
        await cls.world.chance.step()
        return cls()

    async def execute(self, sql: str) -> str:
        await self.world.chance.step()
        return ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.using is not None:
            self.world.users.pop(self.using, None)


class Replication:
    """publisher.replication on the model."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def identify_system(self, connection: Connection) -> Any:
        return SimpleNamespace(system_identifier="7")

    async def start(self, connection: Connection, slot: str, lsn: Lsn, options: Any) -> Stream:
        await self.world.chance.step()
        if slot not in self.world.slots or slot in self.world.users:
            raise PubsubError(f'replication slot "{slot}" does not exist or is active')
        connection.using = slot
        self.world.users[slot] = connection
        return Stream(self.world, slot, lsn)

    async def create_slot(self, connection: Connection, name: str, **_: Any) -> CreatedSlot:
        await self.world.chance.step()
        assert name not in self.world.slots
        self.world.slots[name] = self.world.wal
        return CreatedSlot(name, self.world.wal, str(int(self.world.wal)))

    async def drop_slot(self, connection: Connection, name: str, **_: Any) -> None:
        await self.world.chance.step()
        self.world.slots.pop(name, None)
        await self.world.chance.step()


class Primary:
    """promotion.Promotion of a server that is no standby."""

    def __init__(self, *_: Any) -> None: ...

    async def begin(self, stream: Any) -> None: ...

    async def noticed(self) -> None: ...

    async def close(self) -> None: ...


class Catalog:
    """catalog.store.Catalog: each method stores at once or not at all, and may fail before or after storing."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def relations(self, subid: int) -> list[SubscriptionRel]:
        await self.world.chance.step()
        found = list(self.world.relations.values())
        await self.world.chance.wait()
        return found

    async def relation(self, subid: int, relid: int) -> SubscriptionRel | None:
        await self.world.chance.step()
        return self.world.relations.get(relid)

    async def subscription(self, subid: int) -> Subscription:
        await self.world.chance.step()
        return SUBSCRIPTION

    async def prove(self) -> None:
        """Prove that the catalog is this process's, which it always is here; asking may fail."""
        await self.world.chance.step()

    async def origin(self, subid: int) -> Lsn:
        await self.world.chance.step()
        return self.world.origin

    async def advance_origin(self, subid: int, lsn: Lsn) -> Lsn:
        await self.world.chance.step()
        self.world.origin = max(self.world.origin, lsn)
        stored = self.world.origin
        await self.world.chance.step()
        return stored

    async def begin_copy(self, subid: int, relid: int, *, sync_slot: str) -> int:
        before = self.world.relations[relid]
        if not may_store(before.state, RelState.DATASYNC):
            raise NotInPrerequisiteState(f"{before.name} can not be copied in state {before.state}")
        generation = before.copy_generation + 1
        await self._set(relid, state=RelState.DATASYNC, lsn=None, copy_generation=generation, sync_slot=sync_slot)
        return generation

    async def set_relation_state(self, subid: int, relid: int, state: RelState, lsn: Lsn) -> None:
        before = self.world.relations[relid].state
        self.world.require(may_store(before, state) and lsn is not None, f"{before} goes to {state} at {lsn}")
        await self._set(relid, state=state, lsn=lsn)

    async def set_relation_definition(self, subid: int, relid: int, definition: str, rows: int) -> None:
        await self._set(relid, definition=definition)

    async def copy_plan(self, subid: int, relid: int) -> CopyPlan | None:
        await self.world.chance.step()
        return self.world.plans.get(relid)

    async def put_copy_progress(self, *_: Any, finished: bool) -> None:
        await self.world.chance.step()

    async def put_copy_plan(self, subid: int, relid: int, plan: CopyPlan) -> None:
        await self.world.chance.step()
        self.world.plans[relid] = plan
        await self.world.chance.step()

    async def set_sync_slot(self, subid: int, relid: int, slot: str | None) -> None:
        await self._set(relid, sync_slot=slot)

    async def _set(self, relid: int, **values: Any) -> None:
        await self.world.chance.step()
        self.world.relations[relid] = replace(self.world.relations[relid], **values)
        self.world.counter += 1
        await self.world.chance.step()

    async def set_relation_error(self, *_: Any) -> None: ...
    async def set_subscription_error(self, *_: Any, **__: Any) -> None: ...
    async def set_prepared(self, *_: Any) -> None: ...
    async def clear_worker_stats(self, *_: Any) -> None: ...

    async def put_statistics(self, **_: Any) -> None: ...


class Engine:
    """pubsub.delta.engine.Engine: `run` returns only after its work has ended, even if it is cancelled."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def fence(self) -> None:
        await self.world.chance.step()

    async def start(self) -> None:
        await self.world.chance.wait()

    def lane(self) -> Engine:
        return self

    async def run(self, work: Any, *args: Any) -> None:
        await self._finish(self._work(work, *args), lambda: None)

    async def run_until_told(self, stop: Any, work: Any, *args: Any) -> int | None:
        assert work is copyjob.copy_here
        told = asyncio.Event()
        rows: int | None = await self._finish(self._copy_here(told, *args), told.set)
        return rows

    async def _finish(self, work: Any, stop: Any) -> Any:
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop()
            await asyncio.wait({task})
            task.exception()
            raise

    async def _copy_here(self, told: Any, source: Any, copied: Any, record: Any, *_: Any) -> int | None:
        chance = self.world.chance
        await chance.step()
        if source.bytes >= copyjob.LEAST_JOB_BYTES:
            return None
        if told.is_set() or (chance.trouble and chance.random.random() < 0.3):
            raise ConnectionFailure("the copy is cut short")
        rows = sum((self.world.snapshot(source.oid, source.at, chunk) for chunk in range(CHUNKS)), Counter())
        self._commit_copy(copied, record, rows)
        await chance.step()
        return rows.total()

    def _commit_copy(self, copied: Any, record: Any, rows: Any) -> None:
        held = self.world.delta.tables[copied.path]
        self.world.require(record.app_id not in held.versions, "a copy is committed twice")
        held.rows, held.versions[record.app_id] = rows, record.last

    async def _work(self, work: Any, *args: Any) -> None:
        chance, delta = self.world.chance, self.world.delta
        await chance.step()
        if work is spark_writer.commit:
            staged, record = args
            # Delta plans before it commits: the rows and the version that it checks are those of this moment.
            table, folded, replace_all = delta.staged[staged.directory]
            held = delta.tables[table.path]
            if held.versions.get(record.app_id, INVALID_LSN) < record.last:
                rows = apply_folded(table, folded, replace_all, held.rows)
                await chance.wait()
                held.rows, held.versions[record.app_id] = rows, record.last
        elif work is copyjob.parallelism:
            return
        else:
            assert work is copyjob.copy
            source, copied, record, *_ = args
            finished = self.world.chunks.setdefault(record.app_id, {})
            for chunk in range(CHUNKS):
                if chunk not in finished:
                    await chance.step()
                    if chance.trouble and chance.random.random() < 0.3:
                        raise ConnectionFailure("the copy is cut short")
                    if chance.trouble and chance.random.random() < 0.2:
                        raise RuntimeError("a task said: psycopg.errors.LockNotAvailable: lock timeout")
                    finished[chunk] = self.world.snapshot(source.oid, source.at, chunk)
            self._commit_copy(copied, record, sum(finished.values(), Counter()))
        await chance.step()


SUBSCRIPTION = Subscription(
    1,
    MAIN,
    True,
    "",
    MAIN,
    ("p",),
    SubscriptionOptions(batch_rows=5, batch_age=0.5, schema_changes="refuse"),
    "",
    "7",
    1,
    "d",
    INVALID_LSN,
    "o",
    1,
    False,
)
# Real directories for streamed and prepared transactions, though none is streamed here.
HOME = tempfile.TemporaryDirectory(prefix="pubsub-handover-")
SETTINGS = Settings(home=Path(HOME.name))


class Process:
    """A daemon's life: one runner at a time, and a look at the catalog now and then, as the launcher does."""

    def __init__(self, world: World) -> None:
        self.world = world
        around = Surroundings("9", Catalog(world), Engine(world), world.delta, SETTINGS, WorkerSlots(world.places))  # type: ignore[arg-type]
        self.runner = Runner(SUBSCRIPTION, around, Handover())
        self.killed = False
        self.tasks = [asyncio.create_task(self.keep()), asyncio.create_task(self.poll())]

    async def keep(self) -> None:
        """Replace a runner that has ended, and keep its hand-over, as the launcher does."""
        while not self.killed:
            # A cancelled TaskGroup raises the failure of a task instead; then `killed` ends the loop.
            with suppress(Exception, BaseExceptionGroup):
                await self.runner.run()
            await asyncio.sleep(1)
            self.runner = Runner(SUBSCRIPTION, self.runner._around, self.runner.handover)

    async def poll(self) -> None:
        seen = -1
        while True:
            await asyncio.sleep(self.world.chance.random.choice([0.1, 1.0, 5.0]))
            if self.world.counter != seen:
                seen = self.world.counter
                self.runner.tables_changed()

    async def stop(self) -> None:
        """Drain the runner: it must end soon, whatever its workers wait for.  Another takes its place."""
        runner = self.runner
        runner.drain()
        began = asyncio.get_running_loop().time()
        while self.runner is runner and asyncio.get_running_loop().time() < began + 60:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        self.world.require(self.runner is not runner, "a runner does not drain")

    async def kill(self) -> None:
        self.killed = True
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        for task in self.tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self.world.users.clear()


@asynccontextmanager
async def no_progress(*_: Any) -> AsyncIterator[None]:
    yield None


async def history(seed: int) -> World:
    """Run some minutes of a subscription's life, then peace until everything has arrived."""
    chance = Chance(seed)
    world = World(chance)

    async def seen(self: Any, connection: Any, snapshot: str, lsn: Lsn) -> Any:
        oid = self.relation.relid
        await chance.step()
        return SimpleNamespace(
            definition=SimpleNamespace(estimated_rows=1, pages=100, columns=(), attributes=0, storage=0),
            target=world.delta.targets[TABLES[oid].name],
            source=Source(oid, Lsn(int(snapshot or 0)), chance.random.choice([0, copyjob.LEAST_JOB_BYTES])),
            conditions=SimpleNamespace(fingerprint="f", obstacle=lambda _, kept: None if kept else "nothing is kept"),
        )

    async def nothing(*_: Any) -> None:
        await chance.step()

    async def is_followed(*_: Any) -> bool:
        await chance.step()
        return chance.random.random() < 0.9

    async def end_of_wal(connection: Any) -> Lsn:
        await chance.step()
        return world.wal

    async def export(connection: Any) -> str:
        return str(int(world.wal))

    async def visible(connection: Any) -> str:
        return ""

    async def lacks(connection: Any, earlier: str) -> bool:
        return False

    def begin(table: Any, earlier: Any, copy: str) -> tuple[int, bool]:
        return 0, chance.random.random() < 0.9

    def kept(table: Any, plan: Any, copy: str) -> Any:
        return world.chunks.get(copy, {})

    async def complete(self: Any, staged: Any, commit: Any) -> Any:
        await chance.step()
        return commit

    async def prepare_target(self: Any, copied: Any) -> None:
        await chance.step()

    async def slot_info(connection: Any, slot: str) -> Any:
        await chance.step()
        return SimpleNamespace(wal_status="reserved", invalidation_reason=None) if slot in world.slots else None

    async def reached(name: str) -> None:
        await chance.step()

    Connection.world = world
    with pytest.MonkeyPatch.context() as patch, world.delta.installed():
        for module in (apply.worker, tablesync.worker):
            patch.setattr(module, "Connection", Connection)
            patch.setattr(module, "replication", Replication(world))
        patch.setattr(tablesync.worker.slots, "slot_info", slot_info)
        patch.setattr(tablesync.worker.SyncWorker, "_seen", seen)
        patch.setattr(
            tablesync.worker,
            "snapshots",
            SimpleNamespace(BEGIN="", end_of_wal=end_of_wal, export=export, visible=visible, lacks=lacks),
        )
        # The publisher's identity is not under test here.
        patch.setattr(tablesync.worker, "check_system", nothing)
        patch.setattr(tablesync.worker, "is_followed", is_followed)
        for module in (apply.worker, tablesync.worker):
            patch.setattr(module, "Promotion", Primary)
        for name in ("check_system", "check_publications", "check_position", "remember"):
            patch.setattr(apply.publisher_identity, name, nothing)
        patch.setattr(copyjob, "begin", begin)
        patch.setattr(copyjob, "kept", kept)
        patch.setattr(copyjob, "wait_sql", lambda source: "")
        patch.setattr(tablesync.worker.Window, "complete", complete)
        patch.setattr(tablesync.worker.SyncWorker, "_prepare_target", prepare_target)
        patch.setattr(tablesync.worker, "follow_progress", no_progress)
        patch.setattr(faults, "reached", reached)
        process = Process(world)
        try:
            for _ in range(chance.random.choice([20, 60])):
                for _ in range(chance.random.choice([0, 1, 1, 5])):
                    world.write()
                await asyncio.sleep(chance.random.random() * chance.random.choice([0.02, 1.0, 4.0]))
                what = chance.random.random()
                if what < 0.04:
                    await process.kill()
                    process = Process(world)
                elif what < 0.07:
                    await process.stop()
                elif what < 0.09:
                    # Lose a sync slot that is not in use: its table must be copied again.
                    lost = [slot for slot in world.slots if slot != MAIN and slot not in world.users]
                    for slot in lost[:1]:
                        del world.slots[slot]
            chance.trouble = 0.0
            async with asyncio.timeout(3600):
                while not settled(world):  # noqa: ASYNC110
                    await asyncio.sleep(1)
        finally:
            await process.kill()
    return world


def settled(world: World) -> bool:
    last = max((end for end, _ in world.transactions), default=INVALID_LSN)
    ready = all(r.state is RelState.READY and r.sync_slot is None for r in world.relations.values())
    return ready and world.origin >= last


def check(world: World) -> None:
    assert not world.violations
    for oid, table in TABLES.items():
        held = world.delta.tables[table.name]
        assert held.rows == world.expected[table.name], table.name
        app_id = application_id("9", 1, oid, world.relations[oid].copy_generation)
        assert set(held.versions) <= {application_id("9", 1, oid, g) for g in range(1, 100)}, (
            "a commit under no copy's name"
        )
        assert held.versions[app_id] <= world.origin
    assert set(world.slots) == {MAIN}, "a slot is left behind"
    assert not world.delta.staged, "staged files stay behind"


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_every_row_arrives_once(seed: int) -> None:
    with structlog.testing.capture_logs():
        world = run(history(seed), apply.pipeline.pipeline, launcher.runner)
    check(world)
