"""The slots of logical replication workers: who gets one, who waits, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from launcher.worker_slots import WorkerName, WorkerSlots
from tests.support.captured_logs import captured_logs
from tests.support.virtual_time import run


class Workers:
    """Workers that hold their slots until they are told to end; `running` are those that have one."""

    def __init__(self, limit: int) -> None:
        self.slots = WorkerSlots(limit)
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str) -> None:
        """ "a" is the apply worker of subscription a, "a.t" a sync worker of it."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await asyncio.sleep(0.1)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.sleep(0.1)

    async def _run(self, name: str) -> None:
        async with self.slots.held(named(name)):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def pass_through(slots: WorkerSlots, name: str) -> None:
    async with slots.held(named(name)):
        pass


async def test_a_sync_worker_that_apply_waits_for_takes_a_slot_beyond_the_limit() -> None:
    slots = WorkerSlots(1)
    async with slots.held(named("a")), slots.held(named("a.t")):
        async with asyncio.timeout(10), slots.held(named("a.u"), at_once=True):
            pass
        waiting = asyncio.create_task(pass_through(slots, "b"))
        await asyncio.sleep(0)
        assert slots.wait(named("b")) is not None
    await waiting


def named(name: str) -> WorkerName:
    subscription, _, table = name.partition(".")
    return WorkerName(ord(subscription), subscription, f"public.{table}" if table else None)


def logged(main: Coroutine[Any, Any, None]) -> list[dict[str, Any]]:
    with captured_logs() as entries:
        run(main)
    return [dict(entry) for entry in entries]


def test_four_apply_workers_do_not_keep_tables_from_being_copied() -> None:
    """PostgreSQL's four slots and four subscriptions: no sync worker ever started, and nobody said why."""

    async def main() -> None:
        workers = Workers(4)
        await workers.start("a", "b", "c", "d", "a.t", "b.t", "c.t", "d.t", "d.u")
        assert workers.running == ["a", "b", "c", "d", "a.t", "b.t", "c.t", "d.t"]
        assert workers.slots.wait(named("d.t")) is None
        said = workers.slots.wait(named("d.u"))
        assert said is not None
        assert said.message == "out of logical replication worker slots"
        assert said.hint == 'You might need to increase "max_logical_replication_workers".'
        assert said.detail == (
            '4 of 4 are held: apply worker of "a" (and its sync worker for public.t), '
            'apply worker of "b" (and its sync worker for public.t), '
            'apply worker of "c" (and its sync worker for public.t), '
            'apply worker of "d" (and its sync worker for public.t).'
        )
        await workers.end("d.t")
        assert "d.u" in workers.running
        await workers.end(*workers.running)

    logged(main())


def test_one_slot_and_two_subscriptions() -> None:
    """The first to come applies and copies; the other is told of, once, and begins when the slot is free."""

    async def main() -> None:
        workers = Workers(1)
        await workers.start("a", "a.t", "a.u", "b")
        assert workers.running == ["a", "a.t"]
        await workers.end("a.t")
        assert workers.running == ["a", "a.u"]
        await workers.end("a")
        assert workers.running == ["a.u"], "it holds the slot that was its apply worker's"
        assert workers.slots.shortage().detail == '1 of 1 are held: sync worker of "a" for public.u.'
        await workers.end("a.u")
        assert workers.running == ["b"]
        await workers.start("b.t")
        assert workers.running == ["b", "b.t"]
        await workers.end("b", "b.t")

    entries = logged(main())
    assert [(e["log_level"], e.get("subscription"), e.get("relation")) for e in entries] == [
        ("warning", "a", "public.u"),
        ("warning", "b", None),
        ("info", None, None),
    ]
    assert [(e["event"], e["reason"]) for e in entries] == [
        ("worker waits", "out of logical replication worker slots"),
        ("worker waits", "out of logical replication worker slots"),
        ("no worker waits any more", "out of logical replication worker slots"),
    ]
    assert "max_logical_replication_workers" in entries[1]["hint"]
    assert 'apply worker of "a"' in entries[1]["detail"]


def test_a_free_slot_goes_to_an_apply_worker_then_to_the_fewest_copies() -> None:
    async def main() -> None:
        workers = Workers(5)
        await workers.start("a", "b", "a.1", "a.2", "a.3", "a.4", "b.1", "a.5", "b.2", "c")
        assert workers.running == ["a", "b", "a.1", "a.2", "a.3", "a.4", "b.1"]
        await workers.end("a.1")
        assert workers.running[-1] == "c", "without a slot it stands still altogether"
        await workers.end("a.2")
        assert workers.running[-1] == "b.2", "a.5 came first, and a copies more"
        await workers.end("b.2")
        assert workers.running[-1] == "a.5"
        await workers.end(*workers.running)

    logged(main())


def test_a_shortage_for_forty_subscriptions_is_reported_once() -> None:
    names = [chr(ord("A") + number) for number in range(40)]

    async def main() -> None:
        workers = Workers(40)
        await workers.start(*names)
        await workers.start(*(f"{name}.{table}" for table in range(5) for name in names))
        assert len(workers.running) == 80
        said = workers.slots.shortage()
        assert said.detail is not None
        assert said.detail.endswith("and 30 more.")
        while any("." in name for name in workers.running):
            await workers.end(*(name for name in workers.running if "." in name))
        await workers.end(*workers.running)

    entries = logged(main())
    assert [entry["log_level"] for entry in entries] == ["warning", "info"]


def test_a_cancelled_worker_leaves_the_queue() -> None:
    async def main() -> None:
        workers = Workers(1)
        await workers.start("a", "b", "c")
        await workers.cancel("b")
        assert workers.slots.wait(named("b")) is None
        await workers.end("a")
        assert workers.running == ["c"]
        await workers.end("c")

    logged(main())


def test_no_slot_at_all() -> None:
    async def main() -> None:
        workers = Workers(0)
        await workers.start("a")
        said = workers.slots.wait(named("a"))
        assert said is not None
        assert said.detail == '"max_logical_replication_workers" is 0: no worker starts.'
        await workers.cancel("a")

    logged(main())
