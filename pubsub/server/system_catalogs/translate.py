"""PostgreSQL's SQL on the system catalogs as SQLite's.

Arrays are text there, regclass and its relatives are oids or names, and functions have no schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported
from pubsub.node.select.scope import folded
from pubsub.server.system_catalogs.definitions import PUBLISHED, definitions
from pubsub.server.system_catalogs.result_types import Column, cast_name, columns_of, type_of
from pubsub.sql.lexer import tokenize

_OIDS: Final = {"regclass", "regnamespace", "regrole", "regtype"}
_INTEGERS: Final = {"int2", "int4", "int8", "oid", "xid", "cardinal_number"}
_TEXTS: Final = {"text", "varchar", "name", "bpchar", "char", "sql_identifier", "character_data"}
_OPERATORS: Final = {"~": "regexp", "!~": "regexp", "~*": "pg_regexp_any_case", "!~*": "pg_regexp_any_case"}


#: Functions in FROM that return nothing here, with their columns.
_EMPTY: Final = {
    "pg_partition_ancestors": "relid", "pg_partition_tree": "relid parentrelid isleaf level",
    "aclexplode": "grantor grantee privilege_type",
    "pg_available_extensions": "name default_version comment", "pg_options_to_table": "option_name option_value",
    "pg_get_keywords": "word catcode barelabel catdesc baredesc", "pg_timezone_names": "name abbrev utc_offset is_dst",
    "pg_get_publication_tables": "pubid relid attrs qual", "pg_listening_channels": "pg_listening_channels",
    "pg_stat_get_activity": "datid pid usesysid", "pg_lock_status": "locktype database relation pid mode granted",
    "pg_event_trigger_ddl_commands": "classid", "pg_ls_dir": "pg_ls_dir",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Translated:
    """A query in SQLite's SQL, and its columns."""

    sql: str
    columns: tuple[Column, ...]


def relations_of(tree: Any) -> set[tuple[str | None, str]]:
    """Return the relations that a query names, as (schema, name), without the queries of its WITH."""
    common = {one.alias for with_ in tree.find_all(exp.With) for one in with_.expressions}
    found: set[tuple[str | None, str]] = set()
    for one in tree.find_all(exp.Table):
        if isinstance(one.this, exp.Identifier):
            schema = folded(one.args["db"]) if one.args.get("db") is not None else None
            name = folded(one.this)
            if schema is not None or name not in common:
                found.add((schema, name))
    return found


def is_system(schema: str | None, name: str) -> bool:
    """Return whether this is a relation of the system catalogs."""
    return name in definitions().relations.get(schema or "pg_catalog", {})


def translate(tree: Any, ask: Callable[[str], list[str]]) -> Translated:
    """Translate a query.  `ask` returns the names of a query's columns.  Raises FeatureNotSupported."""
    columns = columns_of(tree)
    root = tree.copy()
    for clause in list(root.find_all(exp.Lock)):
        clause.pop()
    _with_publications(root)
    sql = _rewritten(root).sql(dialect="sqlite")
    if columns is None:
        columns = [Column(name, "text") for name in ask(sql)]
    return Translated(sql, tuple(columns))


def _with_publications(root: Any) -> None:
    """Put a relation in the place of pg_get_publication_tables, which SQLite cannot call with a column.

    `LATERAL pg_get_publication_tables(p.pubname) gpt` is joined by the name; `(pg_get_publication_tables(VARIADIC
    array_agg(pubname))).*` becomes the rows of those publications.
    """
    for call in [one for one in root.find_all(exp.Anonymous) if str(one.this).lower() == "pg_get_publication_tables"]:
        select = call.find_ancestor(exp.Select)
        holder = call.parent
        if isinstance(holder, exp.Paren) and isinstance(holder.parent, exp.Dot):
            inner = exp.Select(expressions=[exp.column("pubname")])
            for part in ("from_", "joins", "where"):
                inner.set(part, select.args.get(part))
                select.set(part, None)
            names = [exp.column(one) for one in ("pubid", "relid", "attrs", "qual")]
            select.set("expressions", names)
            select.from_(exp.to_table(f"pg_catalog.{PUBLISHED}"), copy=False)
            select.where(exp.In(this=exp.column("pubname"), query=exp.Subquery(this=inner)), copy=False)
            continue
        alias = holder.args.get("alias") or exp.TableAlias(this=exp.to_identifier("pg_get_publication_tables"))
        argument = call.expressions[0]
        argument = argument.this if isinstance(argument, exp.Variadic) else argument
        column = exp.column("pubname", alias.name)
        wanted = (
            _call("pg_is_any", column, argument)
            if isinstance(argument, exp.Array)
            else exp.EQ(this=column, expression=argument)
        )
        table = exp.Table(
            this=exp.to_identifier(PUBLISHED),
            db=exp.to_identifier("pg_catalog"),
            alias=alias,
            joins=holder.args.get("joins"),
        )
        holder.replace(table)
        select.where(wanted, copy=False)


