"""Translate queries: FROM, the columns, grouping, order, set operations and WITH, into one text of DataFusion's SQL.

All names in that text are generated, so no alias of the user's can mislead DataFusion: t0 a table, f0 a relation of
FROM, q0 a query of WITH, c0 a column of a query, x0 an extra column from which Python finishes another one
(values.Exact).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select import functions
from pubsub.node.select.casts import coerced, interval_shown
from pubsub.node.select.expressions import Expressions, direction
from pubsub.node.select.names import figure_name
from pubsub.node.select.relations import Relations, kept_whole, renamed
from pubsub.node.select.scope import Scope, folded, value_of
from pubsub.node.select.translated import Finder, Output, Relation, Translated
from pubsub.node.select.types import BPCHAR, INTERVAL, TEXT, UNKNOWN, Type, common, ordering
from pubsub.node.select.values import Value
from pubsub.node.select.windows import defined

_SETS: Final = {"Union": "UNION", "Intersect": "INTERSECT", "Except": "EXCEPT"}
#: The parts of a SELECT that are translated or refused by `_select`; any other part is refused by name.
_PARTS: Final = frozenset(
    [
        "expressions",
        "from_",
        "joins",
        "where",
        "group",
        "having",
        "order",
        "limit",
        "offset",
        "distinct",
        "with_",
        "windows",
        "operation_modifiers",
        "kind",
        "hint",
    ]
)


@dataclass(slots=True)
class Queries:
    """Translates one statement."""

    find: Finder
    names: int = 0
    common_tables: list[dict[str, Relation]] = field(default_factory=list)

    def statement(self, node: Any) -> Translated:
        """Translate the outermost query.  Raises PubsubError in PostgreSQL's words, and FeatureNotSupported."""
        functions.BEGUN.set(datetime.now(UTC))
        found = self.query(node, None, outermost=True)
        return replace(found, columns=tuple(map(_finished, found.columns)))

    def query(self, node: Any, parent: Scope | None, *, outermost: bool = False) -> Translated:
        """Translate a query; `parent` is the scope of the enclosing query."""
        if isinstance(node, exp.Subquery) and not _modified(node):
            return self.query(node.this, parent, outermost=outermost)
        with_ = node.args.get("with_")
        opened, text = len(self.common_tables), ""
        if with_ is not None:
            text = self._with(with_, parent)
        try:
            match node:
                case exp.Select():
                    found = self._select(node, parent, outermost)
                case exp.SetOperation():
                    found = self._set(node, parent)
                case exp.Values():
                    found = self._values(node, parent)
                case exp.Subquery():
                    inner = self.query(node.this, parent)
                    found = self._modified(f"SELECT * FROM ({inner.sql}) AS {self._new('f')}", inner.columns, node)
                case _:
                    raise FeatureNotSupported("only plain queries are supported")
        finally:
            del self.common_tables[opened:]
        return replace(found, sql=text + found.sql)

    def _relations(self) -> Relations:
        return Relations(self.find, self.query, self._new, self.common_tables)

    def _new(self, letter: str) -> str:
        self.names += 1
        return f"{letter}{self.names}"

    def _with(self, node: Any, parent: Scope | None) -> str:
        if node.args.get("recursive"):
            raise FeatureNotSupported("WITH RECURSIVE is not supported")
        parts, known = [], {}
        for one in node.expressions:
            title = folded(one.args["alias"].this)
            if title in known:
                raise PubsubError(f'WITH query name "{title}" specified more than once', sqlstate="42712")
            found = self.query(one.this, parent)
            engine = self._new("q")
            titles = renamed(one.args["alias"], [column.name for column in found.columns], title)
            known[title] = Relation(
                engine, tuple((title, c.engine, c.type) for title, c in zip(titles, found.columns, strict=True))
            )
            parts.append(f"{engine} AS ({found.sql})")
            # A query sees the ones before it.
            self.common_tables.append({title: known[title]})
        return f"WITH {', '.join(parts)} "

    # SELECT

    def _select(self, node: Any, parent: Scope | None, outermost: bool) -> Translated:
        for part, value in node.args.items():
            if value and part not in _PARTS:
                raise FeatureNotSupported(f"{part.strip('_').upper()} in a SELECT is not supported")
        if node.args.get("kind") or node.args.get("hint") or node.args.get("operation_modifiers"):
            raise FeatureNotSupported("this form of SELECT is not supported")
        source = node.args.get("from_")
        scope = Scope(parent)
        from_ = (
            self._relations().clause(source.this, node.args.get("joins") or [], scope) if source is not None else None
        )
        if source is not None and not node.expressions:
            raise FeatureNotSupported("a SELECT without columns is not supported")
        read = Expressions(scope, self.query)
        read.named_windows = defined(node.args.get("windows") or [])
        where = node.args.get("where")
        condition = read.truth(where.this, "WHERE").engine if where is not None else None
        items = self._items(node, scope)
        groups = self._groups(node, scope, read, items)
        having = node.args.get("having")
        if groups or having is not None or _aggregates(node):
            read.grouped = {value.engine for _, value in groups}
            read.grouped_nodes = [one for one, _ in groups]
        read.aggregates, read.windows, read.clause = True, True, "SELECT"
        values = [(title, node_, value if value is not None else read.value(node_)) for title, node_, value in items]
        read.windows, read.clause = False, "HAVING"
        test = read.truth(having.this, "HAVING").engine if having is not None else None
        read.windows, read.clause = True, "ORDER BY"
        columns, parts = self._columns(values, finishing=outermost and not node.args.get("distinct"))
        distinct = self._distinct(node, read, values, columns)
        order = self._order(node, read, values, columns)
        if node.args.get("distinct") is not None:
            _check_distinct(node, distinct, order, columns)
        sql = f"SELECT {distinct}{', '.join(parts)}"
        if from_ is not None:
            sql += f" FROM {from_}"
        if condition is not None:
            sql += f" WHERE {kept_whole(condition, from_ or '')}"
        if groups:
            sql += f" GROUP BY {', '.join(dict.fromkeys(value.engine for _, value in groups))}"
        if test is not None:
            sql += f" HAVING {test}"
        return Translated(f"{sql}{order}{_limits(node)}", columns)

    def _items(self, node: Any, scope: Scope) -> list[tuple[str, Any, Value | None]]:
        """Return the columns as name, expression and, if known already, value.

        A star becomes its columns, with their values unless GROUP BY must check them.
        """
        found: list[tuple[str, Any, Value | None]] = []
        for one in node.expressions:
            if isinstance(one, exp.Star) or (isinstance(one, exp.Column) and isinstance(one.this, exp.Star)):
                star = one if isinstance(one, exp.Star) else one.this
                if any(star.args.values()):
                    raise FeatureNotSupported("EXCEPT, REPLACE and RENAME with a star are not supported")
                columns = scope.star()
                if isinstance(one, exp.Column):
                    schema = one.args.get("db")
                    relation = folded(one.args["table"])
                    columns = scope.relation(relation, folded(schema) if schema else None).of(relation)
                elif not scope.schemas:
                    raise PubsubError("SELECT * with no tables specified is not valid", sqlstate="42601")
                grouped = node.args.get("group") is not None
                for column in columns:
                    reference = exp.column(
                        exp.to_identifier(column.name, quoted=True),
                        table=exp.to_identifier(column.relation, quoted=True) if column.relation else None,
                    )
                    found.append((column.name, reference, None if grouped else value_of(column)))
            elif isinstance(one, exp.Alias):
                found.append((folded(one.args["alias"]), one.this, None))
            else:
                found.append((figure_name(one), one, None))
        return found

    def _columns(
        self, values: list[tuple[str, Any, Value]], *, finishing: bool
    ) -> tuple[tuple[Output, ...], list[str]]:
        columns: list[Output] = []
        parts: list[str] = []
        besides: list[str] = []
        for title, _, value in values:
            engine = self._new("c")
            type_ = value.type
            if type_ == UNKNOWN:
                value, type_ = coerced(value, TEXT), TEXT
            if type_ == INTERVAL and finishing:
                shown = interval_shown(value)
                value = Value(INTERVAL, value.sql, shown.exact)
            if value.exact is None or not finishing:
                columns.append(Output(title, engine, type_))
                parts.append(f"{value.engine} AS {engine}")
                continue
            leaves = tuple(self._new("x") for _ in value.exact.leaves)
            besides += [f"{sql} AS {leaf}" for sql, leaf in zip(value.exact.leaves, leaves, strict=True)]
            columns.append(Output(title, engine, type_, value.exact, leaves))
            parts.append(f"{value.sql or 'NULL'} AS {engine}")
        return tuple(columns), parts + besides

    def _groups(
        self, node: Any, scope: Scope, read: Expressions, items: list[tuple[str, Any, Value | None]]
    ) -> list[tuple[Any, Value]]:
        """Translate GROUP BY: a name is a column of FROM, else of the SELECT; a number is a column of the SELECT."""
        group = node.args.get("group")
        if group is None:
            return []
        if any(value for part, value in group.args.items() if part != "expressions"):
            raise FeatureNotSupported("grouping sets are not supported")
        if not group.expressions:
            raise PubsubError("syntax error at end of input", sqlstate="42601")
        read.clause = "GROUP BY"
        found = []
        for one in group.expressions:
            wanted = one.unnest()
            _check_constant(wanted, "GROUP BY")
            if isinstance(wanted, exp.Literal) and not wanted.is_string:
                wanted = items[_place(wanted, len(items), "GROUP BY")][1]
            elif isinstance(wanted, exp.Column) and wanted.args.get("table") is None:
                title = folded(wanted.this)
                if not any(column.name == title for column in scope.columns):
                    same = [item for name_, item, _ in items if name_ == title]
                    if len({repr(item) for item in same}) > 1:
                        raise PubsubError(f'GROUP BY "{title}" is ambiguous', sqlstate="42702")
                    wanted = same[0] if same else wanted
            value = read.value(wanted)
            if not value.type.has_equality:
                raise FeatureNotSupported(f"grouping by type {value.type.name} is not supported")
            found.append((wanted, value))
        return found

    def _distinct(
        self, node: Any, read: Expressions, values: list[tuple[str, Any, Value]], columns: tuple[Output, ...]
    ) -> str:
        distinct = node.args.get("distinct")
        if distinct is None:
            return ""
        on = distinct.args.get("on")
        if on is None:
            for column in columns:
                if not column.type.has_equality:
                    raise FeatureNotSupported(f"DISTINCT of type {column.type.name} is not supported")
            return "DISTINCT "
        found = []
        for one in on.expressions if isinstance(on, exp.Tuple) else [on]:
            place = _by_name(one, columns, "DISTINCT ON")
            value = values[place][2] if place is not None else read.value(one)
            found.append(ordering(value.type, value.engine))
        return f"DISTINCT ON ({', '.join(found)}) "

    def _order(
        self, node: Any, read: Expressions, values: list[tuple[str, Any, Value]], columns: tuple[Output, ...]
    ) -> str:
        order = node.args.get("order")
        if order is None:
            return ""
        on = node.args.get("distinct") is not None and node.args["distinct"].args.get("on") is not None
        parts = []
        for one in order.expressions:
            if one.args.get("with_fill"):
                raise FeatureNotSupported("this ORDER BY is not supported")
            place = _by_name(one.this, columns, "ORDER BY")
            if place is None and not isinstance(one.this, exp.Literal):
                place = next((at for at, (_, item, _) in enumerate(values) if item == one.this), None)
            if place is None:
                parts.append(direction(one, read.sortable(read.value(one.this)) if on else read.sorted_by(one.this)))
                continue
            value = values[place][2]
            sql, column = read.sortable(value), columns[place]
            if on:
                parts.append(direction(one, sql))
            elif node.args.get("distinct") is None:
                parts.append(direction(one, ordering(column.type, column.engine)))
            elif value.type == BPCHAR:
                raise FeatureNotSupported(
                    f"DISTINCT with ORDER BY of type {value.type.name} is not supported", hint="Cast it to text."
                )
            else:
                # Of values that are ordered alike DISTINCT leaves one.
                parts.append(direction(one, column.engine))
        return f" ORDER BY {', '.join(parts)}"

    # Sets of queries

    def _set(self, node: Any, parent: Scope | None) -> Translated:
        word = _SETS.get(type(node).__name__)
        if word is None or node.args.get("by_name") or (word != "UNION" and not node.args.get("distinct", True)):
            raise FeatureNotSupported("INTERSECT ALL and EXCEPT ALL are not supported")
        sides = [self.query(one, parent) for one in (node.this, node.expression)]
        if len(sides[0].columns) != len(sides[1].columns):
            raise PubsubError(f"each {word} query must have the same number of columns", sqlstate="42601")
        types: list[Type] = []
        for one, other in zip(sides[0].columns, sides[1].columns, strict=True):
            type_ = _untyped(one, node.this, sides[0]) or _untyped(other, node.expression, sides[1])
            found = common([one.type, other.type]) if type_ is None else _other(one, other, type_)
            if found is None:
                message = f"{word} types {one.type.name} and {other.type.name} cannot be matched"
                raise PubsubError(message, sqlstate="42804")
            # Characters of several lengths can be equal.
            if node.args.get("distinct") is not False and not (found.has_equality and found != BPCHAR):
                raise FeatureNotSupported(f"{word} of type {found.name} is not supported")
            types.append(found)
        columns = tuple(
            Output(one.name, self._new("c"), type_) for one, type_ in zip(sides[0].columns, types, strict=True)
        )
        parts = []
        for side in sides:
            alias = self._new("f")
            shown = [
                f"{_as_type(Value(given.type, f'{alias}.{given.engine}'), column.type).engine} AS {column.engine}"
                for given, column in zip(side.columns, columns, strict=True)
            ]
            parts.append(f"SELECT {', '.join(shown)} FROM ({side.sql}) AS {alias}")
        every = " ALL" if node.args.get("distinct") is False else ""
        sql = f"SELECT * FROM ({parts[0]} {word}{every} {parts[1]}) AS {self._new('f')}"
        return self._modified(sql, columns, node)

    def _modified(self, sql: str, columns: tuple[Output, ...], node: Any) -> Translated:
        """Append ORDER BY, LIMIT and OFFSET to VALUES, a set operation or a query in parentheses."""
        order = node.args.get("order")
        parts = []
        for one in order.expressions if order is not None else []:
            place = _by_name(one.this, columns, "ORDER BY")
            if place is None:
                if isinstance(one.this, exp.Column):
                    raise PubsubError(f'column "{folded(one.this.this)}" does not exist', sqlstate="42703")
                raise FeatureNotSupported(
                    "invalid UNION/INTERSECT/EXCEPT ORDER BY clause",
                    detail="Only result column names can be used, not expressions or functions.",
                    hint="Add the expression/function to every SELECT, or move the UNION into a FROM clause.",
                )
            parts.append(direction(one, ordering(columns[place].type, columns[place].engine)))
        return Translated(f"{sql}{' ORDER BY ' + ', '.join(parts) if parts else ''}{_limits(node)}", columns)

    def _values(self, node: Any, parent: Scope | None) -> Translated:
        read = Expressions(Scope(parent), self.query, clause="VALUES")
        rows = [
            [read.value(one) for one in (row.expressions if isinstance(row, exp.Tuple) else [row])]
            for row in node.expressions
        ]
        if len({len(row) for row in rows}) != 1:
            raise PubsubError("VALUES lists must all be the same length", sqlstate="42601")
        columns, lines = [], [[""] * len(rows[0]) for _ in rows]
        for place in range(len(rows[0])):
            type_, values = functions.unified("VALUES", [row[place] for row in rows])
            columns.append(Output(f"column{place + 1}", self._new("c"), type_))
            for line, value in zip(lines, values, strict=True):
                line[place] = value.engine
        text = ", ".join(f"({', '.join(line)})" for line in lines)
        titles = ", ".join(column.engine for column in columns)
        sql = f"SELECT * FROM (VALUES {text}) AS {self._new('f')}({titles})"
        return self._modified(sql, tuple(columns), node)


