"""Servers of tests that run side by side never take each other's ports."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys

import pytest

from pubsub.errors import PubsubError
from pubsub.testing import ports
from pubsub.testing.ports import Port

_HOLDER = """
import sys
from pubsub.testing.ports import Port
port = Port.reserve()
print(port.number, flush=True)
sys.stdin.read()
"""


def _only(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(number, number + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)


def test_a_port_is_held_until_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        number = int(holder.stdout.readline())
        _only(monkeypatch, number)
        with pytest.raises(PubsubError, match="no free port"):
            Port.reserve()
        holder.kill()
        holder.wait()
    assert Port.reserve().number == number


def test_a_port_is_held_while_its_object_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Port.reserve()
    number = held.number
    _only(monkeypatch, number)
    with pytest.raises(PubsubError, match="no free port"):
        Port.reserve()
    del held
    gc.collect()
    assert Port.reserve().number == number


def test_a_port_that_something_listens_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        _only(monkeypatch, other.getsockname()[1])
        with pytest.raises(PubsubError, match="no free port"):
            Port.reserve()
