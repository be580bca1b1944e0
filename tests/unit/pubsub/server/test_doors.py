"""Which backend serves which database."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pubsub.backend.listener import Client
from pubsub.errors import PubsubError
from pubsub.server.doors import Doors
from pubsub.settings import Settings


def client(database: str) -> Client:
    return Client(cast(Any, None), cast(Any, None), "", -1, cast(Any, None), parameters={"database": database})


def test_a_database_named_as_the_node_is_the_upstream_server_s_where_there_is_no_node(tmp_path: Path) -> None:
    node: Any = object()
    publisher: Any = object()
    for ours, theirs, database, expected in (
        (node, publisher, "pubsub", node),
        (node, publisher, "shop", publisher),
        (None, publisher, "pubsub", publisher),
        (None, publisher, "shop", publisher),
        (node, None, "pubsub", node),
    ):
        doors = Doors(Settings.read({}, tmp_path), ours)
        doors.publisher = theirs
        assert doors._choose(client(database)) is expected
    for ours, database in ((node, "shop"), (None, "pubsub")):
        with pytest.raises(PubsubError, match=f'database "{database}" does not exist'):
            Doors(Settings.read({}, tmp_path), ours)._choose(client(database))


async def test_tls_cannot_be_required_without_a_certificate(tmp_path: Path) -> None:
    settings = Settings.read({"walsender": {"listen": "127.0.0.1:0", "require_tls": True}}, tmp_path)
    with pytest.raises(PubsubError, match="without a certificate"):
        Doors(settings, None)
    settings = Settings.read({"walsender": {"require_tls": True}}, tmp_path)
    Doors(settings, None)
