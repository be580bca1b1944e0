"""Arrays, composites and VARIANT as nested values, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pubsub.protocol.arrow_arrays import nulls, repeated
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.column_types import spark_ddl
from pubsub.protocol.refused_values import InvalidText
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import VARIANT

INTS = pa.list_(pa.field("element", pa.int32()))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("[0:1]={1,2}", INTS),
        ("{{1,2},{3,4}}", INTS),
        ("{1,2147483648}", INTS),
        ("{1,x}", INTS),
        ("{1", INTS),
        ("{1,}", INTS),
        ('{"1}', INTS),
        ("{infinity}", pa.list_(pa.date32())),
        ("{1.00,NaN}", pa.list_(pa.decimal128(6, 2))),
        ("(1)", pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        ("(1,2,3)", pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        ('(1,"{{1}}")', pa.struct([("a", pa.int32()), ("b", INTS)])),
        ('{"(1,{NaN})"}', pa.list_(pa.struct([("a", pa.int32()), ("b", pa.list_(pa.decimal128(6, 2)))]))),
        ("1" * 39, VARIANT),
        ("[0." + "1" * 39 + "]", VARIANT),
        ("1e5", VARIANT),
        ("[" * 1000 + "]" * 1000, VARIANT),
    ],
)
def test_values_that_are_refused(text: str, target: pa.DataType) -> None:
    """The error has the whole value's text and its row."""
    good = {True: "{}"}.get(pa.types.is_list(target))
    values = [good, None, text, good]
    with pytest.raises(InvalidText) as caught:
        from_text(pa.array([None if one is None else one.encode() for one in values], pa.binary()), target)
    assert caught.value.index == 2
    assert caught.value.text == text.encode()
    assert f"by Delta type {spark_ddl(target)}" in caught.value.message


def test_shapes_of_binary_arrays() -> None:
    """Two dimensions, and another lower bound."""
    plain = struct.pack(">iiIiiii", 1, 0, 23, 1, 1, 4, 7)
    for edges, text in (((2, 1, 1, 1, 1), b"{{7}}"), ((1, 1, 0), b"[0:0]={7}")):
        other = struct.pack(">iiI", edges[0], 0, 23) + struct.pack(f">{len(edges) - 1}i", *edges[1:]) + plain[-8:]
        with pytest.raises(InvalidText) as caught:
            from_binary(pa.array([plain, other]), 1007, INTS, BinaryTypes())
        assert (caught.value.index, caught.value.text) == (1, text)


def test_variant() -> None:
    """Header bits and little-endian numbers, as the encoding's specification has them."""
    texts = [
        "null",
        "true",
        "false",
        "1",
        "-129",
        "70000",
        str(2**40),
        str(10**20),
        "1.10",
        '"a"',
        '"' + "x" * 64 + '"',
        "[]",
    ]
    found = from_text(pa.array([*texts, None]), VARIANT).to_pylist()
    assert found[-1] is None
    assert {one["metadata"] for one in found[:-1]} == {b"\x01\0\0"}
    values = [one["value"] for one in found[:-1]]
    assert values[:6] == [b"\0", b"\4", b"\x08", b"\x0c\1", b"\x10\x7f\xff", b"\x14\x70\x11\1\0"]
    assert values[6] == b"\x18" + (2**40).to_bytes(8, "little")
    assert values[7] == b"\x28\0" + (10**20).to_bytes(16, "little")
    assert values[8] == b"\x20\x02" + (110).to_bytes(4, "little")
    assert values[9] == b"\5a"
    assert values[10] == b"\x40\x40\0\0\0" + b"x" * 64
    assert values[11] == b"\3\0\0"
    (one,) = from_text(pa.array(['{"b": [1, {"a": null}], "a": 2}']), VARIANT).to_pylist()
    assert one["metadata"] == b"\1\2\0\1\2ab"
    inner = b"\2\1\0\0\1\0"
    array = b"\3\2\0\2\x08\x0c\1" + inner
    assert one["value"] == b"\2\2\0\1\0\2\x0f\x0c\2" + array


def test_nulls_of_a_variant_can_be_written(tmp_path: Path) -> None:
    """Arrow's own NULLs have NULL parts, but the parts are required."""
    some = from_text(pa.array(["1", None, "[]"]), VARIANT)
    none = nulls(3, VARIANT)
    mixed = pc.if_else(pa.array([True, False, True]), none, some)
    column = pa.concat_arrays([none, mixed, pc.coalesce(none, some), repeated(pa.scalar(None, VARIANT), 2)])
    column.validate(full=True)
    schema = pa.schema([pa.field("j", VARIANT)])
    pq.write_table(pa.table({"j": column}).cast(schema), tmp_path / "j.parquet", store_schema=False)
    found = pq.read_table(tmp_path / "j.parquet")
    assert found.schema == schema
    assert found.column("j").to_pylist() == column.to_pylist() == [*[None] * 6, *some.to_pylist(), None, None]
