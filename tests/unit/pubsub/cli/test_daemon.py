"""The daemon's loop around its workers: what a SIGHUP with settings that cannot be served does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pubsub import logs
from pubsub.cli.common import Common
from pubsub.cli.daemon import Beside, serve
from pubsub.errors import ObjectInUse
from tests.support.captured_logs import captured_logs
from tests.support.replica import PATIENCE


class NoWorkers:
    """Stands for launcher.service.Service, without Spark."""

    leased = None

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        pass

    def reloaded(self) -> None:
        pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is logged by a daemon that has no workers."""

    async def start(*_: object, **__: object) -> NoWorkers:
        return NoWorkers()

    monkeypatch.setattr("launcher.service.Service.start", start)
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    with captured_logs() as entries:
        yield entries


async def until(condition: Callable[[], bool], running: asyncio.Task[int]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)


async def test_what_else_is_in_use_ends_a_daemon_that_stands_by(
    events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the catalog, and yet it cannot start: it tried again without a pause, and said nothing."""

    async def in_use(*_: object, **__: object) -> NoWorkers:
        raise ObjectInUse("the spill directory is in use")

    monkeypatch.setattr("launcher.service.Service.start", in_use)
    monkeypatch.setattr("pubsub.cli.daemon.require_shared", lambda *_: None)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ObjectInUse, match="spill directory"):
            await serve(Common(tmp_path, verbose=False), beside=Beside.STANDBY)
    assert not events


async def test_settings_that_a_reload_changes_in_place(events: list[Any], tmp_path: Path) -> None:
    """A longer pause after failures once made every worker start again, and copies begin anew."""

    def count(event: str) -> int:
        return sum(entry["event"] == event for entry in events)

    file = tmp_path / "pubsub.toml"
    running = asyncio.create_task(serve(Common(tmp_path, verbose=False)))
    try:
        await until(lambda: count("daemon has started") == 1, running)
        file.write_text('wal_retrieve_retry_interval = "7s"\nwal_receiver_timeout = "2min"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: count("settings have changed: the workers go on with them") == 1, running)
        assert {entry["parameter"] for entry in events if entry["event"] == "parameter was changed"} == {
            "wal_retrieve_retry_interval",
            "wal_receiver_timeout",
        }
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: count("settings are unchanged") == 1, running)
        file.write_text('wal_retrieve_retry_interval = "7s"\nlogical_decoding_work_mem = "1MB"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: count("daemon has started") == 2, running)
        assert count("settings have changed: the workers start again") == 1
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        code = await running
    assert code == 0


NOT_SERVED = {
    "a port that another has": '[http]\nlisten = "127.0.0.1:{taken}"',
    "a host that has no address": '[http]\nlisten = "host.invalid:0"',
    "a port of slots that another has": '[walsender]\nlisten = "127.0.0.1:{taken}"',
    "a certificate that is not there": '[walsender]\nlisten = "127.0.0.1:0"\nssl_cert_file = "none"',
    "a catalog that cannot be reached": '[catalog]\nurl = "postgresql://nobody@127.0.0.1:1/none"',
}


@pytest.mark.parametrize("settings", NOT_SERVED.values(), ids=NOT_SERVED)
async def test_settings_that_cannot_be_served_are_not_taken(events: list[Any], tmp_path: Path, settings: str) -> None:
    def count(event: str) -> int:
        return sum(entry["event"] == event for entry in events)

    file = tmp_path / "pubsub.toml"
    first = 'wal_receiver_timeout = "61s"\ncatalog_timeout = "1s"\n'
    file.write_text(first)
    with socket.create_server(("127.0.0.1", 0)) as other:
        running = asyncio.create_task(serve(Common(tmp_path, verbose=False)))
        try:
            await until(lambda: count("daemon has started") == 1, running)
            file.write_text(first + settings.replace("{taken}", str(other.getsockname()[1])))
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: count("daemon has started") == 2, running)
            (refused,) = (entry for entry in events if entry["event"] == "settings were not taken")
            assert refused["log_level"] == "error"
            assert refused["reason"]
            # They are tried again when they are read again.
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: count("daemon has started") == 3, running)
            assert count("settings were not taken") == 2
            file.write_text(first)
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: count("settings are unchanged") == 1, running)
        finally:
            if not running.done():
                os.kill(os.getpid(), signal.SIGTERM)
            code = await running
    assert code == 0
    assert {entry["listen"] for entry in events if entry["event"] == "daemon has started"} == {None}
