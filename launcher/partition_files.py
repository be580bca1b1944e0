"""Tell of partitions that were truncated by themselves: the publisher does not send that for a table that it publishes by its root.

PostgreSQL leaves such a TRUNCATE out (pgoutput.c: pgoutput_truncate), so the rows that the partition had stay in the Delta table,
as they do in a subscriber's.  A TRUNCATE gives a partition another file, and statistics that nobody has gathered; so does a
statement that writes it anew, such as SET ACCESS METHOD, which cannot be told from it.  One of the root does so to all of its
partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from catalog.figures import Warned
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import number, text, truth
from pubsub.sql.identifiers import quote_identifier, quote_qualified

logger = structlog.get_logger()

# pg_partition_tree() would wait for whoever has a partition locked.
_PARTITIONS: Final = """
WITH RECURSIVE tree AS (
    SELECT inhparent AS root, inhrelid AS oid FROM pg_inherits JOIN pg_class p ON p.oid = inhparent AND p.relkind = 'p'
     WHERE inhparent = ANY ($1::oid[])
    UNION ALL
    SELECT tree.root, inhrelid FROM tree JOIN pg_inherits ON inhparent = tree.oid
)
SELECT tree.root, c.oid, c.relfilenode, c.reltuples < 0, format('%s.%s', n.nspname, c.relname)
  FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r'
"""


@dataclass(frozen=True, slots=True)
class _Emptied:
    """A partition that has another file than before, and the copy of its root's table that has the rows of before."""

    root: int
    copy_generation: int
    warned: Warned


class PartitionFiles:
    """The files of the partitions of one subscription's tables, as each look finds them."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._emptied: dict[int, _Emptied] = {}

    async def look(
        self, connection: Connection, subscription: str, relations: Sequence[SubscriptionRel]
    ) -> list[Warned]:
        """Return a warning for each partition that was found emptied, until its table is copied anew or has left.

        A partition that is found for the first time has no file of before.  Raises what queries raise.
        """
        ready = {int(one.oid): one for one in relations if one.beside is None and one.state is RelState.READY}
        self._emptied = {
            oid: one
            for oid, one in self._emptied.items()
            if one.root in ready and ready[one.root].copy_generation == one.copy_generation
        }
        partitions: dict[int, dict[int, tuple[int, bool, str]]] = defaultdict(dict)
        for row in await connection.query(_PARTITIONS, [list(ready)]) if ready else ():
            root, oid, file = (number(one) for one in row[:3])
            partitions[root][oid] = file, truth(row[3]), text(row[4])
        files: dict[int, int] = {}
        for root, leaves in partitions.items():
            known = [oid for oid in leaves if oid in self._files]
            changed = [oid for oid in known if leaves[oid][0] != self._files[oid]]
            for oid in changed if len(changed) < len(known) else ():
                if leaves[oid][1] and oid not in self._emptied:
                    self._note(subscription, oid, leaves[oid][2], ready[root])
            files |= {oid: file for oid, (file, _, _) in leaves.items()}
        self._files = files
        return [one.warned for one in self._emptied.values()]

    def _note(self, subscription: str, oid: int, name: str, root: SubscriptionRel) -> None:
        qualified = quote_qualified(root.schema, root.name)
        resync = f"ALTER SUBSCRIPTION {quote_identifier(subscription)} RESYNC TABLE {qualified}"
        warned = Warned(
            f"partition {name} of table {root.qualified_name} was truncated or written anew",
            "The publisher does not send a TRUNCATE of a partition whose table it publishes by its root: the Delta table still holds "
            "the rows that the partition had.",
            f"If it was truncated, {resync} has these rows go; one with the same key stops an INSERT (insert_exists).",
        )
        self._emptied[oid] = _Emptied(root.oid, root.copy_generation, warned)
        logger.warning(
            "partition was truncated or written anew",
            subscription=subscription,
            relation=root.qualified_name,
            partition=name,
            detail=warned.detail,
            hint=warned.hint,
        )
