"""Which streams a pass can serve that has read the WAL already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from walsender.feed.spool import Spool
from walsender.historic.state import CatalogState, DatabaseFacts
from walsender.historic.upstream import Builtins, Upstream
from walsender.streaming.passes import Pass


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Pass]:
    """A pass that has begun at 100, and has read nothing."""
    server = Upstream(180000, 5, "UTF8", 1, 16 << 20, True, True)
    state = CatalogState(100, DatabaseFacts(server, Builtins({}, {}, frozenset())), [], {}, {}, [])
    made = Pass(state, Spool(tmp_path, 16 << 20), 1 << 20, lambda: tmp_path, lambda _subscriber, _warning: None)
    yield made
    made.close()


def test_a_pass_knows_nothing_of_what_was_sent_before_it_began(begun: Pass) -> None:
    """A stream from before its beginning was taken for one that had missed nothing, and lost what had been committed."""
    assert [begun.is_quiet_since(lsn) for lsn in (99, 100, 101)] == [False, True, True]


def test_a_pass_is_quiet_only_after_the_last_end_of_a_transaction(begun: Pass) -> None:
    begun.decoder.ended_at = 200
    assert [begun.is_quiet_since(lsn) for lsn in (99, 150, 200, 201)] == [False, False, False, True]
