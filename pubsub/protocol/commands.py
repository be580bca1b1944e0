"""Replication commands, which a walsender's client sends instead of SQL, and the options of pgoutput.

They have their own grammar and quoting (repl_gram.y, repl_scanner.l): identifiers in double quotes, strings in single
quotes, a quote within doubled.  Nothing else is special: no backslash escapes, no E'', no dollar quotes.  libpq's
PQescapeLiteral is therefore wrong here: it writes an E'' string for text with a backslash.

This module builds commands; repl_gram.py parses them.  Follows libpqwalreceiver.c (libpqrcv_startstreaming,
libpqrcv_create_slot, libpqrcv_alter_slot), tablesync.c (ReplicationSlotDropAtPubNode) and worker.c
(set_stream_options).

`server_version` is libpq's number: 150004 is 15.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from pubsub.errors import FeatureNotSupported, InvalidValue
from pubsub.protocol.lsn import Lsn

Snapshot = Literal["export", "nothing", "use"]
"""What to do with a new slot's snapshot: export it for other sessions, drop it, use it in this transaction."""
Streaming = Literal["off", "on", "parallel"]
OriginFilter = Literal["any", "none"]

PROTOCOL_BASE: Final = 1
PROTOCOL_STREAMING: Final = 2
PROTOCOL_TWO_PHASE: Final = 3
PROTOCOL_PARALLEL: Final = 4

_OLD_SNAPSHOT: Final[dict[Snapshot, str]] = {
    "export": "EXPORT_SNAPSHOT",
    "nothing": "NOEXPORT_SNAPSHOT",
    "use": "USE_SNAPSHOT",
}
_PLAIN_IDENTIFIER: Final = re.compile(r"[a-z_][a-z0-9_]*")


def quote_identifier(name: str) -> str:
    """Return `name` in double quotes.  Raises InvalidValue for a NUL, which no command can carry.

    Servers up to 18 accept doubled quotes in publication_names but not in a command's own identifiers: a name with a
    quote reads as two identifiers in a row, a syntax error.  No slot can have such a name anyway.
    """
    return _quote(name, '"')


def quote_string(text: str) -> str:
    """Return `text` in single quotes.  Raises InvalidValue for a NUL."""
    return _quote(text, "'")


def join_identifiers(names: Sequence[str]) -> str:
    """Return a list for pgoutput's publication_names: quoted, comma-separated (SplitIdentifierString reads it)."""
    return ",".join(quote_identifier(name) for name in names)


def identify_system() -> str:
    """Build IDENTIFY_SYSTEM; the answer is one row: systemid, timeline, xlogpos, dbname."""
    return "IDENTIFY_SYSTEM"


def create_replication_slot(
    name: str,
    plugin: str = "pgoutput",
    *,
    snapshot: Snapshot,
    temporary: bool = False,
    two_phase: bool = False,
    failover: bool = False,
    server_version: int,
) -> str:
    """Build the command that creates a logical slot.

    The answer is one row: slot_name, consistent_point, snapshot_name, output_plugin.  Raises FeatureNotSupported for an
    option that the server is too old for: two_phase before 15, failover before 17.
    """
    if two_phase and server_version < 150000:
        raise FeatureNotSupported("the publisher does not support two-phase replication slots before version 15")
    if failover and server_version < 170000:
        raise FeatureNotSupported("the publisher does not support failover replication slots before version 17")
    lifetime = " TEMPORARY" if temporary else ""
    head = f"CREATE_REPLICATION_SLOT {quote_identifier(name)}{lifetime} LOGICAL {_name(plugin)}"
    if server_version < 150000:
        return f"{head} {_OLD_SNAPSHOT[snapshot]}"
    options = ["TWO_PHASE"] * two_phase + ["FAILOVER"] * failover + [f"SNAPSHOT {quote_string(snapshot)}"]
    return f"{head} ({', '.join(options)})"


