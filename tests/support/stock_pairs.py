"""A stock publisher, our server before it, and a stock subscriber: in databases of shared servers, or on servers of their own.

pair.run("INSERT …")      on the publisher          pair.sub("…")       on the subscriber
pair.subscribe()          CREATE SUBSCRIPTION, by way of our server
pair.equal("t")           the same rows on both sides, sooner or later
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from pubsub.sql.identifiers import quote_literal
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import PATIENCE, wait_until

SETTINGS: Final[dict[str, str | int]] = {
    "wal_retrieve_retry_interval": "100ms",
    "max_worker_processes": 40,
    "max_logical_replication_workers": 24,
    "max_sync_workers_per_subscription": 4,
    "max_prepared_transactions": 10,
    "track_commit_timestamp": "on",
}
_numbers = itertools.count(1)


class Pair:
    """A publisher's database, our server before it, and a subscriber's database."""

    def __init__(
        self,
        publish: Publish,
        publisher: EmbeddedPostgres,
        subscriber: EmbeddedPostgres,
        name: str,
        *,
        encodings: tuple[str, str] = ("", ""),
    ) -> None:
        self.publish, self.publisher, self.subscriber, self.name = publish, publisher, subscriber, name
        """`name`: of both databases."""
        for server, encoding in zip((publisher, subscriber), encodings, strict=True):
            options = f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'" if encoding else ""
            server.create_database(name, options)
        self.made: list[str] = []

    def beside(self, subscriber: EmbeddedPostgres) -> Pair:
        """Return the same publisher's database with another subscriber, whose database is made."""
        subscriber.create_database(self.name)
        other = copy(self)
        other.subscriber, other.made = subscriber, []
        return other

    @property
    def conninfo(self) -> str:
        """Where the subscriber connects to: our server."""
        return self.publish.conninfo(dbname=self.name)

    def _connect(self, server: EmbeddedPostgres) -> psycopg.Connection[Any]:
        return psycopg.connect(server.conninfo(self.name, client_encoding="UTF8"), autocommit=True)

    def run(self, *statements: str) -> None:
        """Run statements on the publisher, each string as one simple query."""
        with self._connect(self.publisher) as connection:
            for sql in statements:
                connection.execute(sql.encode())

    def sub(self, *statements: str) -> None:
        """Run statements on the subscriber, each string as one simple query."""
        with self._connect(self.subscriber) as connection:
            connection.execute(f"SET statement_timeout = '{PATIENCE:g}s'")
            for sql in statements:
                connection.execute(sql.encode())

    def alter(self, statement: str) -> None:
        """Alter the subscription, and wait until its stream has begun anew with what was changed."""
        sender = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{self.name}'"
        ((old,),) = wait_until(lambda: [one for one in self.served(sender) if one[0]], "there is a stream")
        self.sub(f"ALTER SUBSCRIPTION {self.name} {statement}")
        wait_until(lambda: [one for one in self.served(sender) if one[0] not in {None, old}], "it begins anew")

    def both(self, *statements: str) -> None:
        self.run(*statements)
        self.sub(*statements)

    def subscribe(self, name: str = "", publication: str = "p", options: str = "", conninfo: str = "") -> str:
        """Create a subscription, dropped by `close`; return its name, which is its slot's."""
        name = name or self.name
        where = quote_literal(f"{conninfo or self.conninfo} application_name={name}")
        self.sub(f"CREATE SUBSCRIPTION {name} CONNECTION {where} PUBLICATION {publication} {options}")
        self.made.append(name)
        return name

    def drop(self, name: str = "") -> None:
        """Drop a subscription, and its slot at our server."""
        name = name or self.name
        self.sub(f"DROP SUBSCRIPTION {name}")
        self.made.remove(name)

    def published(self, query: str) -> list[tuple[Any, ...]]:
        """Return a query's rows on the publisher, beside our server."""
        with self._connect(self.publisher) as connection:
            return connection.execute(query.encode()).fetchall()

    def served(self, query: str) -> list[tuple[Any, ...]]:
        """Return a query's rows by way of our server."""
        return self.publish.query(query, dbname=self.name)

    def subscribed(self, query: str) -> list[tuple[Any, ...]]:
        """Return a query's rows on the subscriber."""
        with self._connect(self.subscriber) as connection:
            return connection.execute(query.encode()).fetchall()

    def rows(self, query: str) -> tuple[list[Any], list[Any]]:
        return self.published(query), self.subscribed(query)

    def equal(self, *queries: str) -> None:
        """Wait until each query, or table, gives the same rows on both sides."""
        for one in queries:
            query = one if " " in one else f"SELECT t::text FROM {one} t ORDER BY 1"
            self._same(one, lambda query=query: self.published(query), lambda query=query: self.subscribed(query))

    def gives(self, query: str, *rows: Any) -> None:
        """Wait until a query on the subscriber gives these rows; those of one column without their tuples."""
        expected = [row if isinstance(row, tuple) else (row,) for row in rows]
        self._same(query, lambda: expected, lambda: self.subscribed(query))

    def _same(self, what: str, theirs: Callable[[], list[Any]], ours: Callable[[], list[Any]]) -> None:
        try:
            wait_until(lambda: theirs() == ours(), f"{what} is equal")
        except AssertionError:
            wanted, found = theirs(), ours()
            missing, more = [r for r in wanted if r not in found], [r for r in found if r not in wanted]
            pytest.fail(
                f"{what}: {len(wanted)} rows and {len(found)}; missing {missing[:3]}, more {more[:3]}\n"
                f"{self.publish.stands()}\n{self.subscriber.read_log()[-3000:]}"
            )

    def synced(self) -> None:
        """Wait until all tables of the subscriptions are ready."""
        left = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
        try:
            wait_until(lambda: self.subscribed(left) == [(0,)], "all tables are ready")
        except AssertionError:
            states = self.subscribed("SELECT srrelid::regclass, srsubstate FROM pg_subscription_rel")
            pytest.fail(f"{states}\n{self.publish.stands()}\n{self.subscriber.read_log()[-3000:]}")

    def caught_up(self, name: str = "") -> None:
        """Wait until the subscriber has confirmed all of the publisher's WAL."""
        ((lsn,),) = self.published("SELECT pg_current_wal_lsn()")
        confirmed = (
            "SELECT 1 FROM pg_replication_slots "
            f"WHERE slot_name = '{name or self.name}' AND confirmed_flush_lsn >= '{lsn}'"
        )
        try:
            wait_until(lambda: self.served(confirmed) == [(1,)], "the slot is confirmed")
        except AssertionError:
            slots = self.served("SELECT slot_name, active, restart_lsn, confirmed_flush_lsn FROM pg_replication_slots")
            pytest.fail(
                f"{lsn} is not confirmed: {slots}\n{self.publish.stands()}\n{self.subscriber.read_log()[-3000:]}"
            )

    @contextmanager
    def keeps_sync_slots(self) -> Iterator[None]:
        """Have no sync worker drop its slot meanwhile; the subscriber may be killed.

        It does so in a transaction that has changed pg_subscription_rel (tablesync.c: process_syncing_tables_for_sync).
        """
        connection = psycopg.connect(self.subscriber.conninfo(self.name))
        try:
            connection.execute("LOCK TABLE pg_subscription_rel IN SHARE ROW EXCLUSIVE MODE")
            yield
        finally:
            connection.close()

    def subscriber_says(self, text: str, begin: int = 0) -> int:
        """Wait until the subscriber's log has a text after the position `begin`; return the position behind it."""
        found = wait_until(lambda: self.subscriber.read_log().find(text, begin) + 1, f"the subscriber says: {text}")
        return found + len(text)

    def refused(self, sql: str) -> psycopg.Error:
        """Run a statement on the subscriber that fails, and return the error."""
        with pytest.raises(psycopg.Error) as caught:
            self.sub(sql)
        return caught.value

    def slots(self) -> list[str]:
        """Return our server's slots of this database."""
        query = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
        return [name for (name,) in self.served(query)]

    def close(self) -> None:
        """Drop the subscriptions; no slot may be left, and none ever was at the publisher."""
        for name in list(self.made):
            self.drop(name)
        assert self.slots() == []
        assert self.publisher.query("SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'") == []


