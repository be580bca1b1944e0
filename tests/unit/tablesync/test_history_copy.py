"""history_copy: what a copy finds in a history that is there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta import change_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import HISTORY, TargetTable
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from tablesync import history_copy

SCHEMA = pa.schema([*change_rows.FIELDS, pa.field("id", pa.int64())])


def table_at(path: Path, *lsns: int) -> TargetTable:
    """Make a Delta table with a row of each LSN, each in a file of its own."""
    for lsn in lsns:
        same = change_rows.copied(Lsn(lsn), 1)
        row = pa.table([pa.array([same.get(field.name)], field.type) for field in SCHEMA], schema=SCHEMA)
        write_deltalake(path, row, mode="append")
    return TargetTable(str(path), SCHEMA, (), "public.t", history=("id",))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the table's properties say; deltalake makes none that it does not know."""
    properties = {HISTORY: json.dumps(["id"]), "pubsub.key": "[]"}
    monkeypatch.setattr(history_copy, "properties", lambda path: properties)
    monkeypatch.setattr(TableLog, "properties", property(lambda log: properties))
    return properties


def log_of(table: TargetTable) -> TableLog:
    log = TableLog(table.path)
    log.refresh()
    return log


def test_a_publisher_that_went_back_is_refused(tmp_path: Path, said: dict[str, str]) -> None:
    """What it lost would stand after what is copied."""
    table = table_at(tmp_path / "t", 100, 5000, 300)
    history_copy.prepare(log_of(table), table, Lsn(5000))
    for log in (log_of(table), None):
        with pytest.raises(
            NotInPrerequisiteState, match=r"ends at 0/1388, which the publisher has not reached"
        ) as refused:
            history_copy.prepare(log, table, Lsn(4999))
        assert "Move the Delta table" in (refused.value.hint or "")


def test_a_mirror_that_becomes_a_history_is_replaced(tmp_path: Path, said: dict[str, str]) -> None:
    table = table_at(tmp_path / "t", 5000)
    del said[HISTORY]
    history_copy.prepare(log_of(table), table, Lsn(1))
    assert history_copy.begun_anew(log_of(table), table, Lsn(1), 2, "name", 0) == []


def test_an_empty_history_has_no_beginning_anew(tmp_path: Path, said: dict[str, str]) -> None:
    table = table_at(tmp_path / "t", 5000)
    DeltaTable(table.path).delete()
    history_copy.prepare(log_of(table), table, Lsn(1))
    assert history_copy.begun_anew(log_of(table), table, Lsn(1), 2, "name", 0) == []


def test_copies_at_one_lsn_follow_each_other() -> None:
    """And all of them the transaction that ends there."""
    places = [change_rows.begun_anew(Lsn(7), 2), change_rows.copied(Lsn(7), 2), change_rows.begun_anew(Lsn(7), 3)]
    assert sorted(places, key=lambda place: place[change_rows.SEQ]) == places
    assert 1 << 61 < int(places[0][change_rows.SEQ]) < 1 << 63
