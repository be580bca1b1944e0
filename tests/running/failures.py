"""What failed in a run, left in a directory for the process that started it: `-p tests.running.failures`.

counts.json      how many tests passed, and were skipped
failed.json      the ids of those that failed, in order
N.txt            what the Nth of them printed
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import pytest

_VARIABLE: Final = "PUBSUB_TEST_FAILURES"


class Failures:
    """The plugin, for the process that writes to the terminal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._passed: set[str] = set()
        self._skipped: set[str] = set()
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            if report.nodeid not in self._failed:
                self._failed.append(report.nodeid)
            number = self._failed.index(report.nodeid)
            with (self._directory / f"{number}.txt").open("a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")
                file.writelines(f"--- {title} ---\n{text}\n" for title, text in report.sections)
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        # A test whose teardown failed has passed before.
        counts = {"passed": len(self._passed.difference(self._failed)), "skipped": len(self._skipped)}
        (self._directory / "counts.json").write_text(json.dumps(counts))
        (self._directory / "failed.json").write_text(json.dumps(self._failed))


def pytest_configure(config: pytest.Config) -> None:
    """Note what fails, in the directory that the environment names."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(os.environ[_VARIABLE])))


class Run:
    """What a run left in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def environment(cls, directory: Path) -> dict[str, str]:
        """Return the variables that have a run leave it there."""
        return {**os.environ, _VARIABLE: str(directory)}

    @property
    def failed(self) -> list[str]:
        """The ids of the tests that failed; empty if the run did not come to its end."""
        path = self._directory / "failed.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def count(self, outcome: str) -> int:
        """Return how many tests `passed` or were `skipped`."""
        path = self._directory / "counts.json"
        return int(json.loads(path.read_text()).get(outcome, 0)) if path.exists() else 0

    def output(self, test: str) -> str:
        """Return what a failed test printed."""
        return (self._directory / f"{self.failed.index(test)}.txt").read_text()
