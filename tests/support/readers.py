"""A Delta table as its readers have it, beside each other."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta.spark.spark_session import Spark
from tests.support import duck, stores


def assert_read_alike(path: str, spark: Spark) -> None:
    """deltalake, DuckDB and Spark read the same columns and rows."""
    found: Any = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t").read_all()
    ours = _rows(pa.table(found))
    with duck.reader() as connection, stores.readable(path) as files:
        found = connection.execute(f"SELECT * FROM delta_scan('{files}')").to_arrow_table()
    assert _rows(found) == ours, "DuckDB"
    assert _rows(spark.session.read.format("delta").load(path).toArrow()) == ours, "Spark"


def _rows(table: Any) -> list[str]:
    return sorted(map(str, table.to_pylist()))
