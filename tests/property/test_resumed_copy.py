"""A table whose chunks are copied under different snapshots becomes the publisher's table, however its rows move.

The publisher is a model whose tuples move.  The copy is put together from chunks as they stood at random moments.  The
stream, the window, the fold and the Delta table are the real ones.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import structlog
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from apply.batch import Batch
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.delta import table as delta
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import UNCHANGED, Message
from pubsub.publisher.read_table import ReadTable
from tablesync import window
from tablesync.chunk_reader import CopySource
from tests.support.frames import INT8, TEXT, delete, insert, relation, transaction, update
from tests.support.json_transactions import JsonTransactions

OID = 16384
SENT = relation(OID, "a", (("id", INT8), ("n", INT8), ("big", TEXT)))
SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64()), pa.field("big", pa.string())]
)
SLOTS, KEYS = 12, 8

Row = tuple[int, int, str]


@dataclass
class Publisher:
    """`heap` has the rows by place; `history` has the heap before the first transaction and after each one."""

    chance: random.Random
    heap: dict[int, Row] = field(default_factory=dict)
    history: list[dict[int, Row]] = field(default_factory=list)
    sent: list[list[bytes]] = field(default_factory=list)
    values: int = 0

    def begin(self) -> None:
        for key in self.chance.sample(range(KEYS), self.chance.randint(0, KEYS)):
            self.heap[self._place()] = (key, 0, f"first {key}")
        self.history.append(dict(self.heap))

    def commit(self) -> None:
        messages: list[Message] = []
        for _ in range(self.chance.choice([1, 1, 2, 4])):
            messages += self._change()
        self.history.append(dict(self.heap))
        end = self.lsn(len(self.sent) + 1)
        self.sent.append(transaction(end, SENT, *messages, final=Lsn(end - 5)))

    def _place(self) -> int:
        return self.chance.choice([place for place in range(SLOTS + 4) if place not in self.heap])

    def _change(self) -> list[Message]:
        chance = self.chance
        keys = {row[0]: place for place, row in self.heap.items()}
        free = [key for key in range(KEYS) if key not in keys]
        self.values += 1
        kind = chance.choice("iduuukk")
        if kind == "i" or not keys:
            if not free:
                return []
            row = (chance.choice(free), self.values, f"value {self.values}")
            self.heap[self._place()] = row
            return [insert(OID, *row)]
        place = keys[chance.choice(sorted(keys))]
        key, _, big = self.heap.pop(place)
        if kind == "d":
            return [delete(OID, key, None, None)]
        new = chance.choice(free) if kind == "k" and free else key
        unchanged = chance.random() < 0.8
        row = (new, self.values, big if unchanged else f"value {self.values}")
        self.heap[place if chance.random() < 0.3 else self._place()] = row
        old = (key, None, None) if new != key else None
        return [update(OID, new, self.values, UNCHANGED if unchanged else row[2], old=old)]

    def lsn(self, transactions: int) -> Lsn:
        return Lsn(1000 + 10 * transactions)

    def rows(self, transactions: int) -> list[Row]:
        return sorted(self.history[transactions].values())


class Services:
    """The engine and the catalog, as the window uses them."""

    def __init__(self) -> None:
        self.until = INVALID_LSN

    async def run_without_spark(self, work: Any, *args: Any) -> Any:
        return work(*args)

    async def run_until_stopped(self, _stop: Any, work: Any, *args: Any) -> Any:
        return work(*args)

    async def lengthen_window(self, subid: int, relid: int, until: Lsn) -> None:
        self.until = max(self.until, until)


class World:
    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.publisher = Publisher(self.chance)
        self.publisher.begin()
        for _ in range(self.chance.choice([3, 10, 30])):
            self.publisher.commit()
        self.last = len(self.publisher.sent)
        self.table = TargetTable(str(directory / "a"), SCHEMA, ("id",), "public.a")
        self.stage = TableWriters(directory / "stage", JsonTransactions())
        self.services = Services()
        # The publisher's progress, in transactions: later ones cannot be read yet.
        self.now = 0
        self.relation = SubscriptionRel(
            1, OID, "public", "a", RelState.FINISHEDCOPY, None, 1, None, self.table.path, None, None, None, 1
        )

    def copy(self) -> None:
        """Copy chunk by chunk, each at the moment of the one before it or later."""
        assert delta.create_empty(JsonTransactions(), self.table, {})
        edges = [0, *sorted(self.chance.sample(range(1, SLOTS), self.chance.randint(0, 5)))]
        order = self.chance.sample(range(len(edges)), len(edges))
        added = []
        for chunk in order:
            if self.chance.random() < 0.5:
                self.now = min(self.last, self.now + self.chance.choice([1, 2, 5, 20]))
            end = edges[chunk + 1] if chunk + 1 < len(edges) else SLOTS + 4
            rows = [row for place, row in self.publisher.history[self.now].items() if edges[chunk] <= place < end]
            columns = dict(zip(SCHEMA.names, zip(*rows, strict=True), strict=True)) if rows else {}
            part = pa.table({name: list(columns.get(name, ())) for name in SCHEMA.names}, SCHEMA)
            added += data_files.write(self.table, [part])
        log = TableLog(self.table.path, JsonTransactions())
        start = self.publisher.lsn(0)
        arrow_writer.commit_copy(log, self.table, added, Commit("app", start, start))
        self.services.until = self.publisher.lsn(self.now)

    def read_again(self, _source: Any, table: TargetTable, keys: Any, _types: Any, _cut: Any) -> tuple[Any, Lsn]:
        """Stand in for window.read_again, at some moment from now on."""
        self.now = min(self.last, self.now + self.chance.choice([0, 1, 3, 10]))
        wanted = set(keys.column("id").to_pylist())
        rows = [row for row in self.publisher.rows(self.now) if row[0] in wanted]
        found = {name: [row[at] for row in rows] for at, name in enumerate(SCHEMA.names)}
        return pa.table(found, SCHEMA), self.publisher.lsn(self.now)

    async def follow(self) -> int:
        """Follow the stream until the window is passed; return how many transactions the table then holds."""
        at = 0
        while True:
            one = self.window()
            while (stop := one.until) > self.publisher.lsn(at):
                for batch in self.batches(at, stop):
                    await self.apply(batch, one)
                    at = (batch.last_lsn - 1000) // 10
                    # A transaction that was sent has happened at the publisher.
                    self.now = max(self.now, at)
                    if self.chance.random() < 0.1:
                        one = self.window()  # as after a crash
                        break
                else:
                    at = (stop - 1000) // 10
            if self.services.until <= self.publisher.lsn(at):
                return at

    def window(self) -> window.Window:
        source = CopySource("", "", ReadTable("public", "a", tuple(SCHEMA.names), True), "", None)
        services: Any = self.services
        return window.Window(self.relation, self.services.until, SCHEMA, source, {}, catalog=services, engine=services)

    def batches(self, after: int, stop: Lsn) -> list[Batch]:
        dispatcher = Dispatcher(self.publisher.lsn(after))
        found = []
        for frames in self.publisher.sent[after : (stop - 1000) // 10]:
            dispatcher.feed(frames, 0.0)
            if dispatcher.batch.transactions and self.chance.random() < 0.4:
                found.append(dispatcher.take())
        if dispatcher.batch.transactions:
            found.append(dispatcher.take())
        return found

    async def apply(self, batch: Batch, one: window.Window) -> None:
        destinations = {("public", "a"): Destination(OID, self.table, "app", Lsn(batch.first_lsn - 1), window=one)}
        batch.read_messages()
        whole = self.chance.choice([60, 200, 1 << 20])
        for prepared in stage_batch(batch, [destinations], self.stage, "pg_1", whole=whole):
            record = await one.complete(prepared.staged, prepared.commit)
            record = replace(record, previous=delta.committed_lsn(self.table.path, "app"))
            arrow_writer.commit(prepared.staged, record)  # type: ignore[arg-type]

    def rows(self) -> list[Row]:
        found = QueryBuilder().register("x", DeltaTable(self.table.path)).execute("SELECT * FROM x").read_all()
        return sorted(tuple(row.values()) for row in pa.table(found).to_pylist())


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_the_rows_of_many_moments_become_those_of_one(seed: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="pubsub-window-"))
    try:
        with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs():
            world = World(seed, directory)
            patch.setattr(window, "read_again", world.read_again)
            # Rows change their keys all the time here, until the history ends: the window must not give up.
            patch.setattr(window, "_MOST", 1000)
            world.copy()
            at = asyncio.run(world.follow())
        assert world.rows() == world.publisher.rows(at)
    finally:
        shutil.rmtree(directory)
