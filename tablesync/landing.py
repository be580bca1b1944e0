"""Finished chunks on their way from a Spark job's tasks to the driver, each as its task ends: an accumulator's updates.

The job itself gives out its results only when all of it has ended.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from pyspark.accumulators import AccumulatorParam

from apply.delta.datafiles import Action

#: A chunk's number, and the actions that name its data files.
Chunk = tuple[int, list[Action]]


class Landing(AccumulatorParam[list[Chunk]]):
    """In a task chunks are gathered; in the driver they go to `queue`, in a thread of pyspark's."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Chunk | None] = SimpleQueue()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gathering, ()

    def zero(self, value: list[Chunk]) -> list[Chunk]:
        """None."""
        return []

    def addInPlace(self, value1: list[Chunk], value2: list[Chunk]) -> list[Chunk]:  # noqa: N802
        """`value2` has come from a task that has ended."""
        for chunk in value2:
            self.queue.put(chunk)
        return []


class _Gathering(AccumulatorParam[list[Chunk]]):
    def zero(self, value: list[Chunk]) -> list[Chunk]:
        return []

    def addInPlace(self, value1: list[Chunk], value2: list[Chunk]) -> list[Chunk]:  # noqa: N802
        return value1 + value2
