"""RelationMap on a real catalog: the transactions that a table gets, and what the next worker knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apply.batch import Batch
from catalog.records import NewRelation
from catalog.states import RelState
from pubsub.protocol.lsn import Lsn
from tests.support.apply_tables import DEFINITION, A, B, Bench, opened, until_committed


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as bench:
        yield bench


async def test_a_table_in_copy_gets_nothing(bench: Bench) -> None:
    await bench.tables.relations.load()
    assert await bench.after() is None
    await bench.copied(100)
    await bench.tables.relations.load()
    assert await bench.after() is None
    assert await bench.after("b") is None, "it is not in the subscription"


async def test_c_is_at_or_past_what_was_decided(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    assert await bench.handover.catchup_lsn(A.oid, Lsn(100)) == 150
    assert await bench.after() == 150


async def test_what_the_catalog_got_since_it_was_read_is_known_at_the_first_batch(bench: Bench) -> None:
    """The first commit once had the previous copy's application id; a restart then did not find its version."""
    await bench.tables.relations.load()
    await bench.copied(100)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    async with asyncio.timeout(10):
        found, *_ = await bench.tables.adapt_tables(Batch({A.oid: A}), until_committed)
    assert found[("public", "a")].app_id == bench.app_id(1)


async def test_a_table_that_joined_and_was_copied_meanwhile_is_known_at_the_first_batch(bench: Bench) -> None:
    await bench.tables.relations.load()
    await bench.catalog.add_relations(bench.subscription.oid, [NewRelation(B.oid, "public", "b", "b")])
    await bench.copied(100, B.oid)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(B.oid, Lsn(100))
    assert await bench.after("b") == 100


async def test_a_table_that_joined_without_a_copy_is_known_at_the_first_batch(bench: Bench) -> None:
    """Its first rows were once skipped if they arrived before the catalog had been read again."""
    await bench.tables.relations.load()
    joined = NewRelation(B.oid, "public", "b", "b", RelState.READY, Lsn(100), DEFINITION)
    await bench.catalog.add_relations(bench.subscription.oid, [joined])
    assert await bench.after("b") == 100


async def test_after_a_restart_the_table_says_what_it_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(500)
    await bench.restarted().relations.load()
    assert await bench.after() == 500
    assert bench.tables.relations.greatest_version == 500


async def test_after_a_restart_s_counts_where_the_table_holds_less(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.restarted().relations.load()
    assert await bench.after() == 150
    assert bench.tables.version(A.oid) == 100


async def test_the_next_apply_worker_keeps_the_promise_that_still_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    bench.handover.detach()
    await bench.restarted().relations.load()
    assert await bench.after() == 150
    # A new copy breaks the promise after the worker has read it and before it is attached: no one is notified.
    bench.handover.new_copy(A.oid)
    bench.tables.relations.keep_promises()
    assert await bench.after() is None
    assert bench.restarts == 0


async def test_a_table_that_left_and_joined_again_begins_anew(bench: Bench) -> None:
    """Between two readings of the catalog: apply once went on to write what its sync worker copied."""
    await bench.ready(100)
    assert await bench.after() == 100
    await bench.joins_again()
    await bench.tables.relations.load()
    assert await bench.after() is None


async def test_the_least_that_a_synchronized_table_holds(bench: Bench) -> None:
    relations = bench.tables.relations
    await relations.load()
    assert relations.least_synchronized == 0
    await bench.copied(100)
    await relations.load()
    assert relations.least_synchronized == 0, "its sync worker follows a slot of its own"
    bench.decided = Lsn(130)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    assert relations.least_synchronized == 130, "it follows that slot no further"
    await bench.synced(150)
    await relations.load()
    assert relations.least_synchronized == 150
    new = NewRelation(B.oid, "public", "b", "b", RelState.READY, Lsn(120))
    await bench.catalog.add_relations(bench.subscription.oid, [new])
    await relations.load()
    assert relations.least_synchronized == 120
    await bench.catalog.stop_relation(bench.subscription.oid, B.oid, "no", None, None, count="apply")
    await relations.load()
    assert relations.least_synchronized == 150
