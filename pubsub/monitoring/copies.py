"""When the copies that run will have ended, by the speed of their last minute.

The publisher's estimate of a table's rows may be wrong, and so is the end then.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from pubsub.node.status import NodeStatus, TableStatus

#: The speed is that of so many seconds, and known after so many.
_WINDOW: Final = 60.0
_FIRST: Final = 2.0
#: Looks that are closer together, in seconds, count as one.
_APART: Final = 1.0

Name = tuple[str, str]


class CopyEnds:
    """What is seen of copies, look by look."""

    def __init__(self) -> None:
        self._seen: dict[Name, deque[tuple[float, int]]] = {}

    def look(self, status: NodeStatus) -> None:
        """Note how far each copy is; those that run no more are forgotten."""
        now = status.time.timestamp()
        running = {
            (one.name, table.name): table.rows_copied
            for one in status.subscriptions
            for table in one.tables
            if is_copied(table) and table.rows_copied is not None
        }
        self._seen = {name: self._seen.get(name, deque()) for name in running}
        for name, rows in running.items():
            seen = self._seen[name]
            if seen and (rows < seen[-1][1] or now < seen[-1][0]):
                seen.clear()  # it has begun anew
            if not seen or now - seen[-1][0] >= _APART:
                seen.append((now, rows))
            while now - seen[0][0] > _WINDOW:
                seen.popleft()

    def seconds_left(self, subscription: str, table: TableStatus) -> float | None:
        """Return how long the table's copy still takes; None if that is not known."""
        seen = self._seen.get((subscription, table.name))
        if not seen or not table.rows_estimated or table.rows_copied is None:
            return None
        (began, first), (now, last) = seen[0], seen[-1]
        if now - began < _FIRST or last <= first or table.rows_copied >= table.rows_estimated:
            return None
        return (table.rows_estimated - table.rows_copied) * (now - began) / (last - first)


def is_copied(table: TableStatus) -> bool:
    """Return whether the table's rows are being copied."""
    return table.state == "d" and not table.stopped
