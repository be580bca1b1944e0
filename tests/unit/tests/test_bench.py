"""How the benchmarks evaluate their measurements, without a server."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from bench import __main__ as command
from bench import lag, machine, report, workload
from bench.results import OURS, THEIRS, Comparison, Limit, Results, Run
from bench.scenarios import Bench, Plan
from bench.subscribers import Failed
from pubsub.protocol.copyboth import pg_time_to_datetime
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Commit, write_message

PLAN = Plan(only=(), rows=1000, runs=1, lag_seconds=1, warm_rounds=1, goals={}, lag_goal=None)
DATA = workload.Orders("orders", 1000)


def compare(theirs: list[float], ours: list[float], goal: float | None = 1.0) -> Comparison:
    runs = [Run(THEIRS, seconds) for seconds in theirs] + [Run(OURS, seconds) for seconds in ours]
    return Comparison("inserts", "backlog of inserts", 1000, goal, runs)


def test_a_ratio_is_that_of_the_rates_over_medians() -> None:
    found = compare([4.0, 5.0, 90.0], [8.0, 10.0, 12.0])
    assert found.rate(THEIRS) == 200.0
    assert found.rate(OURS) == 100.0
    assert found.ratio == 0.5


def test_a_goal_is_met_at_the_ratio_itself_and_may_be_absent() -> None:
    assert compare([5.0], [5.0]).met is True
    assert compare([5.0], [5.1]).met is False
    assert compare([5.0], [50.0], goal=None).met is None
    assert Limit("lag_p95", "lag", "seconds", 5.0, goal=5.0).met is False
    assert Limit("lag_p95", "lag", "seconds", 4.9, goal=5.0).met is True


def test_every_run_is_in_the_document(tmp_path: Path) -> None:
    results = Results([compare([4.0, 6.0], [5.0])], [Limit("lag_p50", "lag", "seconds", 1.0, 0.1)], ["copy: late"])
    path = tmp_path / "new" / "found.json"
    report.write(path, results.document())
    document = json.loads(path.read_text())
    (comparison,) = document["comparisons"]
    assert [(run["side"], run["seconds"]) for run in comparison["runs"]] == [
        (THEIRS, 4.0),
        (THEIRS, 6.0),
        (OURS, 5.0),
    ]
    assert comparison["ratio"] == 1.0
    assert document["limits"][0]["theirs"] == 0.1
    assert document["failures"] == ["copy: late"]


def test_the_table_says_what_was_missed_and_what_failed() -> None:
    results = Results(
        [compare([5.0], [10.0])],
        [Limit("daemon_memory", "memory of the Python process", "bytes", 500 << 20, goal=600 << 20)],
        ["updates: [not] markup"],
    )
    facts = {
        "cores": 2,
        "memory_bytes": 8 << 30,
        "cpu": "a processor",
        "postgresql": "PostgreSQL 18",
        "python": "3",
        "java": "17",
    }
    output = io.StringIO()
    report.show(Console(file=output, width=132), results, facts)
    lines = output.getvalue().splitlines()
    inserts = next(line for line in lines if "backlog of inserts" in line)
    assert "0.50" in inserts
    assert "missed" in inserts
    memory = next(line for line in lines if "Python process" in line)
    assert "500 MB" in memory
    assert "met" in memory
    assert any("updates: [not] markup" in line for line in lines)


@pytest.mark.parametrize("count", [1, 7, 100, 12_345, 1_000_000])
def test_a_backlog_comes_in_at_most_100_parts_that_cover_it_once(count: int) -> None:
    parts = workload._parts(count)
    assert len(parts) == min(100, count)
    assert all(low < high for low, high in parts)
    assert [parts[0][0], *(high for _, high in parts)] == [*(low for low, _ in parts), count]


def test_pgbench_says_its_rate_or_what_went_wrong() -> None:
    output = "number of transactions actually processed: 10\ntps = 998.25 (without initial connection time)\n"
    assert workload.rate_of(output) == 998.25
    with pytest.raises(RuntimeError, match="no such table"):
        workload.rate_of("pgbench: error: no such table\n")


def test_names_and_numbers_of_the_command_line() -> None:
    assert command._names("copy, lag") == ("copy", "lag")
    assert command._positive("1,000_000") == 1_000_000
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: cpoy"):
        command._names("cpoy,lag")
    with pytest.raises(argparse.ArgumentTypeError):
        command._positive("0")


def test_what_a_process_costs() -> None:
    # Touches 64 MB, uses some processor time, and waits for input before it ends.
    program = "b = bytearray(64 << 20)\nfor i in range(10**7): pass\ndel b\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in machine.descendants(os.getpid())
        assert machine.cpu_seconds(process.pid) > 0
        assert machine.peak_memory(process.pid) > 64 << 20
        assert 0 < machine.resident_memory(process.pid) < 64 << 20
        machine.forget_peak(process.pid)
        assert machine.peak_memory(process.pid) < 64 << 20
        process.communicate(b"\n")
    assert machine.cpu_seconds(process.pid) == 0.0
    assert machine.peak_memory(process.pid) == 0


def test_machine_time_only_grows() -> None:
    before = machine.MachineTime.now()
    sum(range(10**6))
    after = machine.MachineTime.now()
    assert after.busy >= before.busy > 0
    assert after.stolen >= before.stolen


class Server:
    """A publisher, or a subscriber's server, with prepared answers."""

    def __init__(self, rows: list[tuple[Any, ...]] | None = None) -> None:
        self.rows = rows or []

    def query(self, statement: str, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        return self.rows

    def execute(self, statement: str, dbname: str = "postgres") -> None:
        return


class Applying:
    """A subscriber whose origin advances by one each time it is read while the subscription is enabled."""

    def __init__(self, name: str, calls: list[str], difference: str | None = None) -> None:
        self.name = name
        self.pid = os.getpid()
        self.server = Server()
        self._calls = calls
        self._difference = difference
        self._lsn = 0

    def enable(self, data: workload.Dataset) -> None:
        self._calls.append(f"{self.name} on")

    def disable(self, data: workload.Dataset) -> None:
        self._calls.append(f"{self.name} off")

    def applied(self, data: workload.Dataset) -> Lsn:
        self._lsn += 1
        return Lsn(self._lsn)

    def difference(self, data: workload.Dataset) -> str | None:
        self._calls.append(f"{self.name} at {self._lsn}")
        return self._difference

    def settle(self) -> None:
        return

    def cpu(self) -> dict[str, float]:
        return {}

    def details(self, data: workload.Dataset) -> dict[str, int]:
        return {"delta_commits": self._lsn}

    def failure(self) -> str:
        return "why"

    def jvm_pid(self) -> int | None:
        return None


def bench_of(stock: Applying, ours: Applying, publisher: Server | None = None) -> Bench:
    return Bench(PLAN, cast(Any, publisher or Server()), cast(Any, stock), cast(Any, ours), lambda _: None)


def test_each_side_applies_a_backlog_alone_past_its_end_and_is_compared() -> None:
    calls: list[str] = []
    stock, ours = Applying("stock", calls), Applying("pubsub", calls)
    runs = bench_of(stock, ours)._backlog(DATA, lambda: Lsn(3), 1)
    assert calls == ["pubsub on", "pubsub at 4", "pubsub off", "stock on", "stock at 4", "stock off"]
    assert [run.side for run in runs] == [OURS, THEIRS]
    assert runs[0].details["delta_commits"] == 4
    assert runs[0].daemon_memory
    assert "machine" in runs[1].cpu


def test_a_run_whose_tables_differ_is_a_failure_and_no_measurement() -> None:
    calls: list[str] = []
    bench = bench_of(Applying("stock", calls), Applying("pubsub", calls, "one row is missing"))
    bench._data = DATA
    bench._doing = "updates"
    bench._guard("orders", lambda: bench._add({"updates": bench._backlog(DATA, lambda: Lsn(3), 0)}, {}, {}))
    assert bench.results.comparisons == []
    (failure,) = bench.results.failures
    assert failure.startswith("updates: ")
    assert "one row is missing" in failure
    assert calls[-2:] == ["stock off", "pubsub off"]


def test_a_subscriber_that_stands_still_fails_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stock = Applying("stock", calls)
    clock = iter(range(0, 10_000, 400))
    monkeypatch.setattr(
        "bench.scenarios.time",
        SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0, sleep=lambda _: None),
    )
    with pytest.raises(Failed, match="stock is not at 0/3E8 after 600 s\nwhy"):
        bench_of(stock, stock)._follow(cast(Any, stock), DATA, Lsn(1000))


def test_lag_is_from_commit_to_the_first_look_that_found_the_origin_past_it() -> None:
    def commit(end: int, second: int) -> tuple[bytes]:
        return (write_message(Commit(0, Lsn(end - 8), Lsn(end), second * 1_000_000)),)

    publisher = Server([commit(100, 10), commit(200, 11), commit(300, 12), commit(400, 13)])
    zero = pg_time_to_datetime(0).timestamp()
    seen = [(Lsn(90), zero + 9.0), (Lsn(200), zero + 11.5), (Lsn(300), zero + 14.0)]
    # The last commit is the mark, which ends past the LSN that was waited for.
    lags, times = lag.of_transactions(cast(Any, publisher), workload.Pgbench("pgbench", 1), "slot", seen)
    assert list(lags) == pytest.approx([1.5, 0.5, 2.0, 1.0])
    assert list(times - zero) == pytest.approx([10, 11, 12, 13])