def _rewritten(root: Any) -> Any:
    """Rewrite a tree, the innermost nodes first."""
    for node in reversed(list(root.dfs())):
        new = _node(node)
        if new is node:
            continue
        if node is root:
            root = new
        else:
            node.replace(new)
    return root


def _call(name: str, *arguments: Any) -> Any:
    return exp.Anonymous(this=name, expressions=list(arguments))


def _node(node: Any) -> Any:
    match node:
        case exp.Cast():
            return _cast(node)
        case exp.Column() if isinstance(node.this, exp.Identifier) and node.name == "tableoid":
            return _own_oid(node)
        case exp.Collate():
            return node.this
        case exp.ByteString():
            # E'…', with its escapes as they were written.
            return exp.Literal.string(tokenize(f"E'{node.this}'")[0].value)
        case exp.Dot() if isinstance(node.expression, exp.Anonymous | exp.Func):
            return node.expression
        case exp.Operator():
            return _operator(node)
        case exp.RegexpLike():
            return _call("regexp", node.expression, node.this)
        case exp.RegexpILike():
            return _call("pg_regexp_any_case", node.expression, node.this)
        case exp.ILike():
            found = _call("pg_ilike", node.expression, node.this)
            return exp.Not(this=found) if node.args.get("negate") else found
        case exp.CurrentUser() | exp.SessionUser():
            return _call("current_user")
        case exp.CurrentCatalog():
            return _call("current_database")
        case exp.CurrentSchema():
            return _call("current_schema")
        case exp.CurrentTimestamp():
            return exp.Literal.string(_now())
        case exp.EQ() | exp.NEQ() if isinstance(node.expression, exp.Any | exp.All):
            return _quantified(node)
        case exp.NEQ() if isinstance(node.expression, exp.Anonymous) and str(node.expression.this).lower() == "all":
            return exp.Not(this=_call("pg_is_any", node.this, node.expression.expressions[0]))
        case exp.Array():
            return _array(node)
        case exp.ArraySize():
            return _call("array_length", node.this, exp.Literal.number(1))
        case exp.ArrayAgg():
            return _aggregate("array_agg", node.this)
        case exp.LogicalAnd() | exp.LogicalOr():
            return exp.Min(this=node.this) if isinstance(node, exp.LogicalAnd) else exp.Max(this=node.this)
        case exp.Anonymous() if str(node.this).lower() in _RENAMED:
            node.set("this", _RENAMED[str(node.this).lower()])
            return node
        case exp.Dot() if isinstance(node.this, exp.Paren) and isinstance(node.expression, exp.Identifier):
            # A field of what _pg_expandarray returns.
            return _call("pg_pair_field", node.this.this, exp.Literal.string(node.expression.name))
        case exp.Select():
            return _with_sets(node)
        case exp.GroupConcat():
            return _string_agg(node)
        case exp.Bracket():
            # sqlglot counts from 0.
            index = node.expressions[0]
            if isinstance(index, exp.Literal) and not index.is_string:
                index = exp.Literal.number(int(str(index.this)) + 1)
            return _call("pg_subscript", node.this, index)
        case exp.ArrayToString():
            return _call(
                "array_to_string",
                *[one for one in (node.this, node.expression, node.args.get("null")) if one is not None],
            )
        case exp.StrPosition():
            return _call("strpos", node.this, node.args["substr"])
        case exp.Table() if not isinstance(node.this, exp.Identifier):
            return _table_function(node)
        case exp.Unnest():
            return _elements(
                _call("pg_json_elements", node.expressions[0]), node.args.get("alias"), node.args.get("offset")
            )
        case exp.Lateral() if isinstance(node.this, exp.Subquery):
            # SQLite resolves names of earlier relations in table functions, not in subqueries.
            return (
                node.this if not node.args.get("alias") else exp.Subquery(this=node.this.this, alias=node.args["alias"])
            )
        case exp.JSONExtract() | exp.JSONExtractScalar():
            return node
    return node


