"""Pipeline: from a stream to Delta tables in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import apply.pipeline.pipeline
from apply.conflicts import UniqueViolation
from apply.pipeline.interfaces import Limits
from apply.staging import stage_batch
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.errors import ConnectionFailure, InvalidValue, ProgramLimitExceeded
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import BeginPrepare, Column, Prepare
from pubsub.reorderbuffer.buffer import ReorderBuffer
from tests.support.frames import delete, frame, insert, keepalive, transaction, update
from tests.support.memory_pipeline import LIMITS, A, B, MemoryPipeline, cause, virtual
from tests.support.virtual_time import until


@virtual
async def test_a_batch_is_committed_at_its_age_and_then_reported() -> None:
    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "y")))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.9)
    assert not p.rows("a")
    assert not p.tables.durables
    await until(lambda: p.tables.durables)
    assert asyncio.get_running_loop().time() < 1.2
    assert p.rows("a") == [(1, "x")]
    assert p.rows("b") == [(1, "y")]
    assert p.tables.durables == [100]
    assert p.stream.statuses[-1][:3] == (100, 100, 100)
    p.pipeline.drain()
    await task
    assert (p.figures.transactions, p.figures.batches, p.figures.commits, p.figures.inserts) == (1, 1, 2, 2)
    assert p.figures.flush_lsn == 100
    assert p.figures.lag.latest == 1.0


@virtual
async def test_what_waits_is_bounded_and_status_goes_on() -> None:
    """With one batch committing, one staged and one open and full, nothing more is read."""
    frames = [f for n in range(1, 20) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    p = MemoryPipeline(frames, Limits(1, 1 << 20, 0.1, 10.0, 60.0), reads=5)
    gate = p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(100)
    assert p.pipeline.dispatcher.position <= 400
    assert len(p.stream.statuses) >= 90
    assert {flushed for _, flushed, _, _ in p.stream.statuses} == {10}
    gate.set()
    await until(lambda: p.pipeline.flushed == 1900)
    assert len(p.rows("a")) == 19
    p.pipeline.drain()
    await task


@virtual
async def test_drain_commits_what_has_come() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.01)
    p.stream.send(transaction(200, insert(A.oid, 2, "x"))[:-1])
    await asyncio.sleep(0.01)
    p.pipeline.drain()
    await task
    assert p.rows("a") == [(1, "x")]
    assert p.stream.statuses[-1][:3] == (100, 100, 100)


@virtual
async def test_what_comes_after_drain_is_neither_applied_nor_reported() -> None:
    p = MemoryPipeline([keepalive(50)], stop_at=Lsn(200))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.2)
    p.pipeline.drain()
    await asyncio.sleep(0)
    p.stream.send(transaction(200, A, insert(A.oid, 1, "x")))
    await task
    assert not p.rows("a")
    assert p.pipeline.dispatcher.position == 50
    assert p.pipeline.flushed < 200
    assert p.stream.statuses[-1][1] < 200


@virtual
async def test_stop_at_ends_exactly_there() -> None:
    frames = [f for n in range(1, 6) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    p = MemoryPipeline(frames, stop_at=Lsn(300))
    await p.run()
    assert p.rows("a") == [(1, "x"), (2, "x"), (3, "x")]
    assert p.pipeline.flushed == 300
    assert max(flushed for _, flushed, _, _ in p.stream.statuses) == 300


@virtual
async def test_stop_at_is_reached_by_a_keepalive_and_asks_for_one() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), stop_at=Lsn(300))
    task = asyncio.create_task(p.run())
    await until(lambda: any(reply for *_, reply in p.stream.statuses), 3.0)
    p.stream.send([keepalive(310)])
    await task
    assert p.rows("a") == [(1, "x")]
    assert p.pipeline.flushed == 300


@virtual
async def test_nothing_that_ends_after_stop_at_is_applied() -> None:
    p = MemoryPipeline(
        [*transaction(100, A, insert(A.oid, 1, "x")), *transaction(400, insert(A.oid, 2, "x"))], stop_at=Lsn(300)
    )
    await p.run()
    assert p.rows("a") == [(1, "x")]
    assert p.pipeline.flushed == 300


@virtual
async def test_a_batch_that_a_table_holds_already_is_not_committed_to_it() -> None:
    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    p.tables.after["a"] = Lsn(100)
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100)
    assert not p.rows("a")
    assert p.rows("b") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_cancelled_it_waits_for_the_commit_under_way() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    begun, done = asyncio.Event(), []

    async def uninterruptible(commit: Callable[[], None]) -> None:
        begun.set()
        work = asyncio.ensure_future(asyncio.sleep(3))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait({work})
            commit()
            done.append(True)

    p.engine.outcomes["a"] = [uninterruptible]
    task = asyncio.create_task(p.run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
    assert not p.tables.durables


@virtual
async def test_cancelled_while_staging_it_leaves_no_file() -> None:
    """The staged files once stayed on disk until the next start, one batch more with each retry."""
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    with pytest.MonkeyPatch.context() as patch:

        async def slow_thread(function: Any, *args: Any) -> Any:
            await asyncio.sleep(3)
            return function(*args)

        async def in_thread(function: Any, *args: Any) -> Any:
            work = asyncio.ensure_future(slow_thread(function, *args))
            return await asyncio.shield(work)

        patch.setattr(asyncio, "to_thread", in_thread)
        task = asyncio.create_task(p.run())
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(5)
        assert not p.delta.staged


@virtual
async def test_a_value_that_does_not_fit_commits_nothing_of_its_batch() -> None:
    frames = [
        *transaction(100, A, insert(A.oid, 1, "x"), xid=41),
        *transaction(200, B, insert(B.oid, b"ninety", "x"), xid=42, final=150),
    ]
    p = MemoryPipeline(frames)
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    error = cause(raised.value)
    assert isinstance(error, InvalidValue)
    assert error.context is not None
    assert "in transaction 42, finished at 0/96" in error.context
    assert not p.rows("a")
    assert not p.tables.durables


@virtual
async def test_a_table_that_stops_alone_gets_what_was_before_its_failure() -> None:
    frames = [
        *transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")),
        *transaction(200, insert(B.oid, 2, "x"), insert(A.oid, 2, "x")),
        *transaction(300, insert(B.oid, 3, "x"), insert(B.oid, b"ninety", "x"), insert(A.oid, 3, "x"), final=250),
        *transaction(400, insert(B.oid, 4, "x"), insert(A.oid, 4, "x")),
    ]
    p = MemoryPipeline(frames)
    p.tables.isolates = True
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables)
    assert p.rows("a") == [(1, "x"), (2, "x"), (3, "x"), (4, "x")]
    assert p.rows("b") == [(1, "x"), (2, "x")]
    assert p.commits("b") == [(100, 200)]
    assert p.tables.stopped == {B.oid: 250}
    assert p.tables.durables == [400]
    # Later transactions apply only to the other table.
    p.stream.send(transaction(500, insert(B.oid, 5, "x"), insert(A.oid, 5, "x")))
    await until(lambda: p.pipeline.flushed == 500)
    assert len(p.rows("b")) == 2
    assert len(p.rows("a")) == 5
    p.pipeline.drain()
    await task


@virtual
async def test_a_table_whose_commit_fails_for_a_reason_that_lasts_stops_alone() -> None:
    """What Spark's errors say of themselves was not looked at: every commit that failed was tried again, for all tables."""

    async def overflows(_: Callable[[], None]) -> None:
        raise RuntimeError(
            '[CAST_OVERFLOW] The value 9 of the type "BIGINT" cannot be cast. SQLSTATE: 22003\nat somewhere'
        )

    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x"), final=50))
    p.tables.isolates = True
    p.engine.outcomes["b"] = [overflows]
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables)
    assert (p.rows("a"), p.rows("b"), p.tables.stopped) == ([(1, "x")], [], {B.oid: 50})
    p.pipeline.drain()
    await task


