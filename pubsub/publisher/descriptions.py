"""Ask a publisher for the comments of its tables and columns (pg_description)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pubsub.protocol.ids import Oid
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import as_oid, number, text


@dataclass(frozen=True, slots=True)
class Description:
    """The comment of a column, or of a table itself (`number` 0, `name` ""); None: it has none."""

    number: int
    name: str
    comment: str | None


async def descriptions(connection: Connection, oids: Iterable[int]) -> dict[Oid, list[Description]]:
    """Return, for those tables among `oids` that exist, their descriptions and those of all their columns.

    Raises what `Connection.query` raises.
    """
    found: dict[Oid, list[Description]] = defaultdict(list)
    for oid, attnum, name, comment in await connection.query(_DESCRIPTIONS, [list(oids)]):
        found[as_oid(oid)].append(Description(number(attnum), text(name), comment))
    return dict(found)


_DESCRIPTIONS: Final = """
SELECT c.oid, 0, '', obj_description(c.oid, 'pg_class') FROM pg_class c WHERE c.oid = ANY ($1::oid[])
UNION ALL
SELECT a.attrelid, a.attnum, a.attname, col_description(a.attrelid, a.attnum)
FROM pg_attribute a
WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
