"""Fixtures of all tests, and the number of examples that property tests try."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from pubsub.testing.fixtures import (  # noqa: F401
    any_database,
    any_publisher,
    database,
    publisher,
    publisher15,
    publisher16,
    publisher17,
    servers,
    spark,
)

# A slow example on a busy machine is not a failure.
settings.register_profile("pubsub", deadline=None)
settings.load_profile("pubsub")

_FUZZ = int(os.environ.get("PUBSUB_FUZZ", "1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each property test try $PUBSUB_FUZZ times as many examples, also where it sets their number (`make fuzz`)."""
    if _FUZZ == 1:
        return
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            usual = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(
                usual, max_examples=usual.max_examples * _FUZZ, deadline=None
            )