@virtual
async def test_a_table_that_stops_in_its_first_transaction_is_left_as_it_was() -> None:
    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, b"ninety", "x"), final=50))
    p.tables.isolates = True
    task = asyncio.create_task(p.run())
    await until(lambda: p.tables.durables)
    assert (p.rows("a"), p.rows("b"), p.tables.stopped) == ([(1, "x")], [], {B.oid: 50})
    p.pipeline.drain()
    await task


@virtual
async def test_a_table_whose_columns_change_gets_what_was_before() -> None:
    """In one batch, also in one that is decoded in parts."""
    wider = replace(B, columns=(*B.columns, Column(0, "more", Oid(23), -1)))
    frames = [
        *transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")),
        *transaction(200, update(B.oid, 1, "y"), insert(B.oid, 2, "x")),
        *transaction(300, wider, insert(B.oid, 3, "x", "3"), insert(A.oid, 2, "x"), final=250),
        *transaction(400, insert(B.oid, 4, "x", "4"), insert(A.oid, 3, "x")),
    ]
    for whole in (64, 48 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_batch, "_WHOLE", whole)
            p = MemoryPipeline(frames)
            p.tables.isolates = True
            task = asyncio.create_task(p.run())
            await until(lambda: p.tables.durables)  # noqa: B023
            assert (p.rows("b"), p.tables.stopped) == ([(1, "y"), (2, "x")], {B.oid: 250})
            assert p.rows("a") == [(1, "x"), (2, "x"), (3, "x")]
            p.pipeline.drain()
            await task


