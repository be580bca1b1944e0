"""The target tables of a publisher's tables."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from apply.schema_changes.table_definition import definition_json, target_table
from pubsub.delta import table as delta
from pubsub.errors import FeatureNotSupported
from pubsub.protocol.column_types import NUMERICOID
from pubsub.protocol.ids import Oid
from pubsub.protocol.type_contract import BY_NAME
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.source import Source

TEXT = 25


def column(name: str, oid: int = TEXT, *, typmod: int = -1, kind: str = "b", generated: str = "") -> ColumnDefinition:
    return ColumnDefinition(name, 1, Oid(oid), typmod, "t", kind, Oid(oid), typmod, kind, False, generated, True)


def table(
    *columns: ColumnDefinition, identity: str = "d", pk: Any = ("id",), identity_key: Any = ()
) -> TableDefinition:
    return TableDefinition(Oid(1), "s", "t", "r", identity, columns, pk, identity_key, 0, 0, False)


ID = column("id", BY_NAME["int8"].oid)


def test_columns_in_order_and_the_key_is_not_null() -> None:
    made = target_table(table(ID, column("n", NUMERICOID, typmod=(12 << 16 | 2) + 4), column("v")), None, "/w/t")
    assert made.schema == pa.schema(
        [pa.field("id", pa.int64(), False), pa.field("n", pa.decimal128(12, 2)), pa.field("v", pa.string())]
    )
    assert (made.path, made.key, made.relation) == ("/w/t", ("id",), "s.t")
    assert json.loads(definition_json(made, "x")) == {"columns": ["id", "n", "v"], "key": ["id"], "attributes": "x"}


@pytest.mark.parametrize(
    ("identity", "pk", "identity_key", "key"),
    [
        ("d", ("id",), ("id",), ("id",)),
        ("d", (), (), ()),
        ("i", ("id",), ("v", "w"), ("v", "w")),
        ("i", (), ("v",), ("v",)),
        ("f", ("id",), (), ("id",)),
        ("f", (), (), ()),
        ("n", ("id",), (), ("id",)),
    ],
)
def test_the_key_by_replica_identity(identity: str, pk: Any, identity_key: Any, key: Any) -> None:
    definition = table(ID, column("v"), column("w"), identity=identity, pk=pk, identity_key=identity_key)
    assert target_table(definition, None, "").key == key


def test_a_column_list() -> None:
    made = target_table(table(ID, column("v"), column("w")), ["w", "id"], "")
    assert made.schema.names == ["id", "w"]
    assert target_table(table(ID, column("v")), ["v"], "").key == (), "a key that is not published names no row"


def test_generated_columns_come_only_where_they_are_published() -> None:
    definition = table(ID, column("g", generated="s"))
    assert target_table(definition, None, "").schema.names == ["id"]
    assert target_table(definition, ["id", "g"], "").schema.names == ["id", "g"]


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(FeatureNotSupported, match=r'columns "Id" and "iD" of table "s\.t" differ only in case'):
        target_table(table(column("Id"), column("iD"), pk=()), None, "")
    with pytest.raises(FeatureNotSupported, match='columns "k" and "\N{KELVIN SIGN}"'):
        target_table(table(column("k"), column("\N{KELVIN SIGN}"), pk=()), None, "")
    assert target_table(table(column("Id"), column("iD"), pk=()), ["iD"], "").schema.names == ["iD"]


def test_an_unsupported_type_names_its_column() -> None:
    with pytest.raises(FeatureNotSupported, match=r'column "p" of table "s\.t"'):
        target_table(table(ID, column("p", 2249, kind="p")), None, "")


def test_a_type_in_sparks_ddl() -> None:
    nested = pa.struct([("a b", pa.list_(pa.int8())), ("m", pa.map_(pa.string(), pa.decimal128(3, 1)))])
    assert delta.spark_ddl(nested) == "STRUCT<`a b`: ARRAY<TINYINT>, `m`: MAP<STRING, DECIMAL(3,1)>>"
    with pytest.raises(FeatureNotSupported):
        delta.spark_ddl(pa.duration("us"))


def test_a_source_has_a_column_and_needs_a_key() -> None:
    """Or that rows are only inserted; the column's name is the table's own."""
    source = Source("_pubsub_source", "one")
    made = target_table(table(ID, column("v")), None, "/w/t", source=source)
    assert made.schema.names == ["id", "v", "_pubsub_source"]
    assert (made.replicated, made.partitioned_by, made.bounded) == (["id", "v"], ("_pubsub_source",), ("id",))
    known = json.loads(definition_json(made, "x"))
    assert known["source"] == ["_pubsub_source", "one"]
    assert delta.mode_of(made) == {delta.SOURCE: "_pubsub_source"}
    assert target_table(table(column("v"), pk=(), identity="d"), None, "", source=source).key == ()
    with pytest.raises(FeatureNotSupported, match="has no key"):
        target_table(table(column("v"), pk=(), identity="f"), None, "", source=source)
    with pytest.raises(FeatureNotSupported, match="only Spark's statement finds rows by"):
        target_table(table(column("id", BY_NAME["float8"].oid)), None, "", source=source)
    with pytest.raises(FeatureNotSupported, match=r'column "_PUBSUB_source" of table .* has a name that source needs'):
        target_table(table(ID, column("_PUBSUB_source")), None, "", source=source)
