"""PostgreSQL's logical replication in Python: a subscriber whose tables are Delta tables, and a publisher's walsender.

The public names are resolved when they are first used (PEP 562), so that `import pubsub` takes milliseconds: the
command line pays only for what a command needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pubsub.errors import PubsubError
    from pubsub.node.node import Node
    from pubsub.protocol.lsn import Lsn

__version__ = "0.1.0"

__all__ = ["Lsn", "Node", "PubsubError"]

_HOMES = {"Lsn": "pubsub.protocol.lsn", "Node": "pubsub.node.node", "PubsubError": "pubsub.errors"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
