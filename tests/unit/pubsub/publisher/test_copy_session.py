"""copy_out.session: a connection from a thread, which must not outlast those who wait for the thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.publisher import connection, copy_out
from pubsub.publisher.connection import Connection
from pubsub.publisher.copy_out import Cut, session


class Silent:
    """A server that takes connections and says nothing."""

    def __init__(self, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        self.connected = threading.Event()
        self._listener = listener
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self._taken.append(self._listener.accept()[0])
            except OSError:
                return
            self.connected.set()

    @property
    def conninfo(self) -> str:
        return f"host=127.0.0.1 port={self.port} dbname=d user=u password=unspoken"


@pytest.fixture
def silent() -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Silent(listener)


def test_a_cut_ends_an_attempt_that_a_silent_server_keeps_waiting(silent: Silent) -> None:
    """It once held DISABLE and the daemon's end up for as long as the server was silent."""
    cut = Cut()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(session, silent.conninfo, "copy", cut)
        assert silent.connected.wait(60)
        cut()
        with pytest.raises(ConnectionFailure, match="the attempt was ended"):
            opening.result(60)
    with pytest.raises(ConnectionFailure, match="the attempt was ended"):
        session(silent.conninfo, "copy", cut)


@pytest.mark.parametrize("set_there", [True, False])
def test_a_host_that_does_not_answer_is_given_up(
    silent: Silent, set_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not set_there:
        monkeypatch.setattr(connection, "_PATIENCE", 0.2)
    with pytest.raises(ConnectionFailure, match="timeout expired") as caught:
        session(silent.conninfo + (" connect_timeout=2" if set_there else ""), "copy")
    assert "unspoken" not in str(caught.value.report(verbose=True))


@pytest.mark.parametrize("replication", [True, False])
async def test_no_worker_and_no_command_waits_for_ever(
    silent: Silent, replication: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DROP SUBSCRIPTION did, of a publisher whose processes had been stopped."""
    monkeypatch.setattr(connection, "_PATIENCE", 0.2)
    with pytest.raises(ConnectionFailure, match="timeout expired"):
        async with asyncio.timeout(60):
            await Connection.connect(silent.conninfo, replication=replication)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await Connection.connect(f"{silent.conninfo} connect_timeout=0", replication=replication)


def test_a_connection_string_that_cannot_be_read() -> None:
    with pytest.raises(PubsubError) as caught:
        session("host=h password=un'spoken nonsense", "copy")
    assert caught.value.sqlstate == "42601"
    assert "spoken" not in caught.value.report(verbose=True)


def test_a_rate_is_kept_and_a_broken_connection_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that came faster are waited for; a Cut, which breaks the socket, does not wait for them."""
    here, there = socket.socketpair()
    with here, there:
        waits: list[float] = []
        now = 100.0
        monkeypatch.setattr(copy_out.time, "monotonic", lambda: now)

        class Poll:
            def register(self, _: int, events: int) -> None:
                assert not events, "rows that have come do not end the wait"

            def poll(self, milliseconds: float) -> list[tuple[int, int]]:
                nonlocal now
                waits.append(milliseconds / 1000)
                now += waits[-1]
                return []

        monkeypatch.setattr(copy_out.select, "poll", Poll)
        rate = copy_out.Rate(1000)
        for later, nbytes in ((0.0, 500), (0.1, 500), (5.0, 2000), (0.0, 0), (0.0, 4_000_000)):
            now += later
            rate.keep(here.fileno(), nbytes)
        assert waits == [pytest.approx(0.5), pytest.approx(0.5), pytest.approx(2.0), 3600.0, pytest.approx(400.0)]
        copy_out.Rate(0).keep(here.fileno(), 1 << 40)
        assert len(waits) == 5
        monkeypatch.undo()
        there.send(b"rows")
        here.shutdown(socket.SHUT_RDWR)
        copy_out.Rate(1).keep(here.fileno(), 1 << 40)
