"""pubsub.node.snapshot: the LSNs that each version shows."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.delta.history import commits, readable_versions
from pubsub.delta.table import application_id
from pubsub.errors import DataCorrupted, UndefinedTable
from pubsub.node import snapshot
from pubsub.node.snapshot import Held, Shown, together
from pubsub.protocol.lsn import Lsn

ORDERS = [
    (1, Held(Lsn(0x100), Lsn(0x100))),
    (2, None),
    (3, Held(Lsn(0x150), Lsn(0x200))),
    (4, Held(Lsn(0x500), Lsn(0x600))),
]
ITEMS = [(7, Held(Lsn(0x180), Lsn(0x300))), (8, Held(Lsn(0x400), Lsn(0x400)))]


Log = Sequence[tuple[int, Held | None]]


def shown_by(log: Log, origin: Lsn) -> list[Shown]:
    """Oldest first, as this file writes logs."""
    return list(snapshot.shown_by(reversed(log), origin))[::-1]


def test_a_version_shows_from_its_last_to_before_the_next_first() -> None:
    assert shown_by(ORDERS, Lsn(0x700)) == [
        Shown(2, Lsn(0x100), Lsn(0x14F)),
        Shown(3, Lsn(0x200), Lsn(0x4FF)),
        Shown(4, Lsn(0x600), Lsn(0x700)),
    ]


def test_a_commit_past_the_origin_shows_nothing_yet() -> None:
    assert shown_by(ORDERS, Lsn(0x550))[-1] == Shown(3, Lsn(0x200), Lsn(0x4FF))


def test_a_version_before_any_data_shows_nothing() -> None:
    assert shown_by([(0, None), (1, Held(Lsn(5), Lsn(6)))], Lsn(9)) == [Shown(1, Lsn(6), Lsn(9))]


def test_an_altered_table_is_shown_from_the_lsn_of_its_change() -> None:
    # The batch began before its last transaction, which altered the table: up to there only the old version shows
    # anything.
    altered = (5, Held(Lsn(0x300), Lsn(0x300)))
    before, after = (4, Held(Lsn(0x100), Lsn(0x200))), (6, Held(Lsn(0x280), Lsn(0x300)))
    assert shown_by([before, altered, after], Lsn(0x400)) == [
        Shown(4, Lsn(0x200), Lsn(0x27F)),
        Shown(6, Lsn(0x300), Lsn(0x400)),
    ]
    assert shown_by([before, altered], Lsn(0x400)) == [
        Shown(4, Lsn(0x200), Lsn(0x2FF)),
        Shown(5, Lsn(0x300), Lsn(0x400)),
    ]


def test_what_lies_between_two_copies_is_shown_by_nothing() -> None:
    # What was changed between 0/200 and 0/500 was never received, perhaps: then the slot was lost, and RESYNC TABLE made
    # another.  A snapshot of 0/300 had the earlier copy's rows.
    first, second = (1, Held(Lsn(0x100), Lsn(0x100), True)), (4, Held(Lsn(0x500), Lsn(0x500), True))
    assert shown_by([(0, None), first, (2, Held(Lsn(0x180), Lsn(0x200))), (3, None), second], Lsn(0x600)) == [
        Shown(1, Lsn(0x100), Lsn(0x17F)),
        Shown(3, Lsn(0x200), Lsn(0x200)),
        Shown(4, Lsn(0x500), Lsn(0x600)),
    ]


def test_an_lsn_that_every_table_shows_is_kept() -> None:
    lsn, chosen = _together(0x350)
    assert lsn == 0x350
    assert chosen == {1: 3, 2: 7}


def test_an_lsn_is_rounded_down_until_every_table_shows_it() -> None:
    lsn, chosen = _together(0x520)
    assert lsn == 0x4FF
    assert chosen == {1: 3, 2: 8}


def test_rounding_one_table_may_round_another() -> None:
    # The second can show 0x3FF; the first cannot show 0x380 to 0x3FF, so both are rounded below that.
    first = [Shown(1, Lsn(0x300), Lsn(0x37F)), Shown(2, Lsn(0x450), Lsn(0x500))]
    second = [Shown(5, Lsn(0x100), Lsn(0x3FF)), Shown(6, Lsn(0x480), Lsn(0x500))]
    lsn, chosen = together({1: first[::-1], 2: second[::-1]}, Lsn(0x460))
    assert chosen is not None
    assert (lsn, chosen[1].version, chosen[2].version) == (0x37F, 1, 5)


def test_no_common_lsn_is_an_error() -> None:
    _, chosen = together({1: [Shown(1, Lsn(0x100), Lsn(0x1FF))], 2: [Shown(1, Lsn(0x200), Lsn(0x300))]}, Lsn(0x300))
    assert chosen is None


def _together(at: int) -> tuple[Lsn, dict[int, int]]:
    shown = {1: shown_by(ORDERS, Lsn(0x700))[::-1], 2: shown_by(ITEMS, Lsn(0x700))[::-1]}
    lsn, chosen = together(shown, Lsn(at))
    assert chosen is not None
    return lsn, {relid: one.version for relid, one in chosen.items()}


COLUMN = {"name": "n", "type": "long", "nullable": True, "metadata": {}}


class HandWrittenLog:
    """A table without rows, whose commits are written by hand; each says its number in its range."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "_delta_log"
        self.log.mkdir(parents=True)

    def commit(
        self,
        version: int,
        *actions: dict[str, Any],
        first: int | None = None,
        last: int | None = None,
        source: str | None = None,
    ) -> None:
        given = version if first is None else first
        metadata = {"first": str(Lsn(given)), "last": str(Lsn(last or given))} if given else None
        if metadata is not None and source is not None:
            metadata["source"] = source
        info = {"timestamp": 0, "operation": "WRITE"} | ({"userMetadata": json.dumps(metadata)} if metadata else {})
        lines = [json.dumps(action) for action in (*actions, {"commitInfo": info})]
        aside = self.log / f".{version}.tmp"
        aside.write_text("\n".join(lines))
        aside.rename(self.log / f"{version:020d}.json")

    def make(self, *, first: int | None = None) -> None:
        self.commit(
            0,
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {
                "metaData": {
                    "id": "t",
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": json.dumps({"type": "struct", "fields": [COLUMN]}),
                    "partitionColumns": [],
                    "configuration": {},
                }
            },
            first=first,
        )

    def relation(self, generation: int = 1, joined: int = 0) -> SubscriptionRel:
        return SubscriptionRel(
            subid=1, relid=2, schema="public", name="t", state=RelState.READY, lsn=Lsn(joined),
            copy_generation=generation, sync_slot=None, path=str(self.path), error=None, error_hint=None,
            definition=None, estimated_rows=None,
        )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> HandWrittenLog:
    return HandWrittenLog(tmp_path / "t")


