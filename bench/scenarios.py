"""The measurements.

Each side runs alone, and they alternate in going first.  After each run its tables are compared with the publisher's,
so that speed without correctness fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bench import commits, decoding, lag, large, machine, scattered, small, storage, types
from bench.results import OURS, THEIRS, Comparison, Limit, Results, Run
from bench.subscribers import Failed, Ours, Stock, Subscriber, settle
from bench.workload import Dataset, Orders, Pgbench
from pubsub.errors import PubsubError
from pubsub.protocol import commands
from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

if TYPE_CHECKING:
    pass

_TIMEOUT: Final = 600.0
_WARM_ROWS: Final = 20_000
_LAG_RATE: Final = 1000

#: The goals: our rate as a share of the reference side's (GOALS); seconds (LAG_GOAL, _COLD_GOAL, _FIRST_GOAL); bytes (_MEMORY_GOAL).
GOALS: Final = {
    "copy": 1.3,
    "inserts": 1.0,
    "updates": 2.5,
    "random": 1.0,
    "deletes": 2.0,
    "pgbench": 1.0,
    "receive": 0.9,
    "large": 1 / 1.5,
}
# Ten times the rows may take so many times the processor time for scattered updates.
_GROWTH_GOAL: Final = 1.3
# Rows whose keys are indexed, beside the load, in the time that a lag is measured in.
_ROWS_INDEXED: Final = 10_000_000
LAG_GOAL: Final = 1.2
# Beside local disk.
_LAG_TIMES: Final = 2.0
_COLD_GOAL: Final = 12.0
_FIRST_GOAL: Final = 0.25
_MEMORY_GOAL: Final = 600 << 20

ORDERS: Final = ("copy", "inserts", "updates", "random", "deletes")
PGBENCH: Final = ("pgbench", "lag")
RECEIVE: Final = ("receive",)
LARGE: Final = large.NAMES
DECODING: Final = decoding.NAMES
TYPES: Final = types.NAMES
COMMITS: Final = commits.NAMES
SCATTERED: Final = tuple(scattered.KEYS)
SMALL: Final = small.NAMES
ALL: Final = (*ORDERS, *PGBENCH, *SMALL, *SCATTERED, *RECEIVE, *LARGE, *DECODING, *TYPES, *COMMITS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The scenarios, `rows` of the table, `runs` per scenario and side, seconds of load for the lag, warm-up rounds.

    `goals`: our rate as a share of the other side's; `lag_goal`: seconds of the lag's p95, None: twice the other side's.
    """

    only: Sequence[str]
    rows: int
    runs: int
    lag_seconds: int
    warm_rounds: int
    goals: Mapping[str, float]
    lag_goal: float | None


