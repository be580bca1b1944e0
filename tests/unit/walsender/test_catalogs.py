"""The catalogs with which decoding begins: which of those on disk serve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from walsender.feed.archive import Archive
from walsender.historic.state import CatalogState, CatalogStates, DatabaseFacts
from walsender.historic.upstream import Builtins, Upstream
from walsender.streaming.catalogs import Catalogs
from walsender.streaming.requests import Task


class _Saved(Catalogs):
    """Does not read any from the server.  The system's identifier is 1."""

    def __init__(self, spool: Path, states: Path, database: int = 5) -> None:
        more = {"segment_size": 1024, "system_identifier": 1, "work_mem": 1, "tip": 0, "redo": 0, "answer_timeout": 0}
        super().__init__(Task("", database, str(spool), str(states), "", **more))

    async def _read(self, redo: int) -> Any:
        return "read"


@pytest.mark.parametrize(
    ("lsn", "redo", "archive", "found"),
    [
        (1200, 1150, True, "read"),  # all that it needs is in the spool
        (1200, 900, True, 800),
        (1200, 900, False, "read"),  # raises there: that WAL is nowhere
        (1200, 1200, True, 800),  # it is not known from which checkpoint on they could be read
        (1700, 1150, True, 1600),
        (700, 600, True, "read"),
    ],
)
async def test_which_a_pass_begins_with(tmp_path: Path, lsn: int, redo: int, archive: bool, found: object) -> None:
    """There are some at 800 and 1600; the spool begins at 1024."""

    class States:
        positions = (800, 1600)

        def newest_before(self, lsn: int) -> int | None:
            return max((one for one in self.positions if one <= lsn), default=None)

        def load(self, position: int) -> Any:
            server = SimpleNamespace(system_identifier=1, database=5)
            return SimpleNamespace(position=position, facts=SimpleNamespace(server=server))

    (tmp_path / "0000000000000400").touch()
    if archive:
        Archive("/archive", None, 1024, 1, ((1, 1 << 62),)).save(tmp_path)
    catalogs = _Saved(tmp_path, tmp_path)
    catalogs._states = cast(Any, States())
    state: Any = await catalogs.before(lsn, redo)
    assert getattr(state, "position", state) == found


async def test_those_of_another_database_are_not_used(tmp_path: Path) -> None:
    """They may have been saved when two databases had swapped their names."""
    server = Upstream(180000, 6, "UTF8", 1, 1024, True, True)
    state = CatalogState(100, DatabaseFacts(server, Builtins({}, {}, frozenset())), [], {}, {}, [])
    states = CatalogStates(tmp_path)
    taken = states.take(state.tracker(lambda _: False), 100, state)
    assert taken is not None
    states.write(taken)
    for oid in (6, 5):
        found: Any = await _Saved(tmp_path, tmp_path, oid).before(200, 50)
        assert getattr(found, "position", found) == (100 if oid == 6 else "read")
    assert states.positions() == []
