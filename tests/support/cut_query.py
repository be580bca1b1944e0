"""A query's process that dies between two batches of its rows."""

from __future__ import annotations

import os
import socket

import pyarrow as pa


def main(descriptor: int, _errors: int) -> int:
    batch = pa.record_batch({"value": [1]})
    sock = socket.socket(fileno=descriptor)
    sock.makefile("rb").readline()
    target = sock.makefile("wb")
    writer = pa.ipc.new_stream(target, batch.schema)
    writer.write_batch(batch)
    target.flush()
    os._exit(3)
