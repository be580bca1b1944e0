"""SELECTs on replicated tables and on the publisher's own: the same column names, values and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings

from pubsub.cli.output import text
from pubsub.errors import PubsubError
from pubsub.node.node import Node
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import random_selects

_TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE customers (
    id int PRIMARY KEY, full_name text, "Mixed Case" varchar(20), code char(5), balance numeric(12,2), small smallint,
    big bigint, ratio float8, part real, active bool, born date, seen timestamp, created timestamptz, raw bytea,
    props jsonb, doc json, tags text[], numbers int[], u uuid, m mood, loose numeric, lap interval, daytime time
);
INSERT INTO customers VALUES
    (1, 'Ann Smith', 'One', 'ab', 10.50, 1, 10000000000, 1.5, 1.1, true, '1990-05-17', '2024-01-31 10:20:30.5',
     '2024-02-29 23:59:59.999999+00', '\\x00ff', '{"n": 1, "b": {"c": [1, 2.50, null]}, "s": "x\\"y"}', '{"n": 1.0e3, "t": "z"}',
     '{a,"b c",NULL}', '{3,4}', '2f1a0c3e-0000-4000-8000-000000000001', 'ok', 1.500, '1 day', '10:00'),
    (2, 'bob', NULL, 'abc', -3.25, 2, -7, 2.5, 0.1, false, '2001-12-31', '2023-12-31 00:00:00', '2024-01-01 00:00:00+00',
     '', '{"n": "5"}', '[1]', '{}', '{}', '2f1a0c3e-0000-4000-8000-000000000002', 'sad', 2, '2 days', '09:30'),
    (3, 'Çé_%x', 'Two', NULL, NULL, -1, 3, -2.5, -1.5, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL),
    (4, '', 'One', 'abcde', 0.00, NULL, 0, 'NaN', NULL, true, '1970-01-01', '1970-01-01', '1969-12-31 12:00:00+00',
     '\\xab', '[]', 'null', '{{x},{y}}', '[0:1]={7,8}', NULL, 'ok', NULL, NULL, NULL);
CREATE TABLE orders (id int PRIMARY KEY, customer_id int, amount numeric(10,2), placed timestamptz, "Note" text);
INSERT INTO orders VALUES (1, 1, 5.00, '2024-03-01 12:00+00', 'a'), (2, 1, 7.25, '2024-03-02 12:00+00', NULL),
    (3, 2, 1.10, '2024-04-01 00:00+00', 'A'), (4, NULL, 99.99, NULL, 'b');
CREATE TABLE natural_ones (id int PRIMARY KEY, tags text[], numbers int[]);
INSERT INTO natural_ones VALUES (1, '{a,b}', '{3,4}'), (2, '{}', NULL), (3, '{NULL,z}', '{7}');
CREATE TABLE kept (
    id int PRIMARY KEY, t time, i inet, c cidr, m macaddr, r int4range, d daterange, l pg_lsn, b bit(3), v varbit, x8 xid8, x text,
    n numeric(10,3), f real, g float8, ch char(4), vc varchar(9)
);
INSERT INTO kept VALUES
    (1, '10:00', '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', '[1,2]', '[2024-01-01,2024-01-31]', '0/16B3748', '101', '1', '5',
     '2024-03-01 10:00:00+05', 1.005, 0.1, 0.1, 'ab', 'ab'),
    (2, '09:30:00.5', '10.0.0.1/8', '::1/128', '08:00:2b:01:02:04', 'empty', 'empty', '1/0', '000', '', '77', '2024-03-01',
     -2.5, 1.5, 2.5, 'abcd', 'ab '),
    (3, '9:45', '::ffff:1.2.3.4', '2001:db8::/32', NULL, '(,5)', '[2024-01-01,)', NULL, NULL, NULL, NULL, '10.99',
     NULL, NULL, NULL, NULL, NULL);
CREATE PUBLICATION p FOR TABLE customers, orders, natural_ones, kept;
"""


def _statements(name: str) -> list[str]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("--")]


