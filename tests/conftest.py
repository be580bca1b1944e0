"""Fixtures of all tests, and the number of examples that property tests try."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import settings

from pubsub.testing import binaries
from pubsub.testing.fixtures import (  # noqa: F401
    VERSIONS,
    Database,
    any_database,
    any_publisher,
    database,
    fresh,
    publisher,
    publisher15,
    publisher16,
    publisher17,
    publisher19,
    servers,
    spark,
)
from pubsub.testing.servers import EmbeddedPostgres
from tests.running.logs import Logs
from tests.running.processor_time import ProcessorTime
from tests.support import stores

# A slow example on a busy machine is not a failure.
settings.register_profile("pubsub", deadline=None)
settings.load_profile("pubsub")

# How many times the usual number of examples; a part of it in the base.
_FUZZ = float(os.environ.get("PUBSUB_FUZZ", "1"))


# Values of a test's parameters that name a server of a version other than the base's.
_OTHERS = frozenset(VERSIONS) - {"18"}


@pytest.fixture
def databases(publisher: EmbeddedPostgres) -> Iterator[list[Database]]:  # noqa: F811
    """Two empty databases of the publisher."""
    with ExitStack() as stack:
        yield [stack.enter_context(contextmanager(fresh)(publisher)) for _ in range(2)]


def pytest_configure(config: pytest.Config) -> None:
    stores.start(config)
    config.pluginmanager.register(Logs())
    config.pluginmanager.register(ProcessorTime())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on a version of PostgreSQL other than 18 as `full`, so that `make test` stays short.

    Skip those on a version that this machine cannot have; one that it could have and has not is an error of the test.
    Let each property test try $PUBSUB_FUZZ times as many examples, also where it sets their number.
    """
    for item in items:
        parameters = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        versions = {value for value in parameters if isinstance(value, str) and value in _OTHERS}
        if versions:
            item.add_marker(pytest.mark.full)
        for reason in filter(None, map(binaries.obstacle, sorted(versions))):
            item.add_marker(pytest.mark.skip(reason=reason))
    if _FUZZ == 1:
        return
    for item in items:
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            usual = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(
                usual, max_examples=max(1, round(usual.max_examples * _FUZZ)), deadline=None
            )
