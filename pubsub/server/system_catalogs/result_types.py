"""The types of a query's columns on the system catalogs, worked out from its tree: clients go by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlglot import exp

from pubsub.node.select.scope import folded
from pubsub.server.system_catalogs.definitions import definitions


@dataclass(frozen=True, slots=True)
class Column:
    """A result's column: its name and pg_type.typname."""

    name: str
    type_name: str


_BOOL: Final = (
    exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Is, exp.In, exp.Between, exp.Exists,
    exp.Like, exp.ILike, exp.RegexpLike, exp.RegexpILike, exp.Boolean, exp.NullSafeEQ, exp.NullSafeNEQ, exp.SimilarTo,
)  # fmt: skip
_INT: Final = (exp.Add, exp.Sub, exp.Mul, exp.IntDiv, exp.Mod, exp.Neg, exp.BitwiseAnd, exp.BitwiseOr)
_FUNCTIONS: Final = {
    "bool": (
        "pg_is_in_recovery", "has_table_privilege", "has_schema_privilege", "has_database_privilege", "has_column_privilege",
        "has_any_column_privilege", "has_function_privilege", "pg_has_role", "pg_table_is_visible", "pg_type_is_visible",
        "pg_function_is_visible", "pg_relation_is_publishable", "pg_is_wal_replay_paused", "row_security_active",
    ),
    "int4": (
        "pg_backend_pid", "array_length", "array_upper", "array_lower", "cardinality", "pg_relation_is_updatable", "length",
        "char_length", "position", "strpos", "pg_char_to_encoding", "array_position",
    ),
    "int8": ("count", "pg_total_relation_size", "pg_relation_size", "pg_table_size", "txid_current", "pg_database_size"),
    "name": (
        "current_database", "current_schema", "current_user", "session_user", "pg_get_userbyid", "current_catalog",
        "pg_encoding_to_char", "current_role",
    ),
    "_text": ("array_agg", "current_schemas", "string_to_array", "pg_make_array"),
}  # fmt: skip
_OF_FUNCTION: Final = {name: kind for kind, names in _FUNCTIONS.items() for name in names}
_CASTS: Final = {
    "TEXT": "text", "VARCHAR": "varchar", "CHAR": "bpchar", "INT": "int4", "BIGINT": "int8", "SMALLINT": "int2", "BOOLEAN": "bool",
    "NAME": "name", "FLOAT": "float4", "DOUBLE": "float8", "DECIMAL": "numeric", "TIMESTAMPTZ": "timestamptz", "OID": "oid",
    "DATE": "date", "TIMESTAMP": "timestamp", "JSON": "json", "JSONB": "jsonb", "UUID": "uuid",
}  # fmt: skip
_REGISTERED: Final = frozenset({"regclass", "regtype", "regnamespace", "regrole", "regproc", "regprocedure", "regoper"})

Known = Mapping[str, Mapping[str, str]]
"""For each relation of FROM, its columns with their types."""


def cast_name(node: Any) -> str:
    """Return the name of the type that a cast names, without its schema."""
    kind = node.args.get("kind")
    if isinstance(kind, exp.Dot):
        return str(kind.expression.name).lower()
    if isinstance(kind, exp.Expression):
        return kind.name.lower()
    text = node.this.name if hasattr(node.this, "name") else str(node.this)
    return _CASTS.get(text.upper(), text.lower())


