"""From s to r: decided by the stored origin alone, and stored once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apply.ready import is_ready
from catalog.states import RelState
from pubsub.protocol.lsn import Lsn
from tests.support.apply_tables import A, Bench, opened, until_committed


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as bench:
        yield bench


@pytest.mark.parametrize(
    ("sync_lsn", "origin", "ready"), [(None, 500, False), (150, 149, False), (150, 150, True), (150, 151, True)]
)
def test_a_table_is_ready_once_the_origin_has_reached_the_lsn_of_s(
    sync_lsn: int | None, origin: int, ready: bool
) -> None:
    assert is_ready(None if sync_lsn is None else Lsn(sync_lsn), Lsn(origin)) is ready


async def test_r_is_stored_when_the_origin_has_come_to_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.relations.load()
    await bench.tables.durable(Lsn(149), None)
    assert await bench.state() is RelState.SYNCDONE
    await asyncio.gather(bench.tables.durable(Lsn(150), None), bench.tables.store_ready(), bench.tables.store_ready())
    assert await bench.state() is RelState.READY
    assert await bench.catalog.origin(bench.subscription.oid) == 150


async def test_r_is_stored_after_a_restart_of_a_quiet_publisher(bench: Bench) -> None:
    """The origin is already past the LSN of s, and nothing moves it."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.catalog.advance_origin(bench.subscription.oid, Lsn(200))
    await bench.restarted().relations.load()
    await bench.tables.store_ready()
    assert await bench.state() is RelState.READY


async def test_the_origin_never_goes_back(bench: Bench) -> None:
    await bench.tables.durable(Lsn(200), None)
    await bench.tables.durable(Lsn(100), None)
    assert await bench.catalog.origin(bench.subscription.oid) == 200


@pytest.mark.parametrize("slow", ["origin", "advance_origin"])
async def test_a_slow_look_at_the_origin_does_not_take_it_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A table of a quiet publisher then stayed in s."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.relations.load()
    ask, answered, go_on = getattr(bench.catalog, slow), asyncio.Event(), asyncio.Event()

    async def slowly(*args: object, **named: object) -> Lsn:
        found: Lsn = await ask(*args, **named)
        monkeypatch.undo()
        answered.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(bench.catalog, slow, slowly)
    late = asyncio.create_task(
        bench.tables.relations.load() if slow == "origin" else bench.tables.durable(Lsn(120), None)
    )
    await answered.wait()
    monkeypatch.setattr(bench.tables, "store_ready", until_committed)  # r is not stored yet
    await bench.tables.durable(Lsn(200), None)
    go_on.set()
    await late
    monkeypatch.undo()
    await bench.tables.store_ready()
    assert await bench.state() is RelState.READY


async def test_a_table_that_leaves_before_it_is_ready(bench: Bench) -> None:
    """The catalog refused `r`, and the worker failed of it."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.relations.load()
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    await bench.tables.durable(Lsn(200), None)
    await bench.tables.relations.load()
    assert await bench.after() is None


async def test_a_table_that_joined_again_is_not_ready_by_what_it_was(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.relations.load()
    await bench.joins_again()
    await bench.tables.durable(Lsn(200), None)
    assert await bench.state() is RelState.INIT
