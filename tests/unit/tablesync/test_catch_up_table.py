"""CatchUpTable: a table that is renamed while it is copied, and one that takes its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from apply.batch import Batch
from apply.handover import Handover
from apply.schema_changes.follow import Columns
from catalog.records import NewRelation
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import Lsn
from tablesync.catch_up_table import CatchUpTable
from tests.support.apply_tables import A, B, Meanwhile, opened, until_committed
from tests.support.frames import relation
from tests.support.memory import target


def follower(now: dict[int, tuple[str, str]]) -> Meanwhile:
    """Ask a publisher whose tables have these names."""
    found = Meanwhile(until_committed, at="never")
    found.now = now
    return found


async def rows_of(path: Path, following: Meanwhile | None, *batches: Mapping[Any, str]) -> list[set[int]]:
    """Return for each batch the oids of the relations whose rows table a gets; `batches` have relations' names by oid."""
    found = []
    async with opened(path) as bench:
        await bench.catalog.add_relations(bench.subscription.oid, [NewRelation(B.oid, "public", "b", "b")])
        one, _ = await bench.catalog.relations(bench.subscription.oid)
        columns = Columns(A.oid, "app", target("a", relation="public.a"), None)
        follows: Any = following
        none: Any = None
        table = CatchUpTable(
            "o", columns, Lsn(1), BinaryTypes(), follows, one, Lsn(1), bench.catalog, None, none, Handover()
        )
        for names in batches:
            batch = Batch({oid: relation(oid, name) for oid, name in names.items()})
            (destinations,) = await table.adapt_tables(batch, until_committed)
            last = {oid: messages[-1][1] for oid, messages in batch.relations.items()}
            found.append({oid for oid, message in last.items() if (message.namespace, message.name) in destinations})
    return found


async def test_a_table_that_takes_the_name_of_one_that_is_copied(tmp_path: Path) -> None:
    """Its rows came into the copied table, if that was renamed; it is asked once which of both happened."""
    renamed = follower({A.oid: ("public", "old")})
    batches = ({A.oid: "a"}, {A.oid: "a", B.oid: "a"}, {A.oid: "old", B.oid: "a"}, {B.oid: "a"})
    assert await rows_of(tmp_path, renamed, *batches) == [{A.oid}, {A.oid}, {A.oid}, set()]
    assert renamed.asked_for_names == [[A.oid]]


async def test_a_table_that_is_made_anew_while_it_is_copied(tmp_path: Path) -> None:
    """By name it is the same, as in PostgreSQL."""
    dropped = follower({})
    batches = ({A.oid: "a", 77: "a"}, {77: "a"}, {77: "other"})
    assert await rows_of(tmp_path, dropped, *batches) == [{A.oid, 77}, {77}, set()]
    assert dropped.asked_for_names == [[A.oid]]


async def test_a_rename_that_is_not_followed(tmp_path: Path) -> None:
    """Under schema_changes = refuse the rows of the table that was renamed were lost without a word."""
    with pytest.raises(NotInPrerequisiteState, match=r'relation "public\.new" does not exist') as refused:
        await rows_of(tmp_path, None, {A.oid: "new"})
    assert refused.value.relid == A.oid


async def test_names_that_tables_exchange_are_not_followed(tmp_path: Path) -> None:
    """As in PostgreSQL, rows then go where the name says."""
    assert await rows_of(tmp_path, None, {A.oid: "b", B.oid: "a"}) == [{B.oid}]