def _finished(column: Output) -> Output:
    """Let Python write the intervals of DISTINCT and of sets of queries, which are microseconds until then."""
    if column.type != INTERVAL or column.exact is not None:
        return column
    return replace(column, exact=interval_shown(Value(INTERVAL, column.engine)).exact, leaves=(column.engine,))


def _modified(node: Any) -> bool:
    return any(node.args.get(part) for part in ("order", "limit", "offset", "with_"))


def _place(literal: Any, many: int, clause: str) -> int:
    """Return the index of a column that is given by its number, which counts from 1."""
    if not literal.this.isdigit():
        raise PubsubError(f"non-integer constant in {clause}", sqlstate="42601")
    place = int(literal.this)
    if not 1 <= place <= many:
        raise PubsubError(f"{clause} position {place} is not in select list", sqlstate="42P10")
    return place - 1


def _check_constant(node: Any, clause: str) -> None:
    """Refuse a constant that is not a column's number (parse_clause.c: findTargetlistEntrySQL92)."""
    number = node.this if isinstance(node, exp.Neg) else node
    if (
        isinstance(number, exp.Literal)
        and not number.is_string
        and number.this.isdigit()
        and int(number.this) < 1 << 31
    ):
        if number is not node:
            raise PubsubError(f"{clause} position -{number.this} is not in select list", sqlstate="42P10")
    elif isinstance(node, exp.Null | exp.Boolean) or isinstance(number, exp.Literal):
        raise PubsubError(f"non-integer constant in {clause}", sqlstate="42601")


