"""Commands that a kill ends between two of their steps: the catalog then holds all of a change or nothing of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from catalog.records import NewRelation, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher import altersubscription
from launcher.client_session import Session
from launcher.subscriptioncmds import execute
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher.publication import PublishedTable
from pubsub.settings import Settings
from pubsub.sql.parser import parse_one
from pubsub.sql.statements import AlterSubscription, CreateSubscription

OLD, NEW = Lsn(0x500), Lsn(0x900)


class Killed(Exception):
    """Stands for the end of the process: nothing that the command does afterwards has an effect, either."""


class Publisher:
    """What the commands ask of a publisher, in place of a connection.  `tables`: what is published, by oid."""

    dbname = "d"
    server_version = 180000

    def __init__(self) -> None:
        self.tables: dict[int, str] = {}
        self.slot = OLD
        self.steps = -1
        """How many steps are taken before the kill; negative: no kill."""

    def step(self) -> None:
        """Take a step on the publisher or in the catalog, unless the command is dead by then."""
        if self.steps == 0:
            raise Killed
        self.steps -= 1

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def connect(self, *_: object) -> Publisher:
        return self

    async def published_tables(self, *_: object) -> dict[Oid, PublishedTable]:
        return {
            Oid(oid): PublishedTable(Oid(oid), "public", name, None, None, "r", False, "d", False)
            for oid, name in self.tables.items()
        }

    async def identify(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(system_identifier="7", timeline=2, xlogpos=NEW)

    async def plan(self, _: object, __: object, new: Collection[Oid], *___: object, **____: object) -> list[Any]:
        def relation(oid: int, copy_data: bool, lsn: Lsn | None) -> NewRelation:
            return NewRelation(oid, "public", self.tables[oid], f"/w/{oid}")

        return [
            SimpleNamespace(
                relation=lambda oid=oid, **given: relation(oid, **given),
                target=SimpleNamespace(relation=f"public.{self.tables[oid]}", path=f"/w/{oid}"),
            )
            for oid in new
        ]

    async def slot_info(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(name="s", lost=False, confirmed_flush_lsn=self.slot)

    async def advance_slot(self, *_: object) -> Lsn:
        self.step()
        self.slot = NEW
        return NEW


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    publisher = Publisher()

    async def nothing(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(Session, "connect", publisher.connect)
    monkeypatch.setattr(altersubscription, "check_system", publisher.identify)
    monkeypatch.setattr(altersubscription, "identify_system", publisher.identify)
    monkeypatch.setattr(altersubscription, "drop_slots_of", nothing)
    tables = altersubscription.published_tables
    monkeypatch.setattr(tables, "check_publications", nothing)
    monkeypatch.setattr(tables, "published_tables", publisher.published_tables)
    monkeypatch.setattr(tables, "plan", publisher.plan)
    for name in ("slot_info", "advance_slot"):
        monkeypatch.setattr(altersubscription.slots, name, getattr(publisher, name))
    write = Catalog._write

    @asynccontextmanager
    async def killed(catalog: Catalog, *, bump: bool) -> AsyncIterator[Any]:
        publisher.step()
        async with write(catalog, bump=bump) as connection:
            yield connection

    monkeypatch.setattr(Catalog, "_write", killed)
    return publisher


class World:
    """A subscription with tables `a` and `b`, which are ready."""

    def __init__(self, catalog: Catalog, publisher: Publisher, home: Path) -> None:
        self.catalog = catalog
        self.publisher = publisher
        self.session = Session(Settings(home=home), catalog, lambda _: None)

    async def make(self) -> None:
        create = "CREATE SUBSCRIPTION s CONNECTION 'host=h' PUBLICATION p WITH (connect = false)"
        for sql in (create, "ALTER SUBSCRIPTION s ENABLE"):
            await self.run(sql)
        oid = await self.oid()
        await self.catalog.set_publisher(oid, "7", 1)
        ready = [
            NewRelation(relid, "public", name, f"/w/{relid}", RelState.READY, OLD)
            for relid, name in ((1, "a"), (2, "b"))
        ]
        await self.catalog.add_relations(oid, ready)
        await self.catalog.advance_origin(oid, OLD)

    async def run(self, sql: str) -> None:
        statement = parse_one(sql)
        assert isinstance(statement, CreateSubscription | AlterSubscription)
        await execute(self.session, statement)

    async def killed(self, sql: str, steps: int) -> bool:
        """Run the command and kill it after so many steps; return whether it was killed."""
        self.publisher.steps = steps
        try:
            await self.run(sql)
        except Killed:
            return True
        finally:
            self.publisher.steps = -1
        return False

    async def oid(self) -> int:
        return (await self.catalog.subscription("s")).oid

    async def tables(self) -> dict[str, SubscriptionRel]:
        return {relation.name: relation for relation in await self.catalog.relations(await self.oid())}


@asynccontextmanager
async def world(publisher: Publisher, home: Path) -> AsyncIterator[World]:
    async with await Catalog.open(home / "catalog.db") as catalog:
        world = World(catalog, publisher, home)
        await world.make()
        yield world


@pytest.mark.parametrize("published", [{1: "a", 2: "b"}, {1: "a", 12: "b"}])
async def test_resync_of_every_table(publisher: Publisher, tmp_path: Path, published: dict[int, str]) -> None:
    """A table once stayed in r though the stream was to begin anew, or was gone if it had been made anew."""
    publisher.tables = published
    for steps in itertools.count():
        publisher.slot = OLD
        async with world(publisher, tmp_path / str(steps)) as here:
            killed = await here.killed("ALTER SUBSCRIPTION s RESYNC TABLE a, b", steps)
            tables = await here.tables()
            assert tables.keys() == {"a", "b"}
            states = {relation.state for relation in tables.values()}
            assert states in ({RelState.READY}, {RelState.INIT})
            origin = await here.catalog.origin(await here.oid())
            if publisher.slot == NEW:
                assert states == {RelState.INIT}
                assert origin in (INVALID_LSN, NEW)
            if not killed:
                assert (states, publisher.slot) == ({RelState.INIT}, NEW)
                assert (await here.catalog.subscription("s")).publisher_timeline == 2
                return


async def test_refresh(publisher: Publisher, tmp_path: Path) -> None:
    """The new publications were stored, and the tables that they publish not: no worker ever missed them."""
    publisher.tables = {1: "a", 3: "c"}
    for steps in itertools.count():
        async with world(publisher, tmp_path / str(steps)) as here:
            killed = await here.killed("ALTER SUBSCRIPTION s SET PUBLICATION q", steps)
            publications = (await here.catalog.subscription("s")).publications
            assert (publications, set(await here.tables())) in ((("p",), {"a", "b"}), (("q",), {"a", "c"}))
            if not killed:
                assert publications == ("q",)
                return


@pytest.mark.parametrize("command", ["ADD PUBLICATION q", "REFRESH PUBLICATION"])
async def test_a_command_beside_another_one(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The publication that the other one has added was gone, and so were its tables."""
    publisher.tables = {1: "a", 2: "b"}
    async with world(publisher, tmp_path) as here:

        async def published(*_: object) -> dict[Oid, PublishedTable]:
            found = await publisher.published_tables()
            await here.catalog.alter_subscription(await here.oid(), publications=("p", "r"))
            await here.catalog.add_relations(await here.oid(), [NewRelation(4, "public", "of_r", "/w/4")])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(altersubscription.published_tables, "published_tables", published)
            with pytest.raises(NotInPrerequisiteState, match="altered by another command meanwhile"):
                await here.run(f"ALTER SUBSCRIPTION s {command}")
        assert (await here.catalog.subscription("s")).publications == ("p", "r")
        assert set(await here.tables()) == {"a", "b", "of_r"}
        publisher.tables[4] = "of_r"
        await here.run(f"ALTER SUBSCRIPTION s {command}")
        assert set(await here.tables()) == {"a", "b", "of_r"}
