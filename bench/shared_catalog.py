"""What daemons that share a catalog ask of its server, and of themselves: on paper fifty of them, with a thousand subscriptions.

    python -m bench.shared_catalog [DAEMONS … [--each SUBSCRIPTIONS]]

Each daemon is its catalog's connections and what the launcher does there once a second: prove, look, see to its leases, store
its workers' statistics; half of the subscriptions also have a commit a second, whose origin is stored.  Nothing else of a
daemon runs.  Then one daemon ends, as by kill -9.  Prints JSON, for each number of daemons:

server       seconds of processor time of the catalog's server, per second
daemon       seconds of processor time of one daemon, per second
statements   per second
wal          bytes of WAL per second
divided      seconds until nothing moves any more, from the first daemon's start
taken_over   seconds from a daemon's death until others have all that it had
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.machine import tree_seconds
from catalog.figures import PublisherStatus, WorkerFields
from catalog.records import NewSubscription
from catalog.store import Catalog
from launcher.share import Share
from launcher.tenure import Tenure
from pubsub.memory import Memory
from pubsub.protocol.lsn import Lsn
from pubsub.sql.options import SubscriptionOptions
from pubsub.testing.servers import EmbeddedPostgres

_COUNTS: Final = (2, 10, 50)
_SECONDS: Final = 20.0
_PATIENCE: Final = 300.0


class _Daemon:
    """One of the daemons, without workers."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.share = Share(leased=frozenset())
        self._tenure = Tenure(catalog, self.share, lambda: ())
        self._looked = asyncio.create_task(self._look_again_and_again())

    @classmethod
    async def start(cls, url: str, number: int) -> _Daemon:
        catalog = await Catalog.open(url)
        await catalog.join(Path(f"/node{number}"))
        await catalog.put_memory(Memory(python=1, jvm=1))
        return cls(catalog)

    async def _look_again_and_again(self) -> None:
        lsn = 0
        while True:
            began = time.monotonic()
            await self._catalog.prove()
            counter = await self._catalog.change_counter()
            if await self._tenure.see_to(counter):
                await self._catalog.change_counter()
            lsn += 1
            await self._store(Lsn(lsn))
            await asyncio.sleep(max(began + 1.0 - time.monotonic(), 0.0))

    async def _store(self, lsn: Lsn) -> None:
        """Store what a second of work leaves: statistics of all, and each second subscription's origin."""
        own = sorted(oid for oid in self.share.leased or () if oid > 0)
        now = datetime.now(UTC)
        fields = WorkerFields(worker_type="apply", pid=os.getpid(), received_lsn=lsn, latest_end_lsn=lsn, flush_lsn=lsn)
        fields |= WorkerFields(latest_end_time=now, last_msg_receipt_time=now, lag_seconds=0.2, publisher_lsn=lsn)
        await self._catalog.put_statistics(
            workers=[(oid, None, fields) for oid in own],
            counters=[(oid, {"transactions": 1, "commits": 1, "rows_inserted": 10}) for oid in own[::2]],
            publishers={oid: PublisherStatus(current_lsn=lsn, retained_wal_bytes=0) for oid in own},
        )
        for oid in own[::2]:
            await self._catalog.advance_origin(oid, lsn)

    async def die(self) -> None:
        """Leave the catalog as a daemon that is killed does."""
        self._looked.cancel()
        await asyncio.wait({self._looked})
        await self._catalog.let_go()
        await self._catalog.close()

    def check(self) -> None:
        """Raise the error that it ended with."""
        if self._looked.done():
            self._looked.result()


async def _measured(server: EmbeddedPostgres, count: int, each: int) -> dict[str, Any]:
    name = f"shared_{count}"
    server.create_database(name)
    url = f"postgresql://{server.user}@{server.host}:{server.port}/{name}"
    async with await Catalog.open(url) as catalog:
        for number in range(count * each):
            options = SubscriptionOptions(batch_rows=10_000, streaming="on")
            await catalog.create_subscription(
                NewSubscription(f"s{number}", f"host=h{number} dbname=d", ("p",), options, "d", f"s{number}")
            )
    began = time.monotonic()
    daemons = [await _Daemon.start(url, number) for number in range(count)]
    await _evenly(daemons, count * each)
    found: dict[str, Any] = {"divided": round(time.monotonic() - began, 1)}
    found |= await _steady(server, name, count)
    dead = daemons.pop()
    began = time.monotonic()
    await dead.die()
    await _evenly(daemons, count * each)
    found["taken_over"] = round(time.monotonic() - began, 1)
    for daemon in daemons:
        await daemon.die()
    server.drop_database(name)
    return found


async def _evenly(daemons: list[_Daemon], units: int) -> None:
    """Wait until the daemons have all, as many each as the others or one more, and nothing moves."""
    end, loads = time.monotonic() + _PATIENCE, list[int]()
    while time.monotonic() < end:
        for daemon in daemons:
            daemon.check()
        held = [{oid for oid in daemon.share.leased or () if oid > 0} for daemon in daemons]
        loads = [len(one) for one in held]
        if sum(loads) == units and max(loads) - min(loads) <= 1 and not any(one.share.leaving for one in daemons):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the subscriptions are divided as {loads}")


async def _steady(server: EmbeddedPostgres, name: str, count: int) -> dict[str, Any]:
    """Return what is asked while nothing moves."""
    statements = (
        f"SELECT sum(calls) FROM pg_stat_statements JOIN pg_database d ON d.oid = dbid WHERE datname = '{name}'"
    )

    def now() -> tuple[float, float, int, int]:
        ((calls,),) = server.query(statements)
        ((wal,),) = server.query("SELECT pg_current_wal_lsn() - '0/0'")
        return tree_seconds(server.pid), time.process_time(), int(calls), int(wal)

    before, began = now(), time.monotonic()
    await asyncio.sleep(_SECONDS)
    after, seconds = now(), time.monotonic() - began
    of_server, of_daemons, calls, wal = ((late - early) / seconds for early, late in zip(before, after, strict=True))
    return {
        "server": round(of_server, 3),
        "daemon": round(of_daemons / count, 4),
        "statements": round(calls),
        "wal": round(wal),
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.shared_catalog")
    parser.add_argument("daemons", type=int, nargs="*", default=_COUNTS)
    parser.add_argument("--each", type=int, default=20, help="subscriptions of each daemon")
    arguments = parser.parse_args()
    settings: dict[str, str | int] = {"max_connections": 500, "shared_preload_libraries": "pg_stat_statements"}
    found: dict[str, Any] = {"subscriptions of each": arguments.each}
    with EmbeddedPostgres("18", settings=settings) as server:
        server.execute("CREATE EXTENSION pg_stat_statements")
        for count in arguments.daemons:
            found[str(count)] = asyncio.run(_measured(server, count, arguments.each))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
