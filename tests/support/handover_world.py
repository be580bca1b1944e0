"""The publisher, the catalog and Delta as models in memory, for the hand-over's property test.

Each call of a worker to one of them may take long, fail, or succeed and then fail.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Self

from catalog.records import CopyPlan, Subscription, SubscriptionRel
from catalog.states import RelState, may_store
from pubsub.delta.writers import spark_writer
from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher.replication import CreatedSlot
from pubsub.sql.options import SubscriptionOptions
from tablesync import choose_copier, copyjob
from tests.support.frames import insert, keepalive, relation, transaction
from tests.support.memory import MemoryDelta, apply_folded, target

TABLES = {16384 + i: relation(16384 + i, name) for i, name in enumerate("abc")}
MAIN = "s"
CHUNKS = 3
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
        # In some histories it is made later, or late, beside the copies.
        self.slots: dict[str, Lsn] = {MAIN: Lsn(1000)} if chance.random.random() < 0.7 else {}
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
    """chunk_reader.CopySource: a table as it was at an LSN."""

    oid: int
    at: Lsn
    bytes: int
    only: bool = True

    @property
    def table(self) -> Source:
        """ReadTable, too."""
        return self


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

    async def query(self, sql: str, params: Any = ()) -> list[tuple[str]]:
        """Answer whether the role may read a table by its places."""
        await self.world.chance.step()
        return [(str(params[0][0]),)]

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

    standby = False

    def __init__(self, *_: Any) -> None: ...

    async def begin(self, stream: Any) -> None: ...

    async def noticed(self) -> None: ...

    async def close(self) -> None: ...


class Catalog:
    """catalog.store.Catalog: each method stores at once or not at all, and may fail before or after storing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._seen: list[SubscriptionRel] = []
        self._counter = 0

    async def change_counter(self) -> int:
        await self.world.chance.step()
        now = list(self.world.relations.values())
        if now != self._seen:
            self._seen, self._counter = now, self._counter + 1
        return self._counter

    async def relations(self, subid: int) -> list[SubscriptionRel]:
        await self.world.chance.step()
        found = list(self.world.relations.values())
        await self.world.chance.wait()
        return found

    async def sequences(self, subid: int) -> list[Any]:
        return []

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

    async def last_commit(self, subid: int) -> None:
        await self.world.chance.step()

    async def advance_origin(self, subid: int, lsn: Lsn, *, last: object) -> Lsn:
        await self.world.chance.step()
        self.world.origin = max(self.world.origin, lsn)
        stored = self.world.origin
        await self.world.chance.step()
        return stored

    async def begin_copy(self, subid: int, relid: int, *, sync_slot: str, after: int) -> int:
        before = self.world.relations[relid]
        if not may_store(before.state, RelState.DATASYNC):
            raise NotInPrerequisiteState(f"{before.name} cannot be copied in state {before.state}")
        generation = max(before.copy_generation, after) + 1
        await self._set(relid, state=RelState.DATASYNC, lsn=None, copy_generation=generation, sync_slot=sync_slot)
        return generation

    async def set_relation_state(self, subid: int, relid: int, state: RelState, lsn: Lsn | None = None) -> None:
        before = self.world.relations[relid].state
        known = lsn is not None or state is RelState.INIT
        self.world.require(may_store(before, state) and known, f"{before} goes to {state} at {lsn}")
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
    async def prepared(self, *_: Any) -> list[Any]:
        return []

    async def set_prepared(self, *_: Any) -> None: ...
    async def clear_worker_stats(self, *_: Any) -> None: ...

    async def put_statistics(self, **_: Any) -> None: ...


class Engine:
    """pubsub.delta.spark.engine.Engine: `run` returns only after its work has ended, even if it is cancelled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transactions = None

    async def fence(self) -> None:
        await self.world.chance.step()

    async def start(self) -> None:
        await self.world.chance.wait()

    def lane(self) -> Engine:
        return self

    async def run(self, work: Any, *args: Any) -> Any:
        return await self._finish(self._work(work, *args), lambda: None)

    async def run_without_spark(self, work: Any, *args: Any) -> Any:
        await self.world.chance.step()
        return work(*args)

    async def run_until_stopped(self, stop: Any, work: Any, *args: Any) -> int | None:
        assert work is copyjob.copy_in_thread
        cut = asyncio.Event()
        rows: int | None = await self._finish(self._copy_here(cut, *args), cut.set)
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

    async def _copy_here(
        self, cut: Any, transactions: Any, source: Any, copied: Any, record: Any, *_: Any
    ) -> int | None:
        chance = self.world.chance
        await chance.step()
        if source.bytes >= choose_copier.LEAST_JOB_BYTES:
            return None
        if cut.is_set() or (chance.trouble and chance.random.random() < 0.3):
            raise ConnectionFailure("the copy is cut short")
        rows = sum((self.world.snapshot(source.oid, source.at, chunk) for chunk in range(CHUNKS)), Counter())
        self._commit_copy(copied, record, rows)
        await chance.step()
        return rows.total()

    def _commit_copy(self, copied: Any, record: Any, rows: Any) -> None:
        held = self.world.delta.tables[copied.path]
        self.world.require(record.app_id not in held.versions, "a copy is committed twice")
        held.rows, held.versions[record.app_id] = rows, record.last

    async def _work(self, work: Any, *args: Any) -> int | None:
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
            return 2
        else:
            assert work is copyjob.copy
            _, source, copied, record, *_ = args
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
        return None
