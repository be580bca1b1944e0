"""Which Delta table a copy may fill: a new one, one without rows, or one of the same subscription."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta import pins
from pubsub.delta import table as delta
from pubsub.delta.alter import for_copy
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, UndefinedTable
from pubsub.protocol.lsn import Lsn
from pubsub.setting_tables import HousekeepingSettings
from pubsub.sql.layouts import Layouts
from pubsub.sql.source import Source
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


def joined(
    path: Path, value: str, *fields: pa.Field, node: str = "n", oid: int = 1, column: str = "source"
) -> TargetTable:
    """Make or join a table of several sources as a subscription does before its copy."""
    source = Source(column, value)
    schema = pa.schema([pa.field("id", pa.int64(), False), *fields, pa.field(column, pa.string())])
    table = TargetTable(str(path), schema, ("id",), "public.t", source=source, partitioned_by=(column,))
    subscription: Any = SimpleNamespace(
        oid=oid,
        publisher_system_identifier="7",
        publisher_database="d",
        options=SimpleNamespace(create_tables=True, layouts=Layouts()),
    )
    asyncio.run(claim_target(table, subscription, node, Engine(), HousekeepingSettings(), _no_spark))  # type: ignore[arg-type]
    return table


def test_sources_join_a_table(tmp_path: Path) -> None:
    """The first one makes it; each is its subscription's, gets the columns that it needs, and leaves what others have."""
    path = tmp_path / "t"
    one = joined(path, "one", pa.field("v", pa.string()))
    log = TableLog(str(path), JsonTransactions())
    log.refresh()
    assert log.partition_columns == ("source",)
    joined(path, "two", pa.field("w", pa.int32()), oid=2)
    log.refresh()
    assert delta.read_schema(str(path)).names == ["id", "v", "source", "w"]
    owners = {name: text for name, text in log.properties.items() if name.startswith("pubsub.source.")}
    assert {name: json.loads(text)["subscription"] for name, text in owners.items()} == {
        "pubsub.source.one": "1",
        "pubsub.source.two": "2",
    }
    assert "pubsub.subscription" not in log.properties
    version = log.version
    joined(path, "one", pa.field("v", pa.string()))
    table, _ = for_copy(log, one)
    rows = pa.table({"id": [1], "v": ["x"], "source": ["one"], "w": [None]}, schema=table.schema)
    arrow_writer.commit_copy(log, table, data_files.write(table, [rows]), Commit("a/1/2/1", Lsn(1), Lsn(1)))
    joined(path, "one", pa.field("v", pa.string()))
    log.refresh()
    assert log.version <= version + 3, "its own rows are replaced by its copy"
    with pytest.raises(NotInPrerequisiteState, match='holds rows of source "one" already'):
        joined(path, "one", pa.field("v", pa.string()), oid=3)
    joined(path, "two", pa.field("w", pa.int32()), oid=3)  # that of subscription 2 is gone, and has left no rows
    with pytest.raises(DuplicateObject, match="another node"):
        joined(path, "two", pa.field("w", pa.int32()), node="other", oid=3)
    with pytest.raises(NotInPrerequisiteState, match='column "v" of table'):
        joined(path, "three", pa.field("v", pa.int64()), oid=4)
    with pytest.raises(NotInPrerequisiteState, match="has its sources in column"):
        joined(path, "three", column="tenant", oid=4)
    with pytest.raises(NotInPrerequisiteState, match="has the rows of several sources"):
        claim(path)
    fill_plain = tmp_path / "plain"
    claim(fill_plain)
    with pytest.raises(NotInPrerequisiteState, match="has no column of sources"):
        joined(fill_plain, "one")
