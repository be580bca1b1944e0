"""A slot that begins in the past, and what its clients do while the WAL is searched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from pubsub.errors import DuplicateObject, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from walsender.server import past_slots
from walsender.slots.slot import Slot, SlotStore


class _Connection:
    """A connection to the upstream server's database."""

    dbname = "postgres"

    @classmethod
    async def connect(cls, _conninfo: str, **_: object) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def query(self, _sql: str) -> list[tuple[str]]:
        return [("5",)]


async def test_a_slot_that_was_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server listens already: a client's slot of that name was overwritten, with what it had confirmed."""
    slots = SlotStore(tmp_path, 10)
    theirs = Slot("s", "pgoutput", "postgres", 700, 800, 5)

    async def restart_for(*_: object) -> int:
        slots.add(theirs)
        return 100

    monkeypatch.setattr(past_slots.past, "restart_for", restart_for)
    monkeypatch.setattr(past_slots, "Connection", _Connection)
    feed = SimpleNamespace(held=100)
    service: Any = SimpleNamespace(
        options=SimpleNamespace(upstream=""),
        slots=slots,
        feed=feed,
        decoders=SimpleNamespace(slots_changed=lambda: None),
    )
    with pytest.raises(DuplicateObject):
        await past_slots.make(service, "s", "test_decoding", Lsn(200))
    assert (slots.get("s"), feed.held) == (theirs, None)
    assert [slot.confirmed_flush_lsn for slot in SlotStore(tmp_path, 10)] == [800]


@pytest.mark.parametrize(
    ("oid", "name", "is_there"), [(5, "renamed", True), (6, "postgres", False), (0, "postgres", True)]
)
async def test_a_slot_that_is_there_is_known_by_its_database_s_oid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oid: int, name: str, is_there: bool
) -> None:
    """Once its database had another name, the command could not be given again."""
    slots = SlotStore(tmp_path, 10)
    slots.add(Slot("s", "pgoutput", name, 700, 800, oid))
    monkeypatch.setattr(past_slots, "Connection", _Connection)
    service: Any = SimpleNamespace(options=SimpleNamespace(upstream=""), slots=slots)
    if is_there:
        await past_slots.make(service, "s", "pgoutput", Lsn(200))
        return
    with pytest.raises(NotInPrerequisiteState, match="for another plugin or database"):
        await past_slots.make(service, "s", "pgoutput", Lsn(200))
