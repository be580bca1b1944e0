"""Translate FROM: tables, views, queries of WITH, subqueries and VALUES, and their joins.

Each relation gets a generated name; the scope knows it by its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select import functions, operators
from pubsub.node.select.expressions import Expressions
from pubsub.node.select.scope import Column, Scope, folded, value_of
from pubsub.node.select.translated import Finder, Relation, Translated
from pubsub.node.select.values import Value, name

_NULL: Final = re.compile(r"(?<!IS )(?<!IS NOT )\bNULL\b")


@dataclass(frozen=True, slots=True)
class Relations:
    """Translates the FROM of a query.

    `find` looks a table or view up, `query` translates a subquery in a scope, `new` returns a generated name that begins
    with a letter, and `common_tables` are the queries of WITH that are visible, the innermost last.
    """

    find: Finder
    query: Callable[[Any, Scope | None], Translated]
    new: Callable[[str], str]
    common_tables: Sequence[Mapping[str, Relation]]

    def clause(self, first: Any, joins: list[Any], scope: Scope) -> str:
        """Translate FROM; `scope` receives the relations' names and columns."""
        inner = first.args.get("joins") or []
        sql = self._relation(first, scope)
        for join in [*inner, *joins]:
            side, kind = str(join.args.get("side") or "").upper(), str(join.args.get("kind") or "").upper()
            method = str(join.args.get("method") or "").upper()
            if (
                method not in ("", "NATURAL")
                or kind not in ("", "INNER", "OUTER", "CROSS")
                or side not in ("", "LEFT", "RIGHT", "FULL")
            ):
                raise FeatureNotSupported(
                    f"{' '.join(one for one in (method, side, kind) if one)} JOIN is not supported"
                )
            right = Scope(scope.parent)
            other = self._relation(join.this, right)
            for one in join.this.args.get("joins") or []:
                raise FeatureNotSupported(f"joins within parentheses are not supported: {one.sql('postgres')}")
            for title in right.schemas:
                if title in scope.schemas:
                    raise PubsubError(f'table name "{title}" specified more than once', sqlstate="42712")
            using = [folded(one.this if isinstance(one, exp.Column) else one) for one in join.args.get("using") or []]
            if method == "NATURAL":
                left_names = [one.name for one in scope.columns]
                using = [one.name for one in right.columns if one.name in left_names]
                using.sort(key=left_names.index)
            merged = [self._merged(title, side, scope, right) for title in using]
            scope.schemas |= right.schemas
            scope.aliases |= right.aliases
            scope.hidden += right.hidden + [one for one in (*scope.columns, *right.columns) if one.name in using]
            rest = [one for one in (*scope.columns, *right.columns) if one.name not in using]
            scope.columns = [one for one, _ in merged] + rest
            word = f"{side} JOIN" if side else "JOIN"
            on = join.args.get("on")
            if on is not None:
                read = Expressions(scope, self.query, clause="JOIN conditions")
                condition = kept_whole(read.truth(on, "JOIN/ON").engine)
                sql = f"{sql} {word} {other} ON {condition}"
            elif merged:
                sql = f"{sql} {word} {other} ON {' AND '.join(condition for _, condition in merged)}"
            elif side:
                raise PubsubError("syntax error at end of input", sqlstate="42601")
            else:
                sql = f"{sql} CROSS JOIN {other}"
        return sql

    def _merged(self, title: str, side: str, left: Scope, right: Scope) -> tuple[Column, str]:
        """Return the merged column of USING, and the join condition."""
        found = []
        for scope, where in ((left, "left"), (right, "right")):
            same = [one for one in scope.columns if one.name == title]
            if not same:
                message = f'column "{title}" specified in USING clause does not exist in {where} table'
                raise PubsubError(message, sqlstate="42703")
            if len(same) > 1:
                message = f'common column name "{title}" appears more than once in {where} table'
                raise PubsubError(message, sqlstate="42702")
            found.append(value_of(same[0]))
        condition = operators.comparison("=", *found).engine
        if side == "FULL":
            type_, values = functions.unified("JOIN/USING", found)
            merged = Value(type_, f"coalesce({', '.join(value.engine for value in values)})")
        else:
            merged = found[side == "RIGHT"]
        return Column(title, merged.engine, merged.type, None), condition

    def _relation(self, node: Any, scope: Scope) -> str:
        """Translate one relation of FROM, under a generated name; `scope` receives its columns."""
        alias = node.args.get("alias")
        title = folded(alias.this) if alias is not None and alias.this is not None else None
        schema: str | None = None
        match node:
            case exp.Table() if isinstance(node.this, exp.Identifier):
                parts = [
                    folded(one) if one else None for one in (node.args.get("catalog"), node.args.get("db"), node.this)
                ]
                for part in ("sample", "pivots", "hints", "version", "ordinality", "partition", "rows_from"):
                    if node.args.get(part):
                        raise FeatureNotSupported(f"{part.upper()} in FROM is not supported")
                target, schema, table = parts
                assert table is not None
                known = self._common_table(table) if schema is None else None
                found = known or self.find(target, schema, table)
                if title is not None and title != table:
                    scope.aliases[table] = title
                schema = None if title is not None or known else schema
                title = title or table
            case exp.Subquery() | exp.Values():
                query = self.query(node.this if isinstance(node, exp.Subquery) else node, scope.parent)
                found = Relation(f"({query.sql})", tuple((c.name, c.engine, c.type) for c in query.columns))
            case exp.Table():
                call = node.this
                shown = call.this if isinstance(call, exp.Anonymous) else call.sql("postgres")
                raise FeatureNotSupported(f"the function {str(shown).lower()} in FROM is not supported")
            case exp.Lateral():
                raise FeatureNotSupported("LATERAL is not supported")
            case _:
                raise FeatureNotSupported(f"{node.sql('postgres')} in FROM is not supported")
        engine = self.new("f")
        titles = renamed(alias, [one[0] for one in found.columns], title or "")
        hidden = title or f"*{engine}*"
        scope.schemas[hidden] = schema
        scope.columns += [
            Column(shown, f"{engine}.{name(column)}", type_, hidden)
            for shown, (_, column, type_) in zip(titles, found.columns, strict=True)
        ]
        return f"{found.sql} AS {engine}"

    def _common_table(self, title: str) -> Relation | None:
        return next((one[title] for one in reversed(self.common_tables) if title in one), None)


def kept_whole(condition: str, from_: str = "") -> str:
    """Return the condition, put under IS TRUE if it or `from_` contains a NULL literal.

    The reader of Delta tables splits a condition at its ANDs and drops a NULL operand as if it were true.  It does not
    split a condition under IS TRUE.
    """
    return f"({condition}) IS TRUE" if _NULL.search(condition) or _NULL.search(from_) else condition


def renamed(alias: Any, names: list[str], title: str) -> list[str]:
    """Return the columns' names under an alias, which may rename the first of them.  Raises PubsubError for too many."""
    columns = [folded(one) for one in alias.args.get("columns") or []] if alias is not None else []
    if len(columns) > len(names):
        raise PubsubError(
            f'table "{title}" has {len(names)} columns available but {len(columns)} columns specified', sqlstate="42P10"
        )
    return columns + names[len(columns) :]
