"""Parse SQL text into typed statements: the only entry point, for the command line and pubsub.Node.

    for text in script_statements(script):
        statement = parse_statement(text)

A script's statements are parsed one by one, each when its turn comes, as psql sends them: the statements before an
error are executed.
"""

from __future__ import annotations

from typing import Final

from pubsub.errors import SqlSyntaxError
from pubsub.sql.grammar import Grammar, not_supported
from pubsub.sql.keywords import words
from pubsub.sql.lexer import split
from pubsub.sql.statements import Select, Statement

_QUERIES: Final = frozenset({"select", "with", "values", "table"})
#: First words of PostgreSQL's other statements.
_OTHERS: Final = words(
    """
    abort alter analyze begin call checkpoint close cluster comment commit copy create deallocate declare delete
    discard do drop end execute explain fetch grant import insert listen load lock merge move notify prepare reassign
    refresh reindex release reset revoke rollback savepoint security set start truncate unlisten update vacuum
    """
)
_WITH_OBJECT: Final = frozenset({"create", "alter", "drop"})


def script_statements(script: str) -> list[str]:
    """Split a script into texts for `parse_statement`; the last one may lack its semicolon."""
    statements, rest = split(script)
    return [*statements, rest] if rest else statements


def parse_statement(text: str, notices: list[str] | None = None) -> Statement | None:
    """Parse one statement; return None if the text has none (a lone semicolon, a comment).

    Raises SqlSyntaxError with its position in `text`, other PubsubErrors for invalid options, and FeatureNotSupported
    for statements that a node does not accept.  NOTICEs (truncated names) are added to `notices`.
    """
    grammar = Grammar(text, notices)
    if grammar.empty:
        return None
    leading = grammar.words(2)
    first = leading[0] if leading else ""
    if first in _WITH_OBJECT and leading[1:] == ("subscription",):
        return grammar.subscription()
    if first == "show":
        return grammar.show()
    if first in _QUERIES or text.lstrip().startswith("("):
        return _select(text)
    if first in _WITH_OBJECT and len(leading) < 2:
        raise grammar.error_at(1)
    if first in _OTHERS:
        raise not_supported(leading if first in _WITH_OBJECT else leading[:1])
    raise grammar.error_at(0)


def parse(script: str, notices: list[str] | None = None) -> list[Statement]:
    """Parse all statements of a script.  Raises at the first invalid one, like `parse_statement`."""
    found = (parse_statement(text, notices) for text in script_statements(script))
    return [statement for statement in found if statement is not None]


def parse_one(text: str, notices: list[str] | None = None) -> Statement:
    """Parse the only statement of a text.  Raises like `parse_statement`, and SqlSyntaxError for none or several."""
    statements = script_statements(text)
    if len(statements) > 1:
        raise SqlSyntaxError("cannot insert multiple commands into a prepared statement")
    statement = parse_statement(statements[0], notices) if statements else None
    if statement is None:
        raise SqlSyntaxError("syntax error at end of input", statement=text, position=len(text))
    return statement


def _select(text: str) -> Select:
    from pubsub.sql.dialect import parse_query, tables_of  # sqlglot takes 300 ms to import

    return Select(text.rstrip().removesuffix(";").rstrip(), tables_of(parse_query(text)))
