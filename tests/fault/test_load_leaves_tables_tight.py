"""pgbench at a steady rate for minutes: afterwards the tables are about as small, and as fast to read, as fresh copies.

PUBSUB_LOAD_MINUTES (60) says for how long; the retention is half of it, ten minutes at most.  Every figure is printed, each minute's
lag, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from bench.workload import Pgbench, rate_of
from catalog.records import SubscriptionRel
from pubsub.delta.housekeeping.inventory import list_files, list_log, needed
from pubsub.delta.log.table_log import TableLog
from pubsub.node.node import Node
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.compare import compare_tables
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import Daemon
from tests.support import duck
from tests.support.lag import Lag, percentiles
from tests.support.replica import wait_until

MINUTES = float(os.environ.get("PUBSUB_LOAD_MINUTES", "60"))
RETENTION = round(min(600, MINUTES * 30))
RATE = 1000
SCANS = 7


@dataclass(frozen=True)
class Figures:
    files: int
    live: int
    retained: int
    log: int


def figures(path: str) -> Figures:
    log = TableLog(path)
    log.refresh()
    held = needed(log.files.values())
    live = retained = 0
    for one in list_files(Path(path)):
        if one.path in held:
            live += one.size
        else:
            retained += one.size
    return Figures(len(log.files), live, retained, list_log(Path(path)).size)


def scan_with_deltalake(path: str) -> None:
    found = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t").read_all()
    assert pa.table(found).num_rows


def scan_with_duckdb(path: str) -> None:
    with duck.reader() as connection:
        assert connection.execute(f"SELECT * FROM delta_scan({quote_literal(path)})").to_arrow_table().num_rows


def scan_with_spark(path: str) -> None:
    spark = SparkSession.active()
    assert spark.read.format("delta").load(path).selectExpr("bit_xor(xxhash64(*))").collect()


def times(scan: Callable[[str], None], paths: list[str]) -> float:
    """Return the median milliseconds of a scan of all tables, warm."""
    for path in paths:
        scan(path)
    taken = []
    for _ in range(SCANS):
        began = time.perf_counter()
        for path in paths:
            scan(path)
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    home = Daemon(tmp_path)
    (tmp_path / "pubsub.toml").write_text(f'[housekeeping]\ndeleted_file_retention = "{RETENTION}s"\n')
    home.start()
    yield home
    home.kill()


@pytest.mark.soak
def test_after_minutes_of_pgbench(request: pytest.FixtureRequest, daemon: Daemon) -> None:
    data = Pgbench("load", 10)
    with EmbeddedPostgres("18") as server:
        data.load(server)
        conninfo = server.conninfo(data.database)
        daemon.execute(f"CREATE SUBSCRIPTION s CONNECTION {quote_literal(conninfo)} PUBLICATION {data.publication}")
        relations = wait_for_copies(daemon)
        paths = [one.path for one in relations]
        say("fresh", {one.name: figures(one.path) for one in relations})
        writer = data.start_at_rate(server, RATE, round(MINUTES * 60))
        lag = Lag(daemon.home, conninfo, [daemon.process, daemon.jvm()])
        minute = time.monotonic() + 60
        while writer.poll() is None:
            lag.sample()
            if time.monotonic() > minute:
                lag.say_minute()
                minute += 60
            time.sleep(0.05)
        lag.close()
        assert writer.stdout is not None
        print("tps", rate_of(writer.stdout.read()), flush=True)
        print(
            "lag from the second minute on, p50 / p95 / greatest:",
            percentiles([one for minute in lag.minutes[1:] for one in minute]),
            flush=True,
        )
        data.mark(server)
        daemon.client(lambda node: node.wait_for_catchup("s", timeout=1800))
        after = wait_until(lambda: few_files(relations), "small files to be merged", 900)
        say("after", after)
        request.getfixturevalue("spark")
        worn = {name: times(scan, paths) for name, scan in SCANNERS.items()}
        for one in relations:
            difference = compare_tables(conninfo, one.qualified_name, one.path)
            assert difference is None, str(difference)
        listed = daemon.client(lambda node: node.status()).as_json()["subscriptions"][0]["tables"]
        print("status", [{k: t[k] for k in STATUS} for t in listed], flush=True)
        names = ", ".join(one.qualified_name for one in relations)
        daemon.execute(f"ALTER SUBSCRIPTION s RESYNC TABLE {names}")
        wait_for_copies(daemon)
        fresh = {one.name: figures(one.path) for one in relations}
        say("copied again", fresh)
        again = {name: times(scan, paths) for name, scan in SCANNERS.items()}
    live, bare = (sum(one.live for one in each.values()) for each in (after, fresh))
    for name in SCANNERS:
        print(f"scan by {name}: {worn[name]:.0f} ms, fresh {again[name]:.0f} ms: {worn[name] / again[name]:.2f}")
    stored = live + sum(one.retained for one in after.values())
    print(
        f"live bytes {live:,}, with what is retained {stored:,}, fresh {bare:,}: {live / bare:.2f} and {stored / bare:.2f}"
    )
    # What is retained grows with the rate of changes, not with the table: deletion vectors of the accounts above all.
    assert live <= 3 * bare
    assert all(one.log < 100 << 20 for one in after.values())


def few_files(relations: list[SubscriptionRel]) -> dict[str, Figures] | None:
    found = {one.name: figures(one.path) for one in relations}
    return found if all(one.files < 60 for one in found.values()) else None


SCANNERS: dict[str, Callable[[str], None]] = {
    "deltalake": scan_with_deltalake,
    "DuckDB": scan_with_duckdb,
    "Spark": scan_with_spark,
}
STATUS = ("name", "live_bytes", "retained_bytes", "log_bytes", "last_vacuum")


def wait_for_copies(daemon: Daemon) -> list[SubscriptionRel]:
    async def relations(node: Node) -> list[SubscriptionRel]:
        catalog = node.catalog
        return list(await catalog.relations((await catalog.subscription("s")).oid))

    def ready() -> list[SubscriptionRel] | None:
        found: list[SubscriptionRel] = daemon.client(relations)
        time.sleep(0.5)
        return found if all(one.state.value == "r" for one in found) else None

    return wait_until(ready, "the copies", 900) or []


def say(when: str, tables: dict[str, Figures]) -> None:
    for name, one in tables.items():
        print(
            f"{when:>12}  {name:<18} {one.files:>4} files  live {one.live:>12,}  retained {one.retained:>12,}  log {one.log:>12,}",
            flush=True,
        )
