"""Transactions for the tests of the reorder buffer: made, read back, and found on disk."""

from __future__ import annotations

from pathlib import Path

from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.transaction import Transaction

WORK_MEM = 64 << 10


def rows(xid: int, count: int, size: int = 100) -> list[bytes]:
    return [f"{xid}/{number}".encode().ljust(size, b".") for number in range(count)]


def read(transaction: Transaction | None, max_bytes: int = 1 << 20) -> list[bytes]:
    assert transaction is not None
    return [one for chunk in transaction.chunks(max_bytes) for block in chunk.blocks for one in block.frames()]


def spilled(directory: Path) -> list[Path]:
    return sorted(directory.glob("*")) if directory.exists() else []


def on_disk(buffer: ReorderBuffer) -> tuple[Transaction, Path]:
    """Make a transaction with two segments on disk and one block in memory."""
    for number in range(2):
        buffer.append(10, rows(10 + number, 1000))
        buffer.spill()
    buffer.append(10, rows(12, 5))
    transaction = buffer.commit(10)
    assert transaction is not None
    [path] = transaction.paths
    return transaction, path