def type_of(node: Any, known: Known) -> str:
    """Return an expression's type, text if it is not known."""
    match node:
        case exp.Alias() | exp.Paren() | exp.Collate() | exp.Filter() | exp.Window() | exp.Max() | exp.Min():
            return type_of(node.this, known)
        case exp.Cast():
            name = cast_name(node.to)
            if name == "array" or node.to.this == exp.DType.ARRAY:
                return "_text"
            return name if name in definitions().type_oids else "text"
        case exp.Column():
            return _column(node, known)
        case exp.Boolean():
            return "bool"
        case exp.Literal():
            if node.is_string:
                return "text"
            return "int4" if str(node.this).isdecimal() else "numeric"
        case exp.Case():
            found = [type_of(one.args["true"], known) for one in node.args["ifs"]]
            if node.args.get("default") is not None:
                found.append(type_of(node.args["default"], known))
            return (
                next((one for one in found if one != "text"), "text") if len(set(found) - {"unknown"}) == 1 else "text"
            )
        case exp.Coalesce():
            return type_of(node.this, known)
        case exp.Subquery() | exp.Select():
            query = node
            while isinstance(query, exp.Subquery):
                query = query.this
            return (
                type_of(query.expressions[0], tables_of(query, known))
                if getattr(query, "expressions", None)
                else "text"
            )
        case exp.Count():
            return "int8"
        case exp.Sum():
            return "int8"
        case exp.Array() | exp.ArrayAgg():
            return "_text"
        case exp.Dot() if isinstance(node.expression, exp.Anonymous):
            return _OF_FUNCTION.get(str(node.expression.this).lower(), "text")
        case exp.Anonymous():
            return _OF_FUNCTION.get(str(node.this).lower(), "text")
        case exp.CurrentUser():
            return "name"
        case exp.CurrentTimestamp():
            return "timestamptz"
        case exp.Operator():
            return "bool"
        case exp.Null():
            return "text"
    if isinstance(node, _BOOL):
        return "bool"
    if isinstance(node, _INT):
        return "int4"
    return "text"


def _column(node: Any, known: Known) -> str:
    name = folded(node.this) if isinstance(node.this, exp.Identifier) else ""
    table = node.args.get("table")
    if table is not None:
        return known.get(folded(table), {}).get(name, "text")
    return next((columns[name] for columns in known.values() if name in columns), "text")


def tables_of(select: Any, outer: Known) -> dict[str, Mapping[str, str]]:
    """Return the relations that a SELECT's columns can come from, the outer query's last."""
    found: dict[str, Mapping[str, str]] = {}
    with_ = select.args.get("with_")
    common = {one.alias: dict(_named(one.this, outer)) for one in with_.expressions} if with_ is not None else {}
    sources = [select.args["from_"].this] if select.args.get("from_") is not None else []
    sources += [one.this for one in select.args.get("joins") or []]
    while sources:
        one = sources.pop(0)
        sources += [join.this for join in one.args.get("joins") or []]
        if isinstance(one, exp.Paren):
            sources.append(one.this)
            continue
        alias = one.alias or (one.name if isinstance(one, exp.Table) else "")
        if isinstance(one, exp.Table) and isinstance(one.this, exp.Identifier):
            name = folded(one.this)
            schema = folded(one.args["db"]) if one.args.get("db") is not None else "pg_catalog"
            if name in common and one.args.get("db") is None:
                found[alias] = common[name]
                continue
            relation = definitions().relations.get(schema, {}).get(name)
            found[folded(one.args["alias"].this) if one.args.get("alias") else alias] = (
                dict(relation[2]) if relation else {}
            )
        elif isinstance(one, exp.Subquery | exp.Lateral):
            found[alias] = dict(_named(one.this, outer))
    return {**found, **{name: columns for name, columns in outer.items() if name not in found}}


def _named(node: Any, outer: Known) -> list[tuple[str, str]]:
    return [(one.name, one.type_name) for one in columns_of(node, outer) or []]


def columns_of(node: Any, outer: Known | None = None) -> list[Column] | None:
    """Return a query's columns; None if a star among them has to be asked for."""
    from pubsub.node.select.names import figure_name

    while isinstance(node, exp.Subquery | exp.SetOperation):
        node = node.this
    if not isinstance(node, exp.Select):
        return None
    known = tables_of(node, outer or {})
    found: list[Column] = []
    for one in node.expressions:
        star = one if isinstance(one, exp.Star) else one.this if isinstance(one, exp.Column) else None
        if isinstance(star, exp.Star):
            names = (
                [folded(one.args["table"])]
                if isinstance(one, exp.Column)
                else [name for name in known if name not in (outer or {})]
            )
            for name in names:
                found += [Column(column, kind) for column, kind in known.get(name, {}).items()]
            continue
        kind = type_of(one, known)
        try:
            name = folded(one.args["alias"]) if isinstance(one, exp.Alias) else figure_name(one)
        except Exception:  # what has no name of its own there
            name = "?column?"
        found.append(Column(name, kind))
    return found
