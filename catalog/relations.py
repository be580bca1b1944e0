"""pg_subscription_rel: the tables of a subscription and their states (catalog.states)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from sqlalchemy import ColumnElement, Row, Select, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database
from catalog.records import ForeignCommit, NewRelation, SubscriptionRel
from catalog.states import RelState, may_store
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, UndefinedObject
from pubsub.protocol.lsn import Lsn

_T = schema.relation
_I = schema.incident
_S = schema.subscription


class Relations(Database):
    """The part of the catalog that holds the tables of subscriptions."""

    async def relations(self, subid: int) -> list[SubscriptionRel]:
        """Return the tables of a subscription, by oid."""
        async with self._read() as connection:
            return await read_relations(connection, subid)

    async def relation(self, subid: int, relid: int) -> SubscriptionRel | None:
        """Return one table, or None when it is not (or no longer) part of the subscription."""
        async with self._read() as connection:
            row = (await connection.execute(_query().where(_here(subid, relid)))).mappings().one_or_none()
            return None if row is None else from_rows.relation(row)

    async def add_relations(self, subid: int, relations: Sequence[NewRelation]) -> None:
        """Add tables.  Raises DuplicateObject for a table that is already there, or a path that another table has."""
        async with self._write(bump=True) as connection:
            await insert_relations(connection, subid, relations)

    async def remove_relation(self, subid: int, relid: int) -> None:
        """Remove a table with its origin and progress; the Delta table stays.  A missing table is no error."""
        await self.remove_relations(subid, [relid])

    async def remove_relations(self, subid: int, relids: Iterable[int]) -> None:
        """Remove tables in one transaction, each as `remove_relation` does."""
        async with self._write(bump=True) as connection:
            await delete_relations(connection, subid, relids)

    async def set_relation_state(self, subid: int, relid: int, state: RelState, lsn: Lsn | None = None) -> None:
        """Store a state and its LSN, and clear the error (pg_subscription.c: UpdateSubscriptionRelState).

        Raises NotInPrerequisiteState unless catalog.states allows the step or the state is already stored, and for `s`
        or `r` without an LSN.  For `d` use `begin_copy`, which counts the copy.
        """
        if state in (RelState.SYNCDONE, RelState.READY) and lsn is None:
            raise NotInPrerequisiteState(
                f"state {state.value} of a table needs the LSN where its synchronization ended"
            )
        async with self._write(bump=True) as connection:
            await store_state(connection, subid, relid, state, lsn)

    async def begin_copy(
        self,
        subid: int,
        relid: int,
        *,
        sync_slot: str | None = None,
        definition: str | None = None,
        estimated_rows: int | None = None,
        after: int = 0,
    ) -> int:
        """Store `d` for a new copy and return its generation.

        No earlier copy of this table had that generation, not even before the table left and joined again; it is past `after`.
        Stores the slot, definition and estimate, too, except those that are None.
        """
        given = {"sync_slot": sync_slot, "definition": definition, "estimated_rows": estimated_rows}
        async with self._write(bump=True) as connection:
            old = await _locked(connection, subid, relid)
            if not may_store(RelState(old.state), RelState.DATASYNC):
                raise NotInPrerequisiteState(
                    f"table {old.schema_name}.{old.name} cannot be copied in state {old.state}"
                )
            left = (await connection.execute(select(_S.c.left_generation).where(_S.c.oid == subid))).scalar_one()
            generation = max(int(old.copy_generation), left or 0, after) + 1
            await connection.execute(
                update(_T)
                .where(_here(subid, relid))
                .values(
                    state=RelState.DATASYNC.value,
                    lsn=None,
                    copy_generation=generation,
                    error=None,
                    error_hint=None,
                    **{name: value for name, value in given.items() if value is not None},
                )
            )
            await _forget_incidents(connection, subid, relid)
            return generation

    async def set_sync_slot(self, subid: int, relid: int, slot: str | None) -> None:
        """Store the slot of the table's sync worker; None once it is dropped."""
        await self._set(subid, relid, sync_slot=slot)

    async def set_relation_definition(
        self, subid: int, relid: int, definition: str | None, estimated_rows: int | None = None
    ) -> None:
        """Store the table as decided at the copy (JSON text), and the publisher's estimate of its rows."""
        await self._set(subid, relid, definition=definition, estimated_rows=estimated_rows)

    async def ask_for_columns(self, subid: int) -> None:
        """Request that the columns of the copied tables be compared with the publisher's, even if no rows arrive."""
        copied = _T.c.state.in_((RelState.SYNCDONE.value, RelState.READY.value))
        async with self._write(bump=True) as connection:
            await connection.execute(
                update(_T)
                .where((_T.c.subid == subid) & copied)
                .values(look_again=func.coalesce(_T.c.look_again, 0) + 1)
            )

    async def columns_are_known(self, subid: int, asked: Mapping[int, int]) -> None:
        """Mark the requests of `ask_for_columns` as answered.

        `asked` gives each table's `look_again` when it was compared: a table that was asked about again since keeps its
        count.
        """
        async with self._write(bump=False) as connection:
            for relid, count in asked.items():
                here = _here(subid, relid) & (_T.c.look_again == count)
                await connection.execute(update(_T).where(here).values(look_again=None))

    async def rename_relation(self, subid: int, relid: int, schema_name: str, name: str) -> None:
        """Store a table's new name or schema on the publisher; its Delta table stays where it is."""
        await self._set(subid, relid, schema_name=schema_name, name=name)

    async def set_relation_error(self, subid: int, relid: int, error: str | None, hint: str | None = None) -> None:
        """Store why the table's worker failed, or clear it (None).  Does nothing for a table that has left."""
        async with self._write(bump=True) as connection:
            await connection.execute(update(_T).where(_here(subid, relid)).values(error=error, error_hint=hint))

    async def stop_relation(
        self, subid: int, relid: int, error: str, hint: str | None, lsn: Lsn | None, *, count: Literal["apply", "sync"]
    ) -> None:
        """Mark the table as stopped until its next copy; `lsn` is the finish LSN of the transaction that failed.

        Adds one to the subscription's errors of the kind `count`.  Does nothing for a table that has left meanwhile.
        """
        async with self._write(bump=True) as connection:
            done = await connection.execute(update(_T).where(_here(subid, relid)).values(error=error, error_hint=hint))
            if done.rowcount:
                await _put_incident(connection, subid, relid, stopped=True, error_lsn=lsn)
                counter = schema.statistics.c[f"{count}_error_count"]
                await connection.execute(
                    update(schema.statistics).where(schema.statistics.c.subid == subid).values({counter: counter + 1})
                )

    async def set_foreign_commit(self, subid: int, relid: int, foreign: ForeignCommit) -> None:
        """Record that another writer has changed the table's rows.  Does nothing for a table that has left."""
        async with self._write(bump=False) as connection:
            if (await connection.execute(select(_T.c.relid).where(_here(subid, relid)))).first() is not None:
                await _put_incident(
                    connection,
                    subid,
                    relid,
                    foreign_version=foreign.version,
                    foreign_operation=foreign.operation,
                    foreign_engine=foreign.engine,
                )

    async def _set(self, subid: int, relid: int, **values: str | int | None) -> None:
        async with self._write(bump=True) as connection:
            done = await connection.execute(update(_T).where(_here(subid, relid)).values(**values))
            if done.rowcount == 0:
                raise _undefined(subid, relid)


