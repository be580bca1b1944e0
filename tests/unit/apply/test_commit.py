"""commit_table's outcomes, with a whole pipeline in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pubsub.delta.log.transactions import ATTEMPTS
from pubsub.errors import NotInPrerequisiteState, Overtaken, PubsubError
from pubsub.protocol.lsn import Lsn
from tests.support.frames import insert, transaction
from tests.support.memory import commits_then_raises, conflicts, fails
from tests.support.memory_pipeline import A, B, MemoryPipeline, cause, virtual
from tests.support.virtual_time import until


@virtual
async def test_an_unknown_outcome_that_was_a_commit_is_taken_as_one() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    p.engine.outcomes["a"] = [commits_then_raises]
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100)
    assert p.rows("a") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_a_conflict_is_tried_again() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    p.engine.outcomes["a"] = [conflicts, conflicts]
    task = asyncio.create_task(p.run())
    await until(lambda: p.pipeline.flushed == 100)
    assert p.rows("a") == [(1, "x")]
    p.pipeline.drain()
    await task


@virtual
async def test_conflicts_without_end_are_given_up() -> None:
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))
    p.engine.outcomes["a"] = [conflicts] * ATTEMPTS
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    assert isinstance(cause(raised.value), NotInPrerequisiteState)
    assert not p.tables.durables


@virtual
async def test_a_conflict_with_a_commit_of_our_own_name_is_not_tried_again() -> None:
    """Another writer committed under our application id: the batch must be filtered and built again."""
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))

    async def overtaken(commit: Callable[[], None]) -> None:
        p.delta.tables["a"].versions["app"] = Lsn(50)
        await conflicts(commit)

    p.engine.outcomes["a"] = [overtaken]
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    error = cause(raised.value)
    assert isinstance(error, Overtaken)
    assert error.detail == "It holds everything up to 0/32; the commit was worked out for 0/0."
    assert not p.rows("a")


@virtual
async def test_a_version_past_the_batch_is_not_taken_for_its_commit() -> None:
    """Another daemon holds more than the batch: which rows that gave is for the next attempt to see."""
    p = MemoryPipeline(transaction(100, A, insert(A.oid, 1, "x")))

    async def overtaken(commit: Callable[[], None]) -> None:
        p.delta.tables["a"].versions["app"] = Lsn(150)
        await conflicts(commit)

    p.engine.outcomes["a"] = [overtaken]
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    assert isinstance(cause(raised.value), Overtaken)
    assert not p.tables.durables


@virtual
async def test_a_failed_commit_does_not_end_the_others_and_advances_nothing() -> None:
    p = MemoryPipeline(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    p.engine.outcomes["a"] = [fails]

    async def slowly(commit: Callable[[], None]) -> None:
        await asyncio.sleep(5)
        commit()

    p.engine.outcomes["b"] = [slowly]
    with pytest.raises(BaseExceptionGroup) as raised:
        await p.run()
    error = cause(raised.value)
    assert isinstance(error, PubsubError)
    assert "disk on fire" in error.message
    assert '"a"' in error.message
    # It may pass, so the table does not stop; but status shows it beside the table.
    assert (error.relid, error.sqlstate) == (A.oid, "58000")
    assert p.rows("b") == [(1, "x")]
    assert not p.tables.durables
    assert all(flushed == 10 for _, flushed, _, _ in p.stream.statuses)
