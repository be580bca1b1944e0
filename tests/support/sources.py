"""Tenants: databases of one server whose tables one Delta table takes, each by a subscription with a source of its own."""

from __future__ import annotations

import zlib
from typing import Any

from pubsub.sql.identifiers import quote_identifier, quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode

COLUMN = "_pubsub_source"


class Tenant(Replica):
    """A database, and its subscription with the source `value` to the target `target`."""

    def __init__(self, node: RunningNode, server: EmbeddedPostgres, value: str, target: str) -> None:
        super().__init__(node, Database(server, f"{target}_{zlib.crc32(value.encode())}"))
        self.value = value
        self.target = target
        server.create_database(self.database.name)

    def close(self) -> None:
        """Drop the subscription and the database; no slot may be left."""
        if self.created:
            self.drop()
        assert self.slots() == []
        self.database.server.drop_database(self.database.name)

    def join(self, **options: object) -> None:
        """Run CREATE SUBSCRIPTION, and wait until all tables are ready."""
        self.subscribe(**{"target": f"'{self.target}'", "source": quote_literal(self.value), **options})
        self.until_ready()

    def own(self, table: str, what: str = "*") -> list[dict[str, Any]]:
        """Return the source's rows of the Delta table."""
        value = self.value.replace("'", "''")  # DataFusion takes a backslash as it is
        return self.rows(table, f"{what} FROM delta_t WHERE \"{COLUMN}\" = '{value}'")

    def publishers(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        """Return the publisher's rows."""
        listed = ", ".join(quote_identifier(one.strip()) for one in columns.split(","))
        return sorted(self.query(f"SELECT {listed} FROM {table}"), key=repr)

    def assert_own(self, table: str, columns: str = "id, v, n", caught_up: bool = True) -> None:
        """The source's rows are the publisher's, and `pubsub verify` finds so, too."""
        if caught_up:
            self.caught_up()
        names = [one.strip() for one in columns.split(",")]
        found = sorted((tuple(row[name] for name in names) for row in self.own(table)), key=repr)
        assert found == self.publishers(table, columns), (self.value, table)

    def assert_verified(self, *tables: str) -> None:
        """`pubsub verify` finds the tables equal."""
        report = self.node.run(self.node._node.verify(self.name))
        outcomes = {one.relation: (one.outcome, one.reason) for one in report.tables}
        assert {name: outcomes[name][0] for name in tables} == dict.fromkeys(tables, "equal"), outcomes
