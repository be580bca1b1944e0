"""Read the whole catalog from a SQLite file with Python's own driver.

A client's SELECT on a view, or `status`, needs nothing else of the catalog, and importing SQLAlchemy takes several times
as long as the rest of such a command.  catalog.store reads every other catalog, and says what is wrong with one.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from catalog import from_rows
from catalog.records import State
from pubsub.protocol.lsn import Lsn

#: How long a read waits for another process that locks the file as a whole, in seconds.
_TIMEOUT: Final = 30.0

#: The types of columns, as SQLAlchemy declares those of catalog.schema, whose values SQLite holds in another form.
_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "VARCHAR(17)": Lsn.parse,  # LsnType: no other column has this length
    "DATETIME": lambda value: datetime.fromisoformat(value).replace(tzinfo=UTC),
    "BOOLEAN": bool,
    "JSON": json.loads,
}


def read_state(path: Path) -> State | None:
    """Return what Catalog.state() would; None if only catalog.store can tell, or say why there is nothing to read.

    That is a missing file, one that this process may not write, one of another schema version, and any error of SQLite.
    Blocks.  Raises DataCorrupted for an option that this program does not know.
    """
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return None
    try:
        # mode=rw, since a file that was removed meanwhile must not be made again.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_TIMEOUT)) as file:
            file.isolation_level = None
            file.execute("BEGIN")
            found = _table(file, "pubsub_node")
            if [row["schema_version"] for row in found] != [from_rows.SCHEMA_VERSION]:
                return None
            return _state(file, found[0])
    except sqlite3.Error:
        return None


def _state(file: sqlite3.Connection, node: from_rows.Row) -> State:
    incidents = {(row["subid"], row["relid"]): row for row in _table(file, "pubsub_table_incident")}
    none = dict.fromkeys(("stopped", "error_lsn", "foreign_version", "foreign_operation", "foreign_engine"))
    relations = _table(file, "pubsub_subscription_rel", "subid, relid")
    return State(
        node=from_rows.node(node),
        daemons=tuple(map(from_rows.daemon, _table(file, "pubsub_daemon", "id"))),
        subscriptions=tuple(map(from_rows.subscription, _table(file, "pubsub_subscription", "oid"))),
        relations=tuple(
            from_rows.relation({**row, **incidents.get((row["subid"], row["relid"]), none)}) for row in relations
        ),
        origins=tuple(map(from_rows.origin, _table(file, "pubsub_replication_origin", "subid, relid"))),
        workers=tuple(map(from_rows.worker, _table(file, "pubsub_worker", "subid, relid"))),
        copies=tuple(map(from_rows.copy, _table(file, "pubsub_copy_progress", "subid, relid"))),
        statistics=tuple(map(from_rows.statistics, _table(file, "pubsub_subscription_stats", "subid"))),
        prepared=tuple(map(from_rows.prepared, _table(file, "pubsub_prepared", "subid, prepared"))),
        publishers=dict(map(from_rows.publisher, _table(file, "pubsub_publisher"))),
        rows=tuple(map(from_rows.table_rows, _table(file, "pubsub_table_rows"))),
        storage=tuple(map(from_rows.table_storage, _table(file, "pubsub_table_storage", "subid, relid"))),
        verifications=tuple(map(from_rows.verification, _table(file, "pubsub_verification", "subid, relid"))),
        registrations=tuple(map(from_rows.registration, _table(file, "pubsub_table_registration", "subid, relid"))),
        sequences=tuple(
            from_rows.sequence(row)
            for row in _table(file, "pubsub_subscription_seq", "subid, relid")
            if not row["leaving"]
        ),
        pinned_snapshots=tuple(map(from_rows.pinned_snapshot, _table(file, "pubsub_pinned_snapshot", "created, name"))),
        leases=tuple(map(from_rows.lease, _table(file, "pubsub_lease", "unit"))),
    )


def _table(file: sqlite3.Connection, name: str, order: str = "1") -> list[dict[str, Any]]:
    """Return a table's rows, with Python's values."""
    declared = file.execute("SELECT name, type FROM pragma_table_info(?)", (name,)).fetchall()
    readers = [(column, _READ.get(kind)) for column, kind in declared]
    columns = ", ".join(f'"{column}"' for column, _ in readers)
    return [
        {
            column: value if value is None or read is None else read(value)
            for (column, read), value in zip(readers, row, strict=True)
        }
        for row in file.execute(f"SELECT {columns} FROM {name} ORDER BY {order}")
    ]
