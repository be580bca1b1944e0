"""What /metrics has said, read by Prometheus's own parsers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

#: What Prometheus sends as Accept.
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"

#: Values by name and labels.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str, read: Callable[[str], Any] = read_openmetrics) -> Samples:
    """Read an exposition, which must have no sample twice."""
    found: Samples = {}
    for family in read(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(found: Samples, metric: str, **labels: str) -> float | None:
    """Return the value of the sample with exactly these labels; None if there is none."""
    return found.get((metric, frozenset(labels.items())))
