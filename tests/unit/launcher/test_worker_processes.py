"""WorkerProcesses: one that cannot be started, or ends, is started again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import worker_processes
from launcher.worker_processes import WorkerProcesses
from pubsub.settings import Settings
from tests.support.captured_logs import captured_logs


async def test_whatever_fails_in_a_start_it_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody had thought of once ended the other processes, too, and was told when the daemon stopped."""
    errors: list[Exception] = [RuntimeError("can't start new thread"), PermissionError(13, "Permission denied")]
    execute, started = asyncio.create_subprocess_exec, asyncio.Event()

    async def start(*_: Any, **__: Any) -> asyncio.subprocess.Process:
        if errors:
            raise errors.pop()
        process = await execute(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        started.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(worker_processes, "_AGAIN", 0.01)
    catalog = SimpleNamespace(epoch=None, is_sharing=False)
    processes = WorkerProcesses(Settings(home=tmp_path, worker_processes=2), catalog, None, -1)  # type: ignore[arg-type]
    with captured_logs() as logs:
        running = asyncio.create_task(processes.run())
        async with asyncio.timeout(60):
            await started.wait()
            processes.kill()
            await running
    processes.close()
    failed = [one for one in logs if one["event"] == "worker process is started again"]
    reasons = ["PermissionError: [Errno 13] Permission denied", "RuntimeError: can't start new thread"]
    assert [one["reason"] for one in failed] == reasons
    assert [one["exception"] is not None for one in failed] == [False, True]
