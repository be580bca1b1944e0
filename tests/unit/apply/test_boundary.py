"""A boundary between batches, in virtual time: frames that come late, batches that end at an LSN, and a halt there."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from apply.staging.staged_table import StagedTable
from pubsub.delta.table import Commit
from pubsub.delta.writers.changeset import Folded
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.ids import Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import StreamCommit, StreamStart, StreamStop
from pubsub.reorderbuffer.buffer import ReorderBuffer
from tests.support.frames import frame, insert, keepalive, transaction
from tests.support.memory_pipeline import A, MemoryPipeline, virtual
from tests.support.virtual_time import until


def row(number: int) -> list[bytes]:
    """A transaction that ends at 100 times its number."""
    return transaction(number * 100, *([A] if number == 1 else []), insert(A.oid, number, "x"))


@virtual
async def test_a_batch_ends_at_the_boundary_and_another_begins() -> None:
    p = MemoryPipeline(row(1))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    p.pipeline.boundary.hold_back(1.0)
    p.stream.send([*row(2), *row(3), *row(4)])
    await asyncio.sleep(0.1)
    assert p.pipeline.dispatcher.decided == 100
    assert await p.pipeline.boundary.end_batch_at(Lsn(350))
    await until(lambda: p.pipeline.flushed == 400)
    assert p.commits("a") == [(100, 300), (400, 400)]
    p.pipeline.drain()
    await task


@virtual
async def test_what_is_held_back_comes_after_the_delay() -> None:
    p = MemoryPipeline([])
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.5)
    p.pipeline.boundary.hold_back(2.0)
    p.stream.send(row(1))
    await asyncio.sleep(1.9)
    assert p.pipeline.dispatcher.decided == 10
    await asyncio.sleep(1.2)
    assert p.pipeline.dispatcher.decided == 100
    p.stream.send(row(2))
    await asyncio.sleep(0.1)
    p.pipeline.boundary.release()
    await until(lambda: p.pipeline.dispatcher.decided == 200, 1.0)
    p.pipeline.drain()
    await task


@virtual
async def test_a_boundary_that_was_passed_is_refused() -> None:
    p = MemoryPipeline([*row(1), *row(2)])
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.dispatcher.decided == 200)
    assert not await p.pipeline.boundary.end_batch_at(Lsn(150))
    assert await p.pipeline.boundary.end_batch_at(Lsn(200))
    p.pipeline.drain()
    await task


@virtual
async def test_an_idle_publisher_is_asked_how_far_it_is() -> None:
    p = MemoryPipeline([keepalive(50)])
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    assert await p.pipeline.boundary.end_batch_at(Lsn(300))
    await asyncio.sleep(3)
    assert sum(reply for *_, reply in p.stream.statuses) >= 3
    p.stream.send([keepalive(300)])
    await until(lambda: p.pipeline.flushed == 300)
    p.pipeline.drain()
    await task


@virtual
async def test_nothing_past_a_halt_is_applied_until_its_end() -> None:
    p = MemoryPipeline(row(1))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    p.pipeline.boundary.hold_back(1.0)
    p.stream.send([*row(2), *row(3)])
    await asyncio.sleep(0.1)
    assert await p.pipeline.boundary.end_batch_at(Lsn(250), halts=True)
    async with p.pipeline.boundary.standing_at(Lsn(250)):
        assert p.rows("a") == [(1, "x"), (2, "x")]
        await asyncio.sleep(100)
        assert p.rows("a") == [(1, "x"), (2, "x")]
        assert p.pipeline.flushed == 200
        # The publisher hears from us all the while.
        assert len(p.stream.statuses) >= 90
    await until(lambda: p.pipeline.flushed == 300)
    assert p.commits("a") == [(100, 200), (300, 300)]
    p.pipeline.drain()
    await task


@virtual
async def test_rows_are_replaced_within_a_halt_at_its_position() -> None:
    p = MemoryPipeline(row(1))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    assert await p.pipeline.boundary.end_batch_at(Lsn(250), halts=True)
    p.stream.send([*row(2), *row(3)])
    async with p.pipeline.boundary.standing_at(Lsn(250)):
        destination = (await p.tables.adapt_tables(p.pipeline.dispatcher.batch, None))[0]["public", "a"]
        rows = pa.table([[2], ["repaired"]], schema=destination.table.schema)
        change = Folded(rows, rows.slice(0, 0), rows.select(["id"]), pa.table({}), False, False, 1, 0, 0)
        staged = p.delta.write(destination.table, change, replace_all=False)
        await p.pipeline.commit_between(StagedTable(destination, staged, Commit("app", Lsn(250), Lsn(250)), 0, 0, 0))
    await until(lambda: p.pipeline.flushed == 300)
    assert p.rows("a") == [(1, "x"), (2, "repaired"), (3, "x")]
    assert p.commits("a") == [(100, 200), (250, 250), (300, 300)]
    p.pipeline.drain()
    await task


@virtual
async def test_a_halt_ends_with_the_worker() -> None:
    p = MemoryPipeline(row(1))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    assert await p.pipeline.boundary.end_batch_at(Lsn(250), halts=True)
    p.stream.send(row(3))

    async def stand() -> None:
        async with p.pipeline.boundary.standing_at(Lsn(250)):
            await asyncio.sleep(1e6)

    standing = asyncio.create_task(stand())
    await asyncio.sleep(5)
    p.pipeline.drain()
    await task
    standing.cancel()
    late = asyncio.create_task(stand())
    with pytest.raises(NotInPrerequisiteState, match="has ended"):
        await late
    assert p.rows("a") == [(1, "x")]


@virtual
async def test_a_streamed_transaction_past_the_boundary_waits_too() -> None:
    with tempfile.TemporaryDirectory() as directory:
        p = MemoryPipeline(row(1), buffer=ReorderBuffer(Path(directory), 1 << 20))
        task = asyncio.create_task(p.run())
        await asyncio.sleep(0.01)
        assert await p.pipeline.boundary.end_batch_at(Lsn(250), halts=True)
        streamed = replace(insert(A.oid, 7, "y"), xid=Xid(900))
        p.stream.send([frame(StreamStart(Xid(900), True)), frame(streamed), frame(StreamStop())])
        p.stream.send([*row(2), frame(StreamCommit(Xid(900), 0, Lsn(392), Lsn(400), 0))])
        async with p.pipeline.boundary.standing_at(Lsn(250)):
            await asyncio.sleep(5)
            assert p.rows("a") == [(1, "x"), (2, "x")]
        await until(lambda: p.pipeline.flushed == 400)
        assert p.commits("a") == [(100, 200), (400, 400)]
        p.pipeline.drain()
        await task


@virtual
async def test_without_a_boundary_nothing_changes() -> None:
    p = MemoryPipeline([*row(1), *row(2), *row(3)])
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 300)
    assert p.commits("a") == [(100, 300)]
    p.pipeline.drain()
    await task
