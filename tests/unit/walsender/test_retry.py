"""How long a server that is lost while its catalogs are read is tried again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from pubsub.errors import ConnectionFailure
from walsender import decoding
from walsender.decoding import Session
from walsender.source import retry
from walsender.source.retry import RETRY_SECONDS
from walsender.streaming import catalogs
from walsender.streaming.catalogs import Catalogs
from walsender.streaming.requests import Task


class Lost:
    """A connection whose session has ended."""

    answer_timeout: float | None = None

    @classmethod
    async def connect(cls, _conninfo: str, **_: object) -> Self:
        return cls()

    async def query(self, _sql: str) -> None:
        raise ConnectionFailure("gone")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A reading that takes longer than a server is tried for, and loses it twice."""
    now = [1000.0]
    readings = iter(["lost", "lost", "done"])

    async def read(*_: object) -> Any:
        now[0] += RETRY_SECONDS + 1
        if (how := next(readings)) == "lost":
            raise ConnectionFailure("gone")
        return how

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(retry, "RETRY_INTERVAL", 0)
    return read


async def test_a_session_that_worked_for_long_has_the_whole_time_again(
    read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoding, retry):
        monkeypatch.setattr(module, "Connection", Lost)
    monkeypatch.setattr(Session, "_open", read)
    request: Any = SimpleNamespace(conninfo="", receiver_timeout=0)
    nothing: Any = None
    assert await Session.open(request, nothing, nothing, nothing) == "done"


async def test_so_has_a_decoding_process(
    read: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: Any = {"segment_size": 1024, "system_identifier": 1, "work_mem": 1, "tip": 0, "redo": 0, "answer_timeout": 0}
    reading = Catalogs(Task("", 5, str(tmp_path), str(tmp_path), "", **more))

    async def inspect(_: object) -> Any:
        return SimpleNamespace(system_identifier=1, database=5)

    monkeypatch.setattr(Catalogs, "_connect", lambda _: Lost.connect(""))
    monkeypatch.setattr(catalogs.upstream, "inspect", inspect)
    monkeypatch.setattr(catalogs, "read_catalogs", read)
    found: Any = await reading._read(0)
    assert found == "done"
