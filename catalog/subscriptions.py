"""pg_subscription and the replication origins, as CREATE, ALTER and DROP SUBSCRIPTION store them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Unpack

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database
from catalog.records import (
    LastCommit,
    NewRelation,
    NewSequence,
    NewSubscription,
    OriginStatus,
    Subscription,
    SubscriptionChanges,
)
from catalog.relations import copy_relation_again, delete_relations, insert_relations, relids
from catalog.sequences import change_sequences
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, UndefinedObject
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions

_T = schema.subscription
_NO_COMMIT: Final[dict[str, None]] = {"commit_lsn": None, "commit_time": None}


class Subscriptions(Database):
    """The part of the catalog that holds subscriptions and their origins."""

    async def create_subscription(
        self, new: NewSubscription, relations: Sequence[NewRelation] = (), sequences: Sequence[NewSequence] = ()
    ) -> Subscription:
        """Store a subscription with its tables and sequences, in one transaction.

        Raises DuplicateObject for a name that is taken, or a path that another subscription's table has.
        """
        async with self._write(bump=True) as connection:
            await _refuse_taken_name(connection, new.name)
            counter = schema.node.c.next_oid
            oid = int((await connection.execute(select(counter).with_for_update())).scalar_one())
            await connection.execute(update(schema.node).values({counter: oid + 1}))
            values = {name: getattr(new, name) for name in NewSubscription.__slots__}
            values |= {"options": _options_json(new.options), "publications": list(new.publications)}
            await connection.execute(
                insert(_T).values(oid=oid, skip_lsn=INVALID_LSN, generation=1, dropping=False, **values)
            )
            await connection.execute(
                insert(schema.origin).values(subid=oid, relid=0, remote_lsn=INVALID_LSN, local_lsn=None)
            )
            await connection.execute(insert(schema.statistics).values(subid=oid))
            await insert_relations(connection, oid, relations)
            await change_sequences(connection, oid, (), sequences)
            return await _one(connection, oid)

    async def subscriptions(self) -> list[Subscription]:
        """Return every subscription, by oid."""
        async with self._read() as connection:
            return await read_subscriptions(connection)

    async def subscription(self, name_or_oid: str | int) -> Subscription:
        """Return one subscription.  Raises UndefinedObject, in PostgreSQL's words."""
        async with self._read() as connection:
            return await _one(connection, name_or_oid)

    async def alter_subscription(self, oid: int, **changes: Unpack[SubscriptionChanges]) -> Subscription:
        """Change fields and raise the generation by one, even if nothing differs.

        Raises UndefinedObject, and DuplicateObject for a name that is taken.
        """
        async with self._write(bump=True) as connection:
            await _alter(connection, oid, changes)
            return await _one(connection, oid)

    async def refresh_subscription(
        self,
        oid: int,
        changes: SubscriptionChanges,
        leave: Iterable[int],
        join: Sequence[NewRelation],
        sequences: tuple[Iterable[int], Sequence[NewSequence]] = ((), ()),
        *,
        publications: tuple[str, ...] | None = None,
    ) -> None:
        """Change fields, if any are given, and remove and add tables, all in one transaction.

        `sequences`: the oids of those that leave, and those that join.  A table of `join` that is there already stays as it is:
        the launcher and a command may add it at the same time.  `publications`: those that the subscription had when its tables
        were compared with theirs.

        Raises as `alter_subscription` and `add_relations` do; NotInPrerequisiteState if it has others by now.
        """
        async with self._write(bump=True) as connection:
            stored = await _one(connection, oid)
            if publications not in (None, stored.publications):
                raise NotInPrerequisiteState(
                    f'the publications of subscription "{stored.name}" were altered by another command meanwhile',
                    hint="Give the command again.",
                )
            if changes:
                await _alter(connection, oid, changes)
            await delete_relations(connection, oid, leave)
            there = await relids(connection, oid)
            await insert_relations(connection, oid, [one for one in join if one.relid not in there])
            await change_sequences(connection, oid, *sequences)

    async def copy_again(
        self, oid: int, relations: Mapping[int, NewRelation | str | None], publisher: tuple[str, int] | None
    ) -> None:
        """Have tables copied again, in one transaction; their slots have been dropped.

        `relations` has for each table's oid what takes its place, or, if it stays, its definition (None: as before).
        `publisher` is given when the stream begins anew: the system identifier and timeline to follow from now on.  The
        origin is then unset, since the stream may begin anywhere: no table holds anything of it.  Raises UndefinedObject.
        """
        async with self._write(bump=True) as connection:
            for relid, now in relations.items():
                if not isinstance(now, NewRelation):
                    await copy_relation_again(connection, oid, relid, now)
            replaced = {relid: now for relid, now in relations.items() if isinstance(now, NewRelation)}
            await delete_relations(connection, oid, replaced)
            await insert_relations(connection, oid, list(replaced.values()))
            if publisher is not None:
                await _store_publisher(connection, oid, *publisher, None, INVALID_LSN)
                o = schema.origin
                here = (o.c.subid == oid) & (o.c.relid == 0)
                await connection.execute(
                    update(o).where(here).values(remote_lsn=INVALID_LSN, local_lsn=None, **_NO_COMMIT)
                )

    async def set_enabled(self, oid: int, enabled: bool) -> Subscription:
        """Enable or disable the subscription (ALTER SUBSCRIPTION … ENABLE or DISABLE)."""
        return await self.alter_subscription(oid, enabled=enabled)

    async def set_publisher(
        self,
        oid: int,
        system_identifier: str,
        timeline: int,
        timeline_start: Lsn | None = None,
        continues_at: Lsn | None = None,
    ) -> None:
        """Store the publisher's identity.  The generation stays, so that no worker restarts.

        `continues_at`: where the slot of another system begins, behind everything of the former one; None: as before.
        """
        async with self._write(bump=False) as connection:
            await _store_publisher(connection, oid, system_identifier, timeline, timeline_start, continues_at)

    async def set_publisher_lost(self, oid: int, lsn: Lsn) -> None:
        """Remember that the publisher lacks WAL up to `lsn`, which was received.  The generation stays."""
        async with self._write(bump=True) as connection:
            await connection.execute(update(_T).where(_T.c.oid == oid).values(publisher_lost_at=lsn))

    async def clear_skip_lsn(self, oid: int, finish_lsn: Lsn) -> bool:
        """Clear skip_lsn if it is `finish_lsn`, and return whether it was (worker.c: clear_subscription_skip_lsn)."""
        async with self._write(bump=True) as connection:
            done = await connection.execute(
                update(_T)
                .where(_T.c.oid == oid, _T.c.skip_lsn == finish_lsn)
                .values(skip_lsn=INVALID_LSN, generation=_T.c.generation + 1)
            )
            return done.rowcount == 1

    async def drop_subscription(self, oid: int) -> None:
        """Remove a subscription with its tables, origins and statistics.  A missing subscription is no error."""
        async with self._write(bump=True) as connection:
            await connection.execute(delete(_T).where(_T.c.oid == oid))

    async def origin(self, subid: int, relid: int | None = None) -> Lsn:
        """Return the restart point; INVALID_LSN before the first advance."""
        o = schema.origin
        async with self._read() as connection:
            found = await connection.execute(
                select(o.c.remote_lsn).where(o.c.subid == subid, o.c.relid == (relid or 0))
            )
            return Lsn(found.scalar_one_or_none() or INVALID_LSN)

    async def last_commit(self, subid: int) -> LastCommit | None:
        """Return the last transaction stored with the subscription's origin; None if none was, since it was last unset."""
        o = schema.origin
        async with self._read() as connection:
            query = select(o.c.commit_lsn, o.c.commit_time).where(o.c.subid == subid, o.c.relid == 0)
            found = (await connection.execute(query)).one_or_none()
            return None if found is None or None in found else LastCommit(found.commit_lsn, found.commit_time)

    async def origins(self) -> list[OriginStatus]:
        """Return every origin, by subscription."""
        async with self._read() as connection:
            return await read_origins(connection)

    async def advance_origin(
        self,
        subid: int,
        lsn: Lsn,
        local_lsn: Lsn | None = None,
        *,
        relid: int | None = None,
        last: LastCommit | None = None,
    ) -> Lsn:
        """Durably move the restart point forward and return its new value; a smaller LSN changes nothing.

        `last` is the last transaction up to there; None keeps the one stored before.  Creates a table's origin if it is
        missing.  A subscription's own origin lives as long as the subscription: raises UndefinedObject when it is gone.
        """
        o = schema.origin
        here = (o.c.subid == subid) & (o.c.relid == (relid or 0))
        async with self._write(bump=False) as connection:
            stands = (
                await connection.execute(select(o.c.remote_lsn).where(here).with_for_update())
            ).scalar_one_or_none()
            if stands is None:
                if relid is None:
                    raise _undefined(subid)
                try:
                    await connection.execute(
                        insert(o).values(subid=subid, relid=relid, remote_lsn=lsn, local_lsn=local_lsn)
                    )
                except IntegrityError:
                    raise _undefined(subid) from None
                return Lsn(lsn)
            if lsn <= stands:
                return Lsn(stands)
            commit = {} if last is None else {"commit_lsn": last.lsn, "commit_time": last.time}
            await connection.execute(update(o).where(here).values(remote_lsn=lsn, local_lsn=local_lsn, **commit))
            return Lsn(lsn)


