"""Keep the versions of a Delta table readable for as long as a pinned snapshot names one of them.

Whatever removes files of a Delta table or of its log asks the table's properties how long they must stay: VACUUM of any
engine, the clean-up of the log at a checkpoint, and this node's housekeeping.  So a pin is a commit that sets these
properties, and needs nothing of those who clean up.  VACUUM … RETAIN below the property is refused by Spark and by
deltalake, unless its user switches that check off.

    pubsub.pins = {"names": ["audit", "nightly"], "before": {"delta.logRetentionDuration": "interval 7 days", …}}

The names and what the properties were are in the same commit as the properties, so that no crash comes between them.
Blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from pubsub.delta import table
from pubsub.delta.log import durable_files
from pubsub.delta.log.transactions import DELETING, commit_retrying
from pubsub.delta.places import directory, is_local
from pubsub.errors import DataCorrupted, UndefinedTable

PROPERTY: Final = "pubsub.pins"
#: The properties of a table from which nothing may be removed.  1000 weeks back is after 1970, so every engine can
#: compute it.
HELD: Final[Mapping[str, str]] = {
    "delta.deletedFileRetentionDuration": "interval 1000 weeks",
    "delta.logRetentionDuration": "interval 1000 weeks",
    "delta.enableExpiredLogCleanup": "false",
}

Change = Callable[[Mapping[str, str]], Mapping[str, str]]


class Properties(Protocol):
    """Changes the properties of tables."""

    def change_properties(self, path: str, change: Change) -> None:
        """Commit `change` of the properties of the table at `path`; no commit if it changes nothing.

        Raises UndefinedTable, Conflict, CommitFailed, and UnknownOutcome if Spark's JVM was lost meanwhile.
        """


def pin_all(tables: Properties, paths: Iterable[str], name: str) -> None:
    """Let the tables at `paths` keep everything that they have, until `release_all`; return when that is durable.

    What this process was deleting meanwhile is gone then.  A table that has the pin `name` already is left as it is.  Raises
    what `change_properties` raises, and OSError.
    """
    for path in paths:
        _commit(tables, path, lambda properties: pinned(properties, name))
    with DELETING:
        pass


def release_all(tables: Properties, paths: Iterable[str], name: str) -> None:
    """Take the pin back: with its last pin a table's properties are again what they were.  Raises as `pin_all` does.

    Tables that are gone, or lack the pin, are passed over.
    """
    for path in paths:
        with suppress(UndefinedTable):
            _commit(tables, path, lambda properties: released(properties, name))


def pinned(properties: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the properties with the pin `name`.  Values that differ from HELD are remembered, unless they are ours."""
    names, before = _read(properties)
    for key, held in HELD.items():
        if properties.get(key) != held or key not in before:
            before[key] = properties.get(key)
    return {**properties, **HELD, PROPERTY: _text(names | {name}, before)}


def released(properties: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the properties without the pin `name`.

    Without any other pin, each property gets its value from before; one that was changed since is its user's, and stays.
    """
    names, before = _read(properties)
    if name not in names:
        return dict(properties)
    names -= {name}
    if names:
        return {**properties, PROPERTY: _text(names, before)}
    after = {key: value for key, value in properties.items() if key != PROPERTY}
    for key, value in before.items():
        if properties.get(key) != HELD.get(key):
            continue
        if value is None:
            del after[key]
        else:
            after[key] = value
    return after


def holds(path: str, name: str) -> bool:
    """Return whether the table at `path` still keeps what it had when it was pinned.

    It does not if somebody has removed it, or set one of the properties, since.
    """
    try:
        properties = table.properties(path)
    except UndefinedTable:
        return False
    return name in _read(properties)[0] and all(properties.get(key) == value for key, value in HELD.items())


def _commit(tables: Properties, path: str, change: Change) -> None:
    what = f'change the properties of the Delta table "{path}"'
    commit_retrying(what, lambda: tables.change_properties(path, change))
    if is_local(path):
        durable_files.sync_directory(directory(path) / "_delta_log")


def _read(properties: Mapping[str, str]) -> tuple[set[str], dict[str, str | None]]:
    text = properties.get(PROPERTY)
    if text is None:
        return set(), {}
    try:
        found = json.loads(text)
        return set(found["names"]), dict(found["before"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataCorrupted(f'the property "{PROPERTY}" of a Delta table cannot be read: {text}') from error


def _text(names: set[str], before: Mapping[str, str | None]) -> str:
    return json.dumps({"names": sorted(names), "before": before}, ensure_ascii=False)
