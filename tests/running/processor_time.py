"""Processor seconds of each test file, with those of every process that its tests start: servers, daemons, JVMs.

A worker of xdist measures at the end of a file's tests, or of a test that took long, and sends the seconds with the test's
report. The terminal's process adds them up and lists them at the end, dearest first.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_TICKS: Final = os.sysconf("SC_CLK_TCK")

# Measuring takes milliseconds: a test that is shorter than this, in seconds, is counted with the next one of its file.
_WORTH_MEASURING: Final = 0.5

# A report's property, with seconds of processor time.
_PROPERTY: Final = "processor_seconds"

# How many files and tests are listed.
_LISTED: Final = 25


def used(root: int) -> float:
    """Return the processor seconds of process `root` and its descendants so far, ended ones that were waited for among them."""
    times: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue  # it has ended
        # After the command's name in parentheses: state, parent, …; utime, stime, cutime and cstime are fields 14 to 17.
        fields = stat[stat.rindex(b")") + 2 :].split()
        times[int(name)] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(int(name))
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += times.get(pid, 0)
        waiting += children.get(pid, ())
    return total / _TICKS


class ProcessorTime:
    """The plugin; each process of a run has one."""

    def __init__(self) -> None:
        self._before = used(os.getpid())
        self._files: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        began = time.monotonic()
        self._last = nextitem is None or nextitem.path != item.path
        self._began = began
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.when == "teardown" and (self._last or time.monotonic() - self._began > _WORTH_MEASURING):
            now = used(os.getpid())
            # Less, where a process was killed whose children nobody has waited for.
            item.user_properties.append((_PROPERTY, max(0.0, now - self._before)))
            self._before = now
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for name, seconds in report.user_properties:
                if name == _PROPERTY and isinstance(seconds, float):
                    self._files[report.location[0]] += seconds
                    self._tests[report.nodeid] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._files) < 2:
            return
        total = sum(self._files.values())
        terminalreporter.section(f"processor seconds: {total:.0f}")
        for title, counted in (("files", self._files), ("tests", self._tests)):
            terminalreporter.line(f"dearest {title}")
            for name, seconds in counted.most_common(_LISTED):
                terminalreporter.line(f"{seconds:8.1f}  {name}")
        path = os.environ.get("PUBSUB_TEST_TIMES")
        if path is not None:
            rows = [f"{seconds:.2f}\t{name}\n" for name, seconds in self._tests.most_common()]
            Path(path).write_text("".join(rows))
