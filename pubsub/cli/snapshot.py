"""`pubsub snapshot`: print the versions of a subscription's tables that together show one LSN; pin them, and drop pins."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from pubsub.cli.output import Format, render
from pubsub.node.node import Node

if TYPE_CHECKING:
    from catalog.records import PinnedSnapshot
    from pubsub.cli.common import Common


async def show(common: Common, subscription: str, at: str | None, pin: str | None, *, as_json: bool) -> None:
    """Print the snapshot at the LSN `at` (None: the latest), and pin it under the name `pin`.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        found = await node.snapshot(subscription, at, pin=pin)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
        return
    print(f"Subscription {found.subscription} at LSN {found.lsn}" + (f', pinned as "{pin}"' if pin is not None else ""))
    rows = [(name, version, path) for name, (version, path) in sorted(found.tables.items())]
    print(render(("table", "version", "path"), rows, Format.TABLE), end="")


async def show_pinned(common: Common, *, as_json: bool) -> None:
    """Print the pinned snapshots with the versions of their tables, and whether each is kept.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        pinned = await node.pinned_snapshots()
    kept = await asyncio.to_thread(_kept, pinned)
    if as_json:
        print(json.dumps([_as_json(one, kept) for one in pinned], ensure_ascii=False))
        return
    rows = [
        (one.name, one.subscription, str(one.lsn), one.created, table.relation, table.version, table.path, kept[one.name, table.path])
        for one in pinned
        for table in one.tables
    ]  # fmt: skip
    columns = ("name", "subscription", "lsn", "created", "table", "version", "path", "kept")
    print(render(columns, rows, Format.TABLE), end="")


async def drop(common: Common, name: str) -> None:
    """Drop the pinned snapshot `name`.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        await node.drop_snapshot(name)
    print("DROP SNAPSHOT")


def _kept(pinned: tuple[PinnedSnapshot, ...]) -> dict[tuple[str, str], bool]:
    """Return by name and path whether the version is kept: not if the pin is not complete, or no longer holds."""
    if not pinned:
        return {}
    from pubsub.delta import pins

    return {
        (one.name, table.path): one.complete and pins.holds(table.path, one.name)
        for one in pinned
        for table in one.tables
    }


def _as_json(one: PinnedSnapshot, kept: dict[tuple[str, str], bool]) -> dict[str, object]:
    return {
        "name": one.name,
        "subscription": one.subscription,
        "lsn": str(one.lsn),
        "created": one.created.isoformat(),
        "tables": {
            table.relation: {"version": table.version, "path": table.path, "kept": kept[one.name, table.path]}
            for table in one.tables
        },
    }