class Bench:
    """The servers and the results so far.  `say` is called with progress messages."""

    def __init__(
        self, plan: Plan, publisher: EmbeddedPostgres, theirs: Subscriber, ours: Ours, say: Callable[[str], None]
    ) -> None:
        self.results = Results()
        self._plan = plan
        self._publisher = publisher
        self._theirs = theirs
        self._ours = ours
        self._say = say
        self._daemon_peak = 0
        self._jvm_peak = 0
        self._doing = ""
        self._data: Dataset | None = None

    def run(self) -> None:
        """Run the plan.  A failed scenario ends the later ones on the same dataset, not the others."""
        groups = [
            (RECEIVE, self._receive_group),
            (ORDERS, self._orders_group),
            (PGBENCH, self._pgbench_group),
            (SMALL, self._small_group),
            (SCATTERED, self._scattered_group),
            (LARGE, self._large_group),
            (DECODING, self._decoding_group),
            (TYPES, self._types_group),
            (COMMITS, self._commits_group),
        ]
        workers_peak = 0
        with machine.MemoryWatch(self._ours.pid) as watch:
            if any(name in self._plan.only for name in (*ORDERS, *PGBENCH, *SMALL, *SCATTERED, *LARGE)):
                self._guard("warm-up", self._warm_up)
            for names, group in groups:
                wanted = [name for name in names if name in self._plan.only]
                if wanted:
                    self._guard(wanted[0], partial(group, wanted))
            workers_peak = watch.workers_peak
        self._note_peaks()
        if self._jvm_peak:
            self.results.limits += [
                Limit("daemon_memory", "memory of the Python process", "bytes", self._daemon_peak, goal=_MEMORY_GOAL),
                Limit("jvm_memory", "memory of the JVM", "bytes", self._jvm_peak),
                Limit("copy_memory", "memory of a copy's Python workers, sampled", "bytes", workers_peak),
            ]

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (Failed, PubsubError, RuntimeError, psycopg.Error, OSError) as error:
            self.results.failures.append(f"{self._doing or name}: {error}")
            self._say(f"FAILED: {error}")
            # A subscription that keeps failing must not slow the later scenarios.
            for subscriber in (self._theirs, self._ours):
                with suppress(Failed, PubsubError, psycopg.Error):
                    if self._data is not None:
                        subscriber.disable(self._data)

    def _begin(self, name: str, what: str) -> None:
        self._doing = name
        self._say(what)

    # Groups of scenarios, one for each dataset

    def _warm_up(self) -> None:
        """Warm up Spark, whose JVM compiles frequent code: a daemon in use has done so before a backlog arrives."""
        data = Orders("warm", min(self._plan.rows, _WARM_ROWS))
        self._begin(
            "warm-up", f"starting Spark and warming it up with {self._plan.warm_rounds} rounds of small batches"
        )
        self._load(data)
        self._ours.prepare(data)
        began = time.monotonic()
        self._ours.create(data)
        self._ours.wait_until_ready(data, _TIMEOUT)
        cold = time.monotonic() - began
        self.results.limits.append(
            Limit("cold_copy", "the first copy of a new node, Spark's start in it", "seconds", cold, goal=_COLD_GOAL)
        )
        part = max(1, data.rows // 4)
        for number in range(self._plan.warm_rounds):
            first = data.rows + 1 + number * part
            self._follow(self._ours, data, data.insert(self._publisher, first, part))
            self._follow(self._ours, data, data.update_in_order(self._publisher, part))
            self._follow(self._ours, data, data.update_at_random(self._publisher, part))
            self._follow(self._ours, data, data.delete(self._publisher, first, part))
        self._check(self._ours, data)
        self._ours.drop(data)
        self._publisher.drop_database(data.database)

    def _orders_group(self, wanted: Sequence[str]) -> None:
        plan = self._plan
        data = Orders("orders", plan.rows)
        self._begin("copy", f"making a table of {plan.rows:,} rows")
        self._load(data)
        self._theirs.prepare(data)
        self._copy(data, plan.runs if "copy" in wanted else 0)
        found: dict[str, list[Run]] = {name: [] for name in wanted if name != "copy"}
        half = max(1, plan.rows // 2)
        titles = {
            "inserts": "backlog of inserts",
            "updates": "backlog of updates, keys in order",
            "random": "backlog of updates, keys at random",
            "deletes": "backlog of deletes",
        }
        try:
            for number in range(plan.runs):
                # Each round inserts plan.rows new keys, and deletes half of them.
                first = plan.rows * (number + 1) + 1
                writers = {
                    "inserts": partial(data.insert, self._publisher, first, plan.rows),
                    "updates": partial(data.update_in_order, self._publisher, plan.rows),
                    "random": partial(data.update_at_random, self._publisher, plan.rows),
                    "deletes": partial(self._deletes, data, first, half, written="inserts" in wanted),
                }
                for name, runs in found.items():
                    self._begin(name, f"{name}, run {number + 1}: writing the backlog")
                    runs += self._backlog(data, writers[name], number)
        finally:
            self._add(found, titles, {"deletes": half})
        self._drop(data)

    def _deletes(self, data: Orders, first: int, count: int, *, written: bool) -> Lsn:
        """Delete keys that no update needs: this round's inserts, or rows inserted here if there were none."""
        if not written:
            lsn = data.insert(self._publisher, first, count)
            for subscriber in (self._theirs, self._ours):
                subscriber.enable(data)
                self._follow(subscriber, data, lsn)
                subscriber.disable(data)
        return data.delete(self._publisher, first, count)

    def _pgbench_group(self, wanted: Sequence[str]) -> None:
        plan = self._plan
        data = Pgbench("pgbench", max(1, plan.rows // 100_000))
        count = max(1, plan.rows // 10)
        self._begin("pgbench", f"making pgbench's tables at scale {data.scale}")
        self._load(data)
        self._theirs.prepare(data)
        self._copy(data, 0)
        fresh = storage.measure(self._ours.paths(data))
        found: list[Run] = []
        try:
            for number in range(plan.runs if "pgbench" in wanted else 0):
                self._begin("pgbench", f"pgbench, run {number + 1}: writing {count:,} transactions")
                found += self._backlog(data, partial(data.transactions, self._publisher, count), number)
        finally:
            title = f"backlog of {count:,} pgbench transactions"
            # Each transaction updates three rows and inserts one.
            self._add({"pgbench": found}, {"pgbench": title}, {"pgbench": count * 4})
        if "lag" in wanted:
            self._lag(data)
            self.results.limits += storage.limits(fresh, storage.measure(self._ours.paths(data)))
        self._drop(data)

    def _small_group(self, wanted: Sequence[str]) -> None:
        """Measure when the first transaction after silence is visible, and the last of many of one row."""
        data = Orders("small", small.ROWS)
        self._begin(wanted[0], f"small transactions: making a table of {data.rows:,} rows")
        self._load(data)
        self._theirs.prepare(data)
        self._copy(data, 0)
        count = min(small.SINGLES, self._plan.rows)
        found: dict[str, list[float]] = {name: [] for name in wanted}
        for subscriber in (self._theirs, self._ours):
            self._settle()
            subscriber.enable(data)
            for name in wanted:
                self._begin(name, f"small transactions, {name}: {subscriber.name}")
                if name == "first":
                    found[name].append(small.first(self._publisher, subscriber, data, self._follow))
                else:
                    found[name].append(small.singles(self._publisher, subscriber, data, count, self._follow))
            self._check(subscriber, data)
            subscriber.disable(data)
        self._drop(data)
        titles = {
            "first": "the first transaction after silence, until it is visible",
            "singles": f"the last of {count:,} transactions of one row, until it is visible",
        }
        for name, (theirs, ours) in found.items():
            goal = _FIRST_GOAL if name == "first" else theirs
            self.results.limits.append(Limit(name, titles[name], "seconds", ours, theirs, goal))

    def _scattered_group(self, wanted: Sequence[str]) -> None:
        """Measure our lag and processor time for scattered updates of a table, and of one that is ten times as large."""
        for name in wanted:
            spent: list[float] = []
            for rows in (self._plan.rows, 10 * self._plan.rows):
                data = scattered.Scattered(f"scattered_{rows}", rows, scattered.KEYS[name])
                self._begin(name, f"{name}: making a table of {rows:,} rows")
                self._load(data)
                self._ours.prepare(data)
                self._ours.create(data)
                self._ours.wait_until_ready(data, _TIMEOUT)
                self._settle()
                # The index is made meanwhile, some million rows a second.
                making = self._plan.lag_seconds * max(1, rows // _ROWS_INDEXED)
                lags: tuple[float, ...] = ()
                for seconds in (making, self._plan.lag_seconds):
                    before = sum(self._ours.cpu().values())
                    with data.running(self._publisher, seconds) as load:
                        rate, lags = lag.under(self._publisher, self._ours, data, load, self._follow, self._say)
                    used = sum(self._ours.cpu().values()) - before
                    spent.append(used / (rate * seconds * scattered.ROWS) * 1000)
                    shown = " / ".join(f"{one:.2f}" for one in lags)
                    self._say(
                        f"  p50 / p95 / greatest lag: {shown} s; {spent[-1]:.3f} s of processor time per 1,000 rows"
                    )
                self._check(self._ours, data)
                title = f"updates of scattered rows, {name}, of {rows:,}"
                for index, which in enumerate(("p50", "p95")):
                    self.results.limits.append(
                        Limit(f"{name}_{which}_{rows}", f"{title}: lag, {which}", "seconds", lags[index])
                    )
                self.results.limits.append(
                    Limit(f"{name}_cpu_{rows}", f"{title}: processor time per 1,000", "seconds", spent[-1])
                )
                self._ours.drop(data)
                self._publisher.drop_database(data.database)
            title = f"updates of scattered rows, {name}: processor time with ten times the rows"
            self.results.limits.append(Limit(f"{name}_growth", title, "times", spent[-1] / spent[1], goal=_GROWTH_GOAL))

    def _large_group(self, wanted: Sequence[str]) -> None:
        """Measure transactions that each side receives while they are written; the clock starts at their COMMIT."""
        plan = self._plan
        # Only the updates need more than a few rows.
        data = Orders("large", max(1, plan.rows * 3 // 10) if "large-updates" in wanted else 1000)
        self._begin("large", f"making a table of {data.rows:,} rows")
        self._load(data)
        self._theirs.prepare(data)
        self._copy(data, 0)
        if isinstance(self._theirs, Stock):
            self._theirs.server.execute(
                f"ALTER SUBSCRIPTION {self._theirs.name}_{data.database} SET (streaming = on)", data.database
            )
        writers = {
            "large": (large.inserts, plan.rows, f"one transaction of {plan.rows:,} inserts, from its COMMIT"),
            "large-updates": (large.updates, data.rows, f"one transaction of {data.rows:,} updates, from its COMMIT"),
            "large-many": (
                large.interleaved,
                plan.rows,
                f"{large.INTERLEAVED} transactions at once, from their COMMITs",
            ),
            "large-subtransactions": (
                large.subtransactions,
                plan.rows // 10,
                "10,000 subtransactions, from the COMMIT",
            ),
        }
        found: dict[str, list[Run]] = {name: [] for name in wanted}
        first = data.rows + 1
        # The end of the transactions written for the other side, which this side must apply before its run.
        last: Lsn | None = None
        try:
            for number in range(plan.runs):
                for name, runs in found.items():
                    write, count, _ = writers[name]
                    for subscriber in self._in_turn(number + 1):
                        self._begin(name, f"{name}, run {number + 1}: {subscriber.name}")
                        self._settle()
                        subscriber.enable(data)
                        if last is not None:
                            self._follow(subscriber, data, last)
                        with write(self._publisher, data, first, count) as commit:
                            ends: list[Lsn] = []

                            def work(
                                subscriber: Subscriber = subscriber,
                                commit: large.Commit = commit,
                                ends: list[Lsn] = ends,
                            ) -> None:
                                ends.append(commit())
                                self._follow(subscriber, data, ends[-1])

                            runs.append(self._measure(subscriber, data, work))
                            last = ends[-1]
                        first += count
                        self._check(subscriber, data)
                        subscriber.disable(data)
        finally:
            self._add(found, {name: writers[name][2] for name in wanted}, {name: writers[name][1] for name in wanted})
        self._drop(data)

    # The initial copy

    def _copy(self, data: Dataset, runs: int) -> None:
        """Measure the copy `runs` times; leave both subscriptions created, ready and disabled."""
        found: list[Run] = []
        for number in range(runs):
            for subscriber in self._in_turn(number):
                self._begin("copy", f"copy, run {number + 1}: {subscriber.name}")
                self._settle()

                def work(subscriber: Subscriber = subscriber) -> None:
                    subscriber.create(data)
                    subscriber.wait_until_copied(data, _TIMEOUT)

                found.append(self._measure(subscriber, data, work))
                subscriber.wait_until_ready(data, _TIMEOUT)
                self._check(subscriber, data)
                if number < runs - 1:
                    subscriber.drop(data)
                else:
                    subscriber.disable(data)
        if not runs:
            for subscriber in (self._theirs, self._ours):
                subscriber.create(data)
                subscriber.wait_until_ready(data, _TIMEOUT)
                subscriber.disable(data)
        self._add({"copy": found}, {"copy": "initial copy"}, {})

    # A backlog

    def _backlog(self, data: Dataset, write: Callable[[], Lsn], number: int) -> list[Run]:
        """Write a backlog while both are disabled; then measure each side from its ALTER SUBSCRIPTION … ENABLE on."""
        lsn = write()
        found = []
        for subscriber in self._in_turn(number):
            self._settle()

            def work(subscriber: Subscriber = subscriber) -> None:
                subscriber.enable(data)
                self._follow(subscriber, data, lsn)

            found.append(self._measure(subscriber, data, work))
            self._check(subscriber, data)
            subscriber.disable(data)
        return found

    # Lag

    def _lag(self, data: Pgbench) -> None:
        """Measure from a transaction's commit until the subscriber's origin is seen to have passed its end."""
        seconds = self._plan.lag_seconds
        found: dict[str, tuple[float, ...]] = {}
        rates: dict[str, float] = {}
        for subscriber in (self._theirs, self._ours):
            self._begin("lag", f"lag at {_LAG_RATE:,} transactions a second: {subscriber.name}")
            self._settle()
            subscriber.enable(data)
            self._follow(subscriber, data, data.mark(self._publisher))
            load = data.start_at_rate(self._publisher, _LAG_RATE, seconds)
            rate, found[subscriber.name] = lag.under(self._publisher, subscriber, data, load, self._follow, self._say)
            rates[subscriber.name] = rate
            shown = " / ".join(f"{one:.2f}" for one in found[subscriber.name])
            self._say(f"  {rate:,.0f} transactions a second; p50 / p95 / greatest lag: {shown} s")
            self._check(subscriber, data)
            subscriber.disable(data)
        theirs, ours = found[self._theirs.name], found[self._ours.name]
        most = self._plan.lag_goal or _LAG_TIMES * theirs[1]
        for index, (name, goal) in enumerate((("p50", None), ("p95", most), ("max", None))):
            title = f"lag at {_LAG_RATE:,} transactions/s, {name}"
            self.results.limits.append(Limit(f"lag_{name}", title, "seconds", ours[index], theirs[index], goal))
        title = "transactions/s that the publisher reached meanwhile"
        limit = Limit("lag_rate", title, "rate", rates[self._ours.name], rates[self._theirs.name])
        self.results.limits.append(limit)

    # Receiving

    def _receive_group(self, wanted: Sequence[str]) -> None:
        rows = self._plan.rows
        data = Orders("receive", 1)
        self._begin(wanted[0], f"receiving: writing {rows:,} inserts")
        self._load(data)
        self._publisher.query("SELECT pg_create_logical_replication_slot('bench_receive', 'pgoutput')", data.database)
        end = data.insert(self._publisher, 2, rows)
        found = []
        for number in range(self._plan.runs + 1):
            sides = (THEIRS, OURS) if number % 2 == 0 else (OURS, THEIRS)
            for side in sides:
                self._settle()
                # A receiver confirms what it received, which advances the slot: each gets its own copy.
                self._publisher.query(
                    "SELECT pg_copy_logical_replication_slot('bench_receive', 'bench_receiver')", data.database
                )
                found.append(self._receive(side, data, end))
                self._publisher.drop_slot("bench_receiver")
        self._add({"receive": found}, {"receive": "receiving alone (theirs: pg_recvlogical)"}, {})
        self._publisher.drop_database(data.database)

    def _receive(self, side: str, data: Orders, end: Lsn) -> Run:
        conninfo = self._publisher.conninfo(data.database)
        if side == OURS:
            command = [sys.executable, "-m", "bench.receive", conninfo, "bench_receiver", data.publication, str(end)]
        else:
            options = commands.pgoutput_options(180000, [data.publication])
            command = [
                str(binaries.program("pg_recvlogical")),
                f"--dbname={conninfo}",
                "--slot=bench_receiver",
                "--start",
                f"--endpos={end}",
                "--file=/dev/null",
                *(f"--option={name}={value}" for name, value in options.items()),
            ]
        before = machine.MachineTime.now()
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output, errors = process.communicate()
        seconds = time.monotonic() - began
        if process.returncode != 0:
            raise Failed(f"{Path(command[0]).name}: {errors.strip()[-2000:]}")
        details: dict[str, Any] = {}
        if side == OURS:
            details = json.loads(output)
            # Without Python's start, which happens once in a daemon's life.
            seconds = details.pop("seconds")
        after = machine.MachineTime.now()
        cpu = {"machine": after.busy - before.busy, "stolen": after.stolen - before.stolen}
        self._say(f"  {side}: {seconds:.2f} s")
        return Run(side, seconds, cpu, details=details)

    # Decoding

    def _decoding_group(self, wanted: Sequence[str]) -> None:
        plan = self._plan
        self._begin("decoding", "decoding: writing WAL, reading it with pg_recvlogical and with ours")
        decoding.measure(self._publisher, wanted, max(1, plan.rows // 5), plan.runs, self.results, self._say)

    def _types_group(self, _wanted: Sequence[str]) -> None:
        self._say("fields of each type")
        self.results.limits += types.limits(max(1, self._plan.rows // 5))

    def _commits_group(self, _wanted: Sequence[str]) -> None:
        self._say("commits by Delta's transaction")
        self.results.limits += commits.limits(max(20, self._plan.rows // 2500))

    # Shared parts

    def _load(self, data: Dataset) -> None:
        self._data = data
        data.load(self._publisher)

    def _measure(self, subscriber: Subscriber, data: Dataset, work: Callable[[], None]) -> Run:
        ours = subscriber is self._ours
        jvm = self._note_peaks() if ours else None
        details: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        counts = subscriber.details(data)
        own = time.process_time()
        before, times = subscriber.cpu(), machine.MachineTime.now()
        began = time.monotonic()
        work()
        seconds = time.monotonic() - began
        after, later = subscriber.cpu(), machine.MachineTime.now()
        cpu = {name: after[name] - before[name] for name in after}
        cpu |= {"bench": time.process_time() - own}
        cpu |= {"machine": later.busy - times.busy, "stolen": later.stolen - times.stolen}
        shown = ", ".join(f"{name} {spent:.1f}" for name, spent in cpu.items())
        self._say(f"  {subscriber.name}: {seconds:.2f} s (processor seconds: {shown})")
        details |= {name: count - counts.get(name, 0) for name, count in subscriber.details(data).items()}
        if not ours:
            return Run(THEIRS, seconds, cpu, details=details)
        return Run(
            OURS,
            seconds,
            cpu,
            machine.peak_memory(self._ours.pid),
            machine.peak_memory(jvm) if jvm is not None else None,
            details,
        )

    def _note_peaks(self) -> int | None:
        """Keep the peak memory so far and reset the counters; return the JVM's process id, if there is a JVM."""
        jvm = self._ours.jvm_pid()
        self._daemon_peak = max(self._daemon_peak, machine.peak_memory(self._ours.pid))
        machine.forget_peak(self._ours.pid)
        if jvm is not None:
            self._jvm_peak = max(self._jvm_peak, machine.peak_memory(jvm))
            machine.forget_peak(jvm)
        return jvm

    def _follow(self, subscriber: Subscriber, data: Dataset, until: Lsn, seen: lag.Seen | None = None) -> None:
        """Poll until the origin is past `until`, an LSN inside the last transaction.  Raises Failed after _TIMEOUT."""
        seen = [] if seen is None else seen
        deadline = time.monotonic() + _TIMEOUT
        while lag.look(subscriber, data, seen) <= until:
            if time.monotonic() > deadline:
                raise Failed(f"{subscriber.name} is not at {until} after {_TIMEOUT:.0f} s\n{subscriber.failure()}")
            time.sleep(lag.POLL)

    def _check(self, subscriber: Subscriber, data: Dataset) -> None:
        difference = subscriber.difference(data)
        if difference is not None:
            raise Failed(f"the tables of {subscriber.name} are not the publisher's\n{difference}")

    def _settle(self) -> None:
        """Run VACUUM and CHECKPOINT, so that work left by earlier scenarios is not measured."""
        settle(self._publisher)
        self._theirs.settle()

    def _in_turn(self, number: int) -> Sequence[Subscriber]:
        """Return both sides, alternating which is first from run to run."""
        return (self._theirs, self._ours) if number % 2 == 0 else (self._ours, self._theirs)

    def _drop(self, data: Dataset) -> None:
        for subscriber in (self._theirs, self._ours):
            subscriber.drop(data)
        self._publisher.drop_database(data.database)

    def _add(self, found: dict[str, list[Run]], titles: dict[str, str], changes: dict[str, int]) -> None:
        """Add the measured runs to the results; `changes` has the counts that differ from the table's rows."""
        for name, runs in found.items():
            if runs:
                count = changes.get(name, self._plan.rows)
                self.results.comparisons.append(Comparison(name, titles[name], count, self._plan.goals.get(name), runs))
