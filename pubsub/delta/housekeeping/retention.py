"""How long a table keeps removed files and its log: Delta's properties, which follow the settings.

A new table gets them from the settings.  When the settings change, a table that this program created is given the new
ones, unless someone has changed them on the table (ALTER TABLE … SET TBLPROPERTIES, a pinned snapshot): the property
pubsub.retention records what the settings put there.  Tables that an earlier release created have neither, and so follow
the settings, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Operation
from pubsub.processor_time import spent_on

FILES: Final = "delta.deletedFileRetentionDuration"
LOG: Final = "delta.logRetentionDuration"
_RECORD: Final = "pubsub.retention"


def retention_properties(files: float, log: float) -> dict[str, str]:
    """Return the properties of a table that keeps removed files and its log for so many seconds."""
    asked = {FILES: _interval(files), LOG: _interval(log)}
    return {**asked, _RECORD: json.dumps(asked)}


def changed(properties: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a table with these properties must be given the `wanted` ones (see `retention_properties`)."""
    if "pubsub.relation" not in properties or all(properties.get(name) == value for name, value in wanted.items()):
        return False
    try:
        record = json.loads(properties.get(_RECORD, "{}"))
    except ValueError:
        return False
    return all(properties.get(name) == record.get(name) for name in (FILES, LOG))


@spent_on("housekeeping", whole=True)
def follow_settings(log: TableLog, wanted: Mapping[str, str]) -> bool:
    """Give the table the `wanted` properties if it follows the settings; return whether it was altered.

    If another writer commits meanwhile, leave it to a later call.  Blocks; raises as TableLog does.
    """
    with log.writing:
        log.refresh()
        if not changed(log.properties, wanted):
            return False
        configuration = {**log.properties, **wanted}
        try:
            log.commit([{"metaData": {**log.metadata, "configuration": configuration}}], Operation.ALTER)
        except Conflict:
            return False
    return True


def _interval(seconds: float) -> str:
    return f"interval {round(seconds)} seconds"
