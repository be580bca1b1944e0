"""`pubsub catalog`: the node's catalog in one file, and back; an older version's catalog brought to this one."""

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


async def upgrade(common: Common, file: Path | None, *, dry_run: bool) -> None:
    """Say what the catalog lacks, and, unless `dry_run`, add it, after a backup.  Raises PubsubError."""
    from catalog import upgrade as upgrading
    from catalog.from_rows import SCHEMA_VERSION

    settings = Settings.load(common.home)
    found = await upgrading.look(settings.catalog_location, settings.catalog_timeout)
    if not found.is_needed:
        print(f'catalog "{found.place}" has version {found.version}, as this program: nothing is to be done')
        return
    print(f'catalog "{found.place}" has version {found.version}, this program\'s is {SCHEMA_VERSION}')
    for one in found.lacks:
        print(f"    {one} {'would be' if dry_run else 'is'} added")
    if dry_run:
        return
    done = await upgrading.upgrade(common.home, settings.catalog_location, settings.catalog_timeout, file)
    if done.backup is not None:
        print(f'backup of version {done.version}: "{done.backup}"')
    print(f"the catalog has version {SCHEMA_VERSION}")


async def restore(common: Common, file: Path) -> None:
    """Restore the backup, in a node's directory that is made if need be.  Raises PubsubError."""
    from catalog import backup

    settings = Settings.load(common.home)
    make_home(common.home)
    made = await backup.restore(common.home, settings.catalog_location, settings.catalog_timeout, file)
    print(f"{made.subscriptions} subscriptions of node {made.node_id}, as of {made.taken}")
