"""What Spark says of a row that breaks a constraint, in PostgreSQL's words."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pubsub.delta import table as delta
from pubsub.delta.files import constraints, data_files
from pubsub.delta.table import TargetTable
from pubsub.errors import InvalidValue
from tests.support.json_transactions import JsonTransactions

TABLE = TargetTable("/t", pa.schema([pa.field("id", pa.int64(), False)]), ("id",), "public.t")

SAID = {
    "23514": (
        "[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint small (n < 1000) violated by row with values:\n - n : 1000",
        'new row for relation "public.t" violates check constraint "small"',
    ),
    "23502": (
        "[DELTA_NOT_NULL_CONSTRAINT_VIOLATED] NOT NULL constraint violated for column: n.\n",
        'null value in column "n" of relation "public.t" violates not-null constraint',
    ),
    "22001": (
        "[EXCEED_LIMIT_LENGTH] Exceeds char/varchar type length limitation: 40. SQLSTATE: 54006",
        "value too long for type character varying(40)",
    ),
}


@pytest.mark.parametrize("sqlstate", SAID)
def test_each_constraint(sqlstate: str) -> None:
    said, message = SAID[sqlstate]
    found = constraints.violated(Exception(f"Job aborted.\nCaused by: {said}"), TABLE)
    assert found is not None
    assert (found.sqlstate, found.message) == (sqlstate, message)


def test_other_errors_are_none() -> None:
    assert constraints.violated(Exception("ConcurrentAppendException"), TABLE) is None


def test_a_null_is_refused_before_a_file_is_written(tmp_path: object) -> None:
    table = TargetTable(f"{tmp_path}/t", TABLE.schema, ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    with pytest.raises(InvalidValue, match='null value in column "id"') as raised:
        data_files.write(table, [pa.table({"id": pa.array([1, None], pa.int64())})])
    assert raised.value.sqlstate == "23502"