@virtual
async def test_conflicts_are_left_out_and_counted_once_committed() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x"), update(A.oid, 2, "y"), delete(A.oid, 3, None)))
    p.tables.contested = {A.oid}
    gate = p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(5)
    # A batch staged during this commit is staged against the table after it.
    p.stream.send(transaction(200, update(A.oid, 1, "z"), delete(A.oid, 2, None), insert(A.oid, 4, "w")))
    await asyncio.sleep(5)
    assert not p.tables.conflicts
    gate.set()
    await until(lambda: p.pipeline.flushed == 200)
    assert p.rows("a") == [(1, "z"), (4, "w")]
    assert p.tables.conflicts == {"update_missing": 1, "delete_missing": 2}
    p.pipeline.drain()
    await task


@virtual
async def test_a_table_is_altered_when_the_batch_before_is_in_it_and_not_when_its_origin_is_stored() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), Limits(1, 1 << 20, 0.1, 10.0, 60.0))
    gate = p.tables.gates[A.oid] = asyncio.Event()
    stored = asyncio.Event()

    async def store(lsn: Lsn) -> None:
        await stored.wait()

    p.tables.store = store
    task = asyncio.create_task(p.run())
    await asyncio.sleep(5)
    p.tables.alters = True
    # It is full, so it closes while the one before commits.
    p.stream.send(transaction(200, insert(A.oid, 2, "x")))
    await asyncio.sleep(5)
    assert p.tables.altered_at == []
    gate.set()
    await until(lambda: p.tables.altered_at)
    assert p.tables.altered_at == [100]
    stored.set()
    await until(lambda: p.pipeline.flushed == 200)
    assert p.rows("a") == [(1, "x"), (2, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_commits_of_others_are_known_once_the_batch_before_is_committed() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), Limits(1, 1 << 20, 0.1, 10.0, 60.0))
    gate = p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(5)
    p.delta.others["a"] = [OtherCommit(3, "DELETE", "an engine", frozenset(), None)]
    p.stream.send(transaction(200, update(A.oid, 2, "y")))
    await asyncio.sleep(5)
    # The first batch's commit, which has not begun, is to find them itself.
    assert p.tables.contested == set()
    assert p.delta.others
    gate.set()
    await until(lambda: p.pipeline.flushed == 200)
    assert p.tables.contested == {A.oid}
    assert not p.delta.others
    assert p.rows("a") == [(1, "x")], "the update of a row that is missing is left out"
    assert p.tables.conflicts == {"update_missing": 1}
    p.pipeline.drain()
    await task


@virtual
async def test_a_row_in_the_way_stops_all_or_its_table() -> None:
    frames = [
        *transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x"), final=50),
        *transaction(200, insert(A.oid, 1, "again"), insert(B.oid, 2, "x"), final=150),
    ]
    for isolates in (False, True):
        p = MemoryPipeline(list(frames))
        p.tables.contested, p.tables.isolates = {A.oid}, isolates
        if isolates:
            task = asyncio.create_task(p.run())
            await until(lambda p=p: p.pipeline.flushed == 200)  # type: ignore[misc]
            assert (p.rows("a"), p.rows("b")) == ([(1, "x")], [(1, "x"), (2, "x")])
            assert p.tables.stopped == {A.oid: 150}
            p.pipeline.drain()
            await task
            continue
        with pytest.raises(BaseExceptionGroup) as raised:
            await p.run()
        error = cause(raised.value)
        assert isinstance(error, UniqueViolation)
        assert error.message == 'conflict detected on relation "a": conflict=insert_exists'
        assert error.detail == "Key already exists in the Delta table.\nKey (id)=(1); remote row (1, again)."
        assert error.context is not None
        assert 'during message type "INSERT"' in error.context
        assert "finished at 0/96" in error.context


@virtual
async def test_a_table_that_has_left_meanwhile_is_passed_over() -> None:
    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    p.tables.gone = {A.oid}
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100)
    assert not p.rows("a")
    assert p.rows("b") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_timers_that_are_reloaded_hold_in_a_stream_that_runs() -> None:
    @dataclass
    class Reloaded:
        status_interval: float = 10.0
        receiver_timeout: float = 0.0

    timers = Reloaded()
    p = MemoryPipeline(timers=timers)
    task = asyncio.create_task(p.run())
    await asyncio.sleep(1000)
    told = len(p.stream.statuses)
    assert 95 <= told <= 105
    timers.status_interval = 1.0
    await asyncio.sleep(100)
    assert 95 <= len(p.stream.statuses) - told <= 105
    timers.receiver_timeout = 60.0
    with pytest.raises(ExceptionGroup) as raised:
        await task
    assert isinstance(cause(raised.value), ConnectionFailure)