def _by_name(node: Any, columns: tuple[Output, ...], clause: str) -> int | None:
    """Return the index of the column that ORDER BY or DISTINCT ON gives by name or number; None for an expression."""
    node = node.unnest()
    _check_constant(node, clause)
    if isinstance(node, exp.Literal):
        return _place(node, len(columns), clause)
    if not isinstance(node, exp.Column) or node.args.get("table") is not None or isinstance(node.this, exp.Star):
        return None
    title = folded(node.this)
    places = [place for place, column in enumerate(columns) if column.name == title]
    if len(places) > 1:
        raise PubsubError(f'{clause} "{title}" is ambiguous', sqlstate="42702")
    return places[0] if places else None


def _check_distinct(node: Any, distinct: str, order: str, columns: tuple[Output, ...]) -> None:
    """Check ORDER BY against DISTINCT (parse_clause.c: transformDistinctClause, transformDistinctOnClause)."""
    wanted = node.args.get("order")
    if wanted is None:
        return
    terms = order.removeprefix(" ORDER BY ")
    if distinct == "DISTINCT ":
        engines = {column.engine for column in columns}
        for one in _terms(terms):
            if one.partition(" ")[0] not in engines:
                raise PubsubError(
                    "for SELECT DISTINCT, ORDER BY expressions must appear in select list", sqlstate="42P10"
                )
        return
    on = distinct.removeprefix("DISTINCT ON (").removesuffix(") ")
    many = (
        len(node.args["distinct"].args["on"].expressions)
        if isinstance(node.args["distinct"].args["on"], exp.Tuple)
        else 1
    )
    first = [term.rpartition(" NULLS ")[0].rpartition(" ")[0] for term in _terms(terms)][:many]
    if (many == 1 and first != [on]) or (many > 1 and not all(one in _terms(on) for one in first)):
        raise PubsubError("SELECT DISTINCT ON expressions must match initial ORDER BY expressions", sqlstate="42P10")


