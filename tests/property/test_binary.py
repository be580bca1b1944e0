"""Binary transfer without a server: whole columns against single values, and bytes that no server sends."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import PubsubError
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.single_values import BinaryTypes, TypeRow
from pubsub.protocol.column_types import delta_type
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import RULES

TYPES = BinaryTypes(
    (
        TypeRow(20000, "pair", "c", 0, 0, ",", "record_send", 0, (23, 25)),
        TypeRow(20001, "floats", "r", 0, 0, ",", "range_send", 701),
        TypeRow(20002, "hstore", "b", 0, 0, ",", "hstore_send", 0),
        TypeRow(20003, "vector", "b", 0, 0, ",", "vector_send", 0),
        TypeRow(20004, "pairs", "b", 0, 20000, ",", "array_send", 0),
    )
)
READ = [rule.oid for rule in RULES if rule.binary in {"columns", "values"}] + [1007, 1009, *range(20000, 20005)]


@given(st.sampled_from(READ), st.lists(st.none() | st.binary(max_size=40), max_size=4))
def test_any_bytes_give_values_or_a_typed_error(oid: int, values: list[bytes | None]) -> None:
    array = pa.array(values, pa.binary())
    for target in (pa.string(), delta_type(oid, (12 << 16 | 2) + 4)):
        try:
            found = from_binary(array, oid, target, TYPES)
        except PubsubError:
            continue
        found.validate(full=True)
        assert len(found) == len(values)
        assert found.null_count == values.count(None)


numerics = st.none() | st.decimals(allow_nan=False, allow_infinity=False, places=2) | st.integers().map(Decimal)


def numeric_send(value: Decimal) -> bytes:
    """Return numeric.c: numeric_send of the value that numeric_in would read."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = max(-exponent, 0)
    text = "".join(map(str, digits)) + "0" * max(exponent, 0)
    whole, fraction = (text[:-scale], text[-scale:].rjust(scale, "0")) if scale else (text, "")
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int(part) for part in (f"{whole}{fraction}"[i : i + 4] for i in range(0, len(whole + fraction), 4))]
    weight = len(whole) // 4 - 1
    while groups and not groups[0]:
        del groups[0]
        weight -= 1
    while groups and not groups[-1]:
        del groups[-1]
    if not groups:
        sign, weight = 0, 0
    return struct.pack(f">HhHH{len(groups)}H", len(groups), weight, 0x4000 if sign else 0, scale, *groups)


@given(st.lists(numerics, max_size=30), st.sampled_from([(38, 2), (12, 2), (18, 4), (20, 0)]))
def test_numerics_by_columns(values: list[Decimal | None], size: tuple[int, int]) -> None:
    sent = pa.array([None if value is None else numeric_send(value) for value in values], pa.binary())
    texts = pa.array([None if value is None else f"{value:f}" for value in values], pa.string())
    found = from_binary(sent, 1700, pa.string(), TYPES)
    one_by_one = [None if value is None else TYPES.out(1700)(value).decode() for value in sent.to_pylist()]
    assert found.to_pylist() == one_by_one
    assert [None if t is None else Decimal(t) for t in one_by_one] == values
    target = pa.decimal128(*size)
    outcomes: list[Any] = []
    for convert in (lambda: from_text(texts, target), lambda: from_binary(sent, 1700, target, TYPES)):
        try:
            outcomes.append(convert().to_pylist())
        except PubsubError as error:
            outcomes.append((error.sqlstate, getattr(error, "index", None)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("oid", "nans"), [(700, ["ffc00000", "7fc00007"]), (701, ["fff8000000000000", "7ff8000000000007"])]
)
def test_a_nan_has_the_bits_that_its_text_has(oid: int, nans: list[str]) -> None:
    """PostgreSQL sends the bits that it has: those of infinity - infinity have the sign."""
    target = delta_type(oid, -1)
    sent = pa.array([*map(bytes.fromhex, nans), bytes(len(nans[0]) // 2), None], pa.binary())
    texts = from_text(pa.array([b"NaN", b"NaN", b"0", None], pa.binary()), target)
    found = from_binary(sent, oid, target, TYPES)
    bits = f"int{target.bit_width}"
    assert found.view(bits).equals(texts.view(bits))


odd = st.sampled_from(["NULL", "null", '"', "\\", "{", "a,b", " ", "", "abcd"])
elements = st.lists(st.none() | st.text(max_size=6) | odd, max_size=6)


@given(st.lists(st.none() | elements, max_size=8))
def test_arrays_by_columns(values: list[list[str | None] | None]) -> None:
    def sent(one: list[str | None]) -> bytes:
        if not one:
            return struct.pack(">iiI", 0, 0, 25)
        body = b"".join(
            struct.pack(">i", -1) if e is None else struct.pack(">i", len(e.encode())) + e.encode() for e in one
        )
        return struct.pack(">iiIii", 1, 1, 25, len(one), 1) + body

    array = pa.array([None if one is None else sent(one) for one in values], pa.binary())
    expected = [None if value is None else TYPES.out(1009)(value).decode() for value in array.to_pylist()]
    assert from_binary(array, 1009, pa.string(), TYPES).to_pylist() == expected


@pytest.mark.parametrize(
    ("oid", "sent", "text"),
    [
        (
            20002,
            struct.pack(">iI", 2, 1) + b"a" + struct.pack(">i", -1) + b'\0\0\0\2b"\0\0\0\1\\',
            b'"a"=>NULL, "b\\""=>"\\\\"',
        ),
        (20003, struct.pack(">hh3f", 3, 0, 1, 2.5, -3e-10), b"[1,2.5,-3e-10]"),
        (20000, struct.pack(">iIiiIi", 2, 23, 4, 7, 25, -1), b"(7,)"),
        (20001, b"\2" + struct.pack(">idid", 8, 0.1, 8, 2.0), b"[0.1,2)"),
    ],
)
def test_types_of_users_and_extensions(oid: int, sent: bytes, text: bytes) -> None:
    assert TYPES.out(oid)(sent) == text


@pytest.mark.parametrize(
    ("oid", "sent"),
    [
        (20001, b"\x02" + struct.pack(">id", 8, 1.0)),  # the upper bound is missing
        (20001, b"\x01" + struct.pack(">id", 8, 1.0)),  # marked empty, yet it has a bound
        (4451, struct.pack(">i", 5)),  # int4multirange: five ranges announced, none present
        (22, struct.pack(">iiIiiih", 1, 0, 21, 2, 0, 2, 7)),  # int2vector: two elements announced, one present
        (22, struct.pack(">iiIiiih", 1, 0, 21, 1, 0, 4, 7)),  # its last element is cut off
        (20002, struct.pack(">iicic", 2, 1, b"a", 1, b"b")),  # hstore: two pairs announced, one present
    ],
)
def test_a_value_that_lacks_what_its_count_says_is_refused(oid: int, sent: bytes) -> None:
    """Each of these was once read as a shorter value."""
    with pytest.raises(PubsubError):
        from_binary(pa.array([sent], pa.binary()), oid, pa.string(), TYPES)
