"""Queries on Delta tables in processes of their own: what runs there can be ended at any moment, and takes its memory with it.

    to the process      a line of JSON (Task), by a socket; the process ends when the other end of that is gone
    from the process    the rows, an Arrow IPC stream, by the socket; the error, if there is one, by a pipe

A process serves one query (query_program.py); it is forked, and so is there at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from pubsub.errors import PubsubError
from pubsub.forks.processes import Processes
from pubsub.node.query import Query
from pubsub.node.select import outputs

if TYPE_CHECKING:
    import pyarrow as pa

_PROGRAM: Final = "query"


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
        self._processes = Processes({_PROGRAM: "pubsub.server.query_program"})

    async def run(self, query: Query) -> AsyncGenerator[list[tuple[Any, ...]]]:
        """Yield a query's rows; however this ends, the process ends with it.  Raises PubsubError."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        with ours, ours.makefile("rb") as source, os.fdopen(reading, "rb") as errors:
            with theirs, os.fdopen(writing, "wb"):
                process = await self._processes.start(_PROGRAM, [theirs.fileno(), writing])
            try:
                task = Task(query.sql, query.versions(), self._conf)
                stream: list[Any] = []
                try:
                    # A process that hangs reads nothing: a long query fills the socket.
                    await asyncio.to_thread(ours.sendall, json.dumps(asdict(task)).encode() + b"\n")
                    while (rows := await asyncio.to_thread(_next, source, stream, query)) is not None:
                        yield rows
                except (OSError, ValueError):
                    raise _failure(errors, await process.wait()) from None
                # The rows of one that was killed between two batches have ended, too.
                if code := await process.wait():
                    raise _failure(errors, code)
            finally:
                process.kill()
                # A thread that is still reading ends with it; what it reads is closed only then.
                await process.wait()

    async def close(self) -> None:
        """End what waits for queries."""
        await self._processes.close()


def _next(source: IO[bytes], stream: list[Any], query: Query) -> list[tuple[Any, ...]] | None:
    """Return the next rows of a process, None after the last.  Raises OSError, ValueError."""
    import pyarrow as pa

    if not stream:
        stream.append(pa.ipc.open_stream(source))
    try:
        batch: pa.RecordBatch = stream[0].read_next_batch()
    except StopIteration:
        return None
    return query.rows(pa.Table.from_batches([batch]))


def _failure(errors: IO[bytes], code: int) -> PubsubError:
    text = errors.read().decode("utf-8", "replace").strip()
    if not text:
        return PubsubError(f"the query's process ended unexpectedly, with exit code {code}", sqlstate="XX000")
    return outputs.complaint(Exception(text))
