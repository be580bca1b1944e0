"""Delta tables in memory, with the writer's contract, which replace Spark in tests of the pipeline.

As in Delta, a commit counts once per (application id, version).  Tests can make a commit fail, succeed and then fail,
or take long.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import apply.pipeline.pipeline
import apply.staging.large_batches
import apply.staging.stage_batch
import pubsub.delta.table
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.delta.log.transactions import Conflict
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import spark_writer
from pubsub.delta.writers.changeset import BASE_PREFIX, COUNT_COLUMN, UNCHANGED_PREFIX, Folded, NotAsExpected
from pubsub.delta.writers.spark_writer import Staged
from pubsub.delta.writers.staged_parts import Rest
from pubsub.protocol.lsn import INVALID_LSN, Lsn

Row = tuple[Any, ...]


def target(path: str, *fields: pa.Field, key: tuple[str, ...] = ("id",), relation: str | None = None) -> TargetTable:
    """Make a target table; by default its fields are (id bigint, v text)."""
    schema = pa.schema(fields or (pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())))
    return TargetTable(path, schema, key, relation or path)


@dataclass
class MemoryTable:
    """One table: `rows` with their counts; `versions` by application id; `log` has the commits in order."""

    rows: Counter[Row] = field(default_factory=Counter)
    versions: dict[str, Lsn] = field(default_factory=dict)
    log: list[Commit] = field(default_factory=list)


class MemoryDelta:
    """The tables by path, and the batches staged for them and not yet discarded."""

    def __init__(self, *targets: TargetTable) -> None:
        self.targets = {target.path: target for target in targets}
        self.tables: dict[str, MemoryTable] = {target.path: MemoryTable() for target in targets}
        self.staged: dict[Path, tuple[TargetTable, Folded, bool]] = {}
        self.others: dict[str, list[OtherCommit]] = {}
        self._numbers = itertools.count()

    def rows(self, path: str) -> list[Row]:
        return sorted(self.tables[path].rows.elements(), key=repr)

    # pubsub.delta.writers.choose_writer.Stage

    def write(self, table: TargetTable, folded: Folded, *, replace_all: bool, rows: int = 0) -> Staged:
        directory = Path(f"/nonexistent/{next(self._numbers)}")
        self.staged[directory] = (table, folded, replace_all)
        return Staged(table, directory, None, None, None, None, replace_all, None, 0)

    def written_by_others(self, table: TargetTable, app_id: str) -> list[OtherCommit]:
        return self.others.get(table.path, [])

    def forget_others(self, path: str, app_id: str, version: int) -> None:
        left = [commit for commit in self.others.pop(path, []) if commit.version > version]
        if left:
            self.others[path] = left

    def present(self, table: TargetTable, app_id: str) -> Holding:
        return Holding(self.tables[table.path].rows, [table.schema.names.index(name) for name in table.key])

    def look(self, staged: Staged, record: Commit) -> None:
        table, folded, _ = self.staged[staged.directory]
        expected = folded.expected
        if expected is not None and self.tables[table.path].versions.get(record.app_id) == record.previous:
            present = self.present(table, record.app_id)
            if not present.keys(expected.standing).all() or present.keys(expected.free).any():
                raise NotAsExpected

    def discard(self, staged: Staged) -> None:
        self.staged.pop(staged.directory, None)

    def parts(self, table: TargetTable, *, rewrites: bool, replace_all: bool, rows: int = 0) -> MemoryParts:
        return MemoryParts(self, table, replace_all)

    def forget(self, path: str, *, shared: bool = False) -> None: ...

    # pubsub.delta.writers.spark_writer.commit

    def commit(self, staged: Staged, record: Commit) -> None:
        table, folded, replace_all = self.staged[staged.directory]
        held = self.tables[table.path]
        if held.versions.get(record.app_id, INVALID_LSN) >= record.last:
            return
        held.rows = apply_folded(table, folded, replace_all, held.rows)
        held.versions[record.app_id] = record.last
        held.log.append(record)

    # pubsub.delta.table

    def committed_lsn(self, path: str, app_id: str) -> Lsn | None:
        return self.tables[path].versions.get(app_id)

    def load(self, path: str, relation: str, definition: str | None) -> TargetTable:
        return self.targets[path]

    def properties(self, path: str) -> dict[str, str]:
        return {}

    @contextmanager
    def installed(self) -> Iterator[MemoryDelta]:
        """Replace apply.delta in the code under test."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pubsub.delta.table, "committed_lsn", self.committed_lsn)
            patch.setattr(pubsub.delta.table, "load", self.load)
            patch.setattr(pubsub.delta.table, "properties", self.properties)
            patch.setattr(apply.pipeline.pipeline, "discard", self.discard)
            patch.setattr(apply.staging.stage_batch, "discard", self.discard)
            patch.setattr(apply.staging.large_batches, "discard", self.discard)
            yield self


