"""Measure speed compared with PostgreSQL's own tools, in one run on one machine.

    python -m bench [--only NAME,…] [--ours local|s3|cluster] [--theirs stock|local] [--rows N] [--runs N]
                    [--seconds N] [--quick] [--fsync on|off] [--output FILE]

copy       initial copy of a table of N rows             vs. PostgreSQL's tablesync
inserts    a backlog of N inserts                        vs. a stock subscriber
updates    … of N updates, keys in order                           "
random     … of N updates, keys at random                          "
deletes    … of N/2 deletes                                        "
pgbench    … of N/10 pgbench transactions                          "
lag        from commit to visible, at 1,000 transactions/s         "
           (and what the tables then take, beside just copied ones)
first      from the commit of a first transaction after silence to visible         "
singles    from the last of 20,000 transactions of one row to visible             "
receive    receiving only                                vs. pg_recvlogical
large      one transaction, from its COMMIT              vs. a stock subscriber with streaming = on
large-…    the same: updates; many at once; subtransactions        "
decode-…   the publisher's decoder: inserts, pgbench, skip, ddl    vs. pg_recvlogical
commits    by Delta's own transaction, one table and four
types      decoding of each type's fields, in processor time, without a server

The publisher and the stock subscriber are two PostgreSQL servers of the same version and settings, PostgreSQL's
defaults except for a few listed in the results; the stock subscriber's apply worker runs with synchronous_commit = off,
the subscription's default.  Ours is `pubsub daemon` in its own process, with Spark started and warmed up.  A backlog is
written while no subscriber is enabled.  The clock starts at ALTER SUBSCRIPTION … ENABLE (for a copy: CREATE
SUBSCRIPTION) and stops when the subscription's origin has passed the last transaction (for a copy: when the table's
state is s or r).  The sides run one after the other.  After each run all rows and columns are compared with the
publisher's.

`--ours s3` keeps our tables on an S3 server of this machine, `--ours cluster` has Spark's tasks done by a standalone
cluster of two workers with a core each.  With `--theirs local` the other side is ours, too, with its tables on local
disk and Spark's tasks in its own JVM.

The exit code is 1 if something failed or differed; a missed goal is not a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench import machine, report, sides
from bench.results import Results
from bench.scenarios import ALL, GOALS, LAG_GOAL, Bench, Plan
from bench.subscribers import Ours
from pubsub.errors import PubsubError
from pubsub.testing.servers import EmbeddedPostgres

_RESULTS: Final = Path(__file__).parent / "results"
_WIDTH: Final = 132

#: Settings of both servers that differ from the defaults.  VACUUM and checkpoints run between the runs, not during
#: them.
_SERVER: Final[dict[str, str | int]] = {
    "shared_buffers": "128MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "max_connections": 260,
}


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, default=ALL, metavar="NAME,…", help="scenarios, of those above")
    parser.add_argument("--ours", choices=sides.PLACES, default="local", help="where ours keeps its tables (local)")
    parser.add_argument(
        "--theirs", choices=sides.REFERENCES, default="stock", help="what it is measured beside (PostgreSQL's own)"
    )
    parser.add_argument("--rows", type=_positive, help="rows of the table (1,000,000; with --quick 100,000)")
    parser.add_argument("--runs", type=_positive, help="runs of each scenario and side (2; with --quick 1)")
    parser.add_argument("--seconds", type=_positive, help="of load, where a lag is measured (20; with --quick 5)")
    parser.add_argument("--quick", action="store_true", help="small and once: whether it works, not how fast")
    parser.add_argument("--fsync", choices=("on", "off"), default="on", help="of both servers (on)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes (bench/results/<time>.json)")
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(ALL)}")
    return names


def _positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks; return the exit code."""
    options = _arguments(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    plan = Plan(
        only=options.only,
        rows=options.rows or (100_000 if options.quick else 1_000_000),
        runs=options.runs or (1 if options.quick else 2),
        lag_seconds=options.seconds or (5 if options.quick else 20),
        warm_rounds=1 if options.quick else 5,
        goals=GOALS if options.theirs == "stock" else sides.GOALS.get(options.ours, {}),
        lag_goal=LAG_GOAL if options.theirs == "stock" else None,
    )
    began = datetime.now(UTC)
    clock = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - clock:6.1f}] {text}", markup=False)

    facts = machine.facts()
    try:
        results, servers = _measure(plan, options.theirs, options.ours, options.fsync, say)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except PubsubError as error:
        console.print(error.report(), markup=False, style="red")
        return 1
    facts["postgresql"] = servers.pop("version")
    document: dict[str, Any] = {
        "began": began.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 1),
        "rows": plan.rows,
        "runs": plan.runs,
        "machine": facts,
        "servers": servers,
        **results.document(),
    }
    path = options.output or _RESULTS / f"{began:%Y-%m-%dT%H-%M-%S}.json"
    report.write(path, document)
    report.show(Console(width=_WIDTH, highlight=False), results, facts)
    say(f"written to {path}")
    return 1 if results.failures else 0


def _measure(
    plan: Plan, theirs: str, place: str, fsync: str, say: Callable[[str], None]
) -> tuple[Results, dict[str, Any]]:
    settings = {**_SERVER, "fsync": fsync}
    with ExitStack() as stack:
        say("starting the servers and the daemon")
        publisher = stack.enter_context(EmbeddedPostgres("18", wheel=True, settings=settings))
        reference, ours = (stack.enter_context(sides.side(name, publisher, "18", settings)) for name in (theirs, place))
        assert isinstance(ours, Ours)
        changed = publisher.query(
            "SELECT name, current_setting(name) FROM pg_settings WHERE source = 'command line' AND name NOT IN"
            " ('port', 'listen_addresses', 'unix_socket_directories', 'log_line_prefix') ORDER BY name"
        )
        ((version,),) = publisher.query("SELECT split_part(version(), ' on ', 1)")
        bench = Bench(plan, publisher, reference, ours, say)
        bench.run()
        return bench.results, {"version": version, "settings": dict(changed)}


if __name__ == "__main__":
    # The servers' programs and pg_recvlogical would read the user's PG… variables.
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
    sys.exit(main())
