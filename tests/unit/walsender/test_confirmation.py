"""A physical slot moves with what the output's consumer keeps, not with what is decoded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pubsub.errors import PubsubError
from tests.support.replica import wait_until
from walsender.confirmation import Confirmations, Restarts
from walsender.decoding import DecodeRequest, Session
from walsender.outputfile import Output, OutputFailure
from walsender.plugin_request import PluginRequest


def test_a_restart_serves_from_the_position_on_at_which_it_was_found() -> None:
    restarts = Restarts(10)
    assert not restarts.moves
    restarts.note(100, 10)
    assert not restarts.moves
    restarts.note(200, 150)
    restarts.note(300, 150)
    restarts.note(400, 390)
    assert [restarts.kept(position) for position in (0, 199, 200, 399, 400, 200)] == [10, 10, 150, 150, 390, 390]


def test_many_restarts_without_a_confirmation_are_thinned_out() -> None:
    restarts = Restarts(0)
    for number in range(1, 100_000):
        restarts.note(number * 10, number * 10 - 5)
    assert restarts.kept(9) == 0
    assert 450_000 < restarts.kept(500_000) <= 500_000
    assert restarts.kept(999_990) == 999_985


def test_confirmations_come_in_pieces_and_never_go_back() -> None:
    reading, writing = os.pipe()
    confirmations = Confirmations(reading)
    os.write(writing, b"0/20\n0/1")
    wait_until(lambda: confirmations.newest() == 0x20, "the first one")
    os.write(writing, b"0\n1/0\n")
    wait_until(lambda: confirmations.newest() == 1 << 32, "the last one")
    os.write(writing, b"x" * 200)
    os.close(writing)

    def fails() -> bool:
        try:
            confirmations.newest()
        except PubsubError as error:
            return error.sqlstate == "22P02"
        return False

    wait_until(fails, "what is no position is an error")


class Source:
    """A source with nothing in it; after each look it notes where the slot may move to."""

    def __init__(self, decoder: Any) -> None:
        self.flushed = 0
        self.seen: list[int] = []
        self.kept_alive = 0
        self.position: Callable[[], int] = lambda: 0
        self.told: list[int] = []
        self._decoder = decoder

    async def feed(self, _reader: object) -> AsyncGenerator[bool, None]:
        for restart in (10, 20, 30):
            self._decoder.restarts.point = restart
            yield True
            self.seen.append(self.flushed)

    async def keep_alive(self) -> None:
        self.kept_alive += 1
        self.told.append(self.position())


@pytest.mark.parametrize("durable", [True, False])
def test_a_slot_moves_after_the_output_is_durable(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    path = tmp_path / "output"

    def fsync(_descriptor: int) -> None:
        if not durable and synced:
            raise OSError(5, "Input/output error")
        synced.append(path.read_bytes())

    output: Any = SimpleNamespace(proceed=iter([False, False, True, True, True]).__next__)
    builder = SimpleNamespace(consistent=True)
    decoder: Any = SimpleNamespace(outputs=[output], restarts=SimpleNamespace(point=5), builder=builder)
    reader: Any = SimpleNamespace(position=100, geometry=SimpleNamespace(to_byte_position=int))
    source: Any = Source(decoder)
    turn: Any = SimpleNamespace(begin=lambda: None)
    server: Any = None
    request = DecodeRequest("", PluginRequest("test_decoding", {}, 0), tmp_path, slot="hold")
    session = Session(request, server, source, reader, decoder, turn)
    source.position = lambda: session.written
    assert source.flushed == 5
    with Output(path, "test_decoding") as written:

        def run(_reader: object, _end: int) -> bool:
            reader.position += 100
            written.write(reader.position, 1, b"row")
            return False

        def kept(position: int) -> int:
            written.sync()
            return position

        decoder.run = run
        monkeypatch.setattr(os, "fsync", fsync)
        if durable:
            asyncio.run(session.run(idle=written.flush, kept=kept))
            assert source.seen == [10, 20, 30]
            assert source.kept_alive == 2, "while the output was not done"
            assert source.told == [100, 100], "it was not written meanwhile"
            assert session.written == reader.position == 400
            # The file, its directory, and the file again.
            assert [one.count(b"row") for one in synced] == [1, 1, 2, 3]
        else:
            with pytest.raises(OutputFailure, match="could not fsync"):
                asyncio.run(session.run(idle=written.flush, kept=kept))
            assert source.seen == []
            assert source.flushed == 5
