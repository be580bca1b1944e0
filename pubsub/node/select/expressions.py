"""Translate expressions: from sqlglot's nodes to DataFusion's SQL with PostgreSQL's types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select import documents, functions, operators
from pubsub.node.select.casts import bounded, cast, coerced, kept_hint
from pubsub.node.select.known_parts import check_parts
from pubsub.node.select.literals import interval, number
from pubsub.node.select.names import called
from pubsub.node.select.scope import Scope, folded, value_of
from pubsub.node.select.type_names import type_of
from pubsub.node.select.types import (
    BOOL,
    BPCHAR,
    DATE,
    INT4,
    INT8,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    Type,
    array_of,
    ordering,
)
from pubsub.node.select.values import NULL, Value, name, quoted
from pubsub.node.select.windows import Window, window_of

if TYPE_CHECKING:
    from pubsub.node.select.translated import Translated

_COMPARISONS: Final[dict[type[Any], str]] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
    exp.NullSafeEQ: "IS NOT DISTINCT FROM", exp.NullSafeNEQ: "IS DISTINCT FROM",
}  # fmt: skip
_ARITHMETIC: Final[dict[type[Any], str]] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}


@dataclass(slots=True)
class Expressions:
    """Translates expressions of one query.

    `grouped` and `grouped_nodes` hold the GROUP BY expressions, as DataFusion's SQL and as nodes; `grouped` is None
    where columns need not be grouped.  `subquery` translates a query within the expression.  `clause` names the current
    clause in error texts, and `aggregates` and `windows` say whether it allows such functions.
    """

    scope: Scope
    subquery: Callable[[Any, Scope], Translated]
    clause: str = "WHERE"
    grouped: set[str] | None = None
    grouped_nodes: list[Any] = field(default_factory=list)
    aggregates: bool = False
    windows: bool = False
    named_windows: Mapping[str, Window] = field(default_factory=dict)
    _within: bool = False

    def value(self, node: Any) -> Value:
        """Translate an expression.  Raises PubsubError as PostgreSQL does, and FeatureNotSupported."""
        if self.grouped is not None and not self._within and any(node == one for one in self.grouped_nodes):
            grouped, self.grouped = self.grouped, None
            try:
                return self.value(node)
            finally:
                self.grouped = grouped
        check_parts(node)
        match node:
            case exp.Paren():
                return self.value(node.this)
            case exp.Column():
                return self._column(node)
            case exp.Literal():
                return Value(UNKNOWN, quoted(node.this), literal=node.this) if node.is_string else number(node.this)
            case exp.ByteString():
                return Value(UNKNOWN, quoted(node.this), literal=node.this)
            case exp.Null():
                return NULL
            case exp.Boolean():
                return Value(BOOL, "TRUE" if node.this else "FALSE")
            case exp.And() | exp.Or():
                word = "AND" if isinstance(node, exp.And) else "OR"
                sides = [self.truth(side, word).engine for side in _chained(node)]
                return Value(BOOL, f"({f' {word} '.join(sides)})")
            case exp.Not() if self._of_rows(node.this):
                return self._not_among(node)
            case exp.Not():
                return Value(BOOL, f"(NOT {self.truth(node.this, 'NOT').engine})")
            case exp.Neg():
                if isinstance(node.this, exp.Literal) and not node.this.is_string:
                    return number(node.this.this, negative=True)
                return operators.negated(self.value(node.this))
            case exp.Cast():
                return self._cast(node)
            case exp.Is():
                return self._is(node)
            case exp.Between():
                return self._between(node)
            case exp.In():
                return self._in(node)
            case exp.Case():
                return self._case(node)
            case exp.Exists():
                sql = self.subquery(node.this, self.scope).sql
                # DataFusion supports EXISTS only in conditions.
                return Value(BOOL, f"((SELECT count(*) FROM ({sql})) > 0)" if self.windows else f"EXISTS ({sql})")
            case exp.Collate():
                if node.expression.name not in ("C", "POSIX", "ucs_basic", "default"):
                    raise FeatureNotSupported(f"collation {node.expression.sql('postgres')} is not supported")
                return self.value(node.this)
            case exp.Subquery() | exp.Select() | exp.SetOperation():
                query = self._one_column(node)
                return Value(query.columns[0].type, f"({query.sql})")
            case exp.DPipe():
                return operators.concatenated(self.value(node.this), self.value(node.expression))
            case exp.Escape():
                return self._like(node.this, self._literal(node.expression, "ESCAPE"))
            case exp.Like() | exp.ILike():
                return self._like(node, None)
            case exp.RegexpLike() | exp.RegexpILike():
                return operators.matches(
                    self.value(node.this), self.value(node.expression), ignore_case=isinstance(node, exp.RegexpILike)
                )
            case exp.Interval():
                return interval(self._literal(node.this, "INTERVAL"))
            case exp.AtTimeZone():
                return self._at_time_zone(node)
            case exp.Array():
                return self._array(node)
            case exp.Bracket():
                return self._element(node)
            case exp.Filter() | exp.Window():
                return self._windowed(node)
            case exp.Tuple():
                raise FeatureNotSupported("row values are supported in comparisons by = only")
            case _:
                pass
        if type(node) in _COMPARISONS:
            return self._comparison(node)
        if type(node) in _ARITHMETIC:
            return operators.arithmetic(_ARITHMETIC[type(node)], self.value(node.this), self.value(node.expression))
        return self._call(node)

    def truth(self, node: Any, where: str) -> Value:
        """Translate a condition.  Raises PubsubError (42804) if it is not boolean."""
        value = self.value(node)
        if value.type == UNKNOWN:
            return coerced(value, BOOL)
        if value.type != BOOL:
            raise PubsubError(f"argument of {where} must be type boolean, not type {value.type.name}", sqlstate="42804")
        return value

    def _column(self, node: Any) -> Value:
        if isinstance(node.this, exp.Star):
            raise FeatureNotSupported("a star is supported as a column of a SELECT, and in count(*)")
        name = folded(node.this)
        if node.args.get("table") is None:
            if name == "user" and not node.this.args.get("quoted"):
                raise FeatureNotSupported("user is not supported")
            column, scope = self.scope.column(name)
        else:
            db = node.args.get("db")
            column, scope = self.scope.qualified(folded(node.args["table"]), name, folded(db) if db else None)
        if self.grouped is not None and scope is self.scope and not self._within and column.sql not in self.grouped:
            shown = f"{column.relation}.{column.name}" if column.relation else column.name
            raise PubsubError(
                f'column "{shown}" must appear in the GROUP BY clause or be used in an aggregate function',
                sqlstate="42803",
            )
        return value_of(column)

    def _literal(self, node: Any, what: str) -> str:
        if not (isinstance(node, exp.Literal) and node.is_string):
            raise FeatureNotSupported(f"{what} is supported with a literal only")
        found: str = node.this
        return found

    def _cast(self, node: Any) -> Value:
        value = self.value(node.this)
        wanted, length = type_of(node.to)
        found = cast(value, wanted)
        if length is not None and wanted.name == "numeric":
            return bounded(found, length)
        if length is not None:
            found = Value(wanted, f"left({found.engine}, {length})")
            if wanted == BPCHAR:
                found = Value(wanted, f"rpad({found.engine}, {length}, ' ')")
        return found

    def _is(self, node: Any) -> Value:
        value = self.value(node.this)
        word = "IS NOT" if node.args.get("negate") else "IS"
        if isinstance(node.expression, exp.Null):
            return Value(BOOL, f"({value.engine} {word} NULL)")
        if isinstance(node.expression, exp.Boolean):
            word += " TRUE" if node.expression.this else " FALSE"
            return Value(BOOL, f"({self.truth(node.this, word).engine} {word})")
        raise FeatureNotSupported(f"IS {node.expression.sql('postgres')} is not supported")

    def _between(self, node: Any) -> Value:
        if node.args.get("symmetric"):
            raise FeatureNotSupported("BETWEEN SYMMETRIC is not supported")
        value, low, high = self.value(node.this), self.value(node.args["low"]), self.value(node.args["high"])
        least = operators.comparison(">=", value, low)
        return Value(BOOL, f"({least.engine} AND {operators.comparison('<=', value, high).engine})")

    def _in(self, node: Any) -> Value:
        value = self.value(node.this) if not isinstance(node.this, exp.Tuple) else None
        if value is None:
            raise FeatureNotSupported("IN with row values is not supported")
        query = node.args.get("query")
        if query is not None:
            return self._among_rows("=", value, query, node)
        others = [self.value(one) for one in node.expressions]
        # Several elements without columns are an array, of the type that they and the value have in common; each other element
        # is compared by itself (parse_expr.c: transformAExprIn).
        alone = [place for place, one in enumerate(node.expressions) if one.find(exp.Column) is None]
        if len(alone) > 1:
            for place, one in zip(alone, operators.in_one_type([others[place] for place in alone], value), strict=True):
                others[place] = one
        return operators.among(value, others)

    @staticmethod
    def _of_rows(node: Any) -> bool:
        """Return whether it is value IN (query)."""
        while isinstance(node, exp.Paren):
            node = node.this
        return isinstance(node, exp.In) and node.args.get("query") is not None

    def _not_among(self, node: exp.Not) -> Value:
        inner = node.this
        while isinstance(inner, exp.Paren):
            inner = inner.this
        if isinstance(inner.this, exp.Tuple):
            raise FeatureNotSupported("IN with row values is not supported")
        return self._among_rows("<>", self.value(inner.this), inner.args["query"], node)

    def _among_rows(self, operator: str, value: Value, query: Any, node: Any) -> Value:
        """Translate value = ANY (query), or <> ALL: both sides are converted to the type in which they are compared.

        Where the result is NULL, it is false here, or DataFusion's: so it must be a condition itself, or a part of one joined
        by AND and OR.
        """
        found = self._one_column(query, "subquery has too many columns")
        column = found.columns[0]
        row = Value(column.type, name(column.engine))
        self._same_family(operator, value, row)
        one, other = operators.sides(operator, value, row)
        above = node.parent
        while isinstance(above, exp.Paren | exp.And | exp.Or):
            above = above.parent
        if not isinstance(above, exp.Where | exp.Having | exp.Join | exp.Filter):
            raise FeatureNotSupported(
                "a comparison with a subquery's rows is supported in conditions, joined by AND and OR"
            )
        sql = found.sql if other == row.engine else f"SELECT {other} AS {row.engine} FROM ({found.sql}) AS rows"
        if operator == "=":
            return Value(BOOL, f"({one} IN ({sql}))")
        # DataFusion's NOT IN overlooks that a comparison with NULL is neither true nor false.
        rows = f"FROM ({sql}) AS rows"
        known = f"SELECT {row.engine} {rows} WHERE {row.engine} IS NOT NULL"
        nulls = f"(SELECT count(*) {rows} WHERE {row.engine} IS NULL)"
        return Value(
            BOOL,
            f"({one} NOT IN ({known}) AND {nulls} = 0 AND ({one} IS NOT NULL OR (SELECT count(*) {rows}) = 0))",
        )

    def _same_family(self, operator: str, left: Value, right: Value) -> None:
        """Refuse to compare a value with a subquery's rows of a type of another kind."""
        one, other = left.type, right.type
        if (one in (UNKNOWN, other) or other == UNKNOWN) and one.has_equality:
            return
        if (one.is_number and other.is_number) or (one.is_text and other.is_text):
            return
        raise operators.undefined(operator, left, right)

    def _one_column(self, node: Any, otherwise: str = "subquery must return only one column") -> Translated:
        found = self.subquery(node, self.scope)
        if len(found.columns) != 1:
            raise PubsubError(otherwise, sqlstate="42601")
        return found

    def _case(self, node: Any) -> Value:
        subject = self.value(node.this) if node.this is not None else None
        conditions = []
        for branch in node.args["ifs"]:
            if subject is None:
                conditions.append(self.truth(branch.this, "CASE/WHEN").engine)
            else:
                conditions.append(operators.comparison("=", subject, self.value(branch.this)).engine)
        results = [self.value(branch.args["true"]) for branch in node.args["ifs"]]
        default = node.args.get("default")
        results.append(self.value(default) if default is not None else NULL)
        # The common type is searched from the default on (parse_expr.c: transformCaseExpr).
        type_, values = functions.unified("CASE", [results[-1], *results[:-1]])
        values = [*values[1:], values[0]]
        branches = " ".join(
            f"WHEN {one} THEN {value.engine}" for one, value in zip(conditions, values[:-1], strict=True)
        )
        return Value(type_, f"(CASE {branches} ELSE {values[-1].engine} END)")

    def _comparison(self, node: Any) -> Value:
        operator, left, right = _COMPARISONS[type(node)], node.this, node.expression
        if isinstance(left, exp.Tuple) and isinstance(right, exp.Tuple):
            if operator != "=" or len(left.expressions) != len(right.expressions):
                raise FeatureNotSupported("row values are supported in comparisons by = only")
            parts = [
                operators.comparison("=", self.value(one), self.value(other)).engine
                for one, other in zip(left.expressions, right.expressions, strict=True)
            ]
            return Value(BOOL, f"({' AND '.join(parts)})")
        if isinstance(right, exp.Any | exp.All) or (isinstance(right, exp.Anonymous) and right.this.lower() == "all"):
            return self._quantified(node, operator, left, right)
        return operators.comparison(operator, self.value(left), self.value(right))

    def _quantified(self, node: Any, operator: str, left: Any, right: Any) -> Value:
        """Translate value = ANY (…) and value <> ALL (…)."""
        inner = right.this if isinstance(right, exp.Any | exp.All) else right.expressions[0]
        every = not isinstance(right, exp.Any)
        inner = inner.this if isinstance(inner, exp.Paren) else inner
        if operator != ("<>" if every else "="):
            raise FeatureNotSupported(f"{operator} {'ALL' if every else 'ANY'} is not supported")
        value = self.value(left)
        if isinstance(inner, exp.Query | exp.Subquery):
            return self._among_rows(operator, value, inner, node)
        if isinstance(inner, exp.Array):
            return operators.among(
                value, operators.in_one_type([self.value(one) for one in inner.expressions]), every=every
            )
        array = self.value(inner)
        if isinstance(array.literal, str):
            held = documents.elements(array.literal.strip())
            others = [NULL if one is None else Value(UNKNOWN, quoted(one), literal=one) for one in held]
            return operators.among(value, others, every=every)
        if array.type.element is None:
            if array.type.kept:
                raise operators.undefined(f"{operator} ANY", value, array)
            raise PubsubError("op ANY/ALL (array) requires array on right side", sqlstate="42809")
        one = coerced(value, array.type.element)
        if array.type.element != one.type:
            raise operators.undefined(operator, value, array)
        has = f"array_has({array.engine}, {one.engine})"
        # The result is NULL if the array lacks the value but contains a NULL.
        known = f"(CASE WHEN {has} THEN TRUE WHEN array_position({array.engine}, NULL) IS NOT NULL THEN NULL ELSE {has} END)"
        return Value(BOOL, f"(NOT {known})" if every else known)

    def _like(self, node: Any, escape: str | None) -> Value:
        operator = "LIKE" if isinstance(node, exp.Like) else "ILIKE"
        found = operators.like(operator, self.value(node.this), self.value(node.expression), escape)
        return Value(BOOL, f"(NOT {found.engine})") if node.args.get("negate") else found

    def _at_time_zone(self, node: Any) -> Value:
        zone = self._literal(node.args["zone"], "AT TIME ZONE")
        if zone.upper() not in ("UTC", "GMT", "Z"):
            raise FeatureNotSupported("AT TIME ZONE is supported with UTC only")
        value = self.value(node.this)
        if value.type == UNKNOWN:
            value = coerced(value, TIMESTAMPTZ)
        if value.type not in (TIMESTAMP, TIMESTAMPTZ):
            value = coerced(value, TIMESTAMPTZ) if value.type == DATE else value
        if value.type == TIMESTAMPTZ:
            return cast(value, TIMESTAMP)
        if value.type == TIMESTAMP:
            return cast(value, TIMESTAMPTZ)
        raise functions.undefined("timezone", [Value(UNKNOWN, "''"), value])

    def _array(self, node: Any) -> Value:
        if not node.expressions:
            raise PubsubError(
                "cannot determine type of empty array",
                sqlstate="42P18",
                hint="Explicitly cast to the desired type, for example ARRAY[]::integer[].",
            )
        type_, values = functions.unified("ARRAY", [self.value(one) for one in node.expressions])
        if type_.element is not None:
            raise FeatureNotSupported("arrays of arrays are not supported")
        return Value(array_of(type_), f"make_array({', '.join(value.engine for value in values)})")

    def _element(self, node: Any) -> Value:
        """Translate array[n], which counts from 1; NULL if there is no such element."""
        if len(node.expressions) != 1 or isinstance(node.expressions[0], exp.Slice):
            raise FeatureNotSupported("slices of arrays are not supported")
        array, place = self.value(node.this), self.value(node.expressions[0])
        if place.type == UNKNOWN:
            place = coerced(place, INT4)
        if array.type.kept and array.type.name.endswith("[]"):
            return documents.kept_element(array, place)
        if array.type.name in ("json", "jsonb"):
            raise FeatureNotSupported(f"subscripts of {array.type.name} are not supported", hint="Use -> or ->>.")
        if array.type.element is None:
            raise PubsubError(
                f"cannot subscript type {array.type.name} because it does not support subscripting", sqlstate="42804"
            )
        if not place.type.is_integer:
            raise PubsubError("array subscript must have type integer", sqlstate="42804")
        sql = f"array_element({array.engine}, {place.engine})"
        return Value(array.type.element, f"(CASE WHEN {place.engine} > 0 THEN {sql} END)")

    # Functions

    def _call(self, node: Any) -> Value:
        name, arguments = called(node)
        if name in ("->", "->>"):
            return documents.extracted(name, self.value(arguments[0]), self.value(arguments[1]))
        if name == "extract":
            return functions.extract(node.name, self.value(node.expression))
        if name in functions.AGGREGATES:
            return self._aggregate(name, arguments, window=False)
        if name in functions.WINDOWS:
            raise PubsubError(f"window function {name} requires an OVER clause", sqlstate="42809")
        return functions.call(name, [self.value(one) for one in arguments])

    def _aggregate(self, name: str, arguments: Sequence[Any], *, window: bool) -> Value:
        if not window:
            if self._within:
                raise PubsubError("aggregate function calls cannot be nested", sqlstate="42803")
            if not self.aggregates:
                raise PubsubError(f"aggregate functions are not allowed in {self.clause}", sqlstate="42803")
        grouped, within = self.grouped, self._within
        if not window:
            self._within = True
        try:
            star = len(arguments) == 1 and isinstance(arguments[0], exp.Star)
            distinct, order, plain = False, "", []
            for one in () if star else arguments:
                if isinstance(one, exp.Order):
                    order = " ORDER BY " + ", ".join(self.ordered(each) for each in one.expressions)
                    one = one.this
                if isinstance(one, exp.Distinct):
                    distinct = True
                    plain += one.expressions
                else:
                    plain.append(one)
            if not star and not plain and name == "count":
                raise PubsubError("count(*) must be used to call a parameterless aggregate function", sqlstate="42809")
            values = [self.value(one) for one in plain]
            return functions.aggregate(name, values, distinct=distinct, order=order, star=star, window=window)
        finally:
            self.grouped, self._within = grouped, within

    def ordered(self, node: Any) -> str:
        """Translate an element of ORDER BY."""
        return direction(node, self.sortable(self.value(node.this)))

    def sorted_by(self, node: Any) -> str:
        """Translate an expression by which rows are sorted.

        The engine leaves out one that is the same for all rows, and with it the error that PostgreSQL raises when it is planned.
        """
        sql = self.sortable(self.value(node))
        return f"(SELECT {sql})" if _is_fixed(node) else sql

    def sortable(self, value: Value) -> str:
        if not value.type.has_order or value.type.element is not None:
            raise FeatureNotSupported(
                f"an order by type {value.type.name} is not supported", hint=kept_hint(value.type)
            )
        return ordering(value.type, value.engine)

    def _windowed(self, node: Any) -> Value:
        """Translate an aggregate with FILTER, a call with OVER, or both."""
        window = node if isinstance(node, exp.Window) else None
        inner = window.this if window is not None else node
        condition = None
        if isinstance(inner, exp.Filter):
            condition, inner = inner.expression.this, inner.this
        name, arguments = called(inner)
        if name not in functions.AGGREGATES and not (window is not None and name in functions.WINDOWS):
            functions.call(name, [self.value(one) for one in arguments])  # an undefined function is reported first
            raise PubsubError(
                f"{'OVER' if window is not None else 'FILTER'} specified, but {name} is not "
                f"{'a window function nor an aggregate function' if window is not None else 'an aggregate function'}",
                sqlstate="42809",
            )
        if window is not None and not self.windows:
            raise PubsubError(f"window functions are not allowed in {self.clause}", sqlstate="42P20")
        if name in functions.AGGREGATES:
            value = self._aggregate(name, arguments, window=window is not None)
        else:
            value = functions.window(name, [self.value(one) for one in arguments])
        if condition is not None:
            within, self._within = self._within, window is None
            test = self.truth(condition, "FILTER").engine
            self._within = within
            if value.exact is not None or name == "avg":
                raise FeatureNotSupported("avg of exact numbers with FILTER is not supported")
            sql = value.engine
            if not sql.endswith(")") or sql.startswith("CAST("):
                raise FeatureNotSupported(f"{name} with FILTER is not supported")
            value = Value(value.type, f"{sql} FILTER (WHERE {test})")
        if window is None:
            return value
        sql = value.engine
        if sql.startswith("CAST(") or value.sql is None:
            raise FeatureNotSupported(f"{name} of type {value.type.name} with OVER is not supported")
        return Value(value.type, self._typed_window(f"{sql} OVER ({self._over(window)})", value.type))

    def _typed_window(self, sql: str, type_: Type) -> str:
        return f"CAST({sql} AS BIGINT)" if type_ in (INT8, INT4) else sql

    def _over(self, node: Any) -> str:
        partition, order, spec = window_of(node, self.named_windows)
        parts = []
        if partition:
            parts.append("PARTITION BY " + ", ".join(self.sortable(self.value(one)) for one in partition))
        if order:
            parts.append("ORDER BY " + ", ".join(direction(one, self.sorted_by(one.this)) for one in order))
        if spec:
            if spec.args.get("exclude"):
                raise FeatureNotSupported("EXCLUDE in a window's frame is not supported")
            ends = [self._frame(spec.args.get(one), spec.args.get(f"{one}_side")) for one in ("start", "end")]
            kind = str(spec.args["kind"]).upper()
            if kind not in ("ROWS", "RANGE") or (kind == "RANGE" and any(one[0].isdigit() for one in ends if one)):
                raise FeatureNotSupported(f"this frame of {kind} is not supported")
            parts.append(f"{kind} BETWEEN {ends[0]} AND {ends[1] or 'CURRENT ROW'}")
        return " ".join(parts)

    def _frame(self, bound: Any, side: Any) -> str:
        if bound is None:
            return ""
        text = bound if isinstance(bound, str) else bound.sql("postgres")
        if text not in ("CURRENT ROW", "UNBOUNDED") and not text.isdigit():
            raise FeatureNotSupported("a window's frame is supported with literals only")
        return f"{text} {str(side).upper()}" if side else text


def _chained(node: Any) -> list[Any]:
    """Return the operands of a chain of ANDs or of ORs, in order.  A loop, so that long chains need no recursion."""
    found = [node.expression]
    left = node.this
    while type(left) is type(node):
        found.append(left.expression)
        left = left.this
    return [left, *reversed(found)]


def direction(node: Any, sql: str) -> str:
    """Add ASC or DESC and the place of NULLs, which PostgreSQL by default sorts as larger than everything."""
    descending = bool(node.args.get("desc"))
    nulls = "FIRST" if node.args.get("nulls_first") else "LAST"
    return f"{sql} {'DESC' if descending else 'ASC'} NULLS {nulls}"


def _is_fixed(node: Any) -> bool:
    """Return whether an expression has nothing of a row, nor of a group."""
    if node.find(exp.Column, exp.Star, exp.Query, exp.Window, exp.AggFunc) is not None:
        return False
    return not any(str(one.this).lower() in functions.AGGREGATES for one in node.find_all(exp.Anonymous))
