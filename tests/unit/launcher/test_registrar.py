"""The names of tables in catalogs: what is remembered of a table that has moved and whose old name could not be taken away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from catalog.figures import Registration
from catalog.records import SubscriptionRel
from catalog.states import RelState
from launcher.registrar import Registrar
from pubsub.setting_tables import SparkSettings

NAME = ("spark_catalog", "shop", "a")


class Engine:
    """Its catalog has one table, with the path of before; `fails`: what it answers to whoever takes a name away."""

    def __init__(self) -> None:
        self.registered: dict[Any, str] = {NAME: "/old"}
        self.fails: Exception | None = None

    async def fence(self) -> None: ...

    async def run(self, work: Any, path: str, name: Any) -> bool:
        if work.__name__ == "forget":
            if self.fails is not None:
                raise self.fails
            return self.registered.pop(name) == path
        assert name not in self.registered, "it is another table"
        self.registered[name] = path
        return True


class Catalog:
    def __init__(self) -> None:
        self.stored = Registration(1, 2, "/old", NAME)
        self.relation = SubscriptionRel(
            1, 2, "public", "a", RelState.READY, None, 1, None, "/new", None, None, "{}", None
        )

    async def change_counter(self) -> int:
        return 1

    async def prove(self) -> None: ...

    async def state(self) -> Any:
        options = SimpleNamespace(register="spark_catalog.shop")
        return SimpleNamespace(
            subscriptions=[SimpleNamespace(oid=1, options=options)],
            registrations=[self.stored],
            relations=[self.relation],
        )

    async def put_statistics(self, registrations: list[Registration]) -> None:
        [self.stored] = registrations


def test_a_table_that_moved_and_keeps_its_name_for_a_while() -> None:
    """The old path is remembered until the name is gone from it: with the new one the name would be another table's for ever."""

    async def main() -> None:
        catalog, engine = Catalog(), Engine()
        settings = SparkSettings(conf={"spark.sql.catalogImplementation": "hive"})
        one: Any = Registrar(settings, catalog, engine)  # type: ignore[arg-type]
        engine.fails = RuntimeError("the metastore is away")
        await one._look()
        assert catalog.stored == Registration(1, 2, "/old", NAME, "RuntimeError: the metastore is away")
        engine.fails = None
        one._again = dict.fromkeys(one._again, 0.0)
        await one._look()
        assert catalog.stored == Registration(1, 2, "/new", NAME)
        assert engine.registered == {NAME: "/new"}

    asyncio.run(main())
