"""What the benchmarks make of their measurements, without a server."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import __main__ as command
from bench import machine, report, workload
from bench.results import OURS, THEIRS, Comparison, Limit, Results, Run


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
    # 64 MB touched, then some processor time; it waits for its input before it ends.
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
