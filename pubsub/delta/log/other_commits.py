"""What a commit that another writer made has done to a table's rows, and whose rows a commit adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pubsub.delta.log.transactions import Action, applications_of


@dataclass(frozen=True, slots=True)
class OtherCommit:
    """A commit that may change rows.  `applications`: those whose transactions it records.

    `restored`: the version that RESTORE went back to (-1: it was given as a timestamp), None for other operations.
    """

    version: int
    operation: str
    engine: str
    applications: frozenset[str]
    restored: int | None


class ConcurrentCommit(Exception):
    """Others have written the table since the batch was staged for it."""

    def __init__(self, commits: Sequence[OtherCommit]) -> None:
        super().__init__(f"{len(commits)} commits")
        self.commits = commits


def writers_of(actions: Sequence[Action]) -> frozenset[str] | None:
    """Return a commit's applications; None if the commit also copied rows without changing them."""
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    metrics = info.get("operationMetrics") or {}
    if any("copied" in name.lower() and "file" not in name.lower() and str(n) != "0" for name, n in metrics.items()):
        return None
    return applications_of(actions)


def other_commit(version: int, actions: Sequence[Action]) -> OtherCommit | None:
    """Describe a commit; None if it changes no rows, as OPTIMIZE and VACUUM mark each file."""
    files = (what for action in actions for kind, what in action.items() if kind in ("add", "remove"))
    if not any(what.get("dataChange", True) for what in files):
        return None
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    operation = str(info.get("operation", "an unnamed operation"))
    restored = None
    if operation == "RESTORE":
        asked = str((info.get("operationParameters") or {}).get("version"))
        restored = int(asked) if asked.isdecimal() else -1
    return OtherCommit(
        version, operation, str(info.get("engineInfo", "an unnamed engine")), applications_of(actions), restored
    )
