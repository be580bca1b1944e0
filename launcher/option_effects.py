"""Notices about options that are accepted but have no effect here, so that none is ignored silently."""

from __future__ import annotations

from typing import Final

from launcher.client_session import Session
from pubsub.sql.options import SubscriptionOptions

_WITHOUT_EFFECT: Final = {
    "synchronous_commit": "A Delta commit is durable before it is reported.",
    "run_as_owner": "A node has one user.",
    "password_required": "A node has one user.",
}


def tell(session: Session, options: SubscriptionOptions) -> None:
    """Emit a NOTICE for each option of the statement that has no effect."""
    given = options.specified
    for name, reason in _WITHOUT_EFFECT.items():
        if name in given:
            session.notice(f"{name} has no effect", detail=reason)
    if options.max_retention_duration:
        session.notice("max_retention_duration is ineffective when retain_dead_tuples is disabled")
