"""When a test fails, its report shows the ends of the logs of all servers and daemons that were there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet

import pytest

from pubsub.testing import servers


class Logging(Protocol):
    """A process of a test, with a log."""

    def tail(self) -> str:
        """Return the log's end."""


_processes: WeakSet[Logging] = WeakSet()


def show(process: Logging) -> None:
    """Show the log of this process with every test that fails while it is referred to."""
    _processes.add(process)


class Logs:
    """The plugin."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if report.failed:
            for one in _processes:
                report.sections.append((f"log of {one!r}", one.tail()))
            for server in servers._running:
                report.sections.append((f"log of {server!r}", server.read_log()[-3000:]))
        return report
