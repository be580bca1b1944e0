"""The sequences that publications publish, and their state, from PostgreSQL 19 on.

Follows subscriptioncmds.c (fetch_relation_list, check_publications_origin_sequences) and sequencesync.c
(copy_sequences).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.errors import ProtocolViolation
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import as_oid, number, number_or_none, text, truth
from pubsub.sql.identifiers import quote_qualified

#: libpq's number of the first version that publishes sequences.
FIRST_VERSION: Final = 190000


@dataclass(frozen=True, slots=True)
class PublishedSequence:
    """A sequence that is published; `definition` is JSON text of its type, start, increment, bounds and cycle."""

    oid: Oid
    schema: str
    name: str
    definition: str


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence on the publisher, as `place` of the names that were asked for.

    `readable`: whether the role may read it, None if it was dropped meanwhile.  The others are None if it could not be read.
    """

    place: int
    readable: bool | None
    last_value: int | None
    is_called: bool | None
    page_lsn: Lsn | None
    definition: str
    wal_lsn: Lsn
    """Where the publisher's WAL ended when the sequences were read."""


async def published_sequences(connection: Connection, publications: Sequence[str]) -> list[PublishedSequence]:
    """Return the sequences that the publications publish, by schema and name; none from a server before 19."""
    if connection.server_version < FIRST_VERSION:
        return []
    rows = await connection.query(_PUBLISHED, [list(publications)])
    return [PublishedSequence(as_oid(oid), text(schema), text(name), _json(rest)) for oid, schema, name, *rest in rows]


async def publications_with_foreign_values(
    connection: Connection, publications: Sequence[str], besides: Collection[str] = ()
) -> list[str]:
    """Return the publications with sequences that the publisher's own subscriptions synchronize.

    `besides` are sequences to ignore, as schema.sequence in SQL.
    """
    if connection.server_version < FIRST_VERSION:
        return []
    rows = await connection.query(_FOREIGN_VALUES, [list(publications), list(besides)])
    return [text(row[0]) for row in rows]


async def sequence_states(connection: Connection, names: Sequence[tuple[str, str]]) -> list[SequenceState]:
    """Return the state of each of these sequences (schema and name) that exists, with one query."""
    rows = await connection.query(_STATES, [[schema for schema, _ in names], [name for _, name in names]])
    return [
        SequenceState(
            place=_place(place, len(names)),
            readable=None if readable is None else truth(readable),
            last_value=number_or_none(last_value),
            is_called=None if is_called is None else truth(is_called),
            page_lsn=None if page_lsn is None else Lsn.parse(page_lsn),
            definition=_json(rest),
            wal_lsn=Lsn.parse(text(wal_lsn)),
        )
        for place, readable, last_value, is_called, page_lsn, wal_lsn, *rest in rows
    ]


def _place(value: str | None, asked: int) -> int:
    found = number(value) - 1
    if not 0 <= found < asked:
        raise ProtocolViolation("the publisher answered a query with a sequence that it was not asked for")
    return found


def sql_name(schema: str, name: str) -> str:
    """Return the name as `publications_with_foreign_values` compares it."""
    return quote_qualified(schema, name)


def _json(values: Sequence[str | None]) -> str:
    type_name, start, increment, low, high, cycle = map(text, values)
    numbers = {"start": start, "increment": increment, "min": low, "max": high}
    return json.dumps(
        {"type": type_name, **{name: number(value) for name, value in numbers.items()}, "cycle": cycle == "t"}
    )


_PUBLISHED: Final = """
SELECT DISTINCT c.oid, n.nspname COLLATE "C", c.relname COLLATE "C", format_type(s.seqtypid, NULL),
       s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle
  FROM pg_publication p, LATERAL pg_get_publication_sequences(p.pubname) gps(relid)
  JOIN pg_class c ON c.oid = gps.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_sequence s ON s.seqrelid = c.oid
 WHERE p.pubname = ANY ($1::text[])
 ORDER BY 2, 3
"""


_FOREIGN_VALUES: Final = """
SELECT DISTINCT p.pubname
  FROM pg_publication p, LATERAL pg_get_publication_sequences(p.pubname) gps(relid)
  JOIN pg_subscription_rel sr ON sr.srrelid = gps.relid
  JOIN pg_class c ON c.oid = gps.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY ($1::text[]) AND NOT format('%I.%I', n.nspname, c.relname) = ANY ($2::text[])
 ORDER BY 1
"""


# The function gives NULLs for a sequence that the role may not read.  A standby has no place to write to.
_STATES: Final = """
SELECT s.place, has_sequence_privilege(c.oid, 'SELECT'), ps.last_value, ps.is_called, ps.page_lsn,
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END,
       format_type(seq.seqtypid, NULL), seq.seqstart, seq.seqincrement, seq.seqmin, seq.seqmax, seq.seqcycle
  FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS s(schema_name, name, place)
  JOIN pg_namespace n ON n.nspname = s.schema_name
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = s.name
  JOIN pg_sequence seq ON seq.seqrelid = c.oid
  JOIN LATERAL pg_get_sequence_data(seq.seqrelid) ps ON true
 ORDER BY s.place
"""
