"""Feedback: what is reported to the publisher as flushed, and when, with a whole pipeline in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from catalog.records import LastCommit
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from tests.support.frames import insert, keepalive, transaction
from tests.support.memory_pipeline import LIMITS, A, MemoryPipeline, cause, virtual
from tests.support.virtual_time import until


@virtual
async def test_flushed_never_passes_what_is_stored() -> None:
    """A keepalive may raise `flushed` while the batch's LSN is being stored: only a stored LSN may be reported.

    Otherwise, after a restart, the subscriber would ask from the stored origin, and the publisher would start past it.
    """
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    storing = asyncio.Event()
    gates = {100: asyncio.Event(), 500: asyncio.Event()}

    async def store(lsn: Lsn) -> None:
        storing.set()
        await gates[lsn].wait()

    p.tables.store = store
    task = asyncio.create_task(p.run())
    await storing.wait()
    p.stream.send([keepalive(500, reply=True)])
    await until(lambda: p.pipeline.flushed == 500)
    gates[100].set()
    await until(lambda: p.tables.durables)
    await asyncio.sleep(0)
    assert p.tables.durables == [100]
    assert max(flushed for _, flushed, _, _ in p.stream.statuses) <= 100
    gates[500].set()
    await until(lambda: p.stream.statuses[-1][1] == 500)
    p.pipeline.drain()
    await task


@virtual
async def test_a_keepalive_advances_when_nothing_is_pending() -> None:
    p = MemoryPipeline([keepalive(500, reply=True)])
    task = asyncio.create_task(p.run())
    await until(lambda: p.stream.statuses, 0.5)
    assert p.stream.statuses[-1][:3] == (500, 500, 500)
    assert p.tables.durables == [500]
    p.stream.send(transaction(600, A, insert(A.oid, 1, "x"))[:-1])
    p.stream.send([keepalive(700, reply=True)])
    await asyncio.sleep(0.1)
    assert p.stream.statuses[-1][1] == 500, "a transaction is open"
    p.stream.send([*transaction(600)[-1:], keepalive(710, reply=True)])
    await asyncio.sleep(0.1)
    assert p.stream.statuses[-1][1] == 500, "its batch is not committed"
    await until(lambda: p.pipeline.flushed == 710, 30.0)
    assert p.rows("a") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_transactions_of_others_advance_without_a_pause_in_the_stream() -> None:
    """The WAL of a busy publisher must not be retained while none of its changes are published to us."""
    p = MemoryPipeline()
    task = asyncio.create_task(p.run())
    for number in range(1, 60):
        p.stream.send([*transaction(number * 100), keepalive(number * 100 + 50)])
        await asyncio.sleep(0.5)
    assert p.pipeline.flushed > 3000
    assert p.tables.durables[-1] > 3000
    p.pipeline.drain()
    await task


@virtual
async def test_a_table_that_waits_for_the_position_is_ready_with_the_first_keepalive_past_it() -> None:
    """Others write all the time: no silence comes, and it once waited for the next status, or for ever without an interval."""
    p = MemoryPipeline([keepalive(20)], limits=replace(LIMITS, status_interval=0.0))
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables == [20])
    p.tables.synced = Lsn(300)
    for position in range(100, 1000, 100):
        p.stream.send([keepalive(position)])
        await asyncio.sleep(0.5)
    assert p.tables.durables == [20, 300], "and the others do not cost a write to the catalog each"
    p.pipeline.drain()
    await task


@virtual
async def test_caught_up_is_told_under_load_too() -> None:
    """It once stayed true from the first idle second on, and the lag was shown as zero."""
    p = MemoryPipeline()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(2)
    assert p.figures.caught_up
    p.stream.send(transaction(100, A, insert(A.oid, 1, "x")))
    await asyncio.sleep(0.1)
    assert not p.figures.caught_up
    await until(lambda: p.figures.caught_up, 20.0)
    assert p.rows("a") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_without_a_status_interval_nothing_is_said_unasked() -> None:
    """worker.c: send_feedback returns at once unless forced: by a request for a reply, or for its own ping."""
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), limits=replace(LIMITS, status_interval=0.0))
    p.stream.answers_pings = False
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables == [100])
    p.stream.send([keepalive(150)])
    await until(lambda: p.tables.durables == [100, 150])
    assert p.stream.statuses == []
    p.stream.send([keepalive(200, reply=True)])
    await until(lambda: p.stream.statuses)
    assert p.stream.statuses == [(200, 200, 200, False)]
    await until(lambda: len(p.stream.statuses) > 1)
    assert asyncio.get_running_loop().time() > 30
    assert p.stream.statuses[1] == (200, 200, 200, True), "half of wal_receiver_timeout has passed"
    p.stream.send([keepalive(200)])
    p.pipeline.drain()
    await task
    assert not any(flushed == 200 and not reply for _, flushed, _, reply in p.stream.statuses[1:])


@virtual
async def test_without_a_status_interval_a_publisher_that_is_not_read_is_answered() -> None:
    """Its request may lie in the socket while the intake waits for room."""
    p = MemoryPipeline(limits=replace(LIMITS, rows=1, status_interval=0.0), reads=3)
    p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    p.stream.send([frame for lsn in range(100, 500, 100) for frame in transaction(lsn, A, insert(A.oid, lsn, "x"))])
    await asyncio.sleep(100)
    assert len(p.stream.statuses) >= 40
    assert {flushed for _, flushed, _, _ in p.stream.statuses} == {10}
    p.tables.gates[A.oid].set()
    await until(lambda: len(p.rows("a")) == 4)
    p.pipeline.drain()
    await task


@virtual
async def test_a_catalog_that_hangs_holds_up_no_feedback() -> None:
    """Requests are answered, and what comes is read, with what was stored before; then what the catalog says ends it."""
    p = MemoryPipeline([keepalive(500, reply=True)])
    hanging: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables == [500])
    p.tables.store = lambda lsn: asyncio.wait_for(hanging, None)
    said = len(p.stream.statuses)
    p.stream.send([keepalive(600, reply=True)])
    for number in range(20):
        await until(lambda said=said: len(p.stream.statuses) > said, 2.0)
        said = len(p.stream.statuses)
        p.stream.send([keepalive(700 + number, reply=True)])
        await asyncio.sleep(0.2)
        assert len(p.stream.statuses) > said, "it was not answered at once"
        said = len(p.stream.statuses)
        p.stream.send([keepalive(800 + number, reply=True)])
    assert {flushed for _, flushed, _, _ in p.stream.statuses[1:]} == {500}
    await asyncio.sleep(30)
    assert len(p.stream.statuses) >= said + 2, "nothing is said unasked"
    hanging.set_exception(PubsubError("the catalog does not answer"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await task
    assert "does not answer" in str(cause(caught.value))


@virtual
async def test_a_commit_whose_origin_cannot_be_stored_is_not_reported() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    storing = asyncio.Event()
    p.tables.store = lambda lsn: asyncio.wait_for(storing.wait(), None)  # type: ignore[assignment, return-value]
    task = asyncio.create_task(p.run())
    await until(lambda: p.rows("a"))
    await asyncio.sleep(50)
    assert len(p.stream.statuses) >= 4
    assert {flushed for _, flushed, _, _ in p.stream.statuses} == {10}
    storing.set()
    await until(lambda: p.stream.statuses[-1][1] == 100)
    p.pipeline.drain()
    await task


@virtual
async def test_an_origin_that_is_being_stored_when_the_stream_ends_is_stored_and_reported() -> None:
    """Storing it was once cancelled at the end of `run`, which then raised CancelledError without having been cancelled."""
    p = MemoryPipeline([keepalive(500)])
    slow = asyncio.Event()

    async def store(lsn: Lsn) -> None:
        slow.set()
        await asyncio.sleep(5)

    p.tables.store = store
    task = asyncio.create_task(p.run())
    await slow.wait()
    p.pipeline.drain()
    await task
    assert p.tables.durables == [500]
    assert p.stream.statuses[-1][:3] == (500, 500, 500)


@virtual
async def test_a_skipped_transaction_is_the_last_one() -> None:
    """The stream begins behind the last one where the slot has gone back: a skipped one must not come again."""
    p = MemoryPipeline([*transaction(100, A, insert(A.oid, 1, "x"), commit_time=7), keepalive(150)], skip=Lsn(92))
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables and p.tables.durables[-1] == 150)
    assert p.tables.last == LastCommit(Lsn(92), 7)
    p.stream.send([*transaction(200, insert(A.oid, 2, "x")), keepalive(250)])
    await until(lambda: p.tables.durables[-1] == 250)
    assert p.tables.last == LastCommit(Lsn(192), 0)
    assert p.rows("a") == [(2, "x")]
    p.pipeline.drain()
    await task