async def read_subscriptions(connection: AsyncConnection) -> list[Subscription]:
    found = await connection.execute(select(_T).order_by(_T.c.oid))
    return [from_rows.subscription(row) for row in found.mappings()]


async def read_origins(connection: AsyncConnection) -> list[OriginStatus]:
    o = schema.origin
    found = await connection.execute(select(o).order_by(o.c.subid, o.c.relid))
    return [from_rows.origin(row) for row in found.mappings()]


async def _one(connection: AsyncConnection, name_or_oid: str | int) -> Subscription:
    column = _T.c.name if isinstance(name_or_oid, str) else _T.c.oid
    row = (await connection.execute(select(_T).where(column == name_or_oid))).mappings().one_or_none()
    if row is None:
        raise _undefined(name_or_oid)
    return from_rows.subscription(row)


async def _alter(connection: AsyncConnection, oid: int, changes: SubscriptionChanges) -> None:
    if "name" in changes:
        await _refuse_taken_name(connection, changes["name"], besides=oid)
    values: dict[str, Any] = dict(changes)
    if callable(changes.get("options")) or callable(changes.get("publications")):
        await connection.execute(select(_T.c.oid).where(_T.c.oid == oid).with_for_update())
        stored = await _one(connection, oid)
        given = {name: values[name] for name in ("options", "publications") if callable(values.get(name))}
        values |= {name: change(getattr(stored, name)) for name, change in given.items()}
    if "options" in values:
        values["options"] = _options_json(values["options"])
    if "publications" in values:
        values["publications"] = list(values["publications"])
    done = await connection.execute(update(_T).where(_T.c.oid == oid).values(generation=_T.c.generation + 1, **values))
    if done.rowcount == 0:
        raise _undefined(oid)