def _own_oid(node: Any) -> Any:
    """Return the oid of the relation that a column tableoid belongs to."""
    table = folded(node.args["table"]) if node.args.get("table") is not None else None
    select = node.find_ancestor(exp.Select)
    for one in select.find_all(exp.Table) if select is not None else ():
        if isinstance(one.this, exp.Identifier) and table in (None, one.alias_or_name):
            schema = folded(one.args["db"]) if one.args.get("db") is not None else "pg_catalog"
            found = definitions().relations.get(schema, {}).get(folded(one.this))
            if found is not None:
                return exp.Literal.number(found[0])
    return node


def _now() -> str:
    from datetime import UTC, datetime

    from pubsub.texts import text

    return text(datetime.now(UTC))


def _cast(node: Any) -> Any:
    kind = cast_name(node.to)
    inner = node.this
    if kind in _OIDS:
        name = kind.removeprefix("reg")
        is_name = isinstance(inner, exp.Literal) and inner.is_string
        shown = isinstance(node.parent, exp.Select | exp.Alias) and node.arg_key in ("expressions", "this")
        to_text = isinstance(node.parent, exp.Cast) and cast_name(node.parent.to) in _TEXTS
        if is_name:
            oid = _call(f"pg_reg{name}_oid", inner)
            return _call(f"pg_reg{name}_name", oid) if to_text else oid
        return _call(f"pg_reg{name}_name", inner) if to_text or shown else inner
    if kind in _INTEGERS:
        if isinstance(inner, exp.Literal) or not _is_registered(inner):
            return exp.Cast(this=inner, to=exp.DataType.build("INTEGER", dialect="sqlite"))
        return inner
    if kind in _TEXTS:
        if type_of(inner, {}) == "bool":
            return _call("pg_bool_text", inner)
        return (
            inner
            if isinstance(inner, exp.Literal) and inner.is_string
            else exp.Cast(this=inner, to=exp.DataType.build("TEXT"))
        )
    if kind == "bool" and isinstance(inner, exp.Literal) and inner.is_string:
        return exp.Boolean(this=str(inner.this).lower() in ("t", "true", "on", "yes", "1"))
    return inner


def _is_registered(node: Any) -> bool:
    return isinstance(node, exp.Anonymous) and str(node.this).startswith("pg_reg")


def _operator(node: Any) -> Any:
    operator = str(node.args["operator"]).rpartition(".")[2].strip("() ")
    name = _OPERATORS.get(operator)
    if name is not None:
        found = _call(name, node.expression, node.this)
        return exp.Not(this=found) if operator.startswith("!") else found
    plain = {
        "=": exp.EQ,
        "<>": exp.NEQ,
        "<": exp.LT,
        ">": exp.GT,
        "<=": exp.LTE,
        ">=": exp.GTE,
        "+": exp.Add,
        "-": exp.Sub,
    }
    if operator in plain:
        return plain[operator](this=node.this, expression=node.expression)
    raise FeatureNotSupported(f"operator {operator} on system catalogs is not supported")


def _quantified(node: Any) -> Any:
    array = node.expression.this
    while isinstance(array, exp.Paren):
        array = array.this
    if isinstance(array, exp.Select | exp.Subquery):
        query = array.this if isinstance(array, exp.Subquery) else array
        found: Any = exp.In(this=node.this, query=exp.Subquery(this=query))
    else:
        found = _call("pg_is_any", node.this, array)
    return exp.Not(this=found) if isinstance(node, exp.NEQ) else found


def _array(node: Any) -> Any:
    first = node.expressions[0] if node.expressions else None
    if isinstance(first, exp.Select | exp.Subquery | exp.SetOperation):
        query = first.this if isinstance(first, exp.Subquery) else first
        inner = query.copy()
        select = inner
        while isinstance(select, exp.SetOperation):
            select = select.this
        value = select.expressions[0]
        select.set("expressions", [exp.alias_(value.unalias(), "element")])
        return exp.Subquery(
            this=exp.Select(expressions=[_call("array_agg", exp.column("element"))]).from_(inner.subquery("elements"))
        )
    return _call("pg_make_array", *node.expressions)


#: Functions that SQLite has by another name.
_RENAMED: Final = {
    "json_build_object": "json_object", "jsonb_build_object": "json_object", "json_agg": "json_group_array",
    "jsonb_agg": "json_group_array", "bool_and": "min", "bool_or": "max", "every": "min", "json_build_array": "json_array",
    "to_json": "json_quote", "to_jsonb": "json_quote", "char_length": "length", "btrim": "trim",
}  # fmt: skip


