"""What a commit that another writer made has done to a table's rows, and whose rows a commit adds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pubsub.delta.log.transactions import Action, applications_of


@dataclass(frozen=True, slots=True)
class OtherCommit:
    """A commit that may change rows.  `applications`: those whose transactions it records.

    `restored`: the version that RESTORE went back to (-1: it was given as a timestamp), None for other operations.  `copied`: it
    says that it replaces all rows by a copy, as `Commit.user_metadata` does.
    """

    version: int
    operation: str
    engine: str
    applications: frozenset[str]
    restored: int | None
    copied: bool = False


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
    """Describe a commit; None if it changes no rows, as OPTIMIZE and VACUUM mark each file, and is no copy."""
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    copied = _says_copied(info.get("userMetadata"))
    files = (what for action in actions for kind, what in action.items() if kind in ("add", "remove"))
    if not copied and not any(what.get("dataChange", True) for what in files):
        return None
    operation = str(info.get("operation", "an unnamed operation"))
    restored = None
    if operation == "RESTORE":
        asked = str((info.get("operationParameters") or {}).get("version"))
        restored = int(asked) if asked.isdecimal() else -1
    engine = str(info.get("engineInfo", "an unnamed engine"))
    return OtherCommit(version, operation, engine, applications_of(actions), restored, copied)


def _says_copied(metadata: object) -> bool:
    try:
        said = json.loads(metadata) if isinstance(metadata, str) else None
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("copied") is True


def since_copy(commits: Sequence[OtherCommit], app_id: str) -> Sequence[OtherCommit]:
    """Return the commits from the last one on that is a copy of `app_id`'s table: it replaces what was done before."""
    table = app_id.rpartition("/")[0]

    def is_copy(commit: OtherCommit) -> bool:
        return commit.copied and any(one.rpartition("/")[0] == table for one in commit.applications)

    first = next((place for place in range(len(commits))[::-1] if is_copy(commits[place])), 0)
    return commits[first:]
