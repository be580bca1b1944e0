"""What a table's mode and masks cost beside a mirror, and what a tenant costs where many write to one table.

    python -m bench.modes [ROWS [ROUNDS]]

A table of ROWS rows and pgbench's four are followed by a subscription for each kind, all of one daemon.  In each round a backlog
is written, pgbench's transactions (a tenth of ROWS) and scattered updates (half of ROWS), and each kind applies it alone; then
each number of tenants follows a change of ten rows a second of every one of them.  Prints JSON:

seconds   of each kind: until the backlog is in Delta, the median of the rounds
rates     of each kind beside the mirror's, with the goal
tenants   by their number: seconds of processor time of the daemon and its JVM for 1,000 changed rows; `ratio`: the most beside the
          fewest tenants, with the goal
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from psycopg import sql

from bench import machine
from bench.subscribers import Ours, wait
from bench.workload import Dataset, Orders, Pgbench
from catalog import schema
from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres

_TIMEOUT: Final = 900.0
_SCALE: Final = 2
_MODES: Final = {"mirror": "", "history": "mode = history", "mirror + history": "mode = 'mirror + history'"}
_ORDERS: Final = _MODES | {
    "scd2": "mode = scd2",
    "masks": "mask = 'public.orders (name hash, at redact)'",
}
# pgbench_history has no key, by which the versions of a row could be told from others: it is a mirror there.
_PGBENCH: Final = _MODES | {
    "scd2": "mode = 'public.pgbench_accounts (scd2), public.pgbench_branches (scd2), public.pgbench_tellers (scd2)'",
    "masks": "mask = 'public.pgbench_accounts (abalance hash), public.pgbench_history (delta hash, mtime redact)'",
}
_GOALS: Final = {"history": 0.8, "scd2": 0.5, "masks": 0.8}
_TENANTS: Final = (5, 20, 50)
_TENANT_ROWS: Final = 2_000
_CHANGED: Final = 10
_SECONDS: Final = 30
_FLAT: Final = 1.2


class _Subscription:
    """A subscription of ours with options of its own."""

    def __init__(self, ours: Ours, publisher: EmbeddedPostgres, data: Dataset, name: str, options: str) -> None:
        self._ours = ours
        self._name = name
        conninfo = sql.Literal(publisher.conninfo(data.database)).as_string(None)
        ours.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION {conninfo} PUBLICATION {data.publication} WITH ({options})"
        )
        states = (
            f"SELECT r.state FROM {schema.relation.name} r JOIN {schema.subscription.name} s ON s.oid = r.subid"
            f" WHERE s.name = '{name}'"
        )

        def ready() -> bool:
            return all(state == "r" for (state,) in ours.catalog_rows(states))

        wait(ready, _TIMEOUT, "the tables are not ready", ours.failure)

    def enable(self) -> None:
        self._ours.execute(f"ALTER SUBSCRIPTION {self._name} ENABLE")

    def disable(self) -> None:
        self._ours.execute(f"ALTER SUBSCRIPTION {self._name} DISABLE")

    def follow(self, lsn: Lsn) -> None:
        """Wait until it is past an LSN."""
        origin = (
            f"SELECT o.remote_lsn FROM {schema.origin.name} o JOIN {schema.subscription.name} s ON s.oid = o.subid"
            f" WHERE o.relid = 0 AND s.name = '{self._name}'"
        )

        def past() -> bool:
            ((text,),) = self._ours.catalog_rows(origin)
            return Lsn.parse(text) > lsn

        wait(past, _TIMEOUT, f"{self._name} did not catch up", self._ours.failure)


def _kinds(
    ours: Ours,
    publisher: EmbeddedPostgres,
    data: Dataset,
    kinds: Mapping[str, str],
    write: Callable[[], Lsn],
    rounds: int,
) -> dict[str, Any]:
    """Return what each kind takes, by its options, for a backlog that `write` makes, which returns an LSN past it."""
    subscriptions = {}
    for number, (kind, options) in enumerate(kinds.items()):
        name = f"{data.database}_{number}"
        chosen = ", ".join(filter(None, (f"target = {name}", options)))
        subscriptions[kind] = _Subscription(ours, publisher, data, name, chosen)
        subscriptions[kind].disable()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    # The first round is the JVM's warming up.
    for number in range(rounds + 1):
        lsn = write()
        for kind, subscription in subscriptions.items():
            began = time.monotonic()
            subscription.enable()
            subscription.follow(lsn)
            if number:
                found[kind].append(time.monotonic() - began)
            subscription.disable()
    seconds = {kind: statistics.median(runs) for kind, runs in found.items()}
    rates = {kind: round(seconds["mirror"] / one, 2) for kind, one in seconds.items()}
    return {
        "seconds": {kind: round(one, 2) for kind, one in seconds.items()},
        "rates": rates,
        "goals": _GOALS,
        "met": {kind: rates[kind] >= goal for kind, goal in _GOALS.items()},
    }


def _tenants(ours: Ours, publisher: EmbeddedPostgres) -> dict[str, Any]:
    """Return what 1,000 changed rows cost in processor time, by the number of tenants in one table."""
    tenants: list[Orders] = []
    following: list[_Subscription] = []
    found: dict[str, float] = {}
    for count in _TENANTS:
        while len(tenants) < count:
            one = Orders(f"tenant_{len(tenants)}", _TENANT_ROWS)
            one.load(publisher)
            options = f"target = tenants, source = '{one.database}'"
            following.append(_Subscription(ours, publisher, one, one.database, options))
            tenants.append(one)
        _change(publisher, tenants, following, 5)
        before = machine.tree_seconds(ours.pid)
        _change(publisher, tenants, following, _SECONDS)
        found[str(count)] = round((machine.tree_seconds(ours.pid) - before) / (count * _SECONDS * _CHANGED) * 1000, 3)
    ratio = round(found[str(_TENANTS[-1])] / found[str(_TENANTS[0])], 2)
    return {"processor seconds of 1,000 rows": found, "ratio": ratio, "goal": _FLAT, "met": ratio <= _FLAT}


def _change(publisher: EmbeddedPostgres, tenants: list[Orders], following: list[_Subscription], seconds: int) -> None:
    """Let each tenant change ten rows a second, and wait until that has arrived."""
    ends = []
    with ExitStack() as stack:
        connections = [stack.enter_context(publisher.connect(one.database)) for one in tenants]
        for second in range(seconds):
            began = time.monotonic()
            for connection in connections:
                first = second * _CHANGED % (_TENANT_ROWS - _CHANGED)
                connection.execute(
                    f"UPDATE orders SET quantity = quantity + 1 WHERE id > {first} AND id <= {first + _CHANGED}".encode()
                )
            time.sleep(max(began + 1 - time.monotonic(), 0.0))
        for connection in connections:
            (row,) = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchall()
            ends.append(Lsn.parse(row[0]))
            connection.execute("UPDATE orders SET quantity = quantity + 1 WHERE id = 1")
    for subscription, end in zip(following, ends, strict=True):
        subscription.follow(end)


def _measured(rows: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": rows, "rounds": rounds}
    os.environ.setdefault("PUBSUB_MASK_KEY", "00" * 32)
    settings: dict[str, str | int] = {"max_replication_slots": 100, "max_wal_senders": 100, "max_connections": 300}
    with ExitStack() as stack:
        publisher = stack.enter_context(EmbeddedPostgres("18", wheel=True, settings=settings))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pubsub-bench-modes-")), "node")
        home.mkdir()
        ours = stack.enter_context(Ours(publisher, home, "modes", "max_logical_replication_workers = 200\n"))
        orders, pgbench = Orders("orders", rows), Pgbench("pgbench", _SCALE)
        for data in (orders, pgbench):
            data.load(publisher)
        found["scattered updates"] = _kinds(
            ours, publisher, orders, _ORDERS, lambda: orders.update_at_random(publisher, rows // 2), rounds
        )
        found["pgbench"] = _kinds(
            ours, publisher, pgbench, _PGBENCH, lambda: pgbench.transactions(publisher, rows // 10), rounds
        )
        found["tenants"] = _tenants(ours, publisher)
    return found


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    print(json.dumps(_measured(*(asked + [300_000, 3][len(asked) :])), indent=1))
