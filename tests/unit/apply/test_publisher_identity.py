"""Which publishers are accepted: every rule of apply.publisher_identity, without a server; and messages about slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from apply import publisher_identity
from apply.publisher_identity import PublisherLost, SlotLost, Standing, check_position, check_system, explained
from catalog.records import Subscription
from launcher.slot_warnings import Room, about_slot, about_slot_of_a_copy, about_wait
from pubsub.errors import NotInPrerequisiteState, ProtocolViolation, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher import replication
from pubsub.publisher.replication import SystemIdentity
from pubsub.publisher.slots import SlotInfo, SlotWait
from pubsub.sql.options import SubscriptionOptions

SUBSCRIPTION = Subscription(
    oid=16384,
    name="s",
    enabled=True,
    conninfo="",
    slot_name="s",
    publications=("p",),
    options=SubscriptionOptions(),
    target="t",
    publisher_system_identifier="1",
    publisher_timeline=2,
    publisher_database="db",
    skip_lsn=Lsn(0),
    owner="pubsub",
    generation=1,
    dropping=False,
)
SLOT = SlotInfo(
    name="s", plugin="pgoutput", database="db", temporary=False, active=False,
    confirmed_flush_lsn=Lsn(100), wal_status="reserved", safe_wal_size=None, two_phase=False, failover=True,
    invalidation_reason=None, retained_bytes=1000,
)  # fmt: skip
HERE = SystemIdentity("1", 2, Lsn(200), "db")
STANDS = Standing(origin=Lsn(100), held=Lsn(110), copied=True)

#: A difference from an accepted publisher, and the error; None: it is accepted, too.
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("as it was", {}, None),
    ("before the first origin", {"standing": Standing(Lsn(0), Lsn(0), True)}, None),
    ("the same, and the slot is where a copy ends", {"standing": Standing(Lsn(0), Lsn(0), True, least=Lsn(100))}, None),
    (
        # What was changed between the copy and the slot was lost, without a word.
        "the same, and the slot is past a copy",
        {"slot": {"confirmed_flush_lsn": Lsn(101)}, "standing": Standing(Lsn(0), Lsn(0), True, least=Lsn(100))},
        "begins at 0/65, after 0/64",
    ),
    ("the slot is behind", {"slot": {"confirmed_flush_lsn": Lsn(50)}}, None),
    ("the slot is ahead", {"slot": {"confirmed_flush_lsn": Lsn(101)}}, "begins at 0/65, after 0/64"),
    (
        "the slot is ahead, and all is copied anew",
        {"slot": {"confirmed_flush_lsn": Lsn(150)}, "standing": Standing(Lsn(100), Lsn(100), False)},
        None,
    ),
    ("the WAL ends before", {"identity": {"xlogpos": Lsn(109)}}, "WAL ends at 0/6D, before 0/6E"),
    (
        "the WAL of a standby ends before",
        {"identity": {"xlogpos": Lsn(109)}, "standby": True},
        "WAL ends at 0/6D, before 0/6E",
    ),
    ("the WAL ended before when it was first asked", {"identity": {"xlogpos": Lsn(109)}, "again": Lsn(110)}, None),
    (
        "the WAL of another system ends before",
        {"identity": {"system_identifier": "9", "timeline": 1, "xlogpos": Lsn(109)}},
        "WAL ends at 0/6D, before 0/6E",
    ),
    ("the WAL ends there", {"identity": {"xlogpos": Lsn(110)}}, None),
    ("an older timeline", {"identity": {"timeline": 1}}, "on timeline 1, the subscription on 2"),
    ("a later timeline that left at what is held", {"identity": {"timeline": 3}, "left": 110}, None),
    (
        "a later timeline that left before",
        {"identity": {"timeline": 3}, "left": 109},
        "left timeline 2 at 0/6D, before 0/6E",
    ),
    (
        "a later timeline that left before, with a slot that was made anew past that",
        {
            "identity": {"timeline": 3},
            "left": 100,
            "standing": Standing(Lsn(150), Lsn(150), True),
            "slot": {"confirmed_flush_lsn": Lsn(120)},
        },
        "left timeline 2 at 0/64, before 0/96",
    ),
    (
        "the same, and the slot was made past everything",
        {
            "identity": {"timeline": 3},
            "left": 100,
            "standing": Standing(Lsn(150), Lsn(150), True),
            "slot": {"confirmed_flush_lsn": Lsn(190)},
        },
        "left timeline 2 at 0/64, before 0/96",
    ),
    (
        "a table is past where the later timeline left, the origin is not",
        {"identity": {"timeline": 3}, "left": 105, "slot": {"confirmed_flush_lsn": Lsn(90)}},
        "left timeline 2 at 0/69, before 0/6E",
    ),
    (
        "a prepared transaction is",
        {"identity": {"timeline": 3}, "left": 115, "standing": replace(STANDS, prepared=Lsn(120))},
        "left timeline 2 at 0/73, before 0/78",
    ),
    ("a prepared transaction is not past it", {"standing": replace(STANDS, prepared=Lsn(300))}, None),
    (
        "an older timeline whose WAL ends before, too",
        {"identity": {"timeline": 1, "xlogpos": Lsn(50)}},
        "on timeline 1, the subscription on 2",
    ),
    (
        "a later timeline that left before, and has not come as far",
        {"identity": {"timeline": 3, "xlogpos": Lsn(107)}, "left": 105},
        "left timeline 2 at 0/69, before 0/6E",
    ),
    (
        "two switches, the first of which left before",
        {"identity": {"timeline": 4}, "left": 105, "later": [(3, 180)]},
        "left timeline 2 at 0/69, before 0/6E",
    ),
    ("two switches, both past it", {"identity": {"timeline": 4}, "left": 120, "later": [(3, 180)]}, None),
    (
        "a later timeline that left past it, and a slot that was made anew",
        {"identity": {"timeline": 3}, "left": 120, "slot": {"confirmed_flush_lsn": Lsn(130)}},
        "begins at 0/82, after 0/64",
    ),
    (
        "another server's timeline of the same number",
        {"start": 100, "history": [(1, 80)]},
        "timeline 2 began at 0/50, the one that the subscription follows at 0/64, before 0/6E",
    ),
    (
        "the same, and it was left for a later one",
        {"start": 70, "history": [(1, 105), (2, 180)], "identity": {"timeline": 3}},
        "timeline 2 began at 0/69, the one that the subscription follows at 0/46, before 0/6E",
    ),
    ("the same, and nothing of either was received", {"start": 115, "history": [(1, 110)]}, None),
    ("the same timeline", {"start": 40, "history": [(1, 40)]}, None),
    ("a timeline of another history", {"identity": {"timeline": 4}, "left": None}, "is not in the history"),
    ("a lost slot is the server's to refuse", {"slot": {"wal_status": "lost", "confirmed_flush_lsn": Lsn(190)}}, None),
    (
        "another system, by command, its slot carried over",
        {"identity": {"system_identifier": "9", "timeline": 1}, "slot": {"confirmed_flush_lsn": Lsn(120)}},
        None,
    ),
    (
        "another system, by command, with a slot of its own",
        {"identity": {"system_identifier": "9", "timeline": 1}, "slot": {"confirmed_flush_lsn": Lsn(20)}},
        "of the new system stands at 0/14",
    ),
    (
        # A worker that ended before it had applied anything of the new system found its slot past the tables, and stopped.
        "an upgraded system that has been accepted, and nothing of it is applied",
        {"slot": {"confirmed_flush_lsn": Lsn(150)}, "standing": replace(STANDS, continues_at=Lsn(150))},
        None,
    ),
    (
        "the same, before the first origin",
        {"slot": {"confirmed_flush_lsn": Lsn(150)}, "standing": Standing(Lsn(0), Lsn(0), True, continues_at=Lsn(150))},
        None,
    ),
    (
        "the same, and the slot was advanced since",
        {"slot": {"confirmed_flush_lsn": Lsn(151)}, "standing": replace(STANDS, continues_at=Lsn(150))},
        "begins at 0/97, after 0/96",
    ),
    (
        "an upgraded system of which something is applied, and the slot was advanced",
        {"slot": {"confirmed_flush_lsn": Lsn(101)}, "standing": replace(STANDS, continues_at=Lsn(60))},
        "begins at 0/65, after 0/64",
    ),
]


@pytest.mark.parametrize(("changes", "error"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_a_position_is_compared_with_the_timelines_and_the_slot(
    changes: dict[str, Any], error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = changes.get("left")

    async def history(connection: object, timeline: int) -> TimelineHistory:
        if "history" in changes:
            return TimelineHistory((*changes["history"], (timeline, 1 << 64)))
        entries = [(1, 40), (2, left), *changes.get("later", [])] if left is not None else [(1, 40), (3, 60)]
        return TimelineHistory((*entries, (timeline, 1 << 64)))

    monkeypatch.setattr(replication, "timeline_history", history)
    identity = replace(HERE, **changes.get("identity", {}))
    slot = replace(SLOT, **changes.get("slot", {}))
    start = None if "start" not in changes else Lsn(changes["start"])
    subscription = replace(SUBSCRIPTION, options=SubscriptionOptions(rebound=True), publisher_timeline_start=start)
    again = replace(identity, xlogpos=changes.get("again", identity.xlogpos))

    async def identify(connection: object) -> SystemIdentity:
        return again

    monkeypatch.setattr(replication, "identify_system", identify)
    standby = changes.get("standby", False)
    standing = changes.get("standing", STANDS)
    checked = check_position(cast(Any, None), subscription, identity, slot, standing, standby=standby)
    if error is None:
        await checked
    else:
        with pytest.raises((NotInPrerequisiteState, SlotLost, ProtocolViolation), match=error) as caught:
            await checked
        assert caught.value.hint
        lost = "WAL ends" in error and not standby and identity.system_identifier == "1"
        assert isinstance(caught.value, PublisherLost) is lost


async def test_a_publisher_that_was_found_lost_stays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def identify(connection: object) -> SystemIdentity:
        return HERE

    monkeypatch.setattr(replication, "identify_system", identify)
    with pytest.raises(PublisherLost, match="to lack WAL before 0/6E") as caught:
        await check_system(cast(Any, None), replace(SUBSCRIPTION, publisher_lost_at=Lsn(110)))
    assert "RESYNC TABLE" in (caught.value.hint or "")
    assert caught.value.lsn == 110


@pytest.mark.parametrize("rebound", [False, True])
async def test_another_system_needs_a_command(rebound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def identify(connection: object) -> SystemIdentity:
        return replace(HERE, system_identifier="9")

    monkeypatch.setattr(replication, "identify_system", identify)
    subscription = replace(SUBSCRIPTION, options=SubscriptionOptions(rebound=rebound))
    if rebound:
        assert (await check_system(cast(Any, None), subscription)).system_identifier == "9"
    else:
        with pytest.raises(NotInPrerequisiteState, match="another database system"):
            await check_system(cast(Any, None), subscription)


async def test_what_to_do_about_a_stream_that_does_not_start() -> None:
    lost = replace(SLOT, wal_status="lost", invalidation_reason="idle_timeout")
    told = await explained(cast(Any, None), PublisherError("can no longer access", sqlstate="55000"), lost)
    assert "idle_timeout" in (told.detail or "")
    assert told.hint == publisher_identity.RESYNC_HINT
    told = await explained(cast(Any, None), PublisherError("no slot", sqlstate="42704"), None)
    assert told.hint == publisher_identity.RESYNC_HINT
    assert isinstance(told, SlotLost)
    told = await explained(cast(Any, None), PublisherError("no slot", sqlstate="42704"), None, standby=True)
    assert not isinstance(told, SlotLost), "the primary may have it: nothing is copied anew"
    assert "primary" in (told.hint or "")
    told = await explained(cast(Any, None), PublisherError('requires "wal_level" >= "logical"', sqlstate="55000"), None)
    assert "wal_level = logical" in (told.hint or "")


@pytest.mark.parametrize(
    ("slot", "part"),
    [
        (SLOT, None),
        (replace(SLOT, safe_wal_size=10_000), None),
        (replace(SLOT, safe_wal_size=200), "lost after 200 bytes more"),
        (replace(SLOT, safe_wal_size=-1, wal_status="unreserved"), "lost at the next checkpoint"),
        (replace(SLOT, wal_status="lost"), "invalidated"),
        (None, "does not exist"),
    ],
)
def test_a_slot_is_warned_of_in_time(slot: SlotInfo | None, part: str | None) -> None:
    warned = about_slot("s", slot, None)
    if part is None:
        assert warned is None
    else:
        assert warned is not None
        assert part in warned.message
        assert warned.hint


def test_the_time_until_a_slot_is_lost_is_told() -> None:
    room = Room()
    slot = replace(SLOT, retained_bytes=40_000, safe_wal_size=60_000)
    for second in range(0, 61, 2):
        room.see(replace(slot, safe_wal_size=60_600 - 10 * second), float(second))
        assert (room.seconds_left() is None) == (second < 60)
    assert room.seconds_left() == 6000.0
    assert about_slot("s", slot, None, room.seconds_left()) is None, "more than an hour"
    told = about_slot("s", slot, None, 2400.0)
    assert told is not None
    assert "is lost after 60000 bytes more, in about 40 minutes at the rate of the last minutes" in told.message
    assert about_slot("s", replace(slot, retained_bytes=1000), None, 2400.0) is None, "hardly anything is retained"
    room.see(replace(slot, safe_wal_size=90_000), 70.0)
    assert room.seconds_left() is None, "it caught up"
    room.see(None, 80.0)
    room.see(slot, 90.0)
    assert room.seconds_left() is None, "another slot"


def test_the_slot_of_a_copy_is_warned_of_as_the_subscription_s_own() -> None:
    slot = replace(SLOT, name="pg_1_sync_2_3", retained_bytes=40_000, safe_wal_size=60_000)
    assert about_slot_of_a_copy(slot, "public.t") is None
    told = about_slot_of_a_copy(slot, "public.t", 2400.0)
    assert told is not None
    assert told.message == (
        'replication slot "pg_1_sync_2_3", with which table public.t is copied, retains 40000 bytes of WAL and is lost after '
        "60000 bytes more, in about 40 minutes at the rate of the last minutes"
    )
    assert "the copy begins anew" in (told.hint or "")
    lost = about_slot_of_a_copy(replace(slot, wal_status="lost"), "public.t")
    assert lost is not None
    assert "public.t is copied anew" in (lost.hint or "")


def test_the_transaction_that_delays_a_slot_is_named() -> None:
    wait = SlotWait("s", 745, 12, "app", "nightly", "idle in transaction", 33.3, None)
    told = about_wait(wait)
    assert told.detail == (
        'It waits for transaction 745 of process 12 of "nightly", role "app", open for 33 s, idle in transaction.'
    )
    assert "ROLLBACK PREPARED" in (about_wait(replace(wait, pid=None, gid="g")).hint or "")
    assert "pg_log_standby_snapshot" in (about_wait(replace(wait, xid=None)).hint or "")
    # The parts that a role may not see are left out.
    assert (
        about_wait(SlotWait("s", 745, 12, None, None, None, None, None)).detail
        == "It waits for transaction 745 of process 12."
    )
