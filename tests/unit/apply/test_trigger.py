"""Trigger: when a batch closes, asked directly, and then in a pipeline in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from apply.batch import Batch, OpenTransaction
from apply.pipeline.interfaces import Limits
from apply.pipeline.trigger import Trigger
from pubsub.protocol.lsn import Lsn
from tests.support.frames import insert, transaction
from tests.support.memory_pipeline import A, MemoryPipeline, virtual
from tests.support.virtual_time import until

OPENED = 100.0
"""When the batches below were opened, in monotonic seconds; their rows have 10 bytes."""

WIDE = Limits(rows=100_000, nbytes=10_000_000, age=5.0, status_interval=10.0, receiver_timeout=60.0, early=0)


def batch(rows: int = 1, *, end: int = 100, commit_time: int = 0) -> Batch:
    """Make a batch of one transaction."""
    made = Batch({})
    made.add(OpenTransaction(7, Lsn(end - 1), commit_time, [b"0123456789"] * rows), Lsn(end), OPENED)
    return made


def due_at(trigger: Trigger, batch: Batch, **stream: Any) -> float | None:
    """Ask when the batch is due; the stream has no backlog, and no commit is running, unless `stream` says so."""
    usual = {"closing": False, "committing": False, "sent_at": 0, "last_receive": OPENED}
    return trigger.due_at(batch, **{**usual, **stream})


def test_a_batch_is_due_at_its_age() -> None:
    assert due_at(Trigger(WIDE), batch()) == OPENED + 5.0
    assert not Trigger(WIDE).full(batch(), closing=False)


def test_a_batch_closes_early_enough_to_be_visible_at_its_age_but_not_before_half_of_it() -> None:
    trigger = Trigger(WIDE)
    for _ in range(100):
        trigger.committed(1.5)
    assert due_at(trigger, batch()) == pytest.approx(OPENED + 3.5)
    trigger.committed(0.0)
    assert due_at(trigger, batch()) == pytest.approx(OPENED + 3.5 + 1.5 / 4)
    for _ in range(100):
        trigger.committed(60.0)
    assert due_at(trigger, batch()) == OPENED + 2.5


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Limits(10, 10**9, 5.0, 10.0, 60.0, memory=10**9), id="rows"),
        pytest.param(Limits(10**9, 100, 5.0, 10.0, 60.0, memory=10**9), id="bytes"),
        pytest.param(Limits(10**9, 10**9, 5.0, 10.0, 60.0, memory=200), id="half of the memory"),
    ],
)
def test_a_batch_at_a_bound_is_full_and_due_at_once_even_during_a_commit(limits: Limits) -> None:
    trigger = Trigger(limits)
    assert not trigger.full(batch(9), closing=False)
    assert trigger.full(batch(10), closing=False)
    assert due_at(trigger, batch(10), committing=True) == OPENED


def test_a_batch_that_the_dispatcher_closes_is_full_unless_it_is_empty() -> None:
    trigger = Trigger(WIDE)
    assert trigger.full(batch(), closing=True)
    assert due_at(trigger, batch(), closing=True, committing=True) == OPENED
    assert not trigger.full(Batch({}), closing=True)


def test_during_a_commit_a_batch_grows_until_it_is_worth_staging_ahead() -> None:
    trigger = Trigger(WIDE)
    assert due_at(trigger, batch(49_999), committing=True) is None
    assert due_at(trigger, batch(50_000), committing=True) == OPENED + 5.0


def test_a_backlog_is_due_when_the_stream_runs_dry() -> None:
    """A backlog: the publisher sent its newest frame more than 2 s after the last commit, by its own clock."""
    trigger = Trigger(WIDE)
    late = {"last_receive": OPENED + 60.0}
    assert due_at(trigger, batch(commit_time=1_000_000), sent_at=3_000_000, **late) == OPENED + 5.0
    assert due_at(trigger, batch(commit_time=1_000_000), sent_at=3_000_001, **late) == OPENED + 60.25
    assert due_at(trigger, batch(), sent_at=3_000_000, last_receive=OPENED) == OPENED + 5.0, "its age comes first"


QUIET = replace(WIDE, early=2)


def opened(at: float) -> Batch:
    """Make a batch whose transaction joined at that moment."""
    made = Batch({})
    made.add(OpenTransaction(7, Lsn(99), 0, [b"x"]), Lsn(100), at)
    return made


def test_a_quiet_stream_does_not_wait_for_the_age() -> None:
    trigger = Trigger(QUIET)
    assert due_at(trigger, batch()) == pytest.approx(OPENED + 0.03)
    assert due_at(trigger, batch(), last_receive=OPENED + 1) == pytest.approx(OPENED + 1.03), "since the last frame"
    assert due_at(trigger, batch(), last_receive=OPENED + 5) == OPENED + 5.0, "its age comes first"
    assert due_at(trigger, batch(), committing=True) is None
    assert due_at(trigger, batch(commit_time=1), sent_at=3_000_000) == OPENED + 5.0, "a backlog is not quiet"


def test_few_batches_close_early_where_one_would_have_been() -> None:
    """Two in a row, and then one in twice the age: the others close at their age."""
    trigger = Trigger(QUIET)
    at, early = OPENED, 0
    for _ in range(200):  # a transaction, silence, and the next one half a second after the batch
        due = due_at(trigger, opened(at), last_receive=at)
        assert due is not None
        early += due < at + 5.0
        trigger.closed(opened(at), due)
        at = due + 0.5
    seconds = at - OPENED
    assert 2 + seconds / 10 - 2 < early < 2 + seconds / 10 + 2


def test_an_early_batch_that_stays_alone_costs_nothing() -> None:
    """A transaction each time the age is over: each would have had its own batch."""
    trigger = Trigger(QUIET)
    at = OPENED
    for _ in range(20):
        due = due_at(trigger, opened(at), last_receive=at)
        assert due == pytest.approx(at + 0.03)
        trigger.closed(opened(at), due)
        at += 5.1


def test_full_batches_do_not_use_up_the_early_ones() -> None:
    trigger = Trigger(replace(QUIET, rows=10))
    for _ in range(5):
        trigger.closed(batch(10), OPENED)
    assert due_at(trigger, batch()) == pytest.approx(OPENED + 0.03)
    for _ in range(2):
        trigger.closed(batch(), OPENED)
    assert due_at(trigger, batch()) == OPENED + 5.0


def test_only_the_first_batch_that_reaches_align_at_closes_there() -> None:
    trigger = Trigger(WIDE, Lsn(300))
    trigger.closed(batch(end=200), OPENED)
    assert trigger.align_at == 300
    assert not trigger.full(batch(end=299), closing=False)
    assert trigger.full(batch(end=300), closing=False)
    trigger.closed(batch(end=300), OPENED)
    assert trigger.align_at is None
    assert not trigger.full(batch(end=400), closing=False)


@virtual
async def test_a_full_batch_does_not_wait_for_its_age() -> None:
    frames = [*transaction(100, A, insert(A.oid, 1, "x")), *transaction(200, insert(A.oid, 2, "x"))]
    p = MemoryPipeline(frames, Limits(1, 1 << 20, 3600.0, 10.0, 60.0), reads=4)
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 200, 5.0)
    assert p.commits("a") == [(100, 100), (200, 200)]
    p.pipeline.drain()
    await task


@virtual
async def test_the_first_transaction_after_silence_is_committed_at_once() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), Limits(1000, 1 << 20, 3600.0, 10.0, 60.0))
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100, 5.0)
    p.pipeline.drain()
    await task


@virtual
async def test_bytes_close_a_batch_too() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x" * 500)), Limits(10**6, 400, 3600.0, 10.0, 60.0))
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100, 5.0)
    p.pipeline.drain()
    await task


@virtual
async def test_while_a_commit_runs_the_next_batch_grows() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")), Limits(10, 1 << 20, 0.1, 10.0, 60.0))
    gate = p.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(p.run())
    await asyncio.sleep(1)
    for number in range(2, 9):
        p.stream.send(transaction(number * 100, insert(A.oid, number, "x")))
        await asyncio.sleep(1)
    assert not p.rows("a")
    gate.set()
    await until(lambda: p.pipeline.flushed == 800)
    assert p.commits("a") == [(100, 100), (200, 800)]
    p.pipeline.drain()
    await task


@virtual
async def test_the_first_batch_closes_where_the_last_life_ended() -> None:
    frames = [f for n in range(1, 6) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    p = MemoryPipeline(frames, align_at=Lsn(300))
    p.tables.after["a"] = Lsn(300)
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 500)
    assert p.tables.durables == [300, 500]
    assert p.commits("a") == [(400, 500)]
    p.pipeline.drain()
    await task


@virtual
async def test_logs_of_a_batch_hold_half_of_the_memory() -> None:
    """A batch closes at that size, whatever its own bounds are."""
    frames = [f for n in range(1, 9) for f in transaction(n * 100, A, insert(A.oid, n, "x" * 1000))]
    p = MemoryPipeline(frames, Limits(10**6, 1 << 30, 3600.0, 10.0, 60.0, memory=4000), reads=4)
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed >= 600, 5.0)
    assert max(last - first for first, last in p.commits("a")) <= 100
    p.pipeline.drain()
    await task
