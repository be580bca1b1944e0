"""Waiting for the node to reach a state, while the live view is updated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from pubsub.demo.interruption import Interruption
from pubsub.demo.node import DemoFailed, DemoNode, Status
from pubsub.demo.screen import Screen
from pubsub.protocol.lsn import Lsn

_POLL_SECONDS: Final = 0.25
#: The longest time without any progress: starting Spark on a busy machine takes most of a minute.
PATIENCE_SECONDS: Final = 180.0
#: The longest time that a worker may keep failing; an error that a retry cures does not fail the demo.
_FAILING_SECONDS: Final = 30.0


class Waiter:
    """Waits for conditions on the node's status."""

    def __init__(self, node: DemoNode, interruption: Interruption, screen: Screen) -> None:
        self._node = node
        self._interruption = interruption
        self._screen = screen

    def until(self, reached: Callable[[], bool], doing: str, *, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until `reached` is true, and show the progress.

        Raises DemoFailed if the daemon ends, a worker keeps failing, or nothing moves for `patience` seconds; and
        Interrupted.
        """
        moved_at = time.monotonic()
        failing_since: float | None = None
        before: object = None
        while not reached():
            self._node.check()
            status = self._node.status
            self._screen.show(status, doing)
            now = time.monotonic()
            moved = _moving_parts(status)
            if moved != before:
                before, moved_at = moved, now
            error = first_error(status)
            failing_since = None if error is None else failing_since or now
            if error is not None and failing_since is not None and now - failing_since > _FAILING_SECONDS:
                raise DemoFailed(error, detail=self._node.log_tail() or None)
            if now - moved_at > patience:
                raise DemoFailed(
                    f"nothing has moved for {patience:g} seconds: {doing}" + (f": {error}" if error else ""),
                    detail=self._node.log_tail() or None,
                )
            self._interruption.sleep(_POLL_SECONDS)
        self._screen.show(self._node.status, doing)

    def ready(self, names: Sequence[str]) -> bool:
        """Whether every table of these subscriptions is in state r."""
        return all(_is_ready(self._node.subscription(name)) for name in names)

    def copying(self) -> bool:
        """Whether the copy of some table has begun."""
        return any(table["state"] != "i" for one in self._node.status["subscriptions"] for table in one["tables"])

    def caught_up(self, names: Sequence[str], lsn: Lsn) -> bool:
        """Whether everything committed up to `lsn` is durable in Delta, for every table of these subscriptions."""
        found = [self._node.subscription(name) for name in names]
        return all(_is_ready(one) and _flushed(one) >= lsn for one in found)


def first_error(status: Status) -> str | None:
    """Return the first unresolved error of a worker, if there is one."""
    for subscription in status["subscriptions"]:
        for table in subscription["tables"]:
            if table["error"]:
                return f"{subscription['name']}: {table['name']}: {table['error']}" + _hint(table)
        if subscription["error"]:
            return f"{subscription['name']}: {subscription['error']}" + _hint(subscription)
    return None


def _hint(found: Status) -> str:
    return f"\nHINT:  {found['hint']}" if found.get("hint") else ""


def _is_ready(subscription: Status | None) -> bool:
    return subscription is not None and all(table["state"] == "r" for table in subscription["tables"])


def _flushed(subscription: Status | None) -> Lsn:
    return Lsn.parse((subscription or {}).get("flush_lsn") or "0/0")


def _moving_parts(status: Status) -> object:
    return [
        (
            subscription.get("rows_applied"),
            subscription["received_lsn"],
            subscription["flush_lsn"],
            [(table["state"], table["rows_copied"]) for table in subscription["tables"]],
        )
        for subscription in status["subscriptions"]
    ]
