"""Options that are accepted and do nothing here, or nothing yet: each is said, none is passed over in silence."""

from __future__ import annotations

from typing import Final

from launcher.session import Session
from pubsub.sql.options import SubscriptionOptions

_WITHOUT_EFFECT: Final = {
    "synchronous_commit": "A Delta commit is durable before it is reported.",
    "run_as_owner": "A node has one user.",
    "password_required": "A node has one user.",
}


def tell(session: Session, options: SubscriptionOptions) -> None:
    """A NOTICE for each option of the statement that has no effect."""
    given = options.specified
    if "schema_changes" in given and options.schema_changes == "follow":
        _notice(session, "schema_changes = follow", "A changed table stops the subscription with an error.")
    for name, reason in _WITHOUT_EFFECT.items():
        if name in given:
            session.notice(f"{name} has no effect", detail=reason)


def _notice(session: Session, option: str, reason: str) -> None:
    session.notice(f"{option} is stored, and has no effect yet", detail=reason)
