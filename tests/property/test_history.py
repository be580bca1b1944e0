"""mode = history: wherever a stream is cut or breaks, the publisher's rows as of every commit can be read from the history."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from apply.batch import Batch
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from pubsub.delta import change_rows
from pubsub.delta.table import TargetTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tests.property.test_batches import RELATIONS, Publisher, Wish, commit_staged, histories, lives, wholes
from tests.support.history import as_of
from tests.support.memory import MemoryDelta, target


def kept(table: TargetTable) -> TargetTable:
    schema = pa.schema([*change_rows.FIELDS, *(field.with_nullable(True) for field in table.schema)])
    return replace(table, schema=schema, key=(), history=table.key)


TARGETS = [kept(target("a")), kept(target("b")), kept(target("full", key=()))]


def commit(delta: MemoryDelta, batch: Batch, versions: dict[str, Lsn], only: set[str] | None, whole: int) -> None:
    batch.read_messages()
    destinations = {
        ("public", t.path): Destination(RELATIONS[t.path].oid, t, "app", versions.get(t.path, INVALID_LSN))
        for t in TARGETS
    }
    commit_staged(delta, stage_batch(batch, [destinations], delta, "pg_1", whole=whole), versions, only)  # type: ignore[arg-type]


def rows_of(delta: MemoryDelta, table: TargetTable) -> list[dict[str, Any]]:
    return [dict(zip(table.schema.names, row, strict=True)) for row in delta.rows(table.path)]


@settings(max_examples=150)
@given(histories, st.data())
def test_every_moment_can_be_read(history: list[list[Wish]], data: st.DataObject) -> None:
    """Some tables of a batch are committed, then the process dies; the next life starts at the origin, and cuts others."""
    publisher = Publisher(history)
    states: list[dict[str, Counter[Any]]] = []
    for count in range(len(history)):
        until = Publisher(history[: count + 1])
        states.append({name: until.rows(name) for name in RELATIONS})
    delta = MemoryDelta(*TARGETS)
    versions: dict[str, Lsn] = {}
    whole = data.draw(wholes)
    with delta.installed():
        for _ in lives(publisher, data, lambda batch, only: commit(delta, batch, versions, only, whole)):
            pass
    for table in TARGETS:
        rows = rows_of(delta, table)
        places = [(row[change_rows.LSN], row[change_rows.SEQ]) for row in rows]
        assert len(set(places)) == len(places), "two rows at one place"
        for end, state in zip(publisher.ends, states, strict=True):
            assert as_of(rows, end, ["id", "v"], table.identity) == state[table.path], (table.path, end)
