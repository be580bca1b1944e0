"""Which process of a run has which files: xdist's `loadfile`, where a run goes on after one of its processes has died.

In xdist 3.8 the process in its place is given the files that the dead one had ended and waits for a test of them, for ever; it
waits for ever, too, if there is one test left; and the test that was the death of the first is run by the next one, and the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    """`loadfile` that runs what a dead process has left, once."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process away; return the test that it has died of, which is not run again here (but by __main__.py)."""
        left = [
            (scope, test)
            for scope, tests in self.assigned_work[node].items()
            for test, has_ended in tests.items()
            if not has_ended
        ]
        files = self.assigned_work.pop(node)
        for scope, _ in left[1:]:
            self.workqueue[scope] = files[scope]
        if not left:
            return None
        scope, died_of = left[0]
        files[scope][died_of] = True
        for other in self.assigned_work:
            self._reschedule(other)
        return died_of

    def schedule(self) -> None:
        super().schedule()
        # A process begins a test when it knows of another one, or that there is none: the second call says so.
        for node in self.nodes:
            if node in self.registered_collections:
                self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    """Schedule a run with `--dist loadfile`."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
