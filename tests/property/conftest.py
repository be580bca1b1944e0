"""Property tests have no deadline per example: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pubsub", deadline=None)
settings.load_profile("pubsub")
