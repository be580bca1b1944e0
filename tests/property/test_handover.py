"""Copy, catch-up, hand-over and apply together, with failures and kills anywhere: every row arrives once.

The workers, the pipeline and the runner are the real ones.  The publisher, the catalog and Delta are models in memory,
in virtual time (tests/support/handover_world.py).  The whole process may be killed, which loses the hand-over's memory.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import apply.pipeline.feedback
import apply.pipeline.pipeline
import apply.pipeline.receiver
import apply.publisher_identity
import apply.worker
import launcher.runner
import tablesync.catch_up
import tablesync.publisher_table
import tablesync.worker
from apply.handover import Handover
from catalog.states import RelState
from launcher.runner import NodeServices, Runner
from launcher.worker_slots import WorkerSlots
from pubsub import faults
from pubsub.delta.table import application_id
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.setting_tables import DailyWindow
from pubsub.settings import Settings
from tablesync import choose_copier, chunk_reader, copyjob
from tests.support.handover_world import (
    MAIN,
    SUBSCRIPTION,
    TABLES,
    Catalog,
    Chance,
    Connection,
    Engine,
    Primary,
    Replication,
    Source,
    World,
)
from tests.support.virtual_time import run

# Real directories for streamed and prepared transactions, though none is streamed here.
HOME = tempfile.TemporaryDirectory(prefix="pubsub-handover-")
SETTINGS = Settings(home=Path(HOME.name))


class Process:
    """A daemon's life: one runner at a time, and a look at the catalog now and then, as the launcher does."""

    def __init__(self, world: World) -> None:
        self.world = world
        node = NodeServices(
            "9", Catalog(world), Engine(world), world.delta, SETTINGS, WorkerSlots(world.places), None, None
        )  # type: ignore[arg-type]
        self.runner = Runner(SUBSCRIPTION, node, Handover())
        self.killed = False
        self.tasks = [asyncio.create_task(self.keep()), asyncio.create_task(self.poll())]

    async def keep(self) -> None:
        """Replace a runner that has ended, and keep its hand-over, as the launcher does."""
        while not self.killed:
            # A cancelled TaskGroup raises the failure of a task instead; then `killed` ends the loop.
            try:
                await self.runner.run()
            except* (AttributeError, TypeError) as found:
                self.world.violations.extend(map(repr, found.exceptions))
            except* Exception:
                pass
            await asyncio.sleep(1)
            self.runner = Runner(SUBSCRIPTION, self.runner._node, self.runner.handover)

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


