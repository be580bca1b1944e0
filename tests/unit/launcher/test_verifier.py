"""When which subscription is verified by itself, and what the log says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from catalog.figures import Verification
from catalog.records import NodeRow, State, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher import verifier
from launcher.verifier import Verifier, tell
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.setting_tables import VerifySettings
from pubsub.sql.options import SubscriptionOptions
from tests.support.captured_logs import captured_logs
from tests.support.replica import PATIENCE

HOURS = [timedelta(hours=hours) for hours in range(100)]
INTERVAL = HOURS[24]
POINT = Lsn(1)


def subscription(oid: int, name: str, *, enabled: bool = True) -> Subscription:
    given = ("host=h", f"slot_{oid}", ("p",), SubscriptionOptions(), "t", "7", 1, "d", INVALID_LSN, "o", 1, False)
    return Subscription(oid, name, enabled, *given)


def relation(subid: int, relid: int, **changes: Any) -> SubscriptionRel:
    name = f"t{relid}"
    given = (subid, relid, "public", name, RelState.READY, Lsn(1), 1, None, name, None, None, None, None)
    return replace(SubscriptionRel(*given), **changes)


def verified(one: SubscriptionRel, ago: timedelta, outcome: Any = "equal", lsn: Lsn | None = POINT) -> Verification:
    at = datetime.now(UTC) - ago
    return Verification(one.subid, one.relid, one.copy_generation, at, at, lsn, outcome)


class Node:
    """Stands for the catalog, and for what verifies; what is verified is stored as `pubsub verify` stores it."""

    def __init__(
        self,
        subscriptions: Iterable[Subscription],
        relations: Iterable[SubscriptionRel],
        verifications: Iterable[Verification] = (),
    ) -> None:
        self.now = State(
            NodeRow("7", datetime.now(UTC)),
            (),
            tuple(subscriptions),
            tuple(relations),
            (),
            (),
            (),
            (),
            verifications=tuple(verifications),
        )
        self.asked: list[tuple[str, tuple[str, ...], bool]] = []
        self.fails = False
        self.turns = 0

    async def state(self) -> State:
        self.turns += 1
        return self.now

    async def verify(self, name: str, tables: Sequence[str], sample: bool) -> Mapping[str, Any]:
        self.asked.append((name, tuple(tables), sample))
        if self.fails:
            raise PubsubError("the verification was not done")
        oid = next(one.oid for one in self.now.subscriptions if one.name == name)
        named = {
            one.relid
            for one in self.now.relations
            if one.subid == oid and (not tables or f"public.{one.name}" in tables)
        }
        kept = [one for one in self.now.verifications if one.subid != oid or one.relid not in named]
        new = [verified(one, HOURS[0]) for one in self.now.relations if one.subid == oid and one.relid in named]
        self.now = replace(self.now, verifications=(*kept, *new))
        return report(**{f"t{relid}": "equal" for relid in named})

    @asynccontextmanager
    async def verifying(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[None]:
        """Let a verifier look often, until it has looked a few times more after the body."""
        monkeypatch.setattr(verifier, "_LOOK", 0.001)
        chosen = VerifySettings(interval=INTERVAL.total_seconds(), **settings)
        running = asyncio.create_task(Verifier(chosen, cast(Catalog, self), self.verify).run())
        try:
            yield
            last = self.turns + 3
            async with asyncio.timeout(PATIENCE):
                while self.turns < last:
                    assert not running.done()
                    await asyncio.sleep(0.001)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_what_is_due_is_verified_once_longest_ago_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [relation(oid, oid * 10) for oid in (1, 2, 3, 4)]
    node = Node(
        [subscription(1, "a"), subscription(2, "b"), subscription(3, "c"), subscription(4, "d", enabled=False)],
        tables,
        [verified(tables[0], HOURS[25]), verified(tables[1], HOURS[23]), verified(tables[2], HOURS[26])],
    )
    async with node.verifying(monkeypatch, sample=True):
        pass
    assert node.asked == [("c", (), True), ("a", (), True)]


async def test_a_table_that_was_verified_by_hand_puts_off_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [relation(1, relid) for relid in range(4)]
    due = [verified(one, HOURS[30]) for one in tables[1:3]]
    node = Node([subscription(1, "a")], tables, [verified(tables[0], HOURS[1]), *due])
    async with node.verifying(monkeypatch):
        pass
    assert node.asked == [("a", ("public.t3", "public.t1", "public.t2"), False)]


async def test_only_tables_with_rows_to_compare_make_a_verification_due(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [
        relation(1, 0),
        relation(1, 1, state=RelState.DATASYNC),
        relation(1, 2, stopped=True),
    ]
    node = Node([subscription(1, "a")], tables, [verified(tables[0], HOURS[1])])
    async with node.verifying(monkeypatch):
        pass
    assert node.asked == []


async def test_a_table_that_was_copied_since_has_not_been_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has one that was not ready then."""
    tables = [relation(1, 0), relation(1, 1), relation(1, 2)]
    before = [verified(one, HOURS[1]) for one in tables[:2]]
    tables[1] = replace(tables[1], copy_generation=2)
    node = Node([subscription(1, "a")], tables, [*before, verified(tables[2], HOURS[1], "not compared", None)])
    async with node.verifying(monkeypatch):
        pass
    assert node.asked == [("a", ("public.t1", "public.t2"), False)]


async def test_a_verification_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node([subscription(1, "a")], [relation(1, 0)])
    node.fails = True
    with captured_logs() as entries:
        async with node.verifying(monkeypatch):
            pass
    assert len(node.asked) == 1
    assert [one["event"] for one in entries] == ["subscription could not be verified"]


@pytest.mark.parametrize(("interval", "can"), [(0.0, True), (1.0, False)])
async def test_nothing_is_verified_without_an_interval_or_a_way_to_do_it(interval: float, can: bool) -> None:
    node = Node([subscription(1, "a")], [relation(1, 0)])
    without = Verifier(VerifySettings(interval=interval), cast(Catalog, node), node.verify if can else None)
    async with asyncio.timeout(PATIENCE):
        await without.run()
    assert node.asked == []


def report(**outcomes: str) -> Mapping[str, Any]:
    """Return the document of `pubsub verify --json`."""
    tables = {
        f"public.{name}": {"outcome": outcome.replace("_", " "), "reason": f"{outcome} for a reason", "hint": None}
        for name, outcome in outcomes.items()
    }
    return {"subscription": "s", "lsn": "0/10", "seconds": 1.5, "tables": tables}


def told(**outcomes: str) -> list[tuple[str, str, Any]]:
    with captured_logs() as entries:
        tell(report(**outcomes))
    return [(one["log_level"], one["event"], one.get("relation", one.get("tables"))) for one in entries]


def test_each_outcome_has_an_event_of_its_own() -> None:
    """Nothing is called equal that was not compared, and nothing different that could not be."""
    assert told(a="equal", b="equal") == [("info", "tables are equal", 2)]
    assert told(a="not compared") == [("warning", "tables were not compared", "public.a")]
    assert told(a="failed") == [("error", "verification of tables failed", "public.a")]
    assert told(a="equal", b="not compared", c="failed", d="different", e="different") == [
        ("error", "tables differ from the publisher's", "public.d, public.e"),
        ("error", "verification of tables failed", "public.c"),
        ("warning", "tables were not compared", "public.b"),
        ("info", "tables are equal", 1),
    ]


def test_only_some_of_many_tables_are_named() -> None:
    ((_, _, named),) = told(**{f"t{number}": "different" for number in range(7)})
    assert named == "public.t0, public.t1, public.t2, public.t3, public.t4 and 2 more"
