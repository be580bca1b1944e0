"""Where logs go: standard error alone, for people on a terminal, else one JSON document a line (interface.md).

An event has a name that stays, and fields.  On a terminal it is one line, and an unexpected error's traceback is left out unless
more was asked for (`verbose`); as JSON the traceback is the field `exception`.  No renderer shows what variables hold: among them
are connection strings.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

#: What stands first on a terminal, in this order.
_FIRST: Final = ("reason", "detail", "hint", "statement", "subscription", "relation")


def configure(level: int = logging.INFO, *, verbose: bool = False) -> None:
    """Send the logs of this process to standard error, from `level` (of the standard library's logging) on."""
    renderers: list[structlog.typing.Processor]
    if sys.stderr.isatty():
        renderers = [
            _Terminal(verbose=verbose),
            structlog.dev.ConsoleRenderer(sort_keys=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        renderers = [structlog.processors.JSONRenderer(ensure_ascii=False)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # As it is when something is said: a program, or a test, may have put another in its place.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def configure_unless_done() -> None:
    """For an engine inside someone's program, who may have a configuration: structlog's own prints all to standard output."""
    if not structlog.is_configured():
        configure(logging.WARNING)


class _Terminal:
    """A processor that leaves out what a person need not read: empty fields, and tracebacks, or those that were just shown."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._shown: Any = None

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        first = {name: event.pop(name) for name in _FIRST if name in event}
        exception = event.pop("exception", None)
        if exception is not None:
            first.setdefault("reason", exception.strip().splitlines()[-1])
        fields = {name: value for name, value in {**first, **event}.items() if value is not None}
        if exception is not None and self._verbose and exception != self._shown:
            fields["exception"] = self._shown = exception
        return fields