def test_versions_are_the_numbers_of_the_files_while_commits_are_made(log: HandWrittenLog) -> None:
    """deltalake's history() counts from the version loaded before it lists: a commit in between moved each number by one."""
    log.make()
    writing = threading.Thread(target=lambda: [log.commit(version) for version in range(1, 1500)])
    writing.start()
    seen = [0]
    while writing.is_alive():
        found = list(itertools.islice(snapshot.commits("n", log.relation()), 20))
        assert all(held is None or held == Held(Lsn(version), Lsn(version)) for version, held in found), found
        assert found[0][0] >= seen[-1]
        seen.append(found[0][0])
    assert len(set(seen)) > 5, "nothing was committed meanwhile"


def names(versions: Iterable[int], *checkpoints: str) -> list[str]:
    return [f"{version:020d}.json" for version in versions] + list(checkpoints)


CHECKPOINT = "{:020d}.checkpoint.parquet"
PART = "{:020d}.checkpoint.{:010d}.{:010d}.parquet"
OF_V2 = "{:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"


@pytest.mark.parametrize(
    ("files", "readable"),
    [
        (names(range(3)), (0, 2)),
        (names(range(3), CHECKPOINT.format(1)), (0, 2)),
        # Cleaned up: what a checkpoint and the commits since give.
        (names(range(21, 26), CHECKPOINT.format(20)), (21, 25)),
        (names(range(20, 26), CHECKPOINT.format(20)), (20, 25)),
        (names(range(15, 46), CHECKPOINT.format(20), CHECKPOINT.format(40)), (20, 45)),
        (names(range(21, 26), PART.format(20, 1, 2), PART.format(20, 2, 2)), (21, 25)),
        (names(range(21, 26), OF_V2.format(20)), (21, 25)),
        ([*names([0, 1, 2, 20, 21]), CHECKPOINT.format(20)], (20, 21)),
        (names([0, 1, 3]), None),
        (names(range(21, 26), PART.format(20, 1, 2)), None),
        (names([], CHECKPOINT.format(20)), None),
    ],
)
def test_which_versions_can_be_read(files: list[str], readable: tuple[int, int] | None) -> None:
    assert (
        readable_versions([*files, "_last_checkpoint", ".tmp", "00000000000000000000.crc"], lambda _: False) == readable
    )


