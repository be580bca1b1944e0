"""Which partitions are told of as truncated by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

from catalog.records import SubscriptionRel
from catalog.states import RelState
from launcher.partition_files import PartitionFiles
from tests.support.captured_logs import captured_logs
from tests.unit.apply.test_publisher_identity import SUBSCRIPTION


def root(generation: int = 1, state: RelState = RelState.READY) -> SubscriptionRel:
    return SubscriptionRel(
        SUBSCRIPTION.oid, 1, "public", "M", state, None, generation, None, "/w/m", None, None, None, None
    )


#: Partitions by oid: their files, and whether nobody has gathered statistics since.
Leaves = dict[int, tuple[int, bool]]


def looks(*found: tuple[SubscriptionRel, Leaves]) -> list[list[str]]:
    """Return the partitions that each look warns of."""
    told = []

    async def go() -> None:
        watch = PartitionFiles()
        for relation, leaves in found:

            class Connection:
                async def query(self, *_: object, leaves: Leaves = leaves) -> list[tuple[str, ...]]:
                    return [
                        ("1", str(oid), str(file), "t" if bare else "f", f"public.m{oid}")
                        for oid, (file, bare) in leaves.items()
                    ]

            connection: Any = Connection()
            warned = await watch.look(connection, "s", [relation])
            told.append([one.message.split()[1] for one in warned])

    asyncio.run(go())
    return told


def test_a_partition_that_is_truncated_is_told_of_once() -> None:
    with captured_logs() as logs:
        told = looks(
            (root(), {11: (11, False), 12: (12, False)}),
            (root(), {11: (21, True), 12: (12, False)}),
            (root(), {11: (31, True), 12: (12, False)}),
            (root(), {11: (31, False), 12: (12, False)}),
            (root(2), {11: (31, False), 12: (12, False)}),
        )
    assert told == [[], ["public.m11"], ["public.m11"], ["public.m11"], []], "until the table is copied anew"
    (entry,) = logs
    assert entry["event"] == "partition was truncated or written anew"
    assert entry["partition"] == "public.m11"
    assert 'RESYNC TABLE public."M"' in entry["hint"]


def test_what_is_no_truncate_of_a_partition() -> None:
    """VACUUM FULL and CLUSTER count the rows; what is done to the root gives all of its partitions other files."""
    both = {11: (11, True), 12: (12, True)}
    assert looks((root(), both), (root(), {11: (21, False), 12: (12, True)})) == [[], []]
    assert looks((root(), both), (root(), {11: (21, True), 12: (22, True)})) == [[], []]
    more = {13: (13, True)}
    assert looks((root(), both), (root(), both | more)) == [[], []], "a new partition"
    assert looks((root(), both), (root(), {11: (21, True), 12: (22, True)} | more)) == [[], []], (
        "a TRUNCATE of the root beside it"
    )
    assert looks((root(), both), (root(state=RelState.INIT), {11: (21, True)})) == [[], []], "it is copied anyway"