async def store_state(
    connection: AsyncConnection, subid: int, relid: int, state: RelState, lsn: Lsn | None = None
) -> None:
    """Store a table's state within the caller's transaction, as `set_relation_state` does."""
    old = await _locked(connection, subid, relid)
    if not may_store(RelState(old.state), state):
        raise NotInPrerequisiteState(
            f"table {old.schema_name}.{old.name} cannot go from state {old.state} to state {state.value}"
        )
    await connection.execute(
        update(_T).where(_here(subid, relid)).values(state=state.value, lsn=lsn, error=None, error_hint=None)
    )
    if state is RelState.INIT:
        await _forget_incidents(connection, subid, relid)


async def copy_relation_again(
    connection: AsyncConnection, subid: int, relid: int, definition: str | None = None
) -> None:
    """Have a table copied again, within the caller's transaction, by this definition; its slot has been dropped."""
    await store_state(connection, subid, relid, RelState.INIT)
    given = {} if definition is None else {"definition": definition}
    await connection.execute(update(_T).where(_here(subid, relid)).values(sync_slot=None, **given))


async def delete_relations(connection: AsyncConnection, subid: int, relids: Iterable[int]) -> None:
    """Remove tables within the caller's transaction, as `remove_relations` does."""
    for relid in relids:
        await _remember_generation(connection, subid, relid)
        for table in (
            _T,
            _I,
            schema.copy,
            schema.copy_plan,
            schema.rows,
            schema.storage,
            schema.registration,
            schema.verification,
            schema.worker,
            schema.origin,
        ):
            await connection.execute(delete(table).where(table.c.subid == subid, table.c.relid == relid))


