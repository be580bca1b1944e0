"""matching_rows in a batch: what a table gets of it, and which transaction an error names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination, Reading
from apply.staging.matching_rows import NotTold
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from pubsub.delta.writers.changeset import Folded
from pubsub.protocol.lsn import INVALID_LSN
from pubsub.protocol.pgoutput import UNCHANGED, Message, Relation
from pubsub.row_filters import RowFilter
from tests.support.frames import INT8, TEXT, delete, insert, relation, transaction, truncate, update
from tests.support.memory import MemoryDelta, target

FULL = relation(16384, "a", identity="f")
KEYED = relation(16384, "a")
WHERE = RowFilter("v <> 'off'", (("v", "v", TEXT),))


class Bench:
    """Stages transactions, which end at 100, 200, …, for a table with a condition; it holds `rows`."""

    def __init__(self, message: Relation, *rows: tuple[int, str], where: RowFilter = WHERE) -> None:
        self.table = replace(target("a"), where=where, closed=True)
        self.delta = MemoryDelta(self.table)
        self.delta.tables["a"].rows.update(rows)
        self.dispatcher = Dispatcher(INVALID_LSN)
        self.message = message
        self.end = 0

    def send(self, *messages: Message) -> None:
        self.end += 100
        self.dispatcher.feed(transaction(self.end, self.message, *messages), 0.0)

    def stage(self) -> list[StagedTable]:
        readings = {self.message: Reading(tuple(self.table.schema), {})}
        destination = Destination(1, self.table, "app", INVALID_LSN, readings=readings)
        with self.delta.installed():
            writers: Any = self.delta
            return stage_batch(self.dispatcher.batch, [{("public", "a"): destination}], writers, "pg_1")

    def folded(self) -> Folded:
        (found,) = self.stage()
        return self.delta.staged[found.staged.directory][1]


def test_nothing_is_staged_for_a_table_that_gets_no_row() -> None:
    b = Bench(FULL)
    b.send(insert(FULL.oid, 1, "off"), insert(FULL.oid, 2, None))
    b.send(update(FULL.oid, 1, None, old=(1, "off"), kind="O"), delete(FULL.oid, 2, None, kind="O"))
    assert b.stage() == []
    b.send(truncate(FULL.oid))
    assert b.folded().truncated


def test_old_rows_tell() -> None:
    b = Bench(FULL)
    b.send(update(FULL.oid, 1, "on", old=(1, "off"), kind="O"), update(FULL.oid, 2, "off", old=(2, "on"), kind="O"))
    b.send(update(FULL.oid, 4, "new", old=(3, "on"), kind="O"), delete(FULL.oid, 5, "off", kind="O"))
    found = b.folded()
    assert (found.inserts, found.updates, found.deletes) == (1, 1, 1)
    assert found.expected is not None, "the table is not looked at"
    assert found.images.to_pylist() == [{"id": 1, "v": "on"}, {"id": 4, "v": "new"}]
    assert sorted(found.expected.standing.column("id").to_pylist()) == [2, 3]


def test_the_table_tells_where_old_rows_do_not() -> None:
    b = Bench(KEYED, (2, "on"), (3, "on"))
    b.send(update(KEYED.oid, 1, "on"), update(KEYED.oid, 2, "off"), update(KEYED.oid, 4, "new", old=(3, None)))
    b.send(delete(KEYED.oid, 5, None), update(KEYED.oid, 6, "off"), update(KEYED.oid, 2, "again"))
    found = b.folded()
    assert (found.inserts, found.updates, found.deletes) == (2, 1, 1)
    assert (found.missing, found.collisions) == (None, None), "none of them is a conflict"
    assert sorted(found.images.column("id").to_pylist()) == [1, 2, 4]


def test_a_value_that_is_not_sent_is_an_error_of_its_own_transaction() -> None:
    message = KEYED
    b = Bench(message, where=RowFilter("id > 1", (("id", "id", INT8),)))
    b.send(insert(message.oid, 1, "a"), insert(message.oid, 5, "b"))
    b.send(update(message.oid, 7, UNCHANGED, old=(1, None)))
    with pytest.raises(NotTold) as raised:
        b.stage()
    assert raised.value.finish_lsn == 192
    assert raised.value.relid == 1
    assert "REPLICA IDENTITY FULL" in str(raised.value.hint)
    b = Bench(message)
    b.send(insert(message.oid, 1, "on"))
    b.send(update(message.oid, 1, UNCHANGED))
    with pytest.raises(NotTold, match="the publisher did not send it") as raised:
        b.stage()
    assert raised.value.finish_lsn == 192
