"""Send finished chunks from a Spark job's tasks to the driver as each task ends, as updates of an accumulator.

The job's own results arrive only when the whole job has ended.
"""

from __future__ import annotations

from queue import SimpleQueue

from pyspark.accumulators import AccumulatorParam

from pubsub.delta.log.transactions import Action

#: A chunk's number, and the actions that name its data files.
Chunk = tuple[int, list[Action]]


class Landing(AccumulatorParam[list[Chunk]]):
    """The accumulator: a task gathers its chunks; the driver puts them into `queue`, in one of pyspark's threads."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Chunk | None] = SimpleQueue()

    def __reduce__(self) -> tuple[type[_Gathering], tuple[()]]:
        return _Gathering, ()

    def zero(self, value: list[Chunk]) -> list[Chunk]:
        """Return no chunks."""
        return []

    def addInPlace(self, value1: list[Chunk], value2: list[Chunk]) -> list[Chunk]:  # noqa: N802
        """Put `value2`, the chunks of a task that has ended, into the queue."""
        for chunk in value2:
            self.queue.put(chunk)
        return []


class _Gathering(AccumulatorParam[list[Chunk]]):
    def zero(self, value: list[Chunk]) -> list[Chunk]:
        return []

    def addInPlace(self, value1: list[Chunk], value2: list[Chunk]) -> list[Chunk]:  # noqa: N802
        return value1 + value2
