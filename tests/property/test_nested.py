"""Arrays and composites from text and from binary transfer, against a writer of both; and their canonical bytes."""

from __future__ import annotations

import decimal
import json
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pubsub.delta.files.comparable_bytes import canonical
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.single_values import BinaryTypes, TypeRow
from pubsub.protocol.output.containers import array_text, record_text
from pubsub.protocol.text.columns import from_text

# Types by name: Arrow's type, the oid, and Python's values with their text and binary forms.
_OWN = 20_000
Made = tuple[Any, bytes, bytes]


def _int(value: int) -> Made:
    return value, b"%d" % value, struct.pack(">i", value)


def _text(value: str) -> Made:
    return value, value.encode(), value.encode()


def _bytes(value: bytes) -> Made:
    return value, b"\\x" + value.hex().encode(), value


def _bool(value: bool) -> Made:
    return value, b"t" if value else b"f", bytes((value,))


_CHARS = st.text(st.sampled_from('aN\u00e4 ,"\\{}()\nUL'), max_size=6) | st.sampled_from(["NULL", "null", ""])
_LEAVES = {
    23: (pa.int32(), st.integers(-(2**31), 2**31 - 1).map(_int)),
    25: (pa.string(), _CHARS.map(_text)),
    17: (pa.binary(), st.binary(max_size=4).map(_bytes)),
    16: (pa.bool_(), st.booleans().map(_bool)),
}


class _Kind:
    """A type: Arrow's type, its oid, its values, and the rows of pg_type that it needs."""

    def __init__(self, arrow: Any, oid: int, values: Any, rows: list[TypeRow]) -> None:
        self.arrow, self.oid, self.values, self.rows = arrow, oid, values, rows


def _array(of: _Kind, oid: int) -> _Kind:
    def made(items: list[Made | None]) -> Made:
        text = array_text([len(items)], [1], [None if one is None else one[1] for one in items], b",")
        body = b"".join(_sized(None if one is None else one[2]) for one in items)
        edges = struct.pack(">ii", len(items), 1) if items else b""
        return (
            [None if one is None else one[0] for one in items],
            text,
            struct.pack(">iiI", bool(items), None in items, of.oid) + edges + body,
        )

    row = TypeRow(oid, "a[]", "b", 0, of.oid, ",", "array_send", 0)
    values = st.lists(st.none() | of.values, max_size=4).map(made)
    return _Kind(pa.list_(pa.field("element", of.arrow)), oid, values, [*of.rows, row])


def _composite(parts: list[_Kind], oid: int) -> _Kind:
    def made(items: tuple[Made | None, ...]) -> Made:
        body = b"".join(
            struct.pack(">I", part.oid) + _sized(None if one is None else one[2])
            for part, one in zip(parts, items, strict=True)
        )
        return (
            {f"f{place}": None if one is None else one[0] for place, one in enumerate(items)},
            record_text([None if one is None else one[1] for one in items]),
            struct.pack(">i", len(items)) + body,
        )

    row = TypeRow(oid, "c", "c", 0, 0, ",", "record_send", 0, tuple(part.oid for part in parts))
    rows = [one for part in parts for one in part.rows]
    arrow = pa.struct([pa.field(f"f{place}", part.arrow) for place, part in enumerate(parts)])
    return _Kind(arrow, oid, st.tuples(*(st.none() | part.values for part in parts)).map(made), [*rows, row])


def _sized(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


@st.composite
def _columns(draw: Callable[..., Any]) -> tuple[_Kind, list[Made | None]]:
    numbers = iter(range(_OWN, _OWN + 100))

    def kind(depth: int) -> _Kind:
        choice = draw(st.sampled_from(["leaf", "array", "composite"] if depth else ["leaf"]))
        if choice == "array":
            return _array(kind(depth - 1), next(numbers))
        if choice == "composite":
            return _composite([kind(depth - 1) for _ in range(draw(st.integers(1, 3)))], next(numbers))
        oid = draw(st.sampled_from(sorted(_LEAVES)))
        return _Kind(*(_LEAVES[oid][0], oid, _LEAVES[oid][1]), [])

    inner = kind(2)
    outer = _array(inner, next(numbers)) if draw(st.booleans()) else _composite([inner, kind(1)], next(numbers))
    return outer, draw(st.lists(st.none() | outer.values, max_size=6))


@given(_columns())
def test_text_and_binary_give_the_values(given_: tuple[_Kind, list[Made | None]]) -> None:
    kind, values = given_
    wanted = [None if one is None else one[0] for one in values]
    text = pa.array([None if one is None else one[1] for one in values], pa.binary())
    binary = pa.array([None if one is None else one[2] for one in values], pa.binary())
    for found in (from_text(text, kind.arrow), from_binary(binary, kind.oid, kind.arrow, BinaryTypes(kind.rows))):
        found.validate(full=True)
        assert found.type == kind.arrow
        assert found.to_pylist() == wanted
        # the same for a slice of a larger column
        assert found[1:].to_pylist() == wanted[1:]


@given(_columns())
def test_canonical_bytes_tell_values_apart(given_: tuple[_Kind, list[Made | None]]) -> None:
    kind, values = given_
    wanted = [None if one is None else one[0] for one in values]
    column = pa.array([None, *wanted, *wanted], kind.arrow)[1:]
    found = canonical(column).to_pylist()
    assert found[: len(wanted)] == found[len(wanted) :]
    for one, its in zip(wanted, found, strict=False):
        assert (one is None) == (its is None)
        for other, others in zip(wanted, found, strict=False):
            assert (json.dumps(one, default=repr) == json.dumps(other, default=repr)) == (its == others)


def test_canonical_bytes_of_other_types() -> None:
    """Floats compare by their bits, with one NaN; also decimals, dates and timestamps."""
    floats = pa.array([[0.0], [-0.0], [float("nan")], [float("-nan")], [1.5, None], [None]], pa.list_(pa.float64()))
    found = canonical(floats).to_pylist()
    assert found[2] == found[3]
    assert len(set(found)) == 5
    for kind, values in (
        (pa.decimal128(38, 2), [decimal.Decimal("1.10"), decimal.Decimal("-1.10"), None]),
        (pa.float32(), [1.5, -1.5]),
        (pa.timestamp("us", "UTC"), [0, 1, None]),
        (pa.date32(), [0, 1]),
        (pa.int16(), [0, -1]),
    ):
        column = pa.array([[one] for one in values], pa.list_(kind))
        assert len(set(canonical(column).to_pylist())) == len(values)
    assert canonical(pa.array([], pa.list_(pa.int32()))).to_pylist() == []
