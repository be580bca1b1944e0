"""The program of a query's process (query_process.py); it imports no more than a query needs, which every query waits for."""

from __future__ import annotations

import json
import os
import sys
import threading


def main() -> None:
    """Run the query that comes on standard input; end with its error on standard error."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    from pubsub import object_stores

    line = sys.stdin.buffer.readline()
    if not line:
        return

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    task = json.loads(line)
    object_stores.configure(task["conf"])
    builder = QueryBuilder()
    for name, (path, version) in task["tables"].items():
        builder.register(name, DeltaTable(path, version=version, storage_options=object_stores.options(path)))
    try:
        reader = pa.RecordBatchReader.from_stream(builder.execute(task["sql"]))
        with pa.ipc.new_stream(sys.stdout.buffer, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        sys.stdout.flush()
    except Exception as error:
        sys.stderr.write(str(error))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
