"""Whether all subscriptions follow, for /ready."""

from __future__ import annotations

from pubsub.node.status import NodeStatus, SubscriptionStatus

_FOLLOWED = frozenset("sr")
#: The most reasons of one subscription that are told.
_MOST = 10


def obstacles(status: NodeStatus, bound: float) -> dict[str, list[str]]:
    """Return why enabled subscriptions do not follow within `bound` seconds, by name; empty if all do.

    Disabled subscriptions are nobody's fault, and do not count.
    """
    found = {one.name: _of_one(one, bound) for one in status.subscriptions if one.enabled}
    return {name: reasons for name, reasons in found.items() if reasons}


def _of_one(one: SubscriptionStatus, bound: float) -> list[str]:
    reasons = []
    if one.error is not None:
        reasons.append("its last error has not been overcome")
    if one.lag_unknown_since is not None:
        reasons.append("the publisher does not answer")
    elif one.received_lsn is None:
        reasons.append("no apply worker streams")
    elif one.lag_seconds is not None and one.lag_seconds > bound:
        reasons.append(f"it lags {one.lag_seconds:.1f} s behind")
    for table in one.tables:
        if table.stopped:
            reasons.append(f"table {table.name} has stopped")
        elif table.state not in _FOLLOWED:
            reasons.append(f"table {table.name} is in state {table.state}")
    more = len(reasons) - _MOST
    return reasons if more <= 0 else [*reasons[:_MOST], f"{more} more"]