class Holding:
    """changeset.Present of rows in memory; `key` has the positions of the key's columns."""

    def __init__(self, rows: Counter[Any], key: Sequence[int]) -> None:
        self._rows = rows
        self._key = key

    def keys(self, keys: Any) -> Any:
        there = {tuple(row[place] for place in self._key) for row in +self._rows}
        return np.array([tuple(key.values()) in there for key in keys.to_pylist()], np.bool_)

    def copies(self, rows: Any) -> Any:
        return np.array([self._rows[tuple(row.values())] for row in rows.to_pylist()], np.int64)


class MemoryParts:
    """parts.StagedParts: joins the folded parts into one batch."""

    def __init__(self, delta: MemoryDelta, table: TargetTable, replace_all: bool) -> None:
        self._delta, self._table, self._replace_all = delta, table, replace_all
        self._parts: list[Folded] = []

    def add(self, folded: Folded) -> None:
        self._parts.append(folded)

    def finish(self) -> Staged:
        rest = Rest()
        for part in self._parts:
            rest.add(part)
        rest_images = self._table.schema.empty_table()
        joined = replace(
            rest.joined(self._table),
            images=pa.concat_tables(part.images for part in self._parts) if self._parts else rest_images,
        )
        return self._delta.write(self._table, joined, replace_all=self._replace_all)

    def abort(self) -> None:
        self._parts.clear()


def apply_folded(table: TargetTable, folded: Folded, replace_all: bool, rows: Counter[Row]) -> Counter[Row]:
    """Return the table's rows after the writer has applied `folded`."""
    names = table.schema.names
    width = [names.index(name) for name in table.key]
    by_key = {tuple(row[i] for i in width): row for row in rows} if table.key else {}
    result = Counter() if replace_all else Counter(rows)
    for key in folded.deleted_keys.to_pylist():
        row = by_key.get(tuple(key[name] for name in table.key))
        if row is not None:
            result.pop(row, None)
    for removed in folded.removed.to_pylist():
        row = tuple(removed[name] for name in names)
        result[row] = max(0, result[row] - removed[COUNT_COLUMN])
    for image in folded.images.to_pylist():
        result[tuple(_hashable(image[name]) for name in names)] += 1
    for image in folded.masked.to_pylist():
        base = by_key.get(tuple(image[f"{BASE_PREFIX}{j}"] for j in range(len(table.key))))
        if base is not None:
            hidden = [image.get(f"{UNCHANGED_PREFIX}{i}", False) for i in range(len(names))]
            result[tuple(base[i] if hidden[i] else image[name] for i, name in enumerate(names))] += 1
    return +result


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Outcome = Callable[[Callable[[], None]], Awaitable[None]]


async def succeeds(commit: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    commit()


async def fails(commit: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    raise RuntimeError("disk on fire\nat somewhere")


async def commits_then_raises(commit: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    commit()
    raise RuntimeError("connection to the JVM lost")


async def conflicts(commit: Callable[[], None]) -> None:
    raise Conflict("[DELTA_CONCURRENT_APPEND.WITHOUT_HINT] Transaction conflict detected.\nand more")


class MemoryEngine:
    """engine.Engine; `outcomes` are those of the next commits to a path, after which commits succeed."""

    def __init__(self, delta: MemoryDelta) -> None:
        self.delta = delta
        self.outcomes: dict[str, list[Outcome]] = {}
        self.running = 0

    async def run(self, work: Any, staged: Staged, record: Commit) -> None:
        assert work is spark_writer.commit
        outcomes = self.outcomes.get(staged.table.path, [])
        outcome = outcomes.pop(0) if outcomes else succeeds
        self.running += 1
        try:
            await outcome(lambda: self.delta.commit(staged, record))
        finally:
            self.running -= 1

    async def run_without_spark(self, work: Any, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return work(*arguments)


class MemoryStream:
    """replication.ReplicationStream: returns what was sent, `limit` frames at a time; keeps status updates."""

    def __init__(self, frames: list[bytes] | None = None, *, limit: int = 1_000_000) -> None:
        self.statuses: list[tuple[Lsn, Lsn, Lsn, bool]] = []
        self.last_receive = 0.0
        self.closed = False
        self.failure: Exception | None = None
        self.answers_pings = True
        self._limit = limit
        self._frames = list(frames or ())
        self._there = asyncio.Event()

    def send(self, frames: list[bytes]) -> None:
        self._frames += frames
        self._there.set()

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self._there.set()

    async def receive(self, max_bytes: int = 0) -> list[bytes]:
        while not self._frames:
            if self.failure is not None:
                raise self.failure
            self._there.clear()
            await self._there.wait()
        await asyncio.sleep(0)
        taken, self._frames = self._frames[: self._limit], self._frames[self._limit :]
        self.last_receive = asyncio.get_running_loop().time()
        return taken

    async def send_status(self, written: Lsn, flushed: Lsn, applied: Lsn, *, reply: bool = False) -> None:
        self.statuses.append((written, flushed, applied, reply))

    async def close(self, timeout: float = 5.0) -> None:
        self.closed = True