def _terms(text: str) -> list[str]:
    """Split a list of DataFusion's SQL at its own commas: not at those within parentheses, brackets or quotes."""
    found, begin, depth = [], 0, 0
    for piece in re.finditer(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|[(\[{]|[)\]}]|, ", text):
        match piece[0]:
            case "(" | "[" | "{":
                depth += 1
            case ")" | "]" | "}":
                depth -= 1
            case ", " if not depth:
                found.append(text[begin : piece.start()])
                begin = piece.end()
    return [*found, text[begin:]]


def _limits(node: Any) -> str:
    limit, offset, text = node.args.get("limit"), node.args.get("offset"), ""
    if limit is not None:
        if isinstance(limit, exp.Fetch):
            options = limit.args.get("limit_options")
            if options is not None and (options.args.get("percent") or options.args.get("with_ties")):
                raise FeatureNotSupported("FETCH FIRST … WITH TIES is not supported")
            text += _count(limit.args.get("count") or exp.Literal.number(1), "LIMIT")
        else:
            if limit.args.get("offset") or limit.expressions:
                raise PubsubError(
                    "LIMIT #,# syntax is not supported", sqlstate="42601", hint="Use separate LIMIT and OFFSET clauses."
                )
            text += _count(limit.expression, "LIMIT")
    if offset is not None:
        text += _count(offset.expression, "OFFSET")
    return text


def _count(node: Any, word: str) -> str:
    if isinstance(node, exp.Null) or (isinstance(node, exp.Var) and node.name.lower() == "all"):
        return ""
    node = node.this if isinstance(node, exp.Paren) else node
    if isinstance(node, exp.Neg):
        raise PubsubError(f"{word} must not be negative", sqlstate="2201W" if word == "LIMIT" else "2201X")
    if not isinstance(node, exp.Literal) or not node.this.strip().isdigit():
        raise FeatureNotSupported(f"{word} is supported with a number only")
    return f" {word} {node.this.strip()}"


def _aggregates(node: Any) -> bool:
    """Return whether the columns or ORDER BY contain an aggregate of this query that is not a window function."""
    parts = [*node.expressions, *(node.args["order"].expressions if node.args.get("order") else [])]
    return any(_has_aggregate(one) for one in parts)


def _has_aggregate(node: Any) -> bool:
    if isinstance(node, exp.Query | exp.Subquery):
        return False
    if isinstance(node, exp.Window):
        inner = node.this.this if isinstance(node.this, exp.Filter) else node.this
        parts = [*inner.expressions, *(node.args.get("partition_by") or [])]
        return any(_has_aggregate(one) for one in parts)
    if isinstance(node, exp.Anonymous) and str(node.this).lower() in functions.AGGREGATES:
        return True
    return any(_has_aggregate(one) for one in node.iter_expressions())


def _untyped(column: Output, node: Any, side: Translated) -> Type | None:
    """Return UNKNOWN for a column that was an untyped literal (now TEXT), since the other side decides; else None."""
    while isinstance(node, exp.Subquery):
        node = node.this
    if column.type != TEXT or not isinstance(node, exp.Select) or len(node.expressions) != len(side.columns):
        return None
    one = node.expressions[side.columns.index(column)].unalias()
    return UNKNOWN if isinstance(one, exp.Null) or (isinstance(one, exp.Literal) and one.is_string) else None


def _other(one: Output, other: Output, _: Type) -> Type:
    return other.type if one.type == TEXT else one.type


def _as_type(value: Value, type_: Type) -> Value:
    from pubsub.node.select.casts import cast

    if type_.name == "numeric" and not type_.kept:
        return Value(type_, f"CAST({value.engine} AS {type_.engine})")
    return value if (value.type.name, value.type.kept) == (type_.name, type_.kept) else cast(value, type_)