Make = Callable[..., Pair]


class StockPairs:
    """Servers that the tests of a run share, by version; each starts when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._publishers: dict[str, tuple[EmbeddedPostgres, Publish]] = {}
        self._subscribers: dict[str, EmbeddedPostgres] = {}

    def make(self, publisher: str = "18", subscriber: str = "18", **more: Any) -> Pair:
        """Make an empty database on each side."""
        if publisher not in self._publishers:
            server = EmbeddedPostgres(publisher, settings=SETTINGS).start()
            limits = ("--max-replication-slots", "60", "--max-wal-senders", "60", "--work-mem", "64kB")
            self._publishers[publisher] = server, Publish(self._directory / publisher, server.conninfo(), *limits)
        if subscriber not in self._subscribers:
            self._subscribers[subscriber] = EmbeddedPostgres(subscriber, settings=SETTINGS).start()
        server, publish = self._publishers[publisher]
        return Pair(publish, server, self._subscribers[subscriber], f"s{next(_numbers)}", **more)

    def discard(self, pair: Pair) -> None:
        """Close a pair, and drop its databases."""
        try:
            pair.close()
        finally:
            for server in (pair.subscriber, pair.publisher):
                prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                for (gid,) in server.query(prepared, pair.name):
                    server.execute(f"ROLLBACK PREPARED {quote_literal(gid)}", pair.name)
                server.drop_database(pair.name)

    def close(self) -> None:
        """Stop all servers."""
        for server, publish in self._publishers.values():
            try:
                assert publish.terminate() == 0, publish.tail()
            finally:
                server.close()
        for server in self._subscribers.values():
            server.close()
