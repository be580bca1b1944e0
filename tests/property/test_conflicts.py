"""Folding for a table whose rows differ from the publisher's, against a plain subscriber that applies each change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from apply.staging.fold import fold
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import Conflicting, Folded
from pubsub.protocol.rows import OLD_KEY, OLD_ROW, Changes
from tests.support.memory import Holding, apply_folded

SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())])
Row = tuple[int, str | None]
KEYS = st.integers(0, 4)
VALUES = st.sampled_from(["a", "b", None])


@dataclass
class Subscriber:
    """PostgreSQL's subscriber (worker.c: apply_handle_insert, _update, _delete); `collision` is where it would stop."""

    rows: dict[int, str | None]
    sent: list[tuple[str, int | None, Row | None, bool]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    collision: int | None = None

    def send(self, op: str, old: int | None, new: Row | None, unchanged: bool = False) -> None:
        seq = len(self.sent)
        self.sent.append((op, old, new, unchanged))
        if self.collision is not None:
            return
        if op != "I":
            at = old if old is not None else new[0] if new is not None else 0
            if at not in self.rows:
                self.missing.append(seq)
                return
            before = self.rows.pop(at)
            if new is not None and unchanged:
                new = (new[0], before)
        if new is not None:
            if new[0] in self.rows:
                self.collision = seq
                return
            self.rows[new[0]] = new[1]

    def changes(self) -> Changes:
        ops = "".join(op for op, *_ in self.sent).encode()
        return Changes(
            np.arange(len(self.sent)),
            np.frombuffer(ops, np.uint8),
            {
                "k": pa.array([new and new[0] for _, _, new, _ in self.sent], pa.int64()),
                "v": pa.array([new[1] if new and not u else None for _, _, new, u in self.sent], pa.string()),
            },
            {"v": np.array([u for *_, u in self.sent], np.bool_)},
            np.array([OLD_KEY if old is not None else 0 for _, old, *_ in self.sent], np.uint8),
            {"k": pa.array([old for _, old, *_ in self.sent], pa.int64())},
        )


def seqs(conflicting: Conflicting | None) -> list[int]:
    return [] if conflicting is None else conflicting.seq.tolist()


def as_expected(folded: Folded, held: dict[int, str | None]) -> bool:
    """Return whether the table is as the change set takes for granted."""
    expected = folded.expected
    if expected is None:
        return True
    standing, free = (set(keys.column("k").to_pylist()) for keys in (expected.standing, expected.free))
    assert len(standing) + len(free) == expected.standing.num_rows + expected.free.num_rows == len(standing | free)
    return standing <= held.keys() and not free & held.keys()


@given(st.dictionaries(KEYS, VALUES), st.data(), st.booleans())
def test_with_a_key(held: dict[int, str | None], data: st.DataObject, truncates: bool) -> None:
    table = TargetTable("t", SCHEMA, ("k",), "public.t")
    subscriber = Subscriber({} if truncates else dict(held))
    for _ in range(data.draw(st.integers(1, 12))):
        op, key = data.draw(st.sampled_from("IUUDM")), data.draw(KEYS)
        match op:
            case "I":
                subscriber.send("I", None, (key, data.draw(VALUES)))
            case "D":
                subscriber.send("D", key, None)
            case "U":
                subscriber.send("U", None, (key, data.draw(VALUES)), data.draw(st.booleans()))
            case _:
                new = (data.draw(KEYS), data.draw(VALUES))
                subscriber.send("U", key, new, data.draw(st.booleans()))
    rows = Counter((key, value) for key, value in held.items())
    before = 0 if truncates else None
    unseen = fold(subscriber.changes(), ["k"], full=False, truncate_before=before)
    if as_expected(unseen, held):
        # Then the table need not be looked up, unless the batch's own rows collide, which it then does too.
        assert (unseen.collisions is None) == (subscriber.collision is None)
        assert subscriber.collision is not None or seqs(unseen.missing) == subscriber.missing
        if subscriber.collision is None:
            after = Counter((key, value) for key, value in subscriber.rows.items())
            assert apply_folded(table, unseen, truncates, rows) == after
    else:
        assert subscriber.collision is not None or subscriber.missing
    folded = fold(subscriber.changes(), ["k"], full=False, truncate_before=before, present=Holding(rows, [0]))
    if subscriber.collision is not None:
        assert seqs(folded.collisions)[0] == subscriber.collision
        return
    assert seqs(folded.collisions) == []
    assert seqs(folded.missing) == subscriber.missing
    result = apply_folded(table, folded, truncates, rows)
    assert result == Counter((key, value) for key, value in subscriber.rows.items())


@given(st.lists(st.tuples(KEYS, VALUES)), st.lists(st.tuples(st.sampled_from("IUD"), KEYS, VALUES, KEYS, VALUES)))
def test_without_a_key(held: list[Row], sent: list[tuple[str, int, str | None, int, str | None]]) -> None:
    table = TargetTable("t", SCHEMA, (), "public.t")
    rows: Counter[Any] = Counter(held)
    expected, missing = Counter(rows), []
    for seq, (op, *values) in enumerate(sent):
        old, new = (values[0], values[1]), (values[2], values[3])
        if op != "I":
            if not expected[old]:
                missing.append(seq)
                continue
            expected[old] -= 1
        if op != "D":
            expected[new] += 1
    changes = Changes(
        np.arange(len(sent)),
        np.frombuffer("".join(op for op, *_ in sent).encode(), np.uint8),
        {
            "k": pa.array([None if op == "D" else k for op, _, _, k, _ in sent], pa.int64()),
            "v": pa.array([None if op == "D" else v for op, _, _, _, v in sent], pa.string()),
        },
        {},
        np.array([0 if op == "I" else OLD_ROW for op, *_ in sent], np.uint8),
        {
            "k": pa.array([None if op == "I" else k for op, k, *_ in sent], pa.int64()),
            "v": pa.array([None if op == "I" else v for op, _, v, *_ in sent], pa.string()),
        },
    )
    folded = fold(changes, None, full=True, present=Holding(rows, []))
    assert seqs(folded.missing) == missing
    assert +apply_folded(table, folded, False, rows) == +expected