@pytest.fixture(scope="module")
def pair(publisher: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Any, Any]]:
    """A node that has copied the tables, its runner, and a connection to the publisher."""
    publisher.create_database("selects")
    database = Database(publisher, "selects")
    database.execute(_TABLES)
    home = tmp_path_factory.mktemp("select")
    settings = Settings.read({"max_sync_workers_per_subscription": 3, "catalog_poll_interval": "50ms"}, home)
    with asyncio.Runner() as runner:
        node = Node(home, workers=True, settings=settings)
        runner.run(node.__aenter__())
        try:
            runner.run(
                node.execute(
                    f"CREATE SUBSCRIPTION s CONNECTION {quote_literal(database.conninfo)} PUBLICATION p "
                    "WITH (types = 'public.natural_ones.tags natural, public.natural_ones.numbers natural')"
                )
            )
            runner.run(node.wait_for_catchup("s", timeout=180))
            options = "-c timezone=UTC -c extra_float_digits=1"
            with psycopg.connect(database.conninfo, autocommit=True, options=options) as connection:
                yield node, runner, connection
            runner.run(node.execute("DROP SUBSCRIPTION s"))
        finally:
            runner.run(node.__aexit__(None, None, None))
    publisher.drop_database("selects")


def _server(connection: Any, sql: str) -> Any:
    found = connection.pgconn.exec_(sql.encode())
    if found.error_message:
        return found.error_field(psycopg.pq.DiagnosticField.SQLSTATE).decode(), _field(
            found, psycopg.pq.DiagnosticField.MESSAGE_PRIMARY
        )
    columns = [(found.fname(n) or b"").decode() for n in range(found.nfields)]
    rows = [
        [None if (v := found.get_value(r, n)) is None else v.decode() for n in range(found.nfields)]
        for r in range(found.ntuples)
    ]
    return columns, rows


def _field(found: Any, field: Any) -> str:
    text_: str = found.error_field(field).decode()
    return text_


def _node(node: Node, runner: Any, sql: str) -> Any:
    try:
        (found,) = runner.run(node.execute(sql))
    except PubsubError as error:
        return error.sqlstate, error.message
    return list(found.columns), [[None if one is None else text(one) for one in row] for row in found.rows]


@pytest.mark.parametrize("sql", _statements("test_059_answered.sql"))
def test_answers_are_postgresql_s(pair: tuple[Node, Any, Any], sql: str) -> None:
    node, runner, connection = pair
    assert _node(node, runner, sql) == _server(connection, sql)


def _check_random(pair: tuple[Node, Any, Any], sql: str, *, rows: bool = False) -> None:
    node, runner, connection = pair
    ours, theirs = _node(node, runner, sql), _server(connection, sql)
    if ours[0] == "0A000":
        return
    if isinstance(ours[0], str):
        # An error's words can name what DataFusion has made of a value.  Of several `rows` another can be the first to fail.
        assert isinstance(theirs[0], str) if rows else ours[0] == theirs[0], sql
    elif rows:
        # Where rows are grouped, DataFusion's zero has no sign.
        assert (ours[0], _unsigned(ours[1])) == (theirs[0], _unsigned(theirs[1])), sql
    else:
        assert ours == theirs, sql


def _unsigned(rows: list[list[str | None]]) -> list[list[str | None]]:
    return [["0" if value == "-0" else value for value in row] for row in rows]


_ONE_NODE: Final = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.full
@settings(max_examples=300, deadline=None, suppress_health_check=_ONE_NODE)
@given(expression=random_selects.expressions())
def test_random_expressions(pair: tuple[Node, Any, Any], expression: str) -> None:
    """What is answered, is answered as by PostgreSQL."""
    _check_random(pair, f"SELECT {expression}")


@pytest.mark.full
@settings(max_examples=200, deadline=None, suppress_health_check=_ONE_NODE)
@given(sql=random_selects.queries())
def test_random_queries(pair: tuple[Node, Any, Any], sql: str) -> None:
    """A constant is worked out when the query is planned, a column's values when it runs."""
    _check_random(pair, sql, rows=True)


@pytest.mark.full
@settings(max_examples=5000, deadline=None, suppress_health_check=_ONE_NODE)
@given(expression=random_selects.expressions())
def test_thousands_of_random_expressions(pair: tuple[Node, Any, Any], expression: str) -> None:
    _check_random(pair, f"SELECT {expression}")


@pytest.mark.full
@settings(max_examples=5000, deadline=None, suppress_health_check=_ONE_NODE)
@given(sql=random_selects.queries())
def test_thousands_of_random_queries(pair: tuple[Node, Any, Any], sql: str) -> None:
    _check_random(pair, sql, rows=True)


@pytest.mark.parametrize("sql", _statements("test_059_refused.sql"))
def test_refusals_are_postgresql_s(pair: tuple[Node, Any, Any], sql: str) -> None:
    node, runner, connection = pair
    assert _node(node, runner, sql) == _server(connection, sql)
