"""What the log has of slots that are lost or soon will be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from launcher import slot_watch
from launcher.slot_watch import SlotWatch
from pubsub.publisher.slots import SlotInfo
from tests.support.captured_logs import captured_logs
from tests.unit.apply.test_publisher_identity import SLOT, SUBSCRIPTION

ROOMY = replace(SLOT, retained_bytes=1000, safe_wal_size=100_000)
TIGHT = replace(ROOMY, retained_bytes=90_000, safe_wal_size=10_000)
OF_A_COPY = replace(TIGHT, name="pg_16384_sync_4711_815")


class Connection:
    async def query(self, sql: str, parameters: list[str]) -> list[tuple[str]]:
        assert parameters == ["4711"]
        return [("public.large",)]


def looks(monkeypatch: pytest.MonkeyPatch, *found: tuple[SlotInfo | None, list[SlotInfo]]) -> list[list[str]]:
    """Return the messages of each look that finds the own slot and those of copies."""
    told = []

    async def go() -> None:
        connection: Any = Connection()
        watch = SlotWatch(SUBSCRIPTION)
        for own, copies in found:

            async def one(*_: object, own: SlotInfo | None = own) -> SlotInfo | None:
                return own

            async def others(*_: object, copies: list[SlotInfo] = copies) -> list[SlotInfo]:
                return copies

            monkeypatch.setattr(slot_watch.slots, "slot_info", one)
            monkeypatch.setattr(slot_watch.slots, "slot_infos", others)
            slot, warned = await watch.look(connection, "")
            assert slot == own
            told.append([one.message for one in warned])

    asyncio.run(go())
    return told


def test_the_log_has_a_warning_once_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nearer = replace(TIGHT, safe_wal_size=5000)
    with captured_logs() as logs:
        told = looks(monkeypatch, (ROOMY, []), (TIGHT, []), (nearer, []), (nearer, []), (ROOMY, []), (ROOMY, []))
    assert [len(one) for one in told] == [0, 1, 1, 1, 0, 0]
    assert "lost after 5000 bytes more" in told[2][0], "status has the figures of now"
    assert [(one["event"], one["slot"]) for one in logs] == [
        ("replication slot is lost, or soon will be", "s"),
        ("replication slot is in no danger any more", "s"),
    ]
    assert logs[0]["reason"] == told[2][0]


def test_a_slot_that_is_dropped_or_made_anew_at_the_moment_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with captured_logs() as logs:
        told = looks(monkeypatch, (ROOMY, []), (None, []), (ROOMY, []), (None, []), (None, []))
    assert [len(one) for one in told] == [0, 1, 0, 1, 1]
    assert [one["reason"] for one in logs] == ['replication slot "s" does not exist on the publisher']


def test_slots_of_copies_are_watched_with_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    with captured_logs() as logs:
        told = looks(monkeypatch, (ROOMY, [OF_A_COPY]), (ROOMY, [OF_A_COPY]), (ROOMY, []))
    assert "with which table public.large is copied" in told[0][0]
    assert [one["event"] for one in logs] == [
        "replication slot is lost, or soon will be",
        "replication slot is in no danger any more",
    ]
