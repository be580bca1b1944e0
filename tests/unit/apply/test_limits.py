"""A pipeline's limits: a subscription's options and the node's settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from apply.worker import limits
from pubsub.settings import Settings
from pubsub.sql.options import SubscriptionOptions


@pytest.mark.parametrize(("option", "timeout"), [(None, 20.0), (90.0, 90.0), (0.0, 0.0)])
def test_a_subscription_s_wal_receiver_timeout_stands_before_the_setting(option: float | None, timeout: float) -> None:
    subscription = SimpleNamespace(options=SubscriptionOptions(wal_receiver_timeout=option))
    settings = Settings(home=Path("/nonexistent"), wal_receiver_timeout="20s")  # type: ignore[arg-type]
    assert limits(subscription, settings).receiver_timeout == timeout  # type: ignore[arg-type]
