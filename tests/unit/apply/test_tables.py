"""ApplyTables on a real catalog: which worker writes a table, and tables that leave while apply waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from apply.batch import Batch
from apply.pipeline.dispatch import Dispatcher
from apply.relation_entry import RelationEntry
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import Columns, Follower, Looked
from catalog.states import RelState
from pubsub.errors import NotInPrerequisiteState, StartAgain
from pubsub.protocol.lsn import Lsn
from tests.support.apply_tables import A, B, Bench, Meanwhile, opened, until_committed
from tests.support.frames import insert, relation, transaction
from tests.support.memory import target


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as bench:
        yield bench


async def test_apply_writes_after_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    assert not task.done()
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(90)
    await bench.synced(100)
    assert await task
    assert bench.tables.version(A.oid) == 90
    assert await bench.after() == 100
    bench.tables.committed(staged, Lsn(200))
    assert bench.tables.version(A.oid) == 200
    assert await bench.after() == 200


async def test_a_table_that_leaves_is_not_waited_for(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    await bench.tables.relations.load()
    assert not await task
    assert await bench.after() is None
    assert not await bench.tables.may_write(staged)
    bench.tables.committed(staged, Lsn(200))


async def test_a_worker_that_drains_waits_for_no_sync_worker(bench: Bench) -> None:
    """Both end; stopping once took the whole drain_timeout."""
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    bench.tables.drain()
    with pytest.raises(NotInPrerequisiteState, match="not synchronized"):
        async with asyncio.timeout(10):
            await task


class Alters(Meanwhile):
    """A follower that alters the table for each batch, at the version that it then has, with the columns that it is told."""

    def __init__(self) -> None:
        super().__init__(until_committed, at="never")
        self.altered_at: list[Lsn] = []
        self.columns_of: list[Columns] = []

    async def follow(self, batch: Batch, tables: Any, until_committed: Any, version: Any) -> list[CopyAgain]:
        self.columns_of += [columns for columns, _ in tables]
        await until_committed()
        self.altered_at += [version(columns.relid) for columns, _ in tables]
        return []


async def adapted_while_synchronized(bench: Bench, follower: Alters) -> asyncio.Task[Any]:
    """Have a batch of a table adapted that its sync worker still writes."""
    tables = bench.follows(follower)
    await bench.copied(100)
    await tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    task = asyncio.create_task(tables.adapt_tables(Batch({A.oid: A}), until_committed))
    await asyncio.sleep(0.01)
    return task


async def test_a_table_that_its_sync_worker_still_writes_is_altered_after_s(bench: Bench) -> None:
    """The sync worker may have followed the same ALTER by then.  Apply took its commits for those of another process."""
    follower = Alters()
    task = await adapted_while_synchronized(bench, follower)
    assert not task.done()
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(90)
    await bench.synced(100)
    async with asyncio.timeout(10):
        assert set((await task)[0]) == {("public", "a")}
    assert follower.altered_at == [90]
    before, now = follower.columns_of
    assert now is not before, "they are read again"


async def test_a_table_that_became_ready_while_earlier_batches_were_committed_is_not_waited_for(bench: Bench) -> None:
    """Those batches had waited for its sync worker; with r its hand-over is forgotten, and nothing tells of s any more."""
    follower = Alters()
    tables = bench.follows(follower)
    await bench.copied(100)
    await tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))

    async def becomes_ready() -> None:
        if await bench.state() is RelState.FINISHEDCOPY:
            await bench.synced(100)
            await tables.relations.load()
            await tables.durable(Lsn(100), None)
        assert await bench.state() is RelState.READY

    async with asyncio.timeout(10):
        assert set((await tables.adapt_tables(Batch({A.oid: A}), becomes_ready))[0]) == {("public", "a")}
    assert follower.altered_at == [100]


async def test_a_table_that_has_stopped_is_not_waited_for(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    await bench.catalog.stop_relation(bench.subscription.oid, A.oid, "broken", None, Lsn(100), count="sync")
    await bench.tables.relations.load()
    async with asyncio.timeout(10):
        assert not await bench.tables.may_write(staged)


async def test_a_table_is_not_ready_before_it_is_taken_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task stores r while the columns of a table in s are read: the table was still its sync worker's, for ever."""
    await bench.copied(100)
    relations = bench.tables.relations
    columns_of = relations.columns_of

    async def slowly(entry: RelationEntry) -> Columns:
        await bench.tables.durable(Lsn(100), None)
        return await columns_of(entry)

    monkeypatch.setattr(relations, "columns_of", slowly)
    await bench.synced(100)
    await relations.load()
    assert await bench.state() is RelState.SYNCDONE
    await bench.tables.durable(Lsn(100), None)
    assert await bench.state() is RelState.READY


class NeedsACopy(Meanwhile):
    """A follower that finds no way but a new copy."""

    def __init__(self) -> None:
        super().__init__(until_committed, at="never")

    async def follow(self, batch: Batch, tables: Any, until_committed: Any, version: Any) -> list[CopyAgain]:
        return [CopyAgain(A.oid, "public.a", "its key is another")]