async def _remember_generation(connection: AsyncConnection, subid: int, relid: int) -> None:
    """Keep the copy generation of a table that leaves, so that it gets a higher one if it joins again.

    Its Delta table stays, with the transaction identifiers of this stay, which the next one must not reuse.
    """
    copied = (await connection.execute(select(_T.c.copy_generation).where(_here(subid, relid)))).scalar_one_or_none()
    known = func.coalesce(_S.c.left_generation, -1)
    if copied is not None:
        await connection.execute(update(_S).where(_S.c.oid == subid, known < copied).values(left_generation=copied))


async def relids(connection: AsyncConnection, subid: int) -> set[int]:
    """Return the oids of the subscription's tables, within the caller's transaction."""
    return set((await connection.execute(select(_T.c.relid).where(_T.c.subid == subid))).scalars())


async def insert_relations(connection: AsyncConnection, subid: int, relations: Sequence[NewRelation]) -> None:
    """Insert tables within the caller's transaction.  Raises DuplicateObject as `add_relations` does."""
    if not relations:
        return
    owners = await connection.execute(
        select(_T.c.path, schema.subscription.c.name).join(schema.subscription, schema.subscription.c.oid == _T.c.subid)
    )
    taken: dict[str, dict[str | None, str]] = {}
    for row in owners:
        path, source = from_rows.divided_path(row.path)
        taken.setdefault(path, {})[source] = row.name
    left = (await connection.execute(select(_S.c.left_generation).where(_S.c.oid == subid))).scalar_one_or_none()
    joined = 0 if left is None else left + 1
    known = await relids(connection, subid)
    for new in relations:
        if new.relid in known:
            raise DuplicateObject(f'relation "{new.schema}.{new.name}" is already part of the subscription')
        # Subscriptions with sources of their own share a Delta table.
        others, source = taken.setdefault(new.path, {}), new.whose
        owner = (
            others.get(source) or others.get(None) or (next(iter(others.values()), None) if source is None else None)
        )
        if owner is not None:
            raise DuplicateObject(
                f'the Delta table for relation "{new.schema}.{new.name}" belongs to subscription "{owner}"',
                detail=f"Both would write {new.path}.",
                hint="Give the subscription a folder of its own: WITH (target = '…').",
            )
        known.add(new.relid)
        others[source] = "(this one)"
    await connection.execute(
        insert(_T),
        [
            {
                "subid": subid,
                "relid": new.relid,
                "schema_name": new.schema,
                "name": new.name,
                "state": new.state.value,
                "lsn": new.lsn,
                # One that is to be copied gets its generation from begin_copy.
                "copy_generation": 0 if new.state is RelState.INIT else joined,
                "joined_generation": 0 if new.state is RelState.INIT else joined,
                "path": from_rows.stored_path(new.path, new.whose),
                "definition": new.definition,
                "estimated_rows": new.estimated_rows,
            }
            for new in relations
        ],
    )


async def read_relations(connection: AsyncConnection, subid: int | None = None) -> list[SubscriptionRel]:
    query = _query().order_by(_T.c.subid, _T.c.relid)
    if subid is not None:
        query = query.where(_T.c.subid == subid)
    return [from_rows.relation(row) for row in (await connection.execute(query)).mappings()]


def _query() -> Select[tuple[object, ...]]:
    incident = [column for column in _I.c if column.name not in ("subid", "relid")]
    return select(_T, *incident).outerjoin(_I, (_I.c.subid == _T.c.subid) & (_I.c.relid == _T.c.relid))


async def _put_incident(connection: AsyncConnection, subid: int, relid: int, **values: object) -> None:
    here = (_I.c.subid == subid) & (_I.c.relid == relid)
    if (await connection.execute(update(_I).where(here).values(**values))).rowcount == 0:
        await connection.execute(insert(_I).values(subid=subid, relid=relid, **{"stopped": False, **values}))


async def _forget_incidents(connection: AsyncConnection, subid: int, relid: int) -> None:
    """Delete the table's incidents: they concern rows that the new copy replaces."""
    await connection.execute(delete(_I).where(_I.c.subid == subid, _I.c.relid == relid))


def _here(subid: int, relid: int) -> ColumnElement[bool]:
    return (_T.c.subid == subid) & (_T.c.relid == relid)


async def _locked(connection: AsyncConnection, subid: int, relid: int) -> Row[tuple[object, ...]]:
    row = (await connection.execute(select(_T).where(_here(subid, relid)).with_for_update())).one_or_none()
    if row is None:
        raise _undefined(subid, relid)
    return row


def _undefined(subid: int, relid: int) -> UndefinedObject:
    return UndefinedObject(f"relation with OID {relid} is not part of the subscription with OID {subid}")
