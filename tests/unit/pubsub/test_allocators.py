"""Memory goes back to the system at intervals that all pipelines of a process share."""

from __future__ import annotations

import time

import pytest

from pubsub import allocators


def test_memory_goes_back_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    allocators.give_back()
    assert not allocators.is_due()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31.0)
    assert allocators.is_due()
    allocators.give_back()
    assert not allocators.is_due()
