"""A query's process: its rows and its error come, and it is gone however the query ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pytest

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.forks.processes import Processes
from pubsub.node.query import Query
from pubsub.server.query_process import QueryProcesses
from pubsub.testing.fault_points import wait_until


@dataclass
class _Query:
    sql: str

    def versions(self) -> dict[str, tuple[str, int]]:
        return {}

    def rows(self, table: pa.Table) -> list[tuple[Any, ...]]:
        return list(zip(*table.to_pydict().values(), strict=True))


FOREVER = "SELECT sum(value) FROM generate_series(1, 1000000000000)"
MANY = "SELECT value FROM generate_series(1, 100000000)"


@pytest.fixture
async def processes() -> AsyncIterator[QueryProcesses]:
    made = QueryProcesses({})
    yield made
    await made.close()


async def _run(processes: QueryProcesses, sql: str) -> list[tuple[Any, ...]]:
    return [row async for rows in processes.run(cast(Query, _Query(sql))) for row in rows]


async def _process(processes: QueryProcesses) -> int:
    """Return the process id of the one that runs, once it does."""

    def running() -> list[int]:
        return [one.pid for one in list(processes._processes._processes.values()) if one.started.done()]

    await asyncio.to_thread(wait_until, running, "the process runs")
    return running()[0]


async def test_rows_and_errors(processes: QueryProcesses) -> None:
    assert await _run(processes, "SELECT value FROM generate_series(1, 3)") == [(1,), (2,), (3,)]
    with pytest.raises(FeatureNotSupported):
        await _run(processes, "SELECT no_such_function(1)")
    with pytest.raises(PubsubError, match="division by zero"):
        await _run(processes, "SELECT 1 / (value - 1) FROM generate_series(1, 3)")
    assert not processes._processes._processes


async def test_one_that_is_killed_is_told(processes: QueryProcesses) -> None:
    running = asyncio.create_task(_run(processes, FOREVER))
    os.kill(await _process(processes), signal.SIGKILL)
    with pytest.raises(PubsubError, match="the query's process ended unexpectedly, with exit code -9"):
        await running


async def test_rows_that_end_with_their_process_are_not_all(processes: QueryProcesses) -> None:
    """Arrow takes the end of what it reads for the end of the rows, where no batch is cut."""
    processes._processes = Processes({"query": "tests.support.cut_query"})
    async with aclosing(processes.run(cast(Query, _Query(MANY)))) as found:
        assert await anext(found) == [(1,)]
        with pytest.raises(PubsubError, match="the query's process ended unexpectedly, with exit code 3"):
            await anext(found)


async def test_none_is_left(processes: QueryProcesses) -> None:
    """Of a query whose rows are not all wanted, nor of one that is cancelled."""
    async with aclosing(processes.run(cast(Query, _Query(MANY)))) as found:
        await anext(found)
    assert not processes._processes._processes
    running = asyncio.create_task(_run(processes, FOREVER))
    await _process(processes)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not processes._processes._processes
