"""Subscriptions and tables for the tests of the catalog."""

from __future__ import annotations

from dataclasses import replace

from catalog.records import NewRelation, NewSubscription, Subscription
from catalog.store import Catalog
from pubsub.sql.options import SubscriptionOptions


def new(name: str = "sub", **fields: object) -> NewSubscription:
    made = NewSubscription(
        name=name,
        conninfo="host=h password=secret",
        publications=("p", "q"),
        options=SubscriptionOptions(batch_rows=7, streaming="on", origin="none"),
        target="db",
        slot_name=name,
        publisher_system_identifier="18446744073709551615",
        publisher_timeline=1,
        publisher_database="db",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def table(relid: int = 1, name: str = "t", target: str = "db") -> NewRelation:
    return NewRelation(relid, "public", name, f"/w/{target}/public/{name}")


async def with_table(catalog: Catalog) -> Subscription:
    return await catalog.create_subscription(new(), [table()])
