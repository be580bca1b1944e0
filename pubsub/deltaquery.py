"""SELECT on replicated tables, without a JVM: DataFusion, by the deltalake package, reads the Delta tables.

A table goes by schema.name as in the publisher, without a schema in public; target.schema.name tells tables of several
subscriptions apart.  Each table is read as of one version; two tables of a query may show different LSNs (pubsub
snapshot gives versions that fit together).
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from sqlglot import exp

from apply.delta.table import opened
from catalog.records import State, SubscriptionRel
from catalog.system_views import VIEWS
from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedTable
from pubsub.sql.dialect import parse_query


class Rows(NamedTuple):
    """A query's answer: values as Python has them (Decimal, aware datetime in UTC, bytes)."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


#: DataFusion's complaints and PostgreSQL's words for them.
_COMPLAINTS: Final = (
    (re.compile(r"No field named (\S+?)\.(?:\s|$)"), "column {} does not exist", "42703"),
    (re.compile(r"Invalid function '([^']+)'"), "function {} does not exist", "42883"),
    (re.compile(r"Ambiguous reference to unqualified field (\S+)"), "column reference {} is ambiguous", "42702"),
)


def select(state: State, sql: str) -> Rows:
    """Run one query.  Blocks.  Raises SqlSyntaxError, UndefinedTable and others, in PostgreSQL's words."""
    tree = parse_query(sql)
    places = _bind(tree, state)
    names = _name_columns(tree)
    from deltalake import DeltaTable, QueryBuilder

    builder = QueryBuilder()
    for alias, relation in places.items():
        if not DeltaTable.is_deltatable(relation.path):
            raise UndefinedTable(
                f'table "{relation.qualified_name}" has no rows yet',
                detail="Its initial copy has not been committed.",
                hint="pubsub status shows how far it is.",
            )
        builder.register(alias, opened(relation.path))
    try:
        result = builder.execute(tree.sql("postgres")).read_all()
    except Exception as error:
        raise _typed(error) from error
    return _python(result, names)


def find_relation(state: State, schema: str, name: str, target: str | None = None) -> SubscriptionRel:
    """The replicated table of that name.  Raises UndefinedTable, and 42P09 when several subscriptions have one."""
    targets = {subscription.oid: subscription.target for subscription in state.subscriptions}
    found = [
        relation
        for relation in state.relations
        if (relation.schema, relation.name) == (schema, name) and target in (None, targets.get(relation.subid))
    ]
    if not found:
        raise UndefinedTable(f'relation "{schema}.{name}" does not exist')
    if len(found) > 1:
        known = ", ".join(sorted(f'"{targets[relation.subid]}"' for relation in found))
        raise PubsubError(
            f'table reference "{schema}.{name}" is ambiguous',
            sqlstate="42P09",
            detail=f"There is one in each of the targets {known}.",
            hint="Put the target before it: target.schema.table.",
        )
    return found[0]


def _bind(tree: exp.Query, state: State) -> dict[str, SubscriptionRel]:
    """Give each table in the query a name that DataFusion has registered; the user's name stays as its alias."""
    own = {cte.alias_or_name for cte in tree.find_all(exp.CTE)}
    places: dict[str, SubscriptionRel] = {}
    by_relation: dict[tuple[int, int], str] = {}
    for table in list(tree.find_all(exp.Table)):
        if not isinstance(table.this, exp.Identifier):
            continue
        schema, name = _fold(table.args.get("db")), _fold(table.this)
        assert name is not None
        if schema is None and name in own:
            continue
        if schema in (None, "pg_catalog") and name in VIEWS:
            raise FeatureNotSupported(
                "a query on both views and replicated tables is not supported", hint="Ask for them in two queries."
            )
        try:
            relation = find_relation(state, schema or "public", name, _fold(table.args.get("catalog")))
        except UndefinedTable:
            shown = name if schema is None else f"{schema}.{name}"
            raise UndefinedTable(f'relation "{shown}" does not exist') from None
        key = (relation.subid, relation.relid)
        registered = by_relation.setdefault(key, f"pubsub_{len(by_relation)}")
        places[registered] = relation
        if not table.alias:
            table.set("alias", exp.TableAlias(this=exp.to_identifier(name, quoted=True)))
        table.set("this", exp.to_identifier(registered))
        table.set("db", None)
        table.set("catalog", None)
    for column in tree.find_all(exp.Column):
        column.set("db", None)
        column.set("catalog", None)
    return places


def _fold(identifier: Any) -> str | None:
    if identifier is None or not identifier.this:
        return None
    name: str = identifier.this
    return name if identifier.args.get("quoted") else name.lower()


def _name_columns(tree: exp.Query) -> dict[str, str]:
    """Give the columns without a name one of ours: by it, the name that PostgreSQL would give (FigureColname).

    DataFusion names a column after its whole expression, and refuses two of one name.
    """
    first: Any = tree
    while isinstance(first, exp.SetOperation):
        first = first.left
    names: dict[str, str] = {}
    if isinstance(first, exp.Select):
        for column in first.expressions:
            if isinstance(column, exp.Alias | exp.Star) or (isinstance(column, exp.Column) and not column.is_star):
                continue
            if not column.is_star:
                ours = f"pubsub_column_{len(names)}"
                names[ours] = _figure_name(column)
                column.replace(exp.alias_(column.copy(), ours, quoted=True))
    return names


def _figure_name(column: exp.Expression) -> str:
    match column:
        case exp.Cast() | exp.Paren() | exp.Window() | exp.Filter():
            return _figure_name(column.this)
        case exp.Column():
            return column.name
        case exp.Case():
            return "case"
        case exp.Anonymous():
            return str(column.this).lower()
        case exp.Func() if not isinstance(column, exp.Connector):
            return column.sql_name().lower()
        case _:
            return "?column?"


def _python(result: Any, names: dict[str, str]) -> Rows:
    import pyarrow as pa

    table = pa.table(result)
    columns = [column.to_pylist() for column in table.columns]
    shown = tuple(names.get(name, name) for name in table.column_names)
    return Rows(shown, list(zip(*columns, strict=True)) if columns else [()] * table.num_rows)


def _typed(error: Exception) -> PubsubError:
    text = str(error).strip()
    for pattern, message, sqlstate in _COMPLAINTS:
        if match := pattern.search(text):
            return PubsubError(message.format(_quoted(match[1])), sqlstate=sqlstate)
    first = re.sub(r"^(DataFusion error: |\w[\w ]* error: )+", "", text.split("\n")[0])
    return PubsubError(first, sqlstate="42000")


def _quoted(name: str) -> str:
    return f'"{name.strip(chr(34) + chr(39))}"'
