"""Change one value in a Delta table without the node's knowledge, to see that the comparison finds it.

A lost or wrong change would look the same: a valid commit with a wrong row.  The row's data file is rewritten with
another value, and a commit replaces the old file with the new one.  A deletion vector stays valid, since the rows keep
their positions.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.errors import UndefinedObject

if TYPE_CHECKING:
    from pubsub.delta.log.transactions import Action


def falsify(path: Path, key: str, column: str) -> str:
    """Change the text `column` in one row of the table at `path`; return the row's `key` as text.

    Raises UndefinedObject if the table has no row with a value in `column`.
    """
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(path)
    statement = f'SELECT "{key}" AS k FROM t WHERE "{column}" IS NOT NULL ORDER BY 1 LIMIT 1'
    rows = pa.table(QueryBuilder().register("t", table).execute(statement).read_all())
    if not rows.num_rows:
        raise UndefinedObject(f'the Delta table at "{path}" has no row to falsify')
    value = rows["k"][0].as_py()
    actions: list[Action] = [
        {"commitInfo": {"timestamp": int(time.time() * 1000), "operation": "WRITE", "operationParameters": {}}}
    ]
    # Another file may have an earlier version of the row, marked as deleted; changing that too has no effect.
    for add in _files(path, {str(file) for file in table.file_uris()}):
        data = pq.ParquetFile(path / add["path"]).read()
        chosen = pc.equal(data[key], pa.scalar(value, data[key].type))
        if not pc.any(chosen).as_py():
            continue
        falsified = pc.if_else(chosen, pc.binary_join_element_wise(data[column], "falsified", " "), data[column])
        data = data.set_column(data.schema.get_field_index(column), data.schema.field(column), falsified)
        name = f"part-00000-{uuid.uuid4()}.parquet"
        pq.write_table(data, path / name)
        now = int(time.time() * 1000)
        size = (path / name).stat().st_size
        remove = {"path": add["path"], "deletionTimestamp": now, "dataChange": True, "size": add["size"]}
        if "deletionVector" in add:
            remove["deletionVector"] = add["deletionVector"]
        actions.append({"remove": remove})
        actions.append({"add": {**add, "path": name, "size": size, "modificationTime": now, "dataChange": True}})
    entry = path / "_delta_log" / f"{table.version() + 1:020d}.json"
    with entry.open("x") as log:
        log.writelines(json.dumps(action) + "\n" for action in actions)
    return str(value)


def _files(path: Path, live: set[str]) -> list[dict[str, Any]]:
    """Return the latest `add` of each live file, from the log's entries; a young table still has all entries."""
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted((path / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None:
                found[add["path"]] = add
    return [add for name, add in found.items() if any(uri.endswith(f"/{name}") for uri in live)]
