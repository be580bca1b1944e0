"""Traces of batches, from the first transaction received until visible in Delta, for a collector that speaks OTLP.

    batch ─┬─ receive            from the first transaction's receipt until the batch closes
           ├─ stage              until its rows are durable in files
           └─ commit ─┬─ TABLE   one Delta commit each
                      └─ TABLE …

OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER …) hold, too.  A span
is made when its batch is visible, from times that were noted; without `configure` they are not noted.  OpenTelemetry sends
in a thread of its own, and drops spans that a collector does not take, up to 2048 of which wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from pubsub import __version__
from pubsub.errors import PubsubError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_PATH: Final = "/v1/traces"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: How long the last spans are waited for, in seconds.
_LAST: Final = 5.0

_subscription: ContextVar[str] = ContextVar("subscription", default="")

logger = structlog.get_logger()


@dataclass(slots=True)
class _Sender:
    """What this process traces with; None: it does not."""

    provider: TracerProvider | None = None
    tracer: Tracer | None = None


_sender = _Sender()


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A table's commit, in monotonic seconds."""

    relation: str
    began: float
    ended: float


def asked_for(endpoint: str | None) -> bool:
    """Return whether a setting, or one of OpenTelemetry's variables, names a collector."""
    return bool(endpoint) or any(os.environ.get(name) for name in _ENDPOINTS)


def configure(endpoint: str | None, node_id: str) -> None:
    """Trace from now on, if that is asked for: `endpoint` is a collector's URL without the path of traces.

    Raises PubsubError if OpenTelemetry is not installed.  If variables alone ask for traces, which may be meant for other
    programs, that is logged instead.
    """
    if not asked_for(endpoint):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        hint = 'pip install "pubsub-delta[tracing]"'
        if not endpoint:
            logger.warning("traces are not sent", reason=str(error), hint=hint)
            return
        raise PubsubError(
            'parameter "tracing.endpoint" is set, and OpenTelemetry is not installed',
            sqlstate="58P01",
            detail=f"{error}.",
            hint=f"{hint}, or remove the parameter.",
        ) from error
    close()
    _log_what_it_says()
    named = {"service.version": __version__, "service.instance.id": node_id}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        named["service.name"] = "pubsub"
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}{_PATH}") if endpoint else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _sender.provider, _sender.tracer = provider, provider.get_tracer("pubsub", __version__)


class _Log(logging.Handler):
    """Passes on what OpenTelemetry says of a collector that does not take its spans."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.warning("traces are not sent", reason=record.getMessage())


def _log_what_it_says() -> None:
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(one, _Log) for one in theirs.handlers):
        theirs.addHandler(_Log(logging.WARNING))
        # Python would print it to standard error, beside the lines of the log.
        theirs.propagate = False


def is_on() -> bool:
    """Return whether batches are traced."""
    return _sender.tracer is not None


def close() -> None:
    """Send what is left, and trace no more.  Blocks for five seconds at most, if the collector does not answer."""
    provider = _sender.provider
    _sender.provider = _sender.tracer = None
    if provider is not None:
        ending = threading.Thread(target=provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(_LAST)


@contextmanager
def of_subscription(name: str) -> Iterator[None]:
    """Trace what the body does, and the tasks that it starts, as the subscription's."""
    token = _subscription.set(name)
    try:
        yield
    finally:
        _subscription.reset(token)


def batch(
    opened: float,
    closed: float,
    staged: float,
    commits: Sequence[TableCommit],
    attributes: Mapping[str, str | int | float],
) -> None:
    """Make the spans of a batch that is visible now.  Times are monotonic seconds."""
    tracer = _sender.tracer
    if tracer is None:
        return
    now = time.monotonic()
    offset = time.time_ns() - round(now * 1e9)

    def nanoseconds(at: float) -> int:
        return offset + round(at * 1e9)

    # Between staging and the commit a batch may wait for the one before it.
    began = min((one.began for one in commits), default=staged)
    whole = _span(
        tracer, None, "batch", nanoseconds(opened), {"pubsub.subscription": _subscription.get(), **attributes}
    )
    for name, start, end in (("receive", opened, closed), ("stage", closed, staged)):
        _span(tracer, whole, name, nanoseconds(start), {}).end(nanoseconds(end))
    commit = _span(tracer, whole, "commit", nanoseconds(began), {})
    for one in commits:
        found = {"db.collection.name": one.relation}
        _span(tracer, commit, f"commit {one.relation}", nanoseconds(one.began), found).end(nanoseconds(one.ended))
    commit.end(nanoseconds(now))
    whole.end(nanoseconds(now))


def _span(
    tracer: Tracer, parent: Span | None, name: str, start: int, attributes: Mapping[str, str | int | float]
) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    # Of a context of its own: a program that runs a node in its process may have spans, too.
    context = Context() if parent is None else set_span_in_context(parent, Context())
    return tracer.start_span(name, context=context, start_time=start, attributes=dict(attributes))
