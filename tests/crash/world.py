"""One round's world: a database, a network to it, a node, a subscription."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from catalog.records import SubscriptionRel
from pubsub.errors import ConnectionFailure
from pubsub.node.node import Node as Client
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.bad_network import BadNetwork
from pubsub.testing.servers import EmbeddedPostgres
from tests.crash.load import PUBLICATION
from tests.crash.machine import Machine, Node
from tests.crash.plan import Plan


@dataclass(slots=True)
class World:
    """`name`: the database's and the subscription's."""

    plan: Plan
    machine: Machine
    server: EmbeddedPostgres
    node: Node
    network: BadNetwork
    name: str

    @property
    def conninfo(self) -> str:
        """The publisher's connection string, past the network."""
        return self.server.conninfo(self.name)

    def connect(self) -> psycopg.Connection:
        """Connect to the publisher, past the network."""
        return self.server.connect(self.name)

    def execute(self, statements: str) -> None:
        """Run statements past the network; a lock that a prepared transaction holds is not waited for long."""
        self.server.execute(f"SET lock_timeout = '2s'; {statements}", self.name)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.server.query(statement, self.name)

    def persist(self, statements: str, patience: float = 60.0) -> None:
        """Run an ALTER PUBLICATION … ADD or DROP TABLE as soon as the server takes it; it may have taken it before."""
        deadline = time.monotonic() + patience
        while True:
            try:
                self.execute(statements)
                return
            except (psycopg.errors.DuplicateObject, psycopg.errors.UndefinedObject):
                return
            except psycopg.Error as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{statements}: {error}") from error
                time.sleep(0.1)

    def subscribe(self) -> None:
        """Create the subscription, by way of the network."""
        options = " ".join(f"-c {name}={value}" for name, value in self.plan.session.items())
        more = {"options": options} if options else {}
        conninfo = self.server.conninfo(self.name, port=self.network.port, **more)
        listed = ", ".join(f"{name} = {value}" for name, value in self.plan.options.items())
        statement = f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(conninfo)} PUBLICATION {PUBLICATION} WITH ({listed})"
        for attempt in range(5):
            try:
                self.node.daemon.execute(statement)
                return
            except ConnectionFailure:
                # PostgreSQL 18.4 has crashed while it made a slot under DDL; there is no subscription then.
                if attempt == 4:
                    raise
                time.sleep(1)

    def drop(self) -> None:
        self.node.daemon.execute(f"DROP SUBSCRIPTION {self.name}")

    def relations(self) -> list[SubscriptionRel]:
        async def read(node: Client) -> list[SubscriptionRel]:
            return await node.catalog.relations((await node.catalog.subscription(self.name)).oid)

        return list(self.node.daemon.client(read))

    def slots(self) -> list[str]:
        rows = self.query("SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1")
        return [name for (name,) in rows]
