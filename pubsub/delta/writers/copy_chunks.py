"""Record an unfinished copy's finished chunks in the table's log, where the next attempt finds them.

A chunk's commit is a transaction of its own, under (application id of the copy, chunk number), and names the chunk's
data files in its userMetadata.  The copy's last commit adds all files at once; until then readers see the table's
earlier rows, and no version contains part of the copy.  Blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Operation, commit_retrying, transaction
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn


def application_id(copy: str, chunk: int) -> str:
    """Return the application id under which chunk number `chunk` of the copy `copy` is committed."""
    return f"{copy}/chunk/{chunk}"


def commit(
    log: TableLog,
    copy: str,
    attempt: str,
    chunk: int,
    added: Sequence[Action],
    lsn: Lsn,
    part: tuple[str, str] | None = None,
) -> None:
    """Record a chunk whose data files are durable.  `lsn` is past the snapshot under which the `attempt` read it.

    `part`: the partition that the copy fills; None: the whole table.
    """
    name = application_id(copy, chunk)
    metadata = json.dumps({"chunk": name, "attempt": attempt, "files": list(added)})

    def commit() -> None:
        log.refresh()
        log.commit([transaction(name, int(lsn))], Operation.WRITE, user_metadata=metadata, part=part)

    with log.writing:
        commit_retrying(f'keep a chunk of a copy to the Delta table "{log.table}"', commit)


def require_whole(log: TableLog, added: Sequence[Action]) -> None:
    """Raise NotInPrerequisiteState unless the data files that a task has written are where the log will name them."""
    for file in added:
        if not _is_whole(log, file):
            raise NotInPrerequisiteState(
                f'data file "{file["add"]["path"]}" of the Delta table "{log.table}" is not in the warehouse',
                detail="A Spark executor has written it where the daemon does not see it.",
                hint='The setting "warehouse" must name a directory that daemon and executors share, or S3 or HDFS.',
            )


def committed(log: TableLog, copy: str, since: int) -> Mapping[int, tuple[str, list[Action]]]:
    """Return the chunks finished after version `since`, by number: the attempt that read each, and its files' actions.

    A chunk is left out if one of its files is gone, or its commit from the log, since other writers clean up, too.
    """
    with log.writing:
        log.refresh()
    found: dict[int, tuple[str, list[Action]]] = {}
    prefix = application_id(copy, 0)[:-1]
    for version in range(since + 1, log.version + 1):
        for action in log.actions(version) or ():
            kept = _kept(action, prefix)
            if kept is not None and all(_is_whole(log, file) for file in kept[2]):
                found[kept[0]] = kept[1], kept[2]
    return found


def _kept(action: Action, prefix: str) -> tuple[int, str, list[Action]] | None:
    text = action.get("commitInfo", {}).get("userMetadata")
    if not isinstance(text, str) or prefix not in text:
        return None
    kept = json.loads(text)
    if not isinstance(kept, dict) or not str(kept.get("chunk", "")).startswith(prefix):
        return None
    return int(kept["chunk"].removeprefix(prefix)), str(kept.get("attempt", "")), kept["files"]


def _is_whole(log: TableLog, action: Action) -> bool:
    try:
        (path,) = data_files.paths(log.table, [action])
        return bool(path.stat().st_size == action["add"]["size"])
    except FileNotFoundError:
        return False
