"""Runner: what it remembers of tables that have left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from apply.handover import Handover
from launcher.runner import Runner, Surroundings
from pubsub.settings import Settings


class Catalog:
    """No table is left."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def relations(self, subid: int) -> list[Any]:
        self.read.set()
        return []


async def test_a_table_that_has_left_keeps_no_failure_of_its_copy() -> None:
    """With it `status` once showed the error of a table that was no longer there, for good."""
    catalog: Any = Catalog()
    none: Any = None
    settings = Settings(home=Path("/nonexistent"))
    subscription: Any = SimpleNamespace(oid=1, name="s")
    around = Surroundings("1", catalog, none, none, settings, asyncio.Semaphore(1))
    runner = Runner(subscription, around, Handover())
    runner._failed_at[16384] = 0.0
    assert runner.failing
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(runner._keep_syncing(group))
        await catalog.read.wait()
        runner.drain()
    assert not runner.failing