def test_a_listing_that_lacks_a_commit(log: HandWrittenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made while the directory was listed, and so was the one after it."""
    log.make()
    log.commit(1)
    monkeypatch.setattr("os.listdir", lambda _: names([0, 2]))
    found = commits(str(log.path))
    assert (found.oldest, found.newest) == (0, 2)


def test_a_log_that_lacks_a_commit_is_an_error(log: HandWrittenLog) -> None:
    log.make()
    log.commit(2)
    with pytest.raises(DataCorrupted, match="commits are missing"):
        commits(str(log.path))
    with pytest.raises(UndefinedTable):
        commits(str(log.path / "nowhere"))


def test_a_log_elsewhere_is_listed_too(log: HandWrittenLog) -> None:
    """As in an object store: by deltalake's own access to it."""
    from pubsub.delta import history

    log.make()
    log.commit(1)
    listed, exists, read = history._elsewhere(f"file://{log.path}")
    assert readable_versions(listed(), exists) == (0, 1)
    assert exists(f"{1:020d}.json")
    assert not exists(f"{2:020d}.json")
    assert b"commitInfo" in read(f"{1:020d}.json")
    with pytest.raises(FileNotFoundError):
        read(f"{2:020d}.json")


def test_a_cleaned_log_ends_where_it_was_cleaned(log: HandWrittenLog) -> None:
    log.make()
    log.commit(1)
    log.commit(2)
    found = commits(str(log.path))
    (log.log / f"{1:020d}.json").unlink()
    assert [version for version, _ in found.newest_first()] == [2]


@pytest.mark.parametrize("applied", [False, True])
def test_a_cleaned_table_that_joined_without_a_copy(log: HandWrittenLog, applied: bool) -> None:
    """Its oldest commit is how it joined only if nothing was applied before it."""
    log.make(first=0)
    app_id = application_id("n", 1, 2, 0)
    log.commit(1, *([{"txn": {"appId": app_id, "version": 0x150}}] if applied else []), first=0x150 if applied else 0)
    log.commit(2, first=0)
    DeltaTable(log.path).create_checkpoint()
    for version in (0, 1):
        (log.log / f"{version:020d}.json").unlink()
    log.commit(3, first=0x200)
    found = list(snapshot.commits("n", log.relation(generation=0, joined=0x100)))
    joined = None if applied else Held(Lsn(0x100), Lsn(0x100))
    assert found == [(3, Held(Lsn(0x200), Lsn(0x200))), (2, joined)]


def test_the_commits_of_other_sources_have_other_publishers_lsns(log: HandWrittenLog) -> None:
    """They show what the version before them does; also where the log has no commit of the source any more."""
    app_id = application_id("n", 1, 2, 1)
    source = replace(log.relation(), definition=json.dumps({"source": ["_pubsub_source", "one"]}))

    def txn(app: str, version: int) -> dict[str, Any]:
        return {"txn": {"appId": app, "version": version}}

    def held() -> dict[int, Held | None]:
        return dict(snapshot.commits("n", source))

    log.make()
    log.commit(1, txn(app_id, 0x100), first=0x100, source="one")
    log.commit(2, txn(application_id("n", 3, 2, 1), 0x900), first=0x900, source="two")
    log.commit(3, first=0x50)
    assert held() == {0: None, 1: Held(Lsn(0x100), Lsn(0x100)), 2: None, 3: None}
    assert dict(snapshot.commits("n", log.relation()))[2] is None, "nor is it one of a table without sources"
    DeltaTable(str(log.path)).create_checkpoint()
    for version in range(3):
        (log.log / f"{version:020d}.json").unlink()
    log.commit(4, txn(app_id, 0x200), first=0x150, last=0x200, source="one")
    assert held() == {3: Held(Lsn(0x100), Lsn(0x100)), 4: Held(Lsn(0x150), Lsn(0x200))}
    followed = replace(source, lsn=Lsn(0x140))
    assert dict(snapshot.commits("n", followed))[3] == Held(Lsn(0x140), Lsn(0x140))
    assert dict(snapshot.commits("n", replace(source, copy_generation=2)))[3] is None
