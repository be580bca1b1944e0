"""Where logs go: standard error alone, for people on a terminal, else one JSON document a line (interface.md)."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: int = logging.INFO) -> None:
    """Send the logs of this process to standard error, from `level` (of the standard library's logging) on."""
    renderers: list[structlog.typing.Processor]
    if sys.stderr.isatty():
        renderers = [structlog.dev.ConsoleRenderer()]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def configure_unless_done() -> None:
    """For an engine inside someone's program, who may have a configuration: structlog's own prints all to standard output."""
    if not structlog.is_configured():
        configure(logging.WARNING)
