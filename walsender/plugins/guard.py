"""A plugin of a user's own, as decoding calls it: whatever it raises is an error of its stream, and what it writes is bytes.

    decoder ──► Guarded ──► the user's plugin ──► checked write ──► client

Streams of other plugins share the decoding process.  So nothing of a user's plugin may reach the process but results and
PubsubErrors: no SystemExit, which would end it, and no message whose length is not what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pubsub.errors import ProgramLimitExceeded
from walsender.plugins.failure import failure_of
from walsender.plugins.plugin import Plugin, PluginContext, Write

_CALLBACKS: Final = (
    *("describe", "refusal", "forget", "begin", "change", "truncate", "message", "commit"),
    *("begin_prepare", "prepare", "commit_prepared", "rollback_prepared"),
    *("stream_start", "stream_stop", "stream_abort", "stream_prepare", "stream_commit"),
)
_QUESTIONS: Final = ("row", "skips_origin", "prepares")
"""Callbacks whose answer is yes or no."""
_LONGEST: Final = 0x3FFFFFFF
"""MaxAllocSize: bytes of a message with its header, at most."""
_HEADER: Final = 25


class Guarded(Plugin[Any]):
    """A plugin of the class `kind`.  Raises PubsubError, as each of its callbacks does, whatever the plugin raises."""

    def __init__(self, kind: type[Plugin[Any]], context: PluginContext) -> None:
        super().__init__(context)
        try:
            plugin = kind(replace(context, write=_checked(context.write)))
            self.streaming = bool(plugin.streaming)
            self.path = tuple(plugin.path)
            callbacks = {name: getattr(plugin, name) for name in (*_CALLBACKS, *_QUESTIONS)}
        except BaseException as error:
            raise failure_of(kind, error) from error
        for name, callback in callbacks.items():
            # The instance's own attributes go before the class's methods.
            setattr(self, name, _guarded(plugin, callback, bool if name in _QUESTIONS else _as_is))


def _as_is(result: Any) -> Any:
    return result


def _guarded(plugin: Plugin[Any], callback: Callable[..., Any], of: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return of(callback(*arguments, **named))
        except BaseException as error:
            raise failure_of(plugin, error) from error

    return call


def _checked(write: Write) -> Write:
    """Return a `write` that takes what is a message, and nothing of anything else.

    A message that was half written would make the next one, be it an error, a part of it.
    """

    def checked(lsn: int, xid: int, data: bytes) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"a message is bytes, not {type(data).__name__}")
        data = bytes(data)
        if len(data) > _LONGEST - _HEADER:
            raise ProgramLimitExceeded(
                f"string buffer exceeds maximum allowed length ({_LONGEST} bytes)",
                detail=f"Cannot enlarge string buffer containing {_HEADER} bytes by {len(data)} more bytes.",
            )
        if not 0 <= lsn < 1 << 64:
            raise ValueError(f"{lsn} is no LSN")
        if not 0 <= xid < 1 << 32:
            raise ValueError(f"{xid} is no transaction's id")
        write(lsn, xid, data)

    return checked
