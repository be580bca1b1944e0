"""A batch's trace, by OpenTelemetry's own packages, at a collector; and what is said where these are missing."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pubsub import tracing
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from tests.support.captured_logs import captured_logs
from tests.support.frames import insert, transaction
from tests.support.memory_pipeline import LIMITS, A, B, MemoryPipeline
from tests.support.replica import PATIENCE

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME")


class Collector:
    """Keeps the spans that are sent to it, each with what its sender says of itself."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.answer = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces" and collector.answer == 200:
                    collector.take(body)
                self.send_response(collector.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource |= {pair.key: pair.value.string_value for pair in one.resource.attributes}
            self.spans += [span for scope in one.scope_spans for span in scope.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    tracing.close()
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def run_a_batch() -> None:
    async def main() -> None:
        frames = [*transaction(100, A, B, insert(A.oid, 1, "a secret"), insert(B.oid, 1, "y")), *transaction(200, A)]
        p = MemoryPipeline(frames, replace(LIMITS, age=0.01))
        with tracing.of_subscription("shop"):
            running = asyncio.create_task(p.run())
        async with asyncio.timeout(PATIENCE):
            await p.pipeline.until_stored_to(Lsn(200))
            p.pipeline.drain()
            await running
        assert p.rows("a") == [(1, "a secret")]

    asyncio.run(main())


def test_a_batch_is_one_trace(collector: Collector) -> None:
    tracing.configure(f"{collector.endpoint}/", "7438921")
    run_a_batch()
    tracing.close()
    assert not tracing.is_on()
    spans = {one.name: one for one in collector.spans}
    assert len(spans) == len(collector.spans) == 6
    assert len({one.trace_id for one in collector.spans}) == 1
    batch, commit = spans["batch"], spans["commit"]
    tables = [spans["commit a"], spans["commit b"]]
    assert batch.parent_span_id == b""
    assert {spans[one].parent_span_id for one in ("receive", "stage", "commit")} == {batch.span_id}
    assert {one.parent_span_id for one in tables} == {commit.span_id}
    # One after the other, within the whole.
    times = [batch.start_time_unix_nano, spans["receive"].start_time_unix_nano, spans["receive"].end_time_unix_nano]
    times += [spans["stage"].start_time_unix_nano, spans["stage"].end_time_unix_nano, commit.start_time_unix_nano]
    times += [min(one.start_time_unix_nano for one in tables), max(one.end_time_unix_nano for one in tables)]
    times += [commit.end_time_unix_nano, batch.end_time_unix_nano]
    assert times == sorted(times)
    said = {pair.key: pair.value for pair in batch.attributes}
    assert (said["pubsub.subscription"].string_value, said["pubsub.lsn"].string_value) == ("shop", "0/C8")
    numbers = [said[f"pubsub.{one}"].int_value for one in ("transactions", "rows", "tables")]
    assert numbers == [2, 2, 2]
    assert said["pubsub.lag_seconds"].double_value > 0
    assert (collector.resource["service.name"], collector.resource["service.instance.id"]) == ("pubsub", "7438921")
    assert "a secret" not in str(collector.spans)


def test_what_nobody_asked_for_is_not_traced(collector: Collector) -> None:
    tracing.configure(None, "7")
    assert not tracing.is_on()
    run_a_batch()
    assert collector.spans == []


def test_variables_ask_for_it(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lake")
    tracing.configure(None, "7")
    run_a_batch()
    tracing.close()
    assert len(collector.spans) == 6
    assert collector.resource["service.name"] == "lake"


def test_a_collector_that_refuses_is_logged(collector: Collector) -> None:
    collector.answer = 400
    with captured_logs() as logged:
        tracing.configure(collector.endpoint, "7")
        run_a_batch()
        tracing.close()
    assert "traces are not sent" in {one["event"] for one in logged if one["log_level"] == "warning"}


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in [one for one in sys.modules if one.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(PubsubError, match=r'"tracing\.endpoint" is set, and OpenTelemetry is not installed') as caught:
        tracing.configure("http://127.0.0.1:4318", "7")
    assert 'pip install "pubsub-delta[tracing]"' in (caught.value.hint or "")
    # Variables may be meant for other programs.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    with captured_logs() as logged:
        tracing.configure(None, "7")
    assert [(one["event"], one["log_level"]) for one in logged] == [("traces are not sent", "warning")]
    assert not tracing.is_on()
