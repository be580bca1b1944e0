"""Fixtures for all tests, and how many examples property tests try."""

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

# A slow example on a busy machine is no failure.
settings.register_profile("pubsub", deadline=None)
settings.load_profile("pubsub")

_FUZZ = int(os.environ.get("PUBSUB_FUZZ", "1"))


# Files go whole to one process: those that take minutes begin first, or all but one process wait for them at the end.
_LONGEST = (
    "test_090_demo.py",
    "test_020_delta_writer.py",
    "test_kill.py",
    "test_kill_copy.py",
    "test_070_walsender.py",
)


def _turn(item: pytest.Item) -> int:
    return _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first.  `make fuzz`: every property test tries $PUBSUB_FUZZ times as many examples as it names."""
    items.sort(key=_turn)
    if _FUZZ == 1:
        return
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            usual = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(
                usual, max_examples=usual.max_examples * _FUZZ, deadline=None
            )
