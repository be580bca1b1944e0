"""Measure the fields of each type decoded per second of processor time, from text and binary transfer, with no server.

    python -m bench.types [--rows N] [--json]

A row has eight columns of the type.  Types that are decoded value by value (docs/types.md) are measured with fewer
rows.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from bench.results import Limit
from pubsub.protocol.binary.single_values import BinaryTypes, TypeRow
from pubsub.protocol.column_types import delta_type, shaped_type
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import Column, Relation
from pubsub.protocol.rows import decode_changes, split_by_relation
from pubsub.protocol.shapes import TypeShape
from pubsub.reorderbuffer.log import FrameBlock, FrameLog

NAMES: Final = ("types",)
_COLUMNS: Final = 8
_RELATION: Final = Oid(16384)
_DISTINCT: Final = 20_000
"""The number of distinct values of a type.  Python makes them, so they are fewer than the fields."""

_MICROSECONDS: Final = 770_000_000_000_000  # in 2024, from 2000


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    oid: int
    modifier: int
    goal: int
    """Fields per second; 0 for no goal."""
    text: Callable[[int], str]
    binary: Callable[[int], bytes]
    slow: bool = False
    """Whether binary transfer is decoded value by value."""
    shape: TypeShape | None = None
    """The type's shape, for a type whose target depends on `choice`."""
    choice: str = "natural"
    slow_text: bool = False


