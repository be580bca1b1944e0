"""`pubsub catalog backup` and `restore`: the node's catalog in one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pubsub.node.node import make_home
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.cli.common import Common


async def back_up(common: Common, file: Path) -> None:
    """Write the backup.  Raises PubsubError: NoCatalog if there is no node."""
    from catalog import backup
    from catalog.store import Catalog

    settings = Settings.load(common.home)
    async with await Catalog.open(settings.catalog_location, settings.catalog_timeout, make=False) as catalog:
        made = await backup.back_up(catalog, file)
    print(f'"{file}": {made.subscriptions} subscriptions of node {made.node_id}, {made.bytes} bytes')


async def restore(common: Common, file: Path) -> None:
    """Restore the backup, in a node's directory that is made if need be.  Raises PubsubError."""
    from catalog import backup

    settings = Settings.load(common.home)
    make_home(common.home)
    made = await backup.restore(common.home, settings.catalog_location, settings.catalog_timeout, file)
    print(f"{made.subscriptions} subscriptions of node {made.node_id}, as of {made.taken}")
