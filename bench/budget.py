"""Where the processor time goes: of a batch of small transactions, and of a copy.

    python -m bench.budget [ROWS [RATE [SECONDS]]]

A table of ROWS rows is copied, warm; then pgbench runs at RATE transactions a second.  Prints JSON: seconds of processor time for
1,000,000 copied rows, and for 1,000 transactions, of

python     the daemon, by part (pubsub_processor_seconds)
jvm        Spark's JVM: compiling, collecting garbage, all else
tasks      Spark's Python processes, which read and write what is copied
server     the publisher's, with pgbench's own backends while that runs
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from bench import machine
from bench.subscribers import Ours, wait
from bench.workload import Dataset, Orders, Pgbench
from pubsub.processor_time import of_process
from pubsub.protocol.lsn import Lsn
from pubsub.testing.ports import Port
from pubsub.testing.servers import EmbeddedPostgres

_TIMEOUT: Final = 900.0
_SCALE: Final = 5
_PART: Final = re.compile(r'^pubsub_processor_seconds_total\{part="(\w+)"\} (\S+)$', re.MULTILINE)
#: The JVM's threads, as their names begin in /proc.
_COMPILE: Final = ("C1 Comp", "C2 Comp")
_COLLECT: Final = ("GC Thread", "G1 ", "VM Thread")
_WARM_SECONDS: Final = 20


class _Spent:
    """The seconds of processor time that everything has had so far."""

    def __init__(self, ours: Ours, publisher: EmbeddedPostgres, port: int) -> None:
        time.sleep(1.5)  # a picture of the node is a second old at most
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            parts = _PART.findall(answer.read().decode())
        self.python = {part: float(seconds) for part, seconds in parts}
        jvm = ours.jvm_pid() or 0
        of_threads = machine.threads(jvm)
        compiling, collecting = (
            sum(seconds for name, seconds in of_threads if name.startswith(names)) for names in (_COMPILE, _COLLECT)
        )
        own = of_process(jvm) or 0.0
        self.jvm = {"compiling": compiling, "collecting": collecting, "other": own - compiling - collecting}
        self.tasks = machine.tree_seconds(ours.pid) - (of_process(ours.pid) or 0.0) - own
        self.server = machine.tree_seconds(publisher.pid)

    def since(self, before: _Spent, work: float) -> dict[str, Any]:
        """Return what was spent between for each piece of work."""

        def each(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {part: round((seconds - then.get(part, 0.0)) / work, 3) for part, seconds in now.items()}

        python, jvm = each(self.python, before.python), each(self.jvm, before.jvm)
        # One that has ended idle takes what it had with it.
        tasks = max(round((self.tasks - before.tasks) / work, 3), 0.0)
        return {
            "python": python,
            "jvm": jvm,
            "tasks": tasks,
            "all of ours": round(sum(python.values()) + sum(jvm.values()) + tasks, 3),
            "server": round((self.server - before.server) / work, 3),
        }


def _measured(rows: int, rate: int, seconds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        publisher = stack.enter_context(EmbeddedPostgres("18", wheel=True))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pubsub-bench-budget-")), "node")
        home.mkdir()
        port = Port.reserve().number
        settings = f'[http]\nlisten = "127.0.0.1:{port}"\n'
        ours = stack.enter_context(Ours(publisher, home, "budget", settings, polls=False))
        orders, pgbench = Orders("orders", rows), Pgbench("pgbench", _SCALE)
        for data in (orders, pgbench):
            data.load(publisher)

        def copy() -> dict[str, Any]:
            before = _Spent(ours, publisher, port)
            ours.create(orders)
            ours.wait_until_ready(orders, _TIMEOUT)
            spent = _Spent(ours, publisher, port).since(before, rows / 1e6)
            ours.drop(orders)
            return spent

        copy()  # the JVM compiles what it does often
        copied = copy()
        ours.create(pgbench)
        ours.wait_until_ready(pgbench, _TIMEOUT)
        _run(publisher, ours, pgbench, rate, _WARM_SECONDS)
        before = _Spent(ours, publisher, port)
        count = _run(publisher, ours, pgbench, rate, seconds)
        followed = _Spent(ours, publisher, port).since(before, count / 1000)
        return {
            "rows": rows,
            "of 1,000,000 copied rows": copied,
            "rate": rate,
            "seconds": seconds,
            "of 1,000 transactions": followed,
        }


def _run(publisher: EmbeddedPostgres, ours: Ours, data: Pgbench, rate: int, seconds: int) -> int:
    """Run pgbench, and wait until it has arrived; return the number of transactions."""
    running = data.start_at_rate(publisher, rate, seconds)
    output, _ = running.communicate()
    found = re.search(r"transactions actually processed: (\d+)", output)
    if running.returncode or found is None:
        raise SystemExit(f"pgbench has failed\n{output}")
    _follow(ours, data, data.mark(publisher))
    return int(found[1])


def _follow(ours: Ours, data: Dataset, lsn: Lsn) -> None:
    wait(lambda: ours.applied(data) > lsn, _TIMEOUT, "the transactions have not arrived", ours.failure)


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    print(json.dumps(_measured(*(asked + [1_000_000, 1_000, 120][len(asked) :])), indent=1))
