"""What an apply worker promises to the sync worker of a table that was copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from apply.worker import ApplyWorker
from pubsub.protocol.lsn import Lsn


@pytest.mark.parametrize(
    ("decided", "origin", "at", "promised"),
    [
        # The stream begins within the last commit before the origin, which is not sent again.
        (0x439, 0x442, 0x410, 0x442),
        (0x450, 0x442, 0x410, 0x450),
        (0x439, 0x442, 0x460, 0x460),
    ],
)
def test_it_is_not_before_the_origin(decided: int, origin: int, at: int, promised: int) -> None:
    worker: Any = ApplyWorker.__new__(ApplyWorker)
    worker._origin = Lsn(origin)
    worker._pipeline = SimpleNamespace(dispatcher=SimpleNamespace(decided=Lsn(decided)))
    worker._tables = SimpleNamespace(relations=SimpleNamespace(promise=lambda _relid, at, decided: max(at, decided)))
    assert cast(ApplyWorker, worker).answer(1, Lsn(at)) == promised