def _numeric(n: int) -> bytes:
    groups = [n // 10_000 % 10_000, n % 10_000, n * 7 % 100 * 100]
    return struct.pack(">HhHH3H", 3, 1, 0, 2, *groups)


def _json(n: int) -> str:
    return f'{{"id": {n}, "name": "customer {n}", "tags": ["a", "b"], "paid": true}}'


def _array_of(oid: int, values: list[bytes]) -> bytes:
    written = b"".join(struct.pack(">i", len(value)) + value for value in values)
    return struct.pack(">iiIii", 1, 0, oid, len(values), 1) + written


def _array(n: int) -> bytes:
    return _array_of(23, [struct.pack(">i", n + i) for i in range(4)])


def _labels(n: int) -> list[str]:
    return [f"label {n}", "new", f'a "{n}"']


def _pair(n: int) -> bytes:
    name = b"customer %d" % n
    return struct.pack(">iIiiIi", 2, 23, 4, n, 25, len(name)) + name


_PAIR: Final = TypeShape(20_000, kind="c", name="public.pair", attributes=(("a", TypeShape(23)), ("b", TypeShape(25))))


_TYPES: Final = (
    _Type("bool", 16, -1, 5_000_000, lambda n: "ft"[n % 2], lambda n: bytes((n % 2,))),
    _Type("int4", 23, -1, 5_000_000, str, lambda n: struct.pack(">i", n)),
    _Type("int8", 20, -1, 5_000_000, lambda n: str(n * 1_000_003), lambda n: struct.pack(">q", n * 1_000_003)),
    _Type("text", 25, -1, 5_000_000, lambda n: f"customer number {n}", lambda n: f"customer number {n}".encode()),
    _Type(
        "numeric(12,2)",
        1700,
        (12 << 16 | 2) + 4,
        5_000_000,
        lambda n: f"{10_000_000 + n}.{n * 7 % 100:02d}",
        lambda n: _numeric(10_000_000 + n),
    ),
    _Type(
        "numeric",
        1700,
        -1,
        5_000_000,
        lambda n: f"{10_000_000 + n}.{n * 7 % 100:02d}",
        lambda n: _numeric(10_000_000 + n),
    ),
    _Type(
        "timestamptz",
        1184,
        -1,
        5_000_000,
        lambda n: f"2024-05-{n % 28 + 1:02d} 12:{n % 60:02d}:{n % 59:02d}.{n * 37 % 999_999 + 1:06d}+00",
        lambda n: struct.pack(">q", _MICROSECONDS + n * 1_234_567),
    ),
    _Type(
        "uuid",
        2950,
        -1,
        5_000_000,
        lambda n: str(uuid.UUID(int=n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128)),
        lambda n: uuid.UUID(int=n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).bytes,
    ),
    _Type("float8", 701, -1, 0, lambda n: repr(n + 0.1), lambda n: struct.pack(">d", n + 0.1)),
    _Type(
        "date", 1082, -1, 0, lambda n: f"20{n % 90 + 10}-05-{n % 28 + 1:02d}", lambda n: struct.pack(">i", n % 20_000)
    ),
    _Type("bytea", 17, -1, 0, lambda n: "\\x" + n.to_bytes(16, "big").hex(), lambda n: n.to_bytes(16, "big")),
    _Type("jsonb", 3802, -1, 1_000_000, _json, lambda n: b"\1" + _json(n).encode()),
    _Type("int4[]", 1007, -1, 1_000_000, lambda n: f"{{{n},{n + 1},{n + 2},{n + 3}}}", _array),
    _Type(
        "int4[] natural",
        1007,
        -1,
        1_000_000,
        lambda n: f"{{{n},{n + 1},{n + 2},{n + 3}}}",
        _array,
        shape=TypeShape(1007, element=TypeShape(23)),
    ),
    _Type(
        "text[] natural",
        1009,
        -1,
        1_000_000,
        lambda n: f'{{"label {n}",new,"a \\"{n}\\""}}',
        lambda n: _array_of(25, [label.encode() for label in _labels(n)]),
        shape=TypeShape(1009, element=TypeShape(25)),
    ),
    _Type(
        "composite",
        _PAIR.oid,
        -1,
        0,
        lambda n: f'({n},"customer {n}")',
        _pair,
        shape=_PAIR,
        choice="text",
        slow=True,
    ),
    _Type("composite natural", _PAIR.oid, -1, 0, lambda n: f'({n},"customer {n}")', _pair, shape=_PAIR),
    _Type(
        "jsonb variant",
        3802,
        -1,
        0,
        _json,
        lambda n: b"\1" + _json(n).encode(),
        shape=TypeShape(3802),
        choice="variant",
        slow=True,
        slow_text=True,
    ),
    _Type(
        "interval",
        1186,
        -1,
        0,
        lambda n: f"{n % 27 + 2} days 01:02:03",
        lambda n: struct.pack(">qii", n, n % 27, 0),
        slow=True,
    ),
)


def _blocks(values: list[bytes], kind: bytes, rows: int) -> list[FrameBlock]:
    fields = [kind + struct.pack(">I", len(value)) + value for value in values]
    head = b"w" + bytes(XLOG_HEADER - 1) + b"I" + struct.pack(">I", _RELATION) + b"N" + struct.pack(">H", _COLUMNS)
    log = FrameLog()
    frames = [
        head + b"".join(fields[(row * _COLUMNS + place) % len(fields)] for place in range(_COLUMNS))
        for row in range(rows)
    ]
    for first in range(0, rows, 10_000):
        log.append(frames[first : first + 10_000])
    return log.blocks()


def _speed(one: _Type, kind: bytes, rows: int) -> float:
    """Return the fields per second of the fastest of three runs.

    In processor time, which other work on the machine affects less than the clock.
    """
    make: Callable[[int], bytes] = one.binary if kind == b"b" else lambda n: one.text(n).encode()
    blocks = _blocks([make(n) for n in range(_DISTINCT)], kind, rows)
    relation = Relation(
        _RELATION, "public", "t", "d", tuple(Column(0, f"c{i}", Oid(one.oid), one.modifier) for i in range(_COLUMNS))
    )
    target = delta_type(one.oid, one.modifier)
    if one.shape is not None:
        target = shaped_type(one.shape, lambda names: None, one.choice)
    fields = [pa.field(column.name, target) for column in relation.columns]
    types = BinaryTypes([TypeRow(_PAIR.oid, _PAIR.name, "c", 0, 0, ",", "record_send", 0, (23, 25))])
    times = []
    for _ in range(3):
        start = time.process_time()
        decode_changes(split_by_relation(blocks)[_RELATION], relation, fields, types=types)
        times.append(time.process_time() - start)
    return rows * _COLUMNS / min(times)


def measure(rows: int) -> dict[str, dict[str, float]]:
    """Return the fields per second of each type, for text and binary transfer, and the goal (0: none)."""
    pa.set_cpu_count(1)
    return {
        one.name: {
            "text": _speed(one, b"t", rows // 10 if one.slow_text else rows),
            "binary": _speed(one, b"b", rows // 10 if one.slow else rows),
            "goal": one.goal,
        }
        for one in _TYPES
    }


def limits(rows: int) -> list[Limit]:
    """Return limits for the types with a goal, as seconds of processor time for a million fields."""
    return [
        Limit(
            f"fields_{name}_{kind}",
            f"a million fields of {name}, {kind}",
            "seconds",
            1e6 / speeds[kind],
            goal=1e6 / speeds["goal"],
        )
        for name, speeds in measure(rows).items()
        if speeds["goal"]
        for kind in ("text", "binary")
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.types", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options.rows)
    if options.json:
        print(json.dumps({"rows": options.rows, "columns": _COLUMNS, "fields_per_second": found}))
        return 0
    print(f"{'':18}{'text':>14}{'binary':>14}{'goal':>14}   million fields a second")
    for name, speeds in found.items():
        goal = f"{speeds['goal'] / 1e6:.0f}" if speeds["goal"] else ""
        print(f"{name:18}{speeds['text'] / 1e6:14.1f}{speeds['binary'] / 1e6:14.1f}{goal:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
