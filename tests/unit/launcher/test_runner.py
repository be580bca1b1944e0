"""Runner: which of its tables wait for what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher.runner
from apply.handover import Handover
from catalog.figures import Warned
from catalog.records import SubscriptionRel
from catalog.states import RelState
from launcher.runner import Runner
from launcher.worker_slots import WorkerSlots
from pubsub.settings import Settings
from pubsub.sql.options import SubscriptionOptions
from tests.support.virtual_time import run

TABLES = {relid: f"t{relid}" for relid in (1, 2, 3, 4)}


class FakeCatalog:
    """Tables that are to be copied."""

    async def relations(self, subid: int) -> list[SubscriptionRel]:
        return [
            SubscriptionRel(subid, relid, "public", name, RelState.INIT, None, 0, None, name, None, None, None, None)
            for relid, name in TABLES.items()
        ]

    async def sequences(self, subid: int) -> list[Any]:
        return []

    async def clear_worker_stats(self, *_: Any) -> None: ...

    async def put_statistics(self, **_: Any) -> None: ...


class FakeWorker:
    """A worker that never ends by itself."""

    def __init__(self, subscription: Any, *relation: SubscriptionRel, **_: Any) -> None:
        self.relation = relation[0] if relation else None
        self.figures = SimpleNamespace(wait=lambda now: None, warned={}, rows={})
        self.streaming = True
        self.ended = asyncio.Event()

    async def run(self) -> None:
        await self.ended.wait()

    def wait(self, now: float) -> Warned | None:
        return None

    def drain(self) -> None:
        self.ended.set()

    def tables_changed(self) -> None: ...


def waits(slots: WorkerSlots, most: int) -> dict[int, Warned]:
    """What is waited for once the workers run."""
    found: dict[int, Warned] = {}

    async def main() -> None:
        settings = Settings(home=Path("/nonexistent"), max_sync_workers_per_subscription=most)  # type: ignore[arg-type]
        node: Any = SimpleNamespace(
            node_id="1", catalog=FakeCatalog(), engine=None, writers=None, settings=settings, workers=slots
        )
        runner = Runner(SimpleNamespace(oid=5, name="s", options=SubscriptionOptions()), node, Handover())  # type: ignore[arg-type]
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(1)
        found.update(runner.waits())
        began = asyncio.get_running_loop().time()
        runner.drain()
        await running
        assert asyncio.get_running_loop().time() == began, "who waits for a slot ends at once when told to"

    old = launcher.runner.ApplyWorker, launcher.runner.SyncWorker
    launcher.runner.ApplyWorker = launcher.runner.SyncWorker = FakeWorker  # type: ignore[assignment,misc]
    try:
        run(main(), launcher.runner)
    finally:
        launcher.runner.ApplyWorker, launcher.runner.SyncWorker = old  # type: ignore[misc]
    return found


def test_tables_wait_their_turn() -> None:
    turn = Warned("waits for one of 2 sync workers", "They are at work on public.t1, public.t2.")
    assert waits(WorkerSlots(10), 2) == {3: turn, 4: turn}


def test_tables_wait_for_slots() -> None:
    slots = WorkerSlots(2)
    found = waits(slots, 3)
    assert {relid: one.message for relid, one in found.items()} == {
        3: "out of logical replication worker slots",
        4: "waits for one of 3 sync workers",
    }
    assert 'sync worker of "s" for public.t2' in (found[3].detail or "")


def test_without_a_slot_nothing_of_the_subscription_moves() -> None:
    found = waits(WorkerSlots(0), 2)
    assert set(found) == {0, 1, 2, 3, 4}
    assert {one.message for one in found.values()} == {"out of logical replication worker slots"}


def test_no_sync_worker_at_all() -> None:
    found = waits(WorkerSlots(10), 0)
    assert {one.hint for one in found.values()} == {'Increase "max_sync_workers_per_subscription".'}
    assert set(found) == {1, 2, 3, 4}


class NoTables:
    """A catalog of which no table is left."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def relations(self, subid: int) -> list[Any]:
        self.read.set()
        return []


async def test_a_table_that_has_left_keeps_no_failure_of_its_copy() -> None:
    """With it `status` once showed the error of a table that was no longer there, for good."""
    catalog = NoTables()
    node: Any = SimpleNamespace(
        node_id="1",
        catalog=catalog,
        engine=None,
        writers=None,
        settings=Settings(home=Path("/nonexistent")),
        workers=WorkerSlots(1),
    )
    runner = Runner(SimpleNamespace(oid=1, name="s", options=SubscriptionOptions()), node, Handover())  # type: ignore[arg-type]
    runner._copies.failed(16384, 0.0)
    assert runner.failing
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(runner._keep_syncing(group))
        await catalog.read.wait()
        runner.drain()
    assert not runner.failing