async def history(seed: int, events: list[Any]) -> World:
    """Run some minutes of a subscription's life, then peace until everything has arrived.  `events`: what is logged."""
    chance = Chance(seed)
    world = World(chance)

    async def describe(self: Any, connection: Any, snapshot: str, lsn: Lsn) -> Any:
        oid = self.relation.relid
        await chance.step()
        return SimpleNamespace(
            definition=SimpleNamespace(estimated_rows=1, pages=100, columns=(), attributes=0, storage=0),
            choice=None,
            target=world.delta.targets[TABLES[oid].name],
            source=Source(oid, Lsn(int(snapshot or 0)), chance.random.choice([0, choose_copier.LEAST_JOB_BYTES])),
            conditions=SimpleNamespace(
                fingerprint="f", obstacle=lambda _, kept: None if kept else "nothing is kept", missing=lambda _: None
            ),
        )

    async def nothing(*_: Any, **_more: Any) -> None:
        await chance.step()

    async def is_followed(*_: Any) -> bool:
        await chance.step()
        return chance.random.random() < 0.9

    async def end_of_wal(connection: Any) -> Lsn:
        await chance.step()
        return world.wal

    async def export(connection: Any) -> str:
        return str(int(world.wal))

    async def settle(connection: Any, exported: str) -> str:
        await chance.step()
        return ""

    async def begin_under(connection: Any, exported: str) -> None:
        await chance.step()

    async def lacks(connection: Any, earlier: str) -> bool:
        return False

    def begin(table: Any, earlier: Any, copy: str) -> tuple[int, bool]:
        return 0, chance.random.random() < 0.9

    def kept(table: Any, plan: Any, copy: str) -> Any:
        return world.chunks.get(copy, {})

    async def complete(self: Any, staged: Any, commit: Any) -> Any:
        await chance.step()
        return commit

    async def slot_info(connection: Any, slot: str) -> Any:
        await chance.step()
        at = world.slots.get(slot)
        return None if at is None else SimpleNamespace(lost=False, confirmed_flush_lsn=at)

    async def reached(name: str) -> None:
        await chance.step()

    def opens(window: DailyWindow, now: datetime) -> float:
        """The window of copies closes now and then, also while workers run; in the end it is open."""
        return 2.0 if chance.trouble and chance.random.random() < 0.3 else 0.0

    Connection.world = world
    with pytest.MonkeyPatch.context() as patch, world.delta.installed():
        for module in (apply.worker, tablesync.publisher_table):
            patch.setattr(module, "Connection", Connection)
        for module in (apply.worker, tablesync.worker, tablesync.catch_up):
            patch.setattr(module, "replication", Replication(world))
        patch.setattr(tablesync.worker, "sound_slots", Replication(world))
        patch.setattr(tablesync.worker.slots, "slot_info", slot_info)
        patch.setattr(tablesync.publisher_table.PublisherTable, "describe", describe)
        snapshots = SimpleNamespace(
            BEGIN="", flushed_end_of_wal=end_of_wal, export=export, settle=settle, begin_under=begin_under, lacks=lacks
        )
        for module in (tablesync.worker, tablesync.catch_up):
            patch.setattr(module, "snapshots", snapshots)
        # The publisher's identity is not under test here.
        patch.setattr(tablesync.worker, "check_system", nothing)
        patch.setattr(tablesync.worker, "is_followed", is_followed)
        for module in (apply.worker, tablesync.catch_up):
            patch.setattr(module, "Promotion", Primary)
        for name in ("check_system", "check_publications", "check_position", "remember"):
            patch.setattr(apply.publisher_identity, name, nothing)
        patch.setattr(copyjob, "begin", begin)
        patch.setattr(copyjob, "kept", kept)
        patch.setattr(chunk_reader, "wait_sql", lambda source: "")
        patch.setattr(tablesync.catch_up.Window, "complete", complete)
        patch.setattr(tablesync.worker, "claim_target", nothing)
        patch.setattr(tablesync.worker, "follow_progress", no_progress)
        patch.setattr(faults, "reached", reached)
        patch.setattr(DailyWindow, "wait", opens)
        process = Process(world)
        try:
            for _ in range(chance.random.choice([20, 60])):
                for _ in range(chance.random.choice([0, 1, 1, 5])):
                    world.write()
                await asyncio.sleep(chance.random.random() * chance.random.choice([0.02, 1.0, 4.0]))
                what = chance.random.random()
                if MAIN not in world.slots and chance.random.random() < 0.1:
                    world.slots[MAIN] = world.wal
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
            world.slots.setdefault(MAIN, world.wal)
            async with asyncio.timeout(3600):
                while not settled(world) and not world.violations:
                    world.violations += defects(events)
                    await asyncio.sleep(1)
        finally:
            await process.kill()
    return world


def defects(events: list[Any]) -> list[str]:
    """Return failures that are none of the world's: a model lacks what the code has come to use."""
    reasons = [event.get("reason") or "" for event in events]
    return [reason for reason in reasons if reason.startswith(("AttributeError", "TypeError", "AssertionError"))]


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
    with structlog.testing.capture_logs() as events:
        world = run(
            history(seed, events),
            apply.pipeline.pipeline,
            apply.pipeline.feedback,
            apply.pipeline.receiver,
            launcher.runner,
        )
    assert not defects(events)
    check(world)