@virtual
async def test_a_silent_publisher_is_pinged_at_half_time_and_given_up_at_the_end() -> None:
    p = MemoryPipeline()
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    assert isinstance(cause(raised.value), ConnectionFailure)
    assert 60 < asyncio.get_running_loop().time() < 63
    pings = sum(1 for *_, reply in p.stream.statuses if reply)
    assert 25 <= pings <= 31


@virtual
async def test_silence_while_nothing_was_read_is_not_the_publishers() -> None:
    """A commit longer than wal_receiver_timeout once ended the worker, which then repeated its work, without end."""
    frames = [f for n in range(1, 4) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    p = MemoryPipeline(frames, Limits(1, 1 << 20, 0.1, 10.0, 60.0), reads=5)
    gate = p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(300)
    assert p.pipeline.dispatcher.position == 300, "all is read"
    gate.set()
    await asyncio.sleep(20)
    assert p.pipeline.flushed == 300
    assert not task.done()
    p.pipeline.drain()
    await task


class SlowDisk:
    """A store of prepared transactions (twophase.TwoPhase) that takes long."""

    def __init__(self) -> None:
        self.written = asyncio.Event()

    async def keep(self, preparation: object) -> None:
        await self.written.wait()

    async def origin_stored(self, origin: Lsn) -> None: ...


@virtual
async def test_silence_while_a_prepared_transaction_is_written_is_not_the_publishers() -> None:
    """The worker's status is all that the publisher wants meanwhile, so it has nothing to send."""
    prepared = [
        BeginPrepare(Lsn(190), Lsn(200), 5, Xid(2), "g"),
        A,
        insert(A.oid, 1, "x"),
        Prepare(0, Lsn(190), Lsn(200), 5, Xid(2), "g"),
    ]
    with TemporaryDirectory() as home:
        disk = SlowDisk()
        p = MemoryPipeline([frame(one) for one in prepared], two_phase=disk, buffer=ReorderBuffer(Path(home), 1 << 20))
        task = asyncio.create_task(p.run())
        await asyncio.sleep(100)
        disk.written.set()
        await asyncio.sleep(20)
        assert not task.done()
        assert p.pipeline.flushed == 200
        p.pipeline.drain()
        await task


@virtual
async def test_a_timeout_of_nothing_waits_for_ever() -> None:
    p = MemoryPipeline(limits=replace(LIMITS, receiver_timeout=0.0))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(1000)
    assert not task.done()
    assert len(p.stream.statuses) >= 90
    p.pipeline.drain()
    await task


@virtual
async def test_a_broken_connection_ends_it_with_nothing_lost() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    task = asyncio.create_task(p.run())
    await asyncio.sleep(0.5)
    p.stream.fail(ConnectionFailure("could not receive data from WAL stream"))
    with pytest.raises(BaseExceptionGroup) as raised:
        await task
    assert isinstance(cause(raised.value), ConnectionFailure)
    assert not p.tables.durables


@virtual
async def test_a_message_past_the_limit_is_refused() -> None:
    frames = transaction(100, A, insert(A.oid, 1, "x" * 5000))
    p = MemoryPipeline(frames, Limits(1000, 1 << 20, 1.0, 10.0, 60.0, message=5000))
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    error = cause(raised.value)
    assert isinstance(error, ProgramLimitExceeded)
    assert error.sqlstate == "54000"
    assert "max_message_size" in str(error.hint)


@virtual
async def test_nothing_is_received_while_a_large_value_is_staged() -> None:
    """Receiving one takes several times its size, and so does staging one: at the same time they would take the sum."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:

        async def in_thread(function: Any, *args: Any) -> Any:
            await asyncio.sleep(3)
            return function(*args)

        patch.setattr(asyncio, "to_thread", in_thread)
        patch.setattr(apply.pipeline.pipeline, "_LARGE_FRAME", 300_000)
        for size, received in ((400_000, 100), (270_000, 200)):
            buffer = ReorderBuffer(Path(directory), 64 << 20)
            frames = transaction(100, A, insert(A.oid, 1, "x" * size))
            p = MemoryPipeline(frames, buffer=buffer, reads=len(frames) - 1)  # a read ends with the large frame
            task = asyncio.create_task(p.run())
            await asyncio.sleep(2)
            p.stream.send(transaction(200, insert(A.oid, 2, "y")))
            await asyncio.sleep(1)
            assert p.pipeline.dispatcher.position == received
            await until(lambda p=p: p.pipeline.flushed == 200)
            p.pipeline.drain()
            await task
