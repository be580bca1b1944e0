"""How far a subscription lags, sampled while it follows a load."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from pathlib import Path

import numpy as np
import psutil
from psycopg import pq

from catalog import schema
from pubsub.protocol.lsn import Lsn

_ORIGINS = f"SELECT min(remote_lsn) FROM {schema.origin.name} WHERE relid = 0"


class Lag:
    """Samples the publisher's flushed WAL, and waits until the origin of the node's one subscription has passed it.

    Each sample becomes a lag in seconds, exact to the time between two calls of `sample`; `minutes` has them by minute.
    """

    def __init__(self, home: Path, conninfo: str, processes: list[psutil.Process]) -> None:
        self._catalog = sqlite3.connect(f"file:{home}/catalog.db?mode=ro", uri=True, isolation_level=None)
        self._publisher = pq.PGconn.connect(conninfo.encode())
        self._processes = processes
        self._waiting: deque[tuple[float, Lsn]] = deque()
        self._began = time.monotonic()
        self._cpu = self._spent()
        self.minutes: list[list[float]] = [[]]

    def sample(self) -> None:
        """Take one sample; ask for what earlier ones wait for."""
        found = self._publisher.exec_(b"SELECT pg_current_wal_flush_lsn()").get_value(0, 0)
        assert found is not None
        self._waiting.append((time.monotonic(), Lsn.parse(found.decode())))
        ((origin,),) = self._catalog.execute(_ORIGINS).fetchall()
        now = time.monotonic()
        while self._waiting and origin is not None and self._waiting[0][1] <= Lsn.parse(origin):
            since, _ = self._waiting.popleft()
            self.minutes[-1].append(now - since)

    def say_minute(self) -> None:
        """Print the percentiles since the last call, the processor time spent and the memory held."""
        spent = self._spent()
        memory = ", ".join(f"{process.name()} {process.memory_info().rss >> 20} MB" for process in self._processes)
        print(
            f"{time.monotonic() - self._began:>6.0f} s  lag p50 / p95 / greatest {percentiles(self.minutes[-1])} s;"
            f" {spent - self._cpu:.0f} s of processor time; {memory}",
            flush=True,
        )
        self._cpu = spent
        self.minutes.append([])

    def close(self) -> None:
        self._catalog.close()
        self._publisher.finish()

    def _spent(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def percentiles(lags: list[float]) -> str:
    """Return the median, the 95th percentile and the greatest, as text."""
    return " / ".join(f"{np.percentile(lags, part):.2f}" for part in (50, 95, 100)) if lags else "nothing came"
