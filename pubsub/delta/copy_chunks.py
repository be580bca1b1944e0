"""The finished chunks of a copy under way, kept in the table's log: the next attempt finds them there.

A chunk's commit holds (application id of the copy, its number) as a transaction of its own, and names the chunk's data files
in its userMetadata.  They become the table's in the copy's last commit, all at once: until then who reads the table sees what it
held before, and an unfinished copy is part of no version.  Blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pubsub.delta.data_files import Action
from pubsub.delta.log import TableLog
from pubsub.protocol.lsn import Lsn


def application_id(copy: str, chunk: int) -> str:
    """The id that chunk number `chunk` of the copy `copy` commits under."""
    return f"{copy}/chunk/{chunk}"


def commit(log: TableLog, copy: str, attempt: str, chunk: int, added: Sequence[Action], lsn: Lsn) -> None:
    """Keep a chunk whose data files are durable; `lsn` is past the snapshot that it was read under, by the copy's `attempt`."""
    with log.writing:
        while True:
            log.refresh()
            try:
                log.commit(
                    [{"txn": {"appId": application_id(copy, chunk), "version": int(lsn)}}],
                    operation="COPY CHUNK",
                    metrics={"numFiles": len(added)},
                    user_metadata=json.dumps(
                        {"chunk": application_id(copy, chunk), "attempt": attempt, "files": list(added)}
                    ),
                )
            except FileExistsError:
                continue  # another writer's commit: nothing of it matters here
            return


def committed(log: TableLog, copy: str, since: int) -> Mapping[int, tuple[str, list[Action]]]:
    """The copy's finished chunks by number: the attempt that read each, and the actions that name its files.

    They are later than version `since`.

    A chunk is left out when a file of it is gone, or its commit from the log: others clean up too.
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
        return bool((log.table / action["add"]["path"]).stat().st_size == action["add"]["size"])
    except FileNotFoundError:
        return False
