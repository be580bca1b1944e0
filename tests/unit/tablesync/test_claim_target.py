"""Which Delta table a copy may fill: a new one, one without rows, or one of the same subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta import pins
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.errors import NotInPrerequisiteState, UndefinedTable
from pubsub.protocol.lsn import Lsn
from pubsub.setting_tables import HousekeepingSettings
from tablesync.claim_target import claim_target
from tests.support.json_transactions import JsonTransactions

SCHEMA = pa.schema([pa.field("id", pa.int64())])
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})


class Transactions(JsonTransactions):
    def change_properties(self, path: str, change: pins.Change) -> None:
        log = TableLog(path, self)
        log.refresh()
        configuration = change(log.properties)
        log.commit([{"metaData": {**log.metadata, "configuration": configuration}}], Operation.ALTER)


class Engine:
    """Runs in the test's own thread; a table that only Spark can create fails the test."""

    transactions = Transactions()

    async def run_without_spark(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


async def _no_spark() -> None:
    raise AssertionError("Spark is started")


def target(path: Path) -> TargetTable:
    return TargetTable(str(path), SCHEMA, (), "public.t")


def fill(path: Path) -> None:
    """Copy two rows to the table."""
    log = arrow_writer.writable_log(str(path), JsonTransactions())
    assert log is not None
    added = data_files.write(target(path), [ROWS])
    arrow_writer.commit_copy(log, target(path), added, Commit("a/1/2/1", Lsn(1), Lsn(1)))


def claim(
    path: Path,
    *,
    node: str = "n",
    oid: int = 1,
    publisher: str = "7",
    create_tables: bool = True,
    housekeeping: bool = True,
) -> None:
    subscription: Any = SimpleNamespace(
        oid=oid,
        publisher_system_identifier=publisher,
        publisher_database="d",
        options=SimpleNamespace(create_tables=create_tables),
    )
    kept = HousekeepingSettings(enabled=housekeeping)
    asyncio.run(claim_target(target(path), subscription, node, Engine(), kept, _no_spark))  # type: ignore[arg-type]


def test_a_missing_table_is_created(tmp_path: Path) -> None:
    claim(tmp_path / "t")
    assert DeltaTable(tmp_path / "t").metadata().configuration["pubsub.publisher"] == "7/d"


def test_a_missing_table_is_refused_without_create_tables(tmp_path: Path) -> None:
    with pytest.raises(UndefinedTable, match="does not exist"):
        claim(tmp_path / "t", create_tables=False)


def test_rows_of_the_same_subscription_are_replaced_whatever_its_publisher_is_now(tmp_path: Path) -> None:
    claim(tmp_path / "t")
    fill(tmp_path / "t")
    claim(tmp_path / "t", publisher="8", create_tables=False)


@pytest.mark.parametrize("other", [{"node": "m"}, {"oid": 2}])
def test_rows_of_another_node_or_subscription_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    claim(tmp_path / "t")
    fill(tmp_path / "t")
    with pytest.raises(NotInPrerequisiteState, match="holds rows already"):
        claim(tmp_path / "t", **other)


def test_a_table_of_somebody_else_is_taken_if_it_has_no_rows(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", ROWS.slice(0, 0))
    claim(tmp_path / "t", create_tables=False)
    properties = DeltaTable(tmp_path / "t").metadata().configuration
    ours = {"pubsub.node": "n", "pubsub.subscription": "1", "pubsub.publisher": "7/d"}
    assert properties == {**ours, "delta.checkpointInterval": "10000"}
    # The next copy may replace what this one brings, and another subscription's may not.
    fill(tmp_path / "t")
    claim(tmp_path / "t")
    with pytest.raises(NotInPrerequisiteState, match="holds rows already"):
        claim(tmp_path / "t", oid=2)


def test_checkpoints_are_left_to_housekeeping_unless_the_table_says_otherwise(tmp_path: Path) -> None:
    claim(tmp_path / "new")
    assert DeltaTable(tmp_path / "new").metadata().configuration["delta.checkpointInterval"] == "10000"
    claim(tmp_path / "alone", housekeeping=False)
    assert DeltaTable(tmp_path / "alone").metadata().configuration["delta.checkpointInterval"] == "100"
    for name, own in {"own": "7", "delta's": None}.items():
        configuration = {} if own is None else {"delta.checkpointInterval": own}
        write_deltalake(tmp_path / name, ROWS.slice(0, 0), configuration=configuration)
        claim(tmp_path / name, housekeeping=own is not None)
        assert DeltaTable(tmp_path / name).metadata().configuration.get("delta.checkpointInterval") == own


def test_rows_of_somebody_else_are_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", ROWS)
    with pytest.raises(NotInPrerequisiteState, match="holds rows already"):
        claim(tmp_path / "t")
    assert DeltaTable(tmp_path / "t").version() == 0


def test_a_table_that_lacks_a_column_stays_as_it_is(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"other": pa.array([], pa.int64())}))
    with pytest.raises(NotInPrerequisiteState, match="missing replicated columns"):
        claim(tmp_path / "t")
    assert DeltaTable(tmp_path / "t").version() == 0
