"""Two busy subscriptions in one process, and in two (the setting worker_processes).

    python -m bench.processes [TRANSACTIONS [ROUNDS]]

Each subscription has a database of its own, and a backlog of as many pgbench transactions, which is written while both are
disabled; then both are enabled.  The two daemons take turns.  Prints JSON, for each number of processes the medians of:

seconds   from enabling them until both have all
cores     how many the daemon, its processes and its JVM keep busy meanwhile
server    the same of the publisher's server

and `ratio`: how many times as fast two processes are; `most`: how many times as fast they could be if they, the server and what
PostgreSQL and the JVM do besides kept every core busy, with the same processor time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench import machine
from bench.subscribers import Ours, wait
from bench.workload import Pgbench
from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres

_SCALE: Final = 2
_PATIENCE: Final = 900.0
_COUNTS: Final = (1, 2)


def _measured(transactions: int, rounds: int) -> dict[str, Any]:
    data = [Pgbench(f"busy{number}", _SCALE) for number in range(2)]
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in _COUNTS}
    with ExitStack() as stack:
        publisher = stack.enter_context(EmbeddedPostgres("18", wheel=True))
        for one in data:
            one.load(publisher)
        ours = {count: _ours(stack, publisher, count) for count in _COUNTS}
        for subscriber in ours.values():
            for one in data:
                subscriber.create(one)
            for one in data:
                subscriber.wait_until_ready(one, _PATIENCE)
                subscriber.disable(one)
        # The first round is the JVMs' warming up.
        for number in range(rounds + 1):
            ends = [one.transactions(publisher, transactions) for one in data]
            for count in _COUNTS if number % 2 else _COUNTS[::-1]:
                figures = _applied(publisher, ours[count], data, ends)
                if number:
                    found[count].append(figures)
        for subscriber in ours.values():
            for one in data:
                if difference := subscriber.difference(one):
                    raise SystemExit(f"the tables differ: {difference}")
    medians = {
        count: [statistics.median(column) for column in zip(*runs, strict=True)] for count, runs in found.items()
    }
    alone, both = (medians[count] for count in _COUNTS)
    cores = len(os.sched_getaffinity(0))
    return {
        "transactions": transactions,
        "rounds": rounds,
        **{
            f"{count} processes": dict(
                zip(("seconds", "cores", "server"), (round(figure, 2) for figure in of), strict=True)
            )
            for count, of in medians.items()
        },
        "ratio": round(alone[0] / both[0], 2),
        "ratios": [round(a[0] / b[0], 2) for a, b in zip(found[1], found[2], strict=True)],
        "most": round(cores / (alone[1] + alone[2]), 2),
    }


def _ours(stack: ExitStack, publisher: EmbeddedPostgres, count: int) -> Ours:
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pubsub-bench-processes-")), "node")
    home.mkdir()
    return stack.enter_context(Ours(publisher, home, f"in{count}", f"worker_processes = {count}\n"))


def _applied(
    publisher: EmbeddedPostgres, ours: Ours, data: list[Pgbench], ends: list[Lsn]
) -> tuple[float, float, float]:
    """Let a subscriber apply what there is; return the seconds, and how many cores it and the server kept busy."""
    pids = ours.pid, publisher.pid
    before, began = [*map(machine.tree_seconds, pids)], time.monotonic()
    for one in data:
        ours.enable(one)

    def applied() -> bool:
        return all(ours.applied(one) > end for one, end in zip(data, ends, strict=True))

    wait(applied, _PATIENCE, "the backlog was not applied", ours.failure)
    seconds = time.monotonic() - began
    cores = [(machine.tree_seconds(pid) - used) / seconds for pid, used in zip(pids, before, strict=True)]
    for one in data:
        ours.disable(one)
    return seconds, cores[0], cores[1]


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    print(json.dumps(_measured(*(asked + [50_000, 5][len(asked) :])), indent=1))
