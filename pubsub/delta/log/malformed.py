"""Logs that are not as Delta's protocol has them, by whomever they were written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pubsub.errors import DataCorrupted


@contextmanager
def refused(table: object) -> Iterator[None]:
    """Turn what Python raises for fields that lack, are of another type, or nested too deep, into DataCorrupted."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DataCorrupted(
            f'the log of the Delta table "{table}" is malformed: {type(error).__name__}: {error}',
            hint="Find out who wrote its last commits.",
        ) from error
