"""The program of a query's process, which is forked (query_process.py has what it reads and writes)."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pubsub import object_stores

_LONGEST: Final = 32 << 10


def main(descriptor: int, errors: int) -> int:
    """Run the query that comes on a socket, and write its rows there; write its error to `errors`.  Return the exit code."""
    sock = socket.socket(fileno=descriptor)
    source, target = sock.makefile("rb"), sock.makefile("wb")
    line = source.readline()
    if not line:
        return 0

    def watch() -> None:
        source.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    task = json.loads(line)
    object_stores.configure(task["conf"])
    try:
        builder = QueryBuilder()
        for name, (path, version) in task["tables"].items():
            builder.register(name, DeltaTable(path, version=version, storage_options=object_stores.options(path)))
        reader = pa.RecordBatchReader.from_stream(builder.execute(task["sql"]))
        with pa.ipc.new_stream(target, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        target.flush()
    except Exception as error:
        # No more than a pipe takes at once: it is read when this process has ended.
        with suppress(BrokenPipeError):
            os.write(errors, str(error).encode()[:_LONGEST])
        os._exit(1)
    # Threads of the query's engine may still be there.
    os._exit(0)
