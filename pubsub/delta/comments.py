"""The comments of a Delta table and its columns: those that the publisher's have, in a commit of metadata alone.

A comment of the publisher's takes the place of any other.  One that is removed at the publisher goes, unless it came from somewhere
else: the property pubsub.comments names those that were taken over.  In a table of several sources the first comment stays, since
the next source's may be another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pubsub.delta import schema_json as schema
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Conflict, Operation

_RECORD: Final = "pubsub.comments"
_COMMENT: Final = "comment"
#: Stands for the table itself in the record: a column has a name.
_TABLE: Final = ""


@dataclass(frozen=True, slots=True)
class Comments:
    """What a table and its columns are to be told of.  `columns`: by the Delta table's names, None: the publisher's has no comment.

    Columns that are not in it are not the publisher's, and keep what they have.
    """

    table: str | None
    columns: Mapping[str, str | None]


def follow(log: TableLog, wanted: Callable[[Mapping[str, str]], Comments], *, shared: bool = False) -> bool:
    """Give the table comments; return whether it was altered.  `shared`: other sources have comments, too.

    `wanted` returns the comments for a table with these properties, of the version that gets them: they tell what its columns are.

    If another writer commits meanwhile, leave it to a later call.  Blocks; raises as TableLog does.
    """
    with log.writing:
        log.refresh()
        metadata = commented(log.metadata, wanted(log.properties), shared=shared)
        if metadata is None:
            return False
        try:
            log.commit([{"metaData": metadata}], Operation.ALTER)
        except Conflict:
            return False
    return True


def commented(metadata: Mapping[str, Any], wanted: Comments, *, shared: bool = False) -> Action | None:
    """Return a table's `metaData` action with the `wanted` comments; None if it has them."""
    configuration = metadata.get("configuration") or {}
    taken = _taken(configuration)
    columns = schema.fields(metadata)
    now: set[str] = set()
    description = _chosen(metadata.get("description"), wanted.table, _TABLE, taken, now, shared=shared)
    for column in columns:
        if column["name"] not in wanted.columns:
            continue
        held = column.get("metadata") or {}
        found = _chosen(held.get(_COMMENT), wanted.columns[column["name"]], column["name"], taken, now, shared=shared)
        column["metadata"] = {name: value for name, value in held.items() if name != _COMMENT}
        if found is not None:
            column["metadata"][_COMMENT] = found
    same = columns == schema.fields(metadata) and description == metadata.get("description")
    if same and now == taken:
        return None
    action = {name: value for name, value in metadata.items() if name != "description"}
    if description is not None:
        action["description"] = description
    record = {name: value for name, value in configuration.items() if name != _RECORD}
    if now:
        record[_RECORD] = json.dumps(sorted(now), ensure_ascii=False)
    return {**action, "schemaString": schema.schema_string(columns), "configuration": record}


def _chosen(
    held: str | None, wanted: str | None, name: str, taken: Collection[str], now: set[str], *, shared: bool
) -> str | None:
    """Return the comment that is to be there; `now` gets the name if it is the publisher's."""
    if shared and held is not None:
        if name in taken:
            now.add(name)
        return held
    if wanted is not None:
        now.add(name)
        return wanted
    return None if name in taken else held


def _taken(configuration: Mapping[str, str]) -> set[str]:
    try:
        return set(json.loads(configuration.get(_RECORD, "[]")))
    except (ValueError, TypeError):
        return set()  # somebody has written something else there
