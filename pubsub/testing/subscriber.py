"""A subscription of a test: made, waited for, compared with its publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pubsub.testing.daemon import Daemon
from pubsub.testing.fault_points import PATIENCE

if TYPE_CHECKING:
    from pubsub.testing.compare import Difference


class Subscriber:
    """The subscription `name` of a daemon's node, with a publication of the same name.

    `publisher`: the publisher's connection string, with which it is asked; the node may have another one to it.
    """

    def __init__(self, daemon: Daemon, publisher: str, name: str = "pubsub_test") -> None:
        self.daemon, self.publisher, self.name = daemon, publisher, name

    def create(self, tables: Sequence[str], conninfo: str, options: str = "") -> None:
        """Publish the tables (none: all of the database's) and subscribe.  `options`: "name = value, …"."""
        import psycopg

        from pubsub.sql.identifiers import quote_literal

        what = f"TABLE {', '.join(tables)}" if tables else "ALL TABLES"
        with psycopg.connect(self.publisher, autocommit=True) as connection:
            connection.execute(f"CREATE PUBLICATION {self.name} FOR {what}".encode())
        given = f", {options}" if options else ""
        self.daemon.execute(
            f"CREATE SUBSCRIPTION {self.name} CONNECTION {quote_literal(conninfo)} PUBLICATION {self.name} "
            f"WITH (batch_age = '20ms'{given})"
        )

    def wait(self, timeout: float = PATIENCE) -> None:
        """Wait until all that the publisher has committed is visible.  Raises CatchupTimeoutError."""
        self.daemon.wait_for_catchup(self.name, timeout)

    def path(self, table: str) -> str:
        """Return where a table's Delta table is; `table`: "public.orders".  Raises KeyError."""
        paths = {
            one["relation"]: one["path"] for one in self.daemon.fetch("SELECT relation, path FROM pg_subscription_rel")
        }
        return str(paths[table])

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a SELECT over the Delta tables, after everything has arrived."""
        self.wait()
        return self.daemon.fetch(query)

    def difference(self, table: str) -> Difference | None:
        """Wait, and compare every row and column with the publisher's; None if they are equal."""
        from pubsub.testing.compare import compare_tables

        self.wait()
        return compare_tables(self.publisher, table, self.path(table))
