"""Measure how fast rows become columns: decoding frames, folding keys, parsing a copy; on one core, without a server.

    python -m bench.columns [--rows N] [--json]

The table has a bigint key, text, numeric(12,2), timestamptz, bool and int, as in `python -m bench`.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from apply.staging.fold import fold
from pubsub.protocol.column_types import delta_type
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import Column, Relation
from pubsub.protocol.rows import Changes, decode_changes, split_by_relation
from pubsub.protocol.text.copy_csv import parse_copy
from pubsub.reorderbuffer.log import FrameBlock, FrameLog

if TYPE_CHECKING:
    import numpy.typing as npt

_COLUMNS: Final = (
    Column(1, "id", Oid(20), -1),
    Column(0, "name", Oid(25), -1),
    Column(0, "amount", Oid(1700), (12 << 16 | 2) + 4),
    Column(0, "at", Oid(1184), -1),
    Column(0, "paid", Oid(16), -1),
    Column(0, "quantity", Oid(23), -1),
)
_RELATION: Final = Relation(Oid(16384), "public", "orders", "d", _COLUMNS)
_FIELDS: Final = [pa.field(column.name, delta_type(column.type_oid, column.type_modifier)) for column in _COLUMNS]


def _values(key: int) -> list[bytes]:
    return [
        b"%d" % key,
        b"customer number %d" % (key * 7),
        b"%d.%02d" % (key % 1_000_000, key % 100),
        b"2024-05-%02d 12:%02d:%02d.%06d+00" % (key % 28 + 1, key % 60, key % 59, key * 37 % 999_999 + 1),
        b"t" if key % 2 else b"f",
        b"%d" % (key % 5000),
    ]


def _blocks(kind: bytes, keys: npt.NDArray[np.int64]) -> list[FrameBlock]:
    log = FrameLog()
    head = b"w" + bytes(XLOG_HEADER - 1) + kind + struct.pack(">I", _RELATION.oid) + b"N\x00\x06"
    for first in range(0, len(keys), 10_000):
        log.append(
            [
                head + b"".join(b"t" + struct.pack(">I", len(value)) + value for value in _values(key))
                for key in keys[first : first + 10_000].tolist()
            ]
        )
    return log.blocks()


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three runs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _decode(blocks: list[FrameBlock]) -> Changes:
    return decode_changes(split_by_relation(blocks)[_RELATION.oid], _RELATION, _FIELDS, key=["id"])


def measure(rows: int) -> dict[str, float]:
    """Return the seconds of each step for `rows` rows."""
    pa.set_cpu_count(1)
    random = np.random.default_rng(1)
    ordered = np.arange(1, rows + 1)
    shuffled = random.permutation(ordered)
    repeated = random.integers(1, max(2, rows // 4), rows)
    found: dict[str, float] = {}
    for name, kind, keys in (
        ("inserts", b"I", ordered),
        ("updates in order", b"U", ordered),
        ("updates at random", b"U", shuffled),
        ("updates of a quarter as many keys", b"U", repeated),
    ):
        blocks = _blocks(kind, keys)
        changes = _decode(blocks)
        found[f"decode {name}"] = _best(lambda blocks=blocks: _decode(blocks))  # type: ignore[misc]
        found[f"fold {name}"] = _best(lambda changes=changes: fold(changes, ["id"], full=False))  # type: ignore[misc]
    copied = b"".join(b",".join(_values(key)) + b"\n" for key in ordered.tolist())
    found["parse copy"] = _best(lambda: parse_copy(copied, pa.schema(_FIELDS)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.columns", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options.rows)
    if options.json:
        steps = {name: {"seconds": s, "rows_per_second": options.rows / s} for name, s in found.items()}
        print(json.dumps({"rows": options.rows, "steps": steps}))
    else:
        for name, seconds in found.items():
            print(f"{name:42} {seconds:7.3f} s {options.rows / seconds:12,.0f} rows/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
