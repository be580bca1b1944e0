"""ApplyTables on a real catalog: the transactions that a table gets, which worker writes it, when it is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apply.batch import Batch
from apply.delta.table import application_id
from apply.handover import Handover
from apply.tables import ApplyTables
from catalog.records import NewRelation, NewSubscription, Subscription
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions
from tests.frames import relation
from tests.memory import MemoryDelta, target

A, B = relation(16384, "a"), relation(16385, "b")
DEFINITION = json.dumps({"columns": ["id", "v"], "key": ["id"]})


async def quiet() -> None:
    """Return at once: no batch is under way."""


class Bench:
    """A subscription with table a, and its apply worker's ApplyTables."""

    def __init__(self, catalog: Catalog, subscription: Subscription, delta: MemoryDelta) -> None:
        self.catalog, self.subscription, self.delta = catalog, subscription, delta
        self.handover = Handover()
        self.tables = self.restarted()
        self.decided = INVALID_LSN
        self.restarts = 0

    def restarted(self) -> ApplyTables:
        self.tables = ApplyTables(self.catalog, "9", self.subscription, self.handover)
        return self.tables

    # handover.Applying

    def answer(self, relid: int, at: Lsn) -> Lsn:
        return self.tables.promise(relid, at, self.decided)

    def start_again(self) -> None:
        self.restarts += 1

    def tables_changed(self) -> None: ...

    async def copied(self, at: int, relid: int = A.oid) -> None:
        """Store the states of a sync worker up to f."""
        generation = await self.catalog.begin_copy(self.subscription.oid, relid)
        await self.catalog.set_relation_definition(self.subscription.oid, relid, DEFINITION)
        self.delta.tables["a"].versions[self.app_id(generation, relid)] = Lsn(at)
        await self.catalog.set_relation_state(self.subscription.oid, relid, RelState.FINISHEDCOPY, Lsn(at))

    async def synced(self, at: int) -> None:
        await self.catalog.set_relation_state(self.subscription.oid, A.oid, RelState.SYNCDONE, Lsn(at))
        self.handover.synced(A.oid)

    def app_id(self, generation: int, relid: int = A.oid) -> str:
        return application_id("9", self.subscription.oid, relid, generation)

    async def state(self) -> RelState:
        (found,) = await self.catalog.relations(self.subscription.oid)
        return found.state

    async def after(self, name: str = "a") -> Lsn | None:
        async with asyncio.timeout(10):
            found = await self.tables.destinations(Batch({A.oid: A, B.oid: B}), quiet)
        return found[("public", name)].after if ("public", name) in found else None


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    delta = MemoryDelta(target("a"), target("b"))
    async with await Catalog.open(tmp_path / "catalog.db") as catalog:
        new = NewSubscription("s", "", ("p",), SubscriptionOptions(), "s", "s")
        subscription = await catalog.create_subscription(new, [NewRelation(A.oid, "public", "a", "a")])
        with delta.installed():
            yield Bench(catalog, subscription, delta)


async def test_a_table_in_copy_gets_nothing(bench: Bench) -> None:
    await bench.tables.load()
    assert await bench.after() is None
    await bench.copied(100)
    await bench.tables.load()
    assert await bench.after() is None
    assert await bench.after("b") is None, "it is not in the subscription"


