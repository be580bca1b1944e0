"""Keys of rows that differ, as text: so they can be sent with a request, wherever the daemon runs that is asked."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

#: The most keys that are sent at a time, and about how many bytes of them.
_KEYS: Final = 100_000
_BYTES: Final = 4 << 20

_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="zstd")


def parts(keys: pa.Table) -> Iterator[pa.Table]:
    """Yield the keys, as many as are sent at a time."""
    at_once = max(1, min(_KEYS, keys.num_rows * _BYTES // max(keys.nbytes, 1)))
    for first in range(0, keys.num_rows, at_once):
        yield keys.slice(first, at_once)


def write(keys: pa.Table) -> str:
    """Return the keys as text."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, keys.schema, options=_COMPRESSED) as writer:
        writer.write_table(keys)
    return b64encode(sink.getvalue()).decode()


def read(text: str) -> pa.Table:
    """Return the keys that `write` has made a text of."""
    return pa.ipc.open_stream(b64decode(text)).read_all()
