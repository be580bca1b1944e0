"""pg_subscription_rel's sequences: those of a subscription, their states, and what they were on the publisher."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database
from catalog.records import NewSequence, SequenceValue, SubscriptionSequence
from catalog.states import RelState

_T = schema.sequence


class Sequences(Database):
    """The part of the catalog that holds the sequences of subscriptions."""

    async def sequences(self, subid: int) -> list[SubscriptionSequence]:
        """Return the sequences of a subscription by oid, with those that have left and are to leave the Delta table."""
        async with self._read() as connection:
            rows = await connection.execute(select(_T).where(_T.c.subid == subid).order_by(_T.c.relid))
            return [from_rows.sequence(row) for row in rows.mappings()]

    async def ask_for_sequences(self, subid: int) -> None:
        """Set all sequences to `i`, so that they are synchronized again (ALTER SUBSCRIPTION … REFRESH SEQUENCES)."""
        async with self._write(bump=True) as connection:
            await connection.execute(
                update(_T)
                .where(_T.c.subid == subid, _T.c.leaving.is_(False))
                .values(state=RelState.INIT.value, asked=_T.c.asked + 1)
            )

    async def sequences_synchronized(
        self, subid: int, found: Mapping[int, tuple[int, SequenceValue]], gone: Collection[int] = ()
    ) -> None:
        """Store what was found, by oid with the count of `asked` at that time, and forget the sequences that have left.

        A sequence that was asked for again since stays in `i`.  One that has left the subscription meanwhile is no error.
        """
        async with self._write(bump=True) as connection:
            for relid, (asked, value) in found.items():
                here = _here(subid, relid)
                await connection.execute(
                    update(_T)
                    .where(here)
                    .values(
                        last_value=value.last_value,
                        is_called=value.is_called,
                        lsn=value.lsn,
                        definition=value.definition,
                    )
                )
                await connection.execute(update(_T).where(here, _T.c.asked == asked).values(state=RelState.READY.value))
            for relid in gone:
                await connection.execute(delete(_T).where(_here(subid, relid), _T.c.leaving.is_(True)))


async def change_sequences(
    connection: AsyncConnection, subid: int, leave: Iterable[int], join: Sequence[NewSequence]
) -> None:
    """Let sequences leave and join within the caller's transaction."""
    for relid in leave:
        await connection.execute(update(_T).where(_here(subid, relid)).values(leaving=True))
    for new in join:
        # The same oid may have left a moment ago, or have got another name.
        await connection.execute(delete(_T).where(_here(subid, new.relid)))
    if join:
        await connection.execute(
            insert(_T),
            [
                {
                    "subid": subid,
                    "relid": new.relid,
                    "schema_name": new.schema,
                    "name": new.name,
                    "state": new.state.value,
                    "asked": 0,
                    "leaving": False,
                    "path": new.path,
                    "definition": new.definition,
                }
                for new in join
            ],
        )


async def read_sequences(connection: AsyncConnection) -> tuple[SubscriptionSequence, ...]:
    found = await connection.execute(select(_T).where(_T.c.leaving.is_(False)).order_by(_T.c.subid, _T.c.relid))
    return tuple(from_rows.sequence(row) for row in found.mappings())


def _here(subid: int, relid: int) -> ColumnElement[bool]:
    return (_T.c.subid == subid) & (_T.c.relid == relid)
