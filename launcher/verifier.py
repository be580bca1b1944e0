"""Verify each subscription by itself, as often as the settings say, one after the other (pubsub.node.verify).

A table is due `interval` after its last verification began, within the window; the tables of a subscription that are due
are verified together.  So one that was verified by hand puts off no other.  How one is verified comes from above,
since it uses the commands' side: the daemon runs `pubsub verify` in a process of its own, which takes the work from its
interpreter, and a pubsub.Node verifies in its own process.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog

from catalog.records import State, Subscription
from catalog.states import RelState
from catalog.store import Catalog
from launcher.failures import typed
from pubsub.errors import PubsubError
from pubsub.setting_tables import VerifySettings
from pubsub.sql.identifiers import quote_qualified

Verify = Callable[[str, Sequence[str], bool], Awaitable[Mapping[str, Any]]]
"""Verifies tables of a subscription (names as in SQL; none: all), by a sample or not; returns what `pubsub verify --json` prints."""

#: How often the time of the next verification is looked at, in seconds.
_LOOK: Final = 10.0
#: How long a subscription is left alone whose verification could not be done, in seconds, if the interval is longer.
_AFTER_FAILURE: Final = 600.0
#: The most tables that are named to a verification, since they are arguments of a process; the others are due the next time.
_AT_ONCE: Final = 1000
#: How many tables are named in the log.
_NAMED: Final = 5

logger = structlog.get_logger()


class Verifier:
    """One node's verifications; `run` lasts until it is cancelled."""

    def __init__(self, settings: VerifySettings, catalog: Catalog, verify: Verify | None) -> None:
        self._settings = settings
        self._catalog = catalog
        self._verify = verify
        self._tried: dict[int, float] = {}

    async def run(self) -> None:
        """Verify what is due.  A failure is logged."""
        if self._verify is None or not self._settings.interval:
            return
        while True:
            await asyncio.sleep(min(_LOOK, self._settings.interval))
            if self._settings.window.wait(datetime.now().astimezone()):
                continue
            try:
                due = self._due(await self._catalog.state())
            except PubsubError as error:
                logger.warning("verifications could not be looked for", reason=error.message)
                continue
            for subscription, tables in due:
                await self._run(subscription, tables, self._verify)

    def _due(self, state: State) -> list[tuple[Subscription, Sequence[str]]]:
        """Return what to verify now, longest ago first: subscriptions, and which of their tables (none: all)."""
        never = datetime.min.replace(tzinfo=UTC)
        began = state.last_compared
        ready: dict[int, list[tuple[datetime, str]]] = defaultdict(list)
        for one in state.relations:
            if one.state is RelState.READY and not one.stopped:
                key = (one.subid, one.relid, one.copy_generation)
                ready[one.subid].append((began.get(key, never), quote_qualified(one.schema, one.name)))
        before = datetime.now(UTC) - timedelta(seconds=self._settings.interval)
        again = time.monotonic() - min(_AFTER_FAILURE, self._settings.interval)
        found = []
        for subscription in state.subscriptions:
            tables = ready[subscription.oid]
            due = sorted(one for one in tables if one[0] <= before)
            if due and subscription.enabled and self._tried.get(subscription.oid, again) <= again:
                names = () if len(due) == len(tables) else tuple(name for _, name in due[:_AT_ONCE])
                found.append((due[0][0], subscription, names))
        return [(subscription, names) for _, subscription, names in sorted(found, key=lambda one: one[0])]

    async def _run(self, subscription: Subscription, tables: Sequence[str], verify: Verify) -> None:
        self._tried[subscription.oid] = time.monotonic()
        try:
            report = await verify(subscription.name, tables, self._settings.sample)
        except Exception as error:
            known = typed(error)
            logger.warning(
                "subscription could not be verified",
                subscription=subscription.name,
                reason=known.message,
                hint=known.hint,
            )
            return
        tell(report)


def tell(report: Mapping[str, Any]) -> None:
    """Log what a verification has found, an event for each outcome that there is."""
    subscription = report["subscription"]
    by_outcome: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, table in report["tables"].items():
        by_outcome[table["outcome"]][name] = table

    def fields(outcome: str) -> dict[str, Any]:
        tables = by_outcome[outcome]
        first = next(iter(tables.values()))
        return {
            "subscription": subscription,
            "lsn": report["lsn"],
            "tables": len(tables),
            "relation": _named(list(tables)),
            "reason": first["reason"],
            "hint": first["hint"],
        }

    if "different" in by_outcome:
        hint = f"pubsub verify {subscription} names the rows; --repair copies them anew."
        logger.error("tables differ from the publisher's", **(fields("different") | {"hint": hint}))
    if "failed" in by_outcome:
        logger.error("verification of tables failed", **fields("failed"))
    if "not compared" in by_outcome:
        logger.warning("tables were not compared", **fields("not compared"))
    if equal := by_outcome.get("equal"):
        logger.info(
            "tables are equal",
            subscription=subscription,
            lsn=report["lsn"],
            tables=len(equal),
            seconds=report["seconds"],
        )


def _named(relations: Sequence[str]) -> str:
    more = len(relations) - _NAMED
    return ", ".join(relations[:_NAMED]) + (f" and {more} more" if more > 0 else "")
