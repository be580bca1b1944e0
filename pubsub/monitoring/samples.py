"""Metric families from samples.  What is not known has no sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Labels = tuple[str, ...]
Sample = tuple[Labels, float | None]


def gauge(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """Return a family of values that rise and fall; `text` tells people what they are."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family


def counter(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    """Return a family of values that only rise."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family
