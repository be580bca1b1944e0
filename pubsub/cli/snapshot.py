"""`pubsub snapshot`: prints the versions of a subscription's tables that together show one LSN."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pubsub.cli.output import Format, render
from pubsub.node import Node

if TYPE_CHECKING:
    from pubsub.cli.common import Common


async def show(common: Common, subscription: str, at: str | None, *, as_json: bool) -> None:
    """Print the snapshot at the LSN `at` (None: the latest).  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        found = await node.snapshot(subscription, at)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
        return
    print(f"Subscription {found.subscription} at LSN {found.lsn}")
    rows = [(name, version, path) for name, (version, path) in sorted(found.tables.items())]
    print(render(("table", "version", "path"), rows, Format.TABLE), end="")