async def test_c_is_at_or_past_what_was_decided(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    assert await bench.handover.catchup_lsn(A.oid, Lsn(100)) == 150
    assert await bench.after() == 150


async def test_what_the_catalog_got_since_it_was_read_is_known_at_the_first_batch(bench: Bench) -> None:
    """The first commit once had the previous copy's application id; a restart then did not find its version."""
    await bench.tables.load()
    await bench.copied(100)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    async with asyncio.timeout(10):
        found = await bench.tables.destinations(Batch({A.oid: A}), quiet)
    assert found[("public", "a")].app_id == bench.app_id(1)


async def test_a_table_that_joined_and_was_copied_meanwhile_is_known_at_the_first_batch(bench: Bench) -> None:
    await bench.tables.load()
    await bench.catalog.add_relations(bench.subscription.oid, [NewRelation(B.oid, "public", "b", "b")])
    await bench.copied(100, B.oid)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(B.oid, Lsn(100))
    assert await bench.after("b") == 100


async def test_a_table_that_joined_without_a_copy_is_known_at_the_first_batch(bench: Bench) -> None:
    """Its first rows were once skipped if they arrived before the catalog had been read again."""
    await bench.tables.load()
    joined = NewRelation(B.oid, "public", "b", "b", RelState.READY, Lsn(100), DEFINITION)
    await bench.catalog.add_relations(bench.subscription.oid, [joined])
    assert await bench.after("b") == 100


async def test_apply_writes_after_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    task = asyncio.create_task(bench.tables.may_write(A.oid))
    await asyncio.sleep(0.01)
    assert not task.done()
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(90)
    await bench.synced(100)
    assert await task
    assert bench.tables.version(A.oid) == 90
    assert await bench.after() == 100
    bench.tables.committed(A.oid, Lsn(200))
    assert bench.tables.version(A.oid) == 200
    assert await bench.after() == 200


async def test_a_table_that_leaves_is_not_waited_for(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    task = asyncio.create_task(bench.tables.may_write(A.oid))
    await asyncio.sleep(0.01)
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    await bench.tables.load()
    assert not await task
    assert await bench.after() is None
    assert not await bench.tables.may_write(A.oid)
    bench.tables.committed(A.oid, Lsn(200))


async def test_a_worker_that_drains_waits_for_no_sync_worker(bench: Bench) -> None:
    """Both end; stopping once took the whole drain_timeout."""
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    task = asyncio.create_task(bench.tables.may_write(A.oid))
    await asyncio.sleep(0.01)
    bench.tables.drain()
    with pytest.raises(NotInPrerequisiteState, match="not synchronized"):
        async with asyncio.timeout(10):
            await task


async def test_r_is_stored_when_the_origin_has_come_to_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    await bench.tables.durable(Lsn(149))
    assert await bench.state() is RelState.SYNCDONE
    await asyncio.gather(bench.tables.durable(Lsn(150)), bench.tables.settle(), bench.tables.settle())
    assert await bench.state() is RelState.READY
    assert await bench.catalog.origin(bench.subscription.oid) == 150


async def test_r_is_stored_after_a_restart_of_a_quiet_publisher(bench: Bench) -> None:
    """The origin is already past the LSN of s, and nothing moves it."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.catalog.advance_origin(bench.subscription.oid, Lsn(200))
    await bench.restarted().load()
    await bench.tables.settle()
    assert await bench.state() is RelState.READY


async def test_the_origin_never_goes_back(bench: Bench) -> None:
    await bench.tables.durable(Lsn(200))
    await bench.tables.durable(Lsn(100))
    assert await bench.catalog.origin(bench.subscription.oid) == 200


async def test_after_a_restart_the_table_says_what_it_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(500)
    await bench.restarted().load()
    assert await bench.after() == 500
    assert bench.tables.greatest_version == 500


async def test_after_a_restart_s_counts_where_the_table_holds_less(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.restarted().load()
    assert await bench.after() == 150
    assert bench.tables.version(A.oid) == 100


async def test_the_next_apply_worker_keeps_the_promise_that_still_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    bench.handover.detach()
    await bench.restarted().load()
    assert await bench.after() == 150
    # A new copy breaks the promise after the worker has read it and before it is attached: no one is notified.
    bench.handover.new_copy(A.oid)
    bench.tables.keep_promises()
    assert await bench.after() is None
    assert bench.restarts == 0


async def test_changes_of_a_renamed_table_are_refused(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    renamed = relation(A.oid, "other")
    with pytest.raises(NotInPrerequisiteState, match=r'relation "public\.other" does not exist'):
        await bench.tables.destinations(Batch({A.oid: renamed}), quiet)
    assert await bench.tables.destinations(Batch({77: relation(77, "other")}), quiet) == {}
