"""What a commit that another writer made has done to a table's rows, and whose rows a commit adds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pubsub.delta.log.transactions import Action, applications_of

#: A partition column's physical name, and a value as the log has it.
Partition: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class OtherCommit:
    """A commit that may change rows.  `applications`: those whose transactions it records.

    `restored`: the version that RESTORE went back to (-1: it was given as a timestamp), None for other operations.  `copied`: it
    says that it replaces all rows by a copy, as `Commit.user_metadata` does.  `partitions`: those in which it may change rows, as the
    log has them; None: it does not say.
    """

    version: int
    operation: str
    engine: str
    applications: frozenset[str]
    restored: int | None
    copied: bool = False
    partitions: frozenset[Partition] | None = None

    def concerns(self, app_id: str, part: Partition | None) -> bool:
        """Return whether it may change rows of the partition (None: of the table), or copies `app_id`'s table."""
        return (
            part is None
            or self.partitions is None
            or part in self.partitions
            or any(one.rpartition("/")[0] == app_id.rpartition("/")[0] for one in self.applications)
        )


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
    files = [what for action in actions for kind, what in action.items() if kind in ("add", "remove")]
    changed = [what for what in files if what.get("dataChange", True)]
    if not copied and not changed:
        return None
    operation = str(info.get("operation", "an unnamed operation"))
    restored = None
    if operation == "RESTORE":
        asked = str((info.get("operationParameters") or {}).get("version"))
        restored = int(asked) if asked.isdecimal() else -1
    engine = str(info.get("engineInfo", "an unnamed engine"))
    return OtherCommit(version, operation, engine, applications_of(actions), restored, copied, _partitions_of(changed))


def _partitions_of(files: Sequence[Mapping[str, Any]]) -> frozenset[Partition] | None:
    """Return the values of these files' partitions; None if one does not say it, as a `remove` need not."""
    found: set[Partition] = set()
    for what in files:
        values = what.get("partitionValues")
        if values is None:
            return None
        found.update((name, value or "") for name, value in values.items())
    return frozenset(found)


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
