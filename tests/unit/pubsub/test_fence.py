"""pubsub.forks.fence: a lock of processes, however they end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pubsub.forks import fence


def test_it_is_had_at_once_if_nobody_has_it(tmp_path: Path) -> None:
    waited: list[None] = []
    os.close(fence.acquire(tmp_path / "lock", 0.0, lambda: waited.append(None)))
    os.close(fence.acquire(tmp_path / "lock", 0.0, lambda: waited.append(None)))
    assert waited == []


def test_it_lasts_until_the_last_descriptor_is_closed(tmp_path: Path) -> None:
    """As one that another process was given."""
    held = fence.acquire(tmp_path / "lock", 0.0, lambda: None)
    given = os.dup(held)
    os.close(held)
    waited: list[None] = []
    with pytest.raises(TimeoutError):
        fence.acquire(tmp_path / "lock", 0.0, lambda: waited.append(None))
    assert waited == [None]
    waits = threading.Event()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(fence.acquire(tmp_path / "lock", 300.0, waits.set)))
    thread.start()
    assert waits.wait(300.0)
    os.close(given)
    thread.join()
    os.close(found[0])
