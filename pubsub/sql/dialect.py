"""The node's sqlglot dialect: PostgreSQL's, with the statements on subscriptions as typed nodes.

Any tool on sqlglot can read a node's scripts with it; the node itself uses it only for queries.  Importing this module
imports sqlglot.  Statements on subscriptions do not need it (pubsub.sql.parser), which keeps the command line fast.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlglot import TokenType, exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import ErrorLevel, ParseError, TokenError
from sqlglot.generators.postgres import PostgresGenerator
from sqlglot.parsers.postgres import PostgresParser

from pubsub.errors import FeatureNotSupported, SqlSyntaxError
from pubsub.sql.grammar import Grammar
from pubsub.sql.identifiers import QualifiedName
from pubsub.sql.statements import Statement, to_sql


class SubscriptionNode(exp.Expression):
    """A statement on subscriptions in a sqlglot tree."""

    arg_types: ClassVar = {"this": True}

    @property
    def statement(self) -> Statement:
        """The typed statement."""
        found: Statement = self.args["this"]
        return found

    def __repr__(self) -> str:
        return f"SubscriptionNode({self.statement!r})"


def _print(_: PostgresGenerator, node: SubscriptionNode) -> str:
    return to_sql(node.statement)


class PubsubDialect(Postgres):
    """The dialect, for `sqlglot.parse(script, read=PubsubDialect)`."""

    class Parser(PostgresParser):
        """sqlglot's PostgreSQL parser, with our grammar for CREATE, ALTER and DROP SUBSCRIPTION."""

        def _parse_statement(self) -> Any:
            following = self._next
            if (
                self._curr
                and self._curr.token_type in (TokenType.CREATE, TokenType.ALTER, TokenType.DROP)
                and following
                and following.text.upper() == "SUBSCRIPTION"
            ):
                start, end = self._curr.start, self._tokens[-1].end + 1
                statement = Grammar(self.sql[start:end]).subscription()
                self._advance(len(self._tokens) - self._index)
                return SubscriptionNode(this=statement)
            return super()._parse_statement()

    class Generator(PostgresGenerator):
        """sqlglot's PostgreSQL generator, which prints the typed statements too."""

        TRANSFORMS: ClassVar = {
            **PostgresGenerator.TRANSFORMS,
            SubscriptionNode: _print,
        }


class QueryDialect(PubsubDialect):
    """For queries that are carried out here: functions stay as they were written, and so do subscripts."""

    INDEX_OFFSET = 0

    class Parser(PubsubDialect.Parser):
        """PostgreSQL's parser of sqlglot, without other names for functions.  -> and ->> are calls of that name."""

        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: PostgresParser.FUNCTION_PARSERS[name]
            for name in ("CAST", "EXTRACT", "OVERLAY", "POSITION", "SUBSTRING", "TRIM")
        }
        COLUMN_OPERATORS: ClassVar = {
            **PostgresParser.COLUMN_OPERATORS,
            TokenType.ARROW: lambda _, this, key: exp.Anonymous(this="->", expressions=[this, key]),
            TokenType.DARROW: lambda _, this, key: exp.Anonymous(this="->>", expressions=[this, key]),
        }

        def _parse_interval(self, *args: Any, **kwargs: Any) -> Any:
            if (
                self._next
                and self._curr
                and self._next.token_type == TokenType.STRING
                and self._match(TokenType.INTERVAL)
            ):
                return exp.Interval(this=self._parse_string())
            return super()._parse_interval(*args, **kwargs)


def parse_query(text: str) -> exp.Query | exp.Values:
    """Parse one query into a tree.

    Raises SqlSyntaxError with the place where sqlglot stopped, and FeatureNotSupported for text that is not one plain
    query: several statements, SELECT INTO, FOR UPDATE, a data-modifying WITH.
    """
    try:
        trees = QueryDialect().parse(text, error_level=ErrorLevel.IMMEDIATE)
    except ParseError as error:
        raise _syntax_error(text, error) from error
    except TokenError as error:
        raise SqlSyntaxError("syntax error", statement=text) from error
    found = [tree for tree in trees if tree is not None]
    if len(found) != 1 or not isinstance(found[0], exp.Query | exp.Values):
        raise FeatureNotSupported("only plain queries are supported")
    tree = found[0]
    for kind, what in ((exp.Into, "SELECT INTO"), (exp.Lock, "FOR UPDATE"), (exp.DML, "a data-modifying WITH query")):
        if tree.find(kind):
            raise FeatureNotSupported(f"{what} is not supported")
    return tree


def tables_of(tree: exp.Query | exp.Values) -> tuple[QualifiedName, ...]:
    """Return the tables that a query names, each once, in the order of its text, without WITH queries and functions."""
    own = {_fold(cte.args["alias"].this) for cte in tree.find_all(exp.CTE)}
    found: dict[QualifiedName, None] = {}
    for table in tree.find_all(exp.Table, bfs=False):
        if isinstance(table.this, exp.Identifier):
            schema = table.args.get("db")
            name = QualifiedName(_fold(schema) if schema else None, _fold(table.this))
            if name.schema is not None or name.name not in own:
                found[name] = None
    return tuple(found)


def _fold(identifier: exp.Identifier) -> str:
    name: str = identifier.this
    return name if identifier.args.get("quoted") else name.lower()


def _syntax_error(text: str, error: ParseError) -> SqlSyntaxError:
    if not error.errors:
        return SqlSyntaxError("syntax error", statement=text)
    where = error.errors[0]
    highlight = str(where.get("highlight") or "")
    lines = text.split("\n")
    line, column = int(where.get("line") or 1), int(where.get("col") or 1)
    # sqlglot gives the column of the token's last character.
    end = sum(len(before) + 1 for before in lines[: line - 1]) + column
    start = max(0, end - len(highlight))
    if not highlight or (end >= len(text.rstrip().rstrip(";")) and _at_end(str(where.get("description")))):
        return SqlSyntaxError("syntax error at end of input", statement=text, position=len(text))
    return SqlSyntaxError(f'syntax error at or near "{highlight}"', statement=text, position=start)


def _at_end(description: str) -> bool:
    return "Expected" in description or "Required" in description or "Expecting" in description
