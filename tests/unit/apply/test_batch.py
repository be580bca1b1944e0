"""Batch: the rows and truncations that each table gets."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from apply.batch import Batch, OpenTransaction, Truncation, lag_seconds
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import ReorderBuffer


def batch(*sizes: int, truncations: dict[int, list[Truncation]] | None = None) -> Batch:
    """Make a batch of transactions of `sizes` rows, which end at 100, 200, …"""
    made = Batch({})
    for index, size in enumerate(sizes):
        opened = OpenTransaction(700 + index, Lsn(index * 100 + 92), index, rows=[b"w" * 30] * size)
        opened.truncations = (truncations or {}).get(index, [])
        made.add(opened, Lsn(index * 100 + 100), float(index))
    return made


def test_a_transaction_is_dropped_if_it_ends_at_or_before_what_the_table_holds() -> None:
    b = batch(2, 0, 1, 3)
    assert b.kept_rows(Lsn(0)) is None
    assert b.kept_rows(Lsn(99)) is None
    assert b.kept_rows(Lsn(100)).tolist() == [False] * 2 + [True] * 4  # type: ignore[union-attr]
    assert b.kept_rows(Lsn(299)).tolist() == [False] * 2 + [True] * 4  # type: ignore[union-attr]
    assert b.kept_rows(Lsn(300)).tolist() == [False] * 3 + [True] * 3  # type: ignore[union-attr]
    assert not b.kept_rows(Lsn(400)).any()  # type: ignore[union-attr]
    assert not b.kept_rows(Lsn(2**63)).any()  # type: ignore[union-attr]


def test_a_row_knows_its_transaction_also_beside_empty_ones() -> None:
    b = batch(0, 2, 0, 1)
    assert [b.transaction_of(seq).xid for seq in range(3)] == [701, 701, 703]


def test_truncations_that_a_table_gets() -> None:
    b = batch(2, 2, 2, truncations={0: [Truncation(1, (5, 6))], 1: [Truncation(0, (5,)), Truncation(2, (5,))], 2: []})
    assert [one.seq for one in b.kept_truncations([5], Lsn(0))] == [1, 2, 4]
    assert [one.seq for one in b.kept_truncations([6, 7], Lsn(0))] == [1]
    assert [one.seq for one in b.kept_truncations([5, 6], Lsn(0), Lsn(200))] == [1]
    assert [one.seq for one in b.kept_truncations([5], Lsn(100))] == [2, 4]
    assert b.kept_truncations([6], Lsn(100)) == []
    assert b.kept_truncations([5], Lsn(200)) == []
    assert b.kept_truncations([7], Lsn(0)) == []


def test_a_batch_is_as_old_as_its_first_transaction() -> None:
    b = batch(1, 1, 1)
    assert b.opened_at == 0.0
    assert (b.first_lsn, b.last_lsn, b.rows, b.nbytes) == (100, 300, 3, 90)


def test_lag_is_in_seconds() -> None:
    assert lag_seconds(batch(1, 1).transactions, 3_000_000).tolist() == [3.0, 2.999999]
    assert lag_seconds(batch(1).transactions, 0).dtype == np.float64


def test_a_large_frame_from_disk_is_gone_before_the_next_is_read(tmp_path: Path) -> None:
    """A reader that clears what it got holds one frame at a time: a frame may take a gigabyte."""
    size = 8 << 20
    buffer = ReorderBuffer(tmp_path / "spill", 64 << 10)
    for _ in range(4):
        buffer.append(1, [b"w" * 25 + b"I" + bytes(size)])
        buffer.spill()
    spilled = buffer.commit(1)
    assert spilled is not None
    batch = Batch({})
    batch.add_streamed([spilled], Lsn(1), Lsn(2), 0, 0.0)
    assert size < batch.longest < size + 100
    tracemalloc.start()
    try:
        count = 0
        for _, blocks in batch.chunks(1 << 20):
            count += len(blocks)
            blocks.clear()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 4
    assert peak < 1.5 * size
