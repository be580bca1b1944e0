"""Nothing of a user's output plugin reaches the decoding process but results and PubsubErrors: other streams are decoded there."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Callable
from typing import Any

import pytest

from pubsub.errors import ProgramLimitExceeded, PubsubError
from pubsub.protocol.output.styles import Styles
from walsender.plugins.guard import Guarded
from walsender.plugins.plugin import OutputPlugin, Plugin, PluginContext, Write

_CALLBACKS = [name for name, one in vars(OutputPlugin).items() if not name.startswith("_") and inspect.isfunction(one)]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


def _context(write: Write = lambda _lsn, _xid, _data: None) -> PluginContext:
    return PluginContext({}, write, "utf-8", 180000, False, frozenset(), Styles())


def _raising(error: BaseException, *names: str) -> type[Plugin[Any]]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return type("Raising", (Plugin,), dict.fromkeys(names, fail))


@pytest.mark.parametrize("name", _CALLBACKS)
def test_every_callback_is_guarded(name: str) -> None:
    plugin = Guarded(_raising(SystemExit(3), name), _context())
    parameters = list(inspect.signature(getattr(OutputPlugin, name)).parameters.values())[1:]
    named: dict[str, Any] = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    with pytest.raises(PubsubError, match=r"test_guard\.Raising\" has failed: SystemExit: 3"):
        getattr(plugin, name)(*[None] * (len(parameters) - len(named)), **named)


@pytest.mark.parametrize(
    "error",
    [
        *(
            SystemExit(1),
            KeyboardInterrupt(),
            GeneratorExit(),
            asyncio.CancelledError(),
            StopIteration(),
            MemoryError(),
        ),
        # Of these replay.py took some for mistakes in a row's bytes.
        *(ValueError("x"), IndexError("x"), struct.error("x"), Unspeakable(), BaseException("x")),
        PubsubError(b"no text"),  # type: ignore[arg-type]
        PubsubError("x", hint=7),  # type: ignore[arg-type]
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_is_told(error: BaseException) -> None:
    plugin = Guarded(_raising(error, "commit"), _context())
    for call in (lambda: plugin.commit(None), lambda: Guarded(_raising(error, "__init__"), _context())):  # type: ignore[arg-type]
        with pytest.raises(PubsubError) as raised:
            call()
        assert type(error).__name__ in raised.value.message
        assert (raised.value.sqlstate, raised.value.hint) == ("XX000", "The server's log has the traceback.")


def test_an_error_of_postgresql_s_kind_stays_what_it_is() -> None:
    error = PubsubError("no", sqlstate="22023", detail="d", hint="h")
    with pytest.raises(PubsubError) as raised:
        Guarded(_raising(error, "commit"), _context()).commit(None)  # type: ignore[arg-type]
    assert raised.value is error


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ((1, 2, b"x"), None),
        ((1, 2, bytearray(b"x")), None),
        ((1, 2, memoryview(struct.pack("3I", 1, 2, 3)).cast("I")), None),
        ((1, 2, "x"), "TypeError: a message is bytes, not str"),
        ((1, 2, 5), "TypeError: a message is bytes, not int"),
        ((None, 2, b"x"), "TypeError"),
        ((-1, 2, b"x"), "ValueError: -1 is no LSN"),
        ((1, 1 << 32, b"x"), "ValueError: 4294967296 is no transaction's id"),
    ],
)
def test_a_message_is_written_whole_or_not_at_all(message: tuple[Any, ...], expected: str | None) -> None:
    written: list[tuple[int, int, bytes]] = []

    class Writing(Plugin[Any]):
        def commit(self, txn: object) -> None:
            self.context.write(*message)

    def write(lsn: int, xid: int, data: bytes) -> None:
        written.append((lsn, xid, data))

    plugin = Guarded(Writing, _context(write))
    if expected is None:
        plugin.commit(None)  # type: ignore[arg-type]
        assert written == [(1, 2, bytes(message[2]))]
        return
    with pytest.raises(PubsubError, match=expected):
        plugin.commit(None)  # type: ignore[arg-type]
    assert written == []


def test_a_message_that_no_client_could_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walsender.plugins.guard._LONGEST", 100)

    class Writing(Plugin[Any]):
        def commit(self, txn: object) -> None:
            self.context.write(1, 2, bytes(76))

    with pytest.raises(ProgramLimitExceeded, match="exceeds maximum allowed length"):
        Guarded(Writing, _context()).commit(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["streaming", "path"])
def test_attributes_are_looked_at_once(name: str) -> None:
    def fail(_: object) -> None:
        raise SystemExit(3)

    kind: Callable[..., Any] = type("Odd", (Plugin,), {name: property(fail)})
    with pytest.raises(PubsubError, match="SystemExit: 3"):
        Guarded(kind, _context())  # type: ignore[arg-type]
