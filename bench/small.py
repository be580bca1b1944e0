"""Small transactions: the first one after silence, and the end of many of one row each."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.subscribers import Subscriber
from bench.workload import Dataset, Orders, last_transaction
from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

NAMES: Final = ("first", "singles")
#: Rows of the table, and transactions of one row.
ROWS: Final = 10_000
SINGLES: Final = 20_000
_CLIENTS: Final = 4
_FIRST: Final = 15
# Longer than a batch may stay open.
_SILENCE: Final = 2.0

Follow = Callable[[Subscriber, Dataset, Lsn], None]
"""Waits until a subscriber is past an LSN."""


def first(publisher: EmbeddedPostgres, subscriber: Subscriber, data: Orders, follow: Follow) -> float:
    """Return the median seconds from a commit, before which nothing came for a while, until it is visible."""
    found = []
    for _ in range(_FIRST):
        time.sleep(_SILENCE)
        lsn = _mark(publisher, data)
        began = time.monotonic()
        follow(subscriber, data, lsn)
        found.append(time.monotonic() - began)
    return statistics.median(found)


def singles(publisher: EmbeddedPostgres, subscriber: Subscriber, data: Orders, count: int, follow: Follow) -> float:
    """Return the seconds from the last of `count` transactions in a row, of one row each, until it is visible."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "single.sql")
        script.write_text(
            f"\\set id random(1, {data.rows})\nUPDATE orders SET quantity = quantity + 1 WHERE id = :id;\n"
        )
        arguments = ["--no-vacuum", "--protocol=prepared", f"--client={_CLIENTS}", f"--file={script}"]
        subprocess.run(
            [
                *(str(binaries.program("pgbench")), *arguments, f"--transactions={count // _CLIENTS}"),
                publisher.conninfo(data.database),
            ],
            check=True,
            capture_output=True,
        )
    lsn = _mark(publisher, data)
    began = time.monotonic()
    follow(subscriber, data, lsn)
    return time.monotonic() - began


def _mark(publisher: EmbeddedPostgres, data: Orders) -> Lsn:
    return last_transaction(publisher, data.database, "UPDATE orders SET quantity = quantity + 1 WHERE id = 1")
