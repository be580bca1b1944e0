"""The options of a subscription: PostgreSQL 18's and ours (interface.md).

The names, defaults and texts of the errors are those of subscriptioncmds.c: parse_subscription_options and define.c:
defGetBoolean, defGetStreamingMode.  Nothing here imports a parser, so that the catalog can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Streaming = Literal["off", "on", "parallel"]
OnTableError = Literal["stop", "isolate"]
SchemaChanges = Literal["follow", "refuse"]

#: Options that say what one command does; nothing of them is stored.
COMMAND_OPTIONS: Final = frozenset({"connect", "create_slot", "copy_data", "refresh"})


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """Every option with its value; `specified` names those that the statement gave (subscriptioncmds.c: SubOpts).

    `slot_name` is None for NONE, and also when it was not given: then the subscription's own name is meant.
    `batch_bytes` is in bytes, `batch_age` in seconds.
    """

    connect: bool = True
    enabled: bool = True
    create_slot: bool = True
    slot_name: str | None = None
    copy_data: bool = True
    refresh: bool = True
    synchronous_commit: str = "off"
    binary: bool = False
    streaming: Streaming = "parallel"
    two_phase: bool = False
    disable_on_error: bool = False
    password_required: bool = True
    run_as_owner: bool = False
    failover: bool = False
    origin: str = "any"
    create_tables: bool = True
    target: str | None = None
    on_table_error: OnTableError = "stop"
    schema_changes: SchemaChanges = "follow"
    batch_rows: int = 500_000
    batch_bytes: int = 256 * 1024 * 1024
    batch_age: float = 1.0
    specified: frozenset[str] = frozenset()
