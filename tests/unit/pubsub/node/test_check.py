"""What `pubsub check` finds of the node's own side."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pubsub.node import check
from pubsub.settings import Settings


def settings(home: Path, master: str) -> Settings:
    return Settings.read({"spark": {"master": master}}, home)


@pytest.mark.parametrize("master", ["local[*]", "yarn", "k8s://https://h:443"])
async def test_what_has_no_master_to_look_for(master: str, tmp_path: Path) -> None:
    assert await check._master(settings(tmp_path, master)) == []


async def test_one_of_the_masters_is_enough(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there, away = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listening, closed))
        (found,) = await check._master(settings(tmp_path, f"spark://{away},{there}"))
        assert (found.severity, found.message) == ("ok", f'the master of "spark://{away},{there}" listens')
        (found,) = await check._master(settings(tmp_path, f"spark://{away}"))
    assert (found.severity, found.message) == ("error", f'no master of "spark://{away}" can be reached')
    assert found.detail is not None
    assert "refused" in found.detail.lower()


async def test_a_master_that_cannot_be(tmp_path: Path) -> None:
    (found,) = await check._master(settings(tmp_path, "spark://h:99999,h"))
    assert found.severity == "error"
    assert found.detail is not None
    assert "h: it has no port." in found.detail
