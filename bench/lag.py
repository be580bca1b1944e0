"""The lag of a subscriber under a load: from a transaction's commit until its origin is seen to have passed the end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from psycopg import sql

from bench.scattered import Scattered
from bench.subscribers import Subscriber
from bench.workload import Dataset, Pgbench, rate_of
from pubsub.protocol import commands
from pubsub.protocol.copyboth import pg_time_to_datetime
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Commit, read_message
from pubsub.testing.servers import EmbeddedPostgres

if TYPE_CHECKING:
    import numpy.typing as npt

#: Seconds between two looks at an origin.
POLL: Final = 0.02
_SLOT: Final = "bench_lag"

Seen: TypeAlias = list[tuple[Lsn, float]]
"""Positions of an origin, and when each was first seen, in seconds since the epoch."""

Follow: TypeAlias = Callable[[Subscriber, Dataset, Lsn, Seen], None]
"""Looks until a subscriber is past an LSN."""


def under(
    publisher: EmbeddedPostgres,
    subscriber: Subscriber,
    data: Pgbench | Scattered,
    load: subprocess.Popen[str],
    follow: Follow,
    say: Callable[[str], None],
) -> tuple[float, tuple[float, ...]]:
    """Watch a subscriber that follows a load until its end; return the load's rate, and p50, p95 and the greatest lag."""
    publisher.query(f"SELECT pg_create_logical_replication_slot('{_SLOT}', 'pgoutput')", data.database)
    seen: Seen = []
    while load.poll() is None:
        look(subscriber, data, seen)
        time.sleep(POLL)
    assert load.stdout is not None
    rate = rate_of(load.stdout.read())
    follow(subscriber, data, data.mark(publisher), seen)
    lags, times = of_transactions(publisher, data, _SLOT, seen)
    publisher.drop_slot(_SLOT)
    for minute in range(int(times[-1] - times[0]) // 60):
        part = lags[(times >= times[0] + minute * 60) & (times < times[0] + minute * 60 + 60)]
        shown = " / ".join(f"{np.percentile(part, p):.2f}" for p in (50, 95, 100)) if len(part) else "nothing"
        say(f"  minute {minute + 1}: {shown}")
    return rate, tuple(float(np.percentile(lags, p)) for p in (50, 95, 100))


def of_transactions(
    publisher: EmbeddedPostgres, data: Dataset, slot: str, seen: Sequence[tuple[Lsn, float]]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the lag in seconds of each transaction in the slot, the mark's included, and when each committed."""
    options = commands.pgoutput_options(180000, [data.publication])
    words = ", ".join(sql.Literal(word).as_string(None) for pair in options.items() for word in pair)
    rows = publisher.query(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL, {words})"
        " WHERE get_byte(data, 0) = ascii('C')",
        data.database,
    )
    commits = [one for (frame,) in rows if isinstance(one := read_message(bytes(frame)), Commit)]
    ends = np.array([int(commit.end_lsn) for commit in commits], np.uint64)
    times = np.array([pg_time_to_datetime(commit.commit_time).timestamp() for commit in commits])
    positions = np.array([int(lsn) for lsn, _ in seen], np.uint64)
    moments = np.array([moment for _, moment in seen])
    # The mark's LSN is taken inside the last transaction, whose commit may lie after it; that counts as seen with
    # the mark.
    first = np.minimum(np.searchsorted(positions, ends), len(positions) - 1)
    return moments[first] - times, times


def look(subscriber: Subscriber, data: Dataset, seen: Seen) -> Lsn:
    """Return the origin's position; if it has moved, add it and the time to `seen`."""
    lsn = subscriber.applied(data)
    if not seen or lsn > seen[-1][0]:
        seen.append((lsn, time.time()))
    return lsn