async def _store_publisher(
    connection: AsyncConnection,
    oid: int,
    system_identifier: str,
    timeline: int,
    timeline_start: Lsn | None,
    continues_at: Lsn | None,
) -> None:
    here = _T.c.oid == oid
    query = select(_T.c.options, _T.c.publisher_system_identifier).where(here).with_for_update()
    stored = (await connection.execute(query)).one_or_none()
    if stored is None:
        raise _undefined(oid)
    if stored.publisher_system_identifier != system_identifier:
        # The commit record of another system is not to be found in this one's WAL.
        own = (schema.origin.c.subid == oid) & (schema.origin.c.relid == 0)
        await connection.execute(update(schema.origin).where(own).values(**_NO_COMMIT))
    now: dict[str, object] = {"rebound": False}
    if continues_at is not None:
        now["continues_at"] = continues_at
    await connection.execute(
        update(_T)
        .where(here)
        .values(
            publisher_system_identifier=system_identifier,
            publisher_timeline=timeline,
            publisher_timeline_start=timeline_start,
            publisher_lost_at=None,
            options=dict(stored.options) | now,
        )
    )


async def _refuse_taken_name(connection: AsyncConnection, name: str, besides: int = 0) -> None:
    taken = await connection.execute(select(_T.c.oid).where(_T.c.name == name, _T.c.oid != besides))
    if taken.first() is not None:
        raise DuplicateObject(f'subscription "{name}" already exists')


def _undefined(name_or_oid: str | int) -> UndefinedObject:
    if isinstance(name_or_oid, str):
        return UndefinedObject(f'subscription "{name_or_oid}" does not exist')
    return UndefinedObject(f"subscription with OID {name_or_oid} does not exist")


def _options_json(options: SubscriptionOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name in from_rows.OPTION_NAMES}
