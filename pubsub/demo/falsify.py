"""Change one value in a Delta table behind everybody's back, to see that the comparison finds it.

This is what a lost or wrong change would look like: a commit that is valid, and a row that is not.  The data file that holds
the row is written again with another value, in a commit that replaces the one file by the other; a deletion vector stays as it
is, since the rows stay where they are.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.errors import UndefinedObject


def falsify(path: Path, key: str, column: str) -> str:
    """In one row of the table at `path` the text `column` becomes another; returns the row's `key`, as text.

    Raises UndefinedObject when the table has no row.
    """
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(path)
    statement = f'SELECT "{key}" AS k FROM t WHERE "{column}" IS NOT NULL ORDER BY 1 LIMIT 1'
    rows = pa.table(QueryBuilder().register("t", table).execute(statement).read_all())
    if not rows.num_rows:
        raise UndefinedObject(f'the Delta table at "{path}" has no row to falsify')
    value = rows["k"][0].as_py()
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": int(time.time() * 1000), "operation": "WRITE", "operationParameters": {}}}
    ]
    # An earlier version of the row may lie in another file, marked as deleted: to change it there too is of no effect.
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
    """The latest `add` of each live file, from the log's entries: a young table has all of them."""
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted((path / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None:
                found[add["path"]] = add
    return [add for name, add in found.items() if any(uri.endswith(f"/{name}") for uri in live)]
