"""Logs go to standard error only: in lines for people on a terminal, otherwise as one JSON document a line.

An event has a fixed name, and fields.  On a terminal it is one line, with an unexpected error's traceback only if
`verbose`; in JSON the traceback is the field `exception`.  No renderer shows the values of variables, since these may
be connection strings with passwords.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

#: The fields that come first on a terminal, in this order.
_FIRST: Final = ("reason", "detail", "hint", "statement", "subscription", "relation")


def configure(level: int = logging.INFO, *, verbose: bool = False) -> None:
    """Send this process's logs to standard error, from `level` (of the standard library's logging) upwards."""
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
        # Looks up sys.stderr with each logger: a program or a test may have replaced it.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def configure_unless_done() -> None:
    """Configure logging for warnings and errors unless the surrounding program has done so.

    structlog's default would print everything to standard output.
    """
    if not structlog.is_configured():
        configure(logging.WARNING)


class _Terminal:
    """A processor that drops empty fields, and tracebacks unless `verbose`; a repeated traceback is shown only once."""

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
