"""`pubsub verify` as a process of the daemon's."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.store import Catalog
from pubsub.errors import PubsubError
from pubsub.node.node import make_home
from pubsub.node.verify import process
from pubsub.settings import Settings


async def test_what_the_process_says_is_raised(tmp_path: Path) -> None:
    """Names are arguments, whatever they look like."""
    make_home(tmp_path)
    async with await Catalog.open(Settings.load(tmp_path).catalog_location):
        pass
    with pytest.raises(PubsubError, match='subscription "-s" does not exist'):
        await process.run(tmp_path, "-s", ['public."--repair"', "public.t"], True)
