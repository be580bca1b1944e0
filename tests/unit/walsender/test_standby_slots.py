"""How far the standbys of synchronized_standby_slots are, by what the upstream server says of its slots."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from walsender.server.standby_slots import StandbySlots

PHYSICAL = ["physical", False, True]


@pytest.mark.parametrize(
    ("setting", "slots", "reached"),
    [
        ("", {}, None),
        (" , ", {}, None),
        ("a", {"a": [*PHYSICAL, "0/50"]}, 0x50),
        ('A, "b"', {"a": [*PHYSICAL, "0/50"], "b": [*PHYSICAL, "0/40"], "c": [*PHYSICAL, "0/1"]}, 0x40),
        ("a", {"a": ["physical", False, False, "0/50"]}, 0x50),  # its standby is away: what it had it has
        ("a, b", {"a": [*PHYSICAL, "0/50"]}, 0),
        ("a", {"a": [*PHYSICAL, None]}, 0),
        ("a", {"a": ["physical", True, True, "0/50"]}, 0),
        ("a", {"a": ["logical", False, True, "0/50"]}, 0),
    ],
)
def test_what_all_of_them_have(setting: str, slots: dict[str, list[Any]], reached: int | None) -> None:
    told: list[int | None] = []

    async def look() -> None:
        feed: Any = SimpleNamespace(received=0x60)
        standbys = StandbySlots("", feed, lambda: True, lambda: told.append(standbys.reached))
        standbys._look(setting, slots)
        assert standbys.reached == reached
        assert told == ([] if reached == 0 else [reached])
        # A slot that is there no more does not take back what its standby had.
        standbys._look(setting, {})
        assert standbys.reached == reached
        # Other standbys are asked for: nothing is known of them.
        standbys._look("other", {})
        assert standbys.reached == 0

    asyncio.run(look())