async def test_a_table_that_its_sync_worker_still_writes_is_copied_again_after_s(bench: Bench) -> None:
    """State i came under the sync worker that runs: it failed when it stored s, and disable_on_error took that for an error."""
    tables = bench.follows(NeedsACopy())
    await bench.copied(100)
    await tables.relations.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    task = asyncio.create_task(tables.adapt_tables(Batch({A.oid: A}), until_committed))
    await asyncio.sleep(0.01)
    assert await bench.state() is RelState.FINISHEDCOPY
    assert not task.done()
    await bench.synced(100)
    async with asyncio.timeout(10):
        with pytest.raises(StartAgain):
            await task
    assert await bench.state() is RelState.INIT


async def test_a_table_that_leaves_before_it_is_altered_is_left_out(bench: Bench) -> None:
    task = await adapted_while_synchronized(bench, Alters())
    await bench.leaves()
    async with asyncio.timeout(10):
        assert await task == [{}]


async def test_a_table_to_be_copied_again_is_still_so_after_another_one_s_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_table_error = isolate the batch is then followed once more, without the other one."""

    async def look(oids: Sequence[int], xids: Sequence[int]) -> Looked:
        return Looked({}, Lsn(50))

    async def follow(batch: Batch, table: Columns, *_: object) -> None:
        raise CopyAgain(A.oid, "a", "…") if table.relid == A.oid else NotInPrerequisiteState("b cannot be altered")

    follower = Follower(bench.catalog, bench.subscription, look, None)  # type: ignore[arg-type]
    monkeypatch.setattr(follower, "_follow", follow)
    a, b = (Columns(oid, "app", target(name), None) for oid, name in ((A.oid, "a"), (B.oid, "b")))
    dispatcher = Dispatcher(Lsn(10))
    dispatcher.feed(transaction(100, A, insert(A.oid, 1, "x"), B, insert(B.oid, 1, "x")), 0.0)
    batch = dispatcher.take()
    with pytest.raises(NotInPrerequisiteState, match="b cannot"):
        await follower.follow(batch, [(a, Lsn(0)), (b, Lsn(0))], until_committed, lambda _: Lsn(0))
    batch.announced.clear()
    a.looked_at.add(A)
    a.follows = A
    (again,) = await follower.follow(batch, [(a, Lsn(0))], until_committed, lambda _: Lsn(0))
    assert again.relid == A.oid


async def test_what_was_staged_for_a_table_is_not_committed_to_its_next_copy(bench: Bench) -> None:
    """The copy holds it already, and newer rows besides."""
    await bench.ready(100)
    staged = await bench.destination()
    await bench.joins_again()
    await bench.tables.relations.load()
    await bench.copied(300)
    bench.decided = Lsn(200)
    bench.handover.attach(bench)
    assert await bench.handover.catchup_lsn(A.oid, Lsn(300)) == 300
    await bench.synced(300)
    assert not await bench.tables.may_write(staged)
    bench.tables.committed(staged, Lsn(200))
    assert (await bench.destination()).after == 300


@pytest.mark.parametrize("how", ["leaves", "leaves unheard"])
async def test_a_table_that_leaves_before_it_is_to_be_copied_again(bench: Bench, how: str) -> None:
    async def unheard() -> None:
        await bench.catalog.remove_relation(bench.subscription.oid, A.oid)

    tables = bench.follows(Meanwhile(bench.leaves if how == "leaves" else unheard, at="follow", again=True))
    await bench.ready(100)
    with pytest.raises(StartAgain):
        await tables.adapt_tables(Batch({A.oid: A}), until_committed)


async def test_a_table_that_leaves_while_its_destination_is_found_is_left_out(bench: Bench) -> None:
    tables = bench.follows(Meanwhile(bench.leaves, at="follow"))
    await bench.ready(100)
    assert await tables.adapt_tables(Batch({A.oid: A}), until_committed) == [{}]


async def test_a_partition_that_is_only_announced_does_not_cost_a_look_at_the_catalog(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under publish_via_partition_root a leaf is announced beside its root.  A table that joins is found all the same."""
    await bench.ready(100)
    read = 0
    relations = bench.catalog.relations

    async def counted(subid: int) -> Any:
        nonlocal read
        read += 1
        return await relations(subid)

    monkeypatch.setattr(bench.catalog, "relations", counted)
    leaf = relation(16400, "leaf")
    for _ in range(3):
        assert set((await bench.tables.adapt_tables(Batch({A.oid: A, leaf.oid: leaf}), None))[0]) == {("public", "a")}
    assert read == 1
    other = relation(16401, "other")
    await bench.tables.adapt_tables(Batch({A.oid: A, other.oid: other}), None)
    assert read == 2
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    assert await bench.tables.adapt_tables(Batch({A.oid: A, other.oid: other}), None) == [{}]
    assert read == 3
