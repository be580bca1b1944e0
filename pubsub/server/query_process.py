"""Queries on Delta tables in processes of their own: what runs there can be ended at any moment, and takes its memory with it.

    standard input    a line of JSON (Task); the process ends when its standard input does
    standard output   the rows, an Arrow IPC stream
    standard error    the error, if there is one

A process serves one query (query_program.py).  One waits, started, for the next query, so that a query does not wait for
a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from pubsub.errors import PubsubError
from pubsub.node.query import Query
from pubsub.node.select import outputs

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Task:
    """A query in DataFusion's SQL.  `tables`: path and version of each, by its name in the query; `conf`: Spark's, for stores."""

    sql: str
    tables: Mapping[str, tuple[str, int]]
    conf: Mapping[str, str]


class QueryProcesses:
    """The processes of a node's queries."""

    def __init__(self, conf: Mapping[str, str]) -> None:
        self._conf = conf
        self._spare: subprocess.Popen[bytes] | None = None

    async def run(self, query: Query) -> AsyncIterator[list[tuple[Any, ...]]]:
        """Yield a query's rows; however this ends, the process ends with it.  Raises PubsubError."""
        process, self._spare = self._spare, None
        if process is None or process.poll() is not None:
            process = await asyncio.to_thread(_start)
        try:
            task = Task(query.sql, query.versions(), self._conf)
            # A process that is still starting, or hangs, reads nothing: a long query fills the pipe.
            await asyncio.to_thread(_give, process, json.dumps(asdict(task)).encode() + b"\n")
            if self._spare is None:
                self._spare = await asyncio.to_thread(_start)
            stream: list[Any] = []
            while (rows := await asyncio.to_thread(_next, process, stream, query)) is not None:
                yield rows
        finally:
            _end(process)

    def close(self) -> None:
        """End the process that waits."""
        if self._spare is not None:
            _end(self._spare)
            self._spare = None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pubsub.server.query_program"]
    # NumPy, which pyarrow imports, would start a thread for each processor; nothing here computes with it.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def _give(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError, ValueError):
            if pipe is not None:
                pipe.close()


def _next(process: subprocess.Popen[bytes], stream: list[Any], query: Query) -> list[tuple[Any, ...]] | None:
    """Return the next rows of a process, None after the last.  Raises PubsubError."""
    import pyarrow as pa

    assert process.stdout is not None
    try:
        if not stream:
            stream.append(pa.ipc.open_stream(process.stdout))
        batch: pa.RecordBatch = stream[0].read_next_batch()
    except StopIteration:
        if process.wait() == 0:
            return None
        raise _failure(process.stderr) from None
    except (pa.ArrowInvalid, OSError, ValueError):
        raise _failure(process.stderr) from None
    return query.rows(pa.Table.from_batches([batch]))


def _failure(errors: IO[bytes] | None) -> PubsubError:
    text = errors.read().decode("utf-8", "replace") if errors is not None and not errors.closed else ""
    return outputs.complaint(Exception(text.strip()))