def _aggregate(name: str, value: Any, *more: Any) -> Any:
    """Return an aggregate; with ORDER BY in it, one that sorts by its last argument."""
    if not isinstance(value, exp.Order):
        return _call(name, value, *more)
    keys = [one.this if isinstance(one, exp.Ordered) else one for one in value.expressions]
    return _call(f"{name}_by", value.this, *more, keys[0])


def _string_agg(node: Any) -> Any:
    separator = node.args.get("separator") or exp.Literal.string("")
    if isinstance(separator, exp.Order):
        return _aggregate("string_agg", exp.Order(this=node.this, expressions=separator.expressions), separator.this)
    return _aggregate("string_agg", node.this, separator)


def _is_set(node: Any) -> bool:
    name = str(node.this).lower() if isinstance(node, exp.Anonymous) else ""
    return isinstance(node, exp.Explode) or name in ("unnest", "generate_subscripts", "_pg_expandarray")


def _with_sets(select: Any) -> Any:
    """Return a SELECT with functions that return sets among its columns: SQLite has them in FROM only.

    They go on together, as in PostgreSQL; the first one's array says how far.
    """
    found = [node for one in select.expressions for node in one.find_all(exp.Explode, exp.Anonymous) if _is_set(node)]
    found = [one for one in found if one.find_ancestor(exp.Select) is select]
    if not found:
        return select
    first = found[0].this if isinstance(found[0], exp.Explode) else found[0].expressions[0]
    elements = exp.Table(
        this=_call("json_each", _call("pg_json_elements", first.copy())),
        alias=exp.TableAlias(this=exp.to_identifier("_sets")),
    )
    key = exp.column("key", "_sets")
    for node in found:
        array = node.this if isinstance(node, exp.Explode) else node.expressions[0]
        name = str(node.this).lower() if isinstance(node, exp.Anonymous) else "unnest"
        if name == "generate_subscripts":
            new: Any = exp.Add(this=key.copy(), expression=_call("pg_first_subscript", array.copy()))
        else:
            new = _call("pg_element" if name == "unnest" else "pg_expanded", array.copy(), key.copy())
        node.replace(new)
    if select.args.get("from_") is None:
        return select.from_(elements)
    return select.join(elements, join_type="CROSS")


def _table_function(node: Any) -> Any:
    function = node.this
    alias = node.args.get("alias")
    if isinstance(function, exp.GenerateSeries | exp.ExplodingGenerateSeries):
        step = [function.args["step"]] if function.args.get("step") is not None else []
        return _elements(_call("pg_series", function.args["start"], function.args["end"], *step), alias, None)
    if isinstance(function, exp.Anonymous):
        name = str(function.this).lower()
        if name == "generate_subscripts":
            end = _call("array_upper", function.expressions[0], exp.Literal.number(1))
            return _elements(_call("pg_series", exp.Literal.number(1), end), alias, None)
        if name in ("unnest", "pg_catalog.unnest"):
            return _elements(_call("pg_json_elements", function.expressions[0]), alias, None)
        empty = _EMPTY.get(name)
        if empty is not None:
            nothing = exp.select(*(f"NULL AS {one}" for one in empty.split())).where("1 = 0")
            return exp.Subquery(this=nothing, alias=alias or exp.TableAlias(this=exp.to_identifier(name)))
    if isinstance(function, exp.Explode):
        return _elements(_call("pg_json_elements", function.this), alias, None)
    if node.args.get("rows_from"):
        raise FeatureNotSupported("ROWS FROM on system catalogs is not supported")
    return node


def _elements(json: Any, alias: Any, offset: Any) -> Any:
    """Return a table function of SQLite that gives a JSON array's elements, with the names that the query has for them."""
    columns = [one.name for one in alias.args.get("columns") or []] if alias is not None else []
    name = alias.name if alias is not None else "unnest"
    selected = [exp.alias_(exp.column("value"), columns[0] if columns else name)]
    if offset is not None:
        selected.append(exp.alias_(exp.Add(this=exp.column("key"), expression=exp.Literal.number(1)), offset.name))
    elif len(columns) > 1:
        selected.append(exp.alias_(exp.Add(this=exp.column("key"), expression=exp.Literal.number(1)), columns[1]))
    query = exp.Select(expressions=selected).from_(exp.Table(this=_call("json_each", json)))
    return exp.Subquery(this=query, alias=exp.TableAlias(this=exp.to_identifier(name)))
