"""Logs go to standard error only: in lines for people on a terminal, otherwise as one JSON document a line.

An event has a fixed name, and fields.  On a terminal it is one line, with an unexpected error's traceback only if
`verbose`; in JSON the traceback is the field `exception`.  No renderer shows the values of variables, since these may
be connection strings with passwords.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final

import structlog

#: The fields that come first on a terminal, in this order.
_FIRST: Final = ("reason", "detail", "hint", "statement", "subscription", "relation")
#: The fields of an event that are kept with it, and how many characters of each.
_KEPT: Final = (
    "subscription", "relation", "slot", "lsn", "reason", "detail", "hint", "statement", "parameter", "before", "after",
)  # fmt: skip
_LONGEST: Final = 500

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Event:
    """An event as it was last logged, `first` and `last` when (ISO 8601, UTC), and how often since `first`."""

    level: str
    text: str
    fields: tuple[tuple[str, str], ...]
    first: str
    last: str
    times: int = 1


class RecentEvents:
    """A processor that keeps the last events, `most` at most, of level info and above.

    An event that comes again, with the same fields, counts up the one that is kept: a worker that fails every few seconds
    does not drive out everything else.  Only fields of _KEPT are kept, shortened: no traceback.
    """

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._events: OrderedDict[object, Event] = OrderedDict()
        self._lock = Lock()

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        level = event.get("level", "info")
        if level != "debug":
            fields = tuple((name, _shortened(event[name])) for name in _KEPT if event.get(name) is not None)
            text, time = _shortened(event.get("event", "")), str(event.get("timestamp", ""))
            key = (level, text, fields)
            with self._lock:
                known = self._events.pop(key, None)
                self._events[key] = (
                    Event(level, text, fields, time, time)
                    if known is None
                    else replace(known, last=time, times=known.times + 1)
                )
                while len(self._events) > self._most:
                    self._events.popitem(last=False)
        return event

    def newest(self) -> list[Event]:
        """Return the events, the one that was logged last first."""
        with self._lock:
            return list(reversed(self._events.values()))


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"


def configure(level: int = logging.INFO, *, verbose: bool = False, recent: RecentEvents | None = None) -> None:
    """Send this process's logs to standard error, from `level` (of the standard library's logging) upwards.

    `recent` keeps the last ones.
    """
    # It would print the texts of statements that it cannot read, with whatever they hold.
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
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
            *([recent] if recent is not None else []),
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


def hear_libraries() -> None:
    """Log what libraries say by the standard library's logging, warnings and errors, from now on.

    Python would print it to standard error, plain lines between the log's.  For a process of ours only: in a program that
    has us as a library this is the program's.
    """
    root = logging.getLogger()
    if not any(isinstance(one, _OfLibraries) for one in root.handlers):
        root.addHandler(_OfLibraries(logging.WARNING))


class _OfLibraries(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            reason, _, detail = record.getMessage().partition("\n")
            fields = {"library": record.name, "reason": reason, "detail": detail or None, "exc_info": record.exc_info}
            if record.levelno >= logging.ERROR:
                logger.error("a library has failed", **fields)
            else:
                logger.warning("a library warns", **fields)
        except Exception:
            self.handleError(record)


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