def alter_replication_slot(name: str, *, failover: bool | None = None, two_phase: bool | None = None) -> str:
    """Build the command that sets the options that are not None.  Raises ValueError if all are.

    Servers take `failover` from 17 on, `two_phase` from 18 on.
    """
    values = {"FAILOVER": failover, "TWO_PHASE": two_phase}
    options = [f"{option} {'true' if value else 'false'}" for option, value in values.items() if value is not None]
    if not options:
        raise ValueError("nothing to alter")
    return f"ALTER_REPLICATION_SLOT {quote_identifier(name)} ({', '.join(options)})"


def drop_replication_slot(name: str, *, wait: bool) -> str:
    """Build the command that drops a slot; `wait`: wait while it is in use, instead of failing with 55006."""
    return f"DROP_REPLICATION_SLOT {quote_identifier(name)}{' WAIT' if wait else ''}"


def start_replication(slot: str, lsn: int, options: Mapping[str, str]) -> str:
    """Build the command that streams from a logical slot, with `options` in their order.

    The server starts at the later of `lsn` and the slot's confirmed_flush_lsn; with 0 the slot decides.
    """
    given = ", ".join(f"{_name(option)} {quote_string(value)}" for option, value in options.items())
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {Lsn(lsn)}{f' ({given})' if given else ''}"


def start_physical_replication(slot: str | None, lsn: int, timeline: int) -> str:
    """Build the command that streams `timeline`'s WAL from `lsn` on; a physical `slot` retains unacknowledged WAL."""
    given = f"SLOT {quote_identifier(slot)} " if slot is not None else ""
    return f"START_REPLICATION {given}PHYSICAL {Lsn(lsn)} TIMELINE {timeline}"


def timeline_history(timeline: int) -> str:
    """Build TIMELINE_HISTORY; the answer is one row: the name and content of the timeline's history file."""
    return f"TIMELINE_HISTORY {timeline}"


def protocol_version(server_version: int) -> int:
    """Return the pgoutput protocol version that a stock subscriber requests of such a server, whatever its options."""
    if server_version >= 160000:
        return PROTOCOL_PARALLEL
    if server_version >= 150000:
        return PROTOCOL_TWO_PHASE
    return PROTOCOL_STREAMING if server_version >= 140000 else PROTOCOL_BASE


def pgoutput_options(
    server_version: int,
    publications: Sequence[str],
    *,
    streaming: Streaming = "off",
    binary: bool = False,
    origin: OriginFilter = "any",
    two_phase: bool = False,
    messages: bool = False,
) -> dict[str, str]:
    """Return START_REPLICATION's options in a stock subscriber's order, without those that the server is too old for.

    Before 16, streaming 'parallel' becomes 'on': a StreamAbort then carries no LSN (`streams_in_parallel`).
    Raises ValueError without publications.
    """
    if not publications:
        raise ValueError("pgoutput needs at least one publication")
    options = {"proto_version": str(protocol_version(server_version))}
    if streaming != "off" and server_version >= 140000:
        options["streaming"] = "parallel" if streaming == "parallel" and server_version >= 160000 else "on"
    if two_phase and server_version >= 150000:
        options["two_phase"] = "on"
    if server_version >= 160000:
        options["origin"] = origin
    options["publication_names"] = join_identifiers(publications)
    if binary and server_version >= 140000:
        options["binary"] = "true"
    if messages and server_version >= 140000:
        options["messages"] = "true"
    return options


def streams_in_parallel(options: Mapping[str, str]) -> bool:
    """Whether a stream started with `options` must be read with `parallel` (pgoutput.read_message)."""
    return options.get("streaming") == "parallel"


def _quote(text: str, mark: str) -> str:
    if "\0" in text:
        raise InvalidValue("a replication command cannot hold a null character", sqlstate="22021")
    return f"{mark}{text.replace(mark, mark * 2)}{mark}"


def _name(name: str) -> str:
    """Quote an identifier only if needed; a plain lower-case name needs no quotes, since keywords are upper case."""
    return name if _PLAIN_IDENTIFIER.fullmatch(name) else quote_identifier(name)
