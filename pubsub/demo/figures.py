"""The demo's figures, measured from outside the daemon, not reported by it.

Lag is the time from the publisher's commit until the change is visible in Delta.  A thread asks the publisher twenty
times a second how far its WAL is flushed.  Every Delta commit names its transactions, and its log entry's time says
when it became visible.  A transaction between two samples counts from the earlier one, so a lag is at most 50 ms too
long, never too short.
"""

from __future__ import annotations

import json
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psycopg

from pubsub.demo.processes import descendants, jvm_of, memory, name_of
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.session_settings import session_settings_sql

_SAMPLE_SECONDS: Final = 0.05
_MEMORY_SECONDS: Final = 0.5


class WalClock:
    """Samples of the publisher's WAL position over time; `times` are Unix times.  `conninfo` is the database to ask."""

    def __init__(self, conninfo: str) -> None:
        self.times: list[float] = []
        self.lsns: list[Lsn] = []
        self._conninfo = conninfo
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            with psycopg.connect(self._conninfo, autocommit=True, application_name="pubsub demo") as connection:
                connection.execute(session_settings_sql(connection.info.server_version).encode())
                while not self._stop.wait(_SAMPLE_SECONDS):
                    # Taken before the query: any commit that the answer lacks is later than this.
                    now = time.time()
                    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
                    assert row is not None
                    self.times.append(now)
                    self.lsns.append(Lsn.parse(row[0]))
        except psycopg.Error:
            return  # the publisher has ended; the samples so far remain valid


@dataclass(frozen=True, slots=True)
class Batch:
    """Transactions that became visible together: the end LSNs of the first and the last, and the Unix time."""

    first: Lsn
    last: Lsn
    visible_at: float


def batches(paths: Iterable[Path]) -> list[Batch]:
    """Return the batches committed to the tables at `paths`; a batch is visible once its last table has it."""
    found: dict[Lsn, Batch] = {}
    for path in paths:
        for entry in (path / "_delta_log").glob("*.json"):
            if (held := _range(entry)) is None:
                continue
            first, last = held
            visible_at = entry.stat().st_mtime
            known = found.get(last)
            if known is not None:
                first, visible_at = min(first, known.first), max(visible_at, known.visible_at)
            found[last] = Batch(first, last, visible_at)
    return [found[last] for last in sorted(found)]


def _range(entry: Path) -> tuple[Lsn, Lsn] | None:
    if re.fullmatch(r"\d{20}", entry.stem) is None:
        return None
    for line in entry.read_text().splitlines():
        metadata = json.loads(line).get("commitInfo", {}).get("userMetadata")
        if metadata is not None:
            held = json.loads(metadata)
            # Commits for a chunk of a copy or a change of columns have no transactions.
            return (Lsn.parse(held["first"]), Lsn.parse(held["last"])) if "first" in held else None
    return None


def lags(times: Sequence[float], lsns: Sequence[Lsn], committed: Iterable[Batch], since: float) -> list[float]:
    """Return the lags in seconds, sorted: one for each interval between samples in which something was committed.

    Only commits after `since` (Unix time) count.
    """
    found = []
    for batch in committed:
        # The interval that ends with sample i has the WAL flushed after sample i - 1, up to sample i.
        for index in range(max(1, bisect_left(lsns, batch.first)), len(lsns)):
            if times[index - 1] >= since and lsns[index] > lsns[index - 1]:
                found.append(max(0.0, batch.visible_at - times[index - 1]))
            if lsns[index] >= batch.last:
                break
    return sorted(found)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest of sorted values that `percent` of them do not exceed; None without values."""
    if not values:
        return None
    return values[min(len(values) - 1, max(0, -(-len(values) * percent // 100).__int__() - 1))]


class Memory:
    """The peak resident bytes of a daemon, of its JVM, and of the Python processes that Spark starts for copies."""

    def __init__(self, daemon: int) -> None:
        self.python = 0
        self.jvm = 0
        self.workers = 0
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            self._look()
            if self._stop.wait(_MEMORY_SECONDS):
                self._look()
                return

    def _look(self) -> None:
        self.python = max(self.python, memory(self._daemon, "VmHWM"))
        jvm = jvm_of(self._daemon)
        if jvm is not None:
            self.jvm = max(self.jvm, memory(jvm, "VmHWM"))
            # The workers are forks of one process, so shared memory must count once: hence Pss.  While the JVM starts a
            # program it briefly has a copy of itself as a child, which the name excludes.
            workers = [pid for pid in descendants(jvm) if name_of(pid).startswith("python")]
            self.workers = max(self.workers, sum(memory(pid, "Pss", "smaps_rollup") for pid in workers))


@dataclass(frozen=True, slots=True)
class Copy:
    """An initial copy, with its start and end in Unix time."""

    relation: str
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def copies(events: Iterable[Mapping[str, Any]]) -> list[Copy]:
    """Return the copies in the daemon's log, the last one of each table."""
    started: dict[str, float] = {}
    found: dict[str, Copy] = {}
    for event in events:
        relation = event.get("relation")
        if relation is None:
            continue
        if event.get("event") == "copy has started":
            started[relation] = _time(event)
        elif event.get("event") == "copy is done" and relation in started:
            found[relation] = Copy(relation, started[relation], _time(event))
    return list(found.values())


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


class Rate:
    """A counter's rate over the last `seconds`; `fastest` is the highest rate over a full such period."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: list[tuple[float, int]] = []
        self.fastest = 0.0

    def add(self, now: float, count: int) -> float:
        """Record the count at `now` (seconds); return the rate per second over the last `seconds`."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()  # the counter was reset
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._seconds:
            self._seen.pop(0)
        before, earlier = self._seen[0]
        if now - before <= 0:
            return 0.0
        rate = (count - earlier) / (now - before)
        if now - before >= self._seconds * 0.9:
            self.fastest = max(self.fastest, rate)
        return rate
