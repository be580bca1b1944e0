"""What a statement of a client is, and how it is carried out.

SELECT, VALUES, TABLE, WITH            queries.py
COPY (…) TO STDOUT                     copying.py
SET, RESET, SHOW, DISCARD              session_parameters.py
BEGIN, COMMIT, SAVEPOINT, …            the block's state; nothing is ever undone
DECLARE, FETCH, MOVE, CLOSE            cursors
CREATE SUBSCRIPTION and its relatives  pubsub.Node, as in `pubsub sql`
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from launcher.notices import Notice
from pubsub.errors import FeatureNotSupported, InsufficientPrivilege, PubsubError, SqlSyntaxError
from pubsub.server.queries import Batches, Query
from pubsub.server.values import INT4, TEXT, Field
from pubsub.sql.lexer import Kind, Token, tokenize
from pubsub.sql.parser import parse_statement

if TYPE_CHECKING:
    from pubsub.server.session import Session

_QUERIES: Final = frozenset({"select", "with", "values", "table", "("})
_BLOCK: Final = frozenset({"begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release"})
_ENDS: Final = frozenset({"commit", "end", "rollback", "abort"})
_SETTINGS: Final = frozenset({"set", "reset", "show", "discard", "deallocate"})
_CURSORS: Final = frozenset({"declare", "fetch", "move", "close"})
_NOTHING: Final = frozenset({"listen", "unlisten", "analyze", "vacuum", "checkpoint"})
_ALL: Final = 1 << 62


@dataclass(slots=True)
class Answer:
    """The answer to a statement: a tag, or columns and rows, of which the tag has the number."""

    tag: str
    fields: tuple[Field, ...] | None = None
    rows: Batches | None = None
    counts: bool = True
    """Whether the number of rows follows the tag."""
    copy: AsyncIterator[bytes] | None = None
    """The lines of COPY TO STDOUT; with them `fields` are those of the rows."""
    copy_binary: bool = False


@dataclass(slots=True)
class Cursor:
    """A cursor that DECLARE has made: what was read and not fetched yet, and the rest."""

    fields: tuple[Field, ...]
    rows: Batches
    held: list[tuple[Any, ...]] = field(default_factory=list)

    async def take(self, count: int) -> list[tuple[Any, ...]]:
        """Return the next rows."""
        while len(self.held) < count:
            batch = await anext(self.rows, None)
            if batch is None:
                break
            self.held += batch
        taken, self.held = self.held[:count], self.held[count:]
        return taken


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement.  `start`: where it begins in the query that the client sent; `types`: its parameters' oids."""

    text: str
    start: int = 0
    types: tuple[int, ...] = ()
    tokens: tuple[Token, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str, start: int = 0, types: tuple[int, ...] = ()) -> Statement:
        """Look at a statement's words.  Raises SqlSyntaxError, with its place in the statement."""
        return cls(text, start, types, tuple(tokenize(text)))

    @property
    def first(self) -> str:
        """Its first word."""
        return self.tokens[0].value if self.tokens else ""

    @property
    def is_empty(self) -> bool:
        return all(token.value == ";" for token in self.tokens)

    @property
    def is_query(self) -> bool:
        return self.first in _QUERIES

    @property
    def ends_block(self) -> bool:
        """Whether it is taken in a transaction that has failed."""
        return self.first in _ENDS and "prepared" not in self.words()

    def words(self) -> list[str]:
        return [token.value for token in self.tokens if token.value != ";"]

    def query(self) -> Query:
        text = self.text.rstrip().removesuffix(";").rstrip()
        return Query(text, self.types)


async def describe(session: Session, statement: Statement) -> tuple[tuple[int, ...], tuple[Field, ...] | None]:
    """Return a statement's parameters' types, and its columns, None if it returns no rows.  Raises PubsubError."""
    if statement.is_query:
        return await statement.query().described(await session.environment())
    if statement.first == "show":
        return (), _show_fields(session, statement)
    if statement.first == "fetch":
        _, name = _fetch(statement)
        return (), _cursor(session, name).fields
    return (), None


async def carry_out(
    session: Session, statement: Statement, parameters: Sequence[str | None], tell: Callable[[Notice], None]
) -> Answer:
    """Carry a statement out, or begin to; return the answer.  Raises PubsubError."""
    if session.status == b"E" and not statement.ends_block:
        raise PubsubError(
            "current transaction is aborted, commands ignored until end of transaction block", sqlstate="25P02"
        )
    first = statement.first
    if statement.is_query:
        fields, rows = await statement.query().run(await session.environment(), parameters)
        return Answer("SELECT", fields, rows)
    if first in _BLOCK:
        return _block(session, statement, tell)
    if first in _SETTINGS:
        return await _setting(session, statement)
    if first in _CURSORS:
        return await _use_cursor(session, statement)
    if first == "copy":
        from pubsub.server import copying

        columns, lines, binary = await copying.copy(session, statement)
        return Answer("COPY", columns, copy=lines, copy_binary=binary)
    if first in _NOTHING:
        return Answer(first.upper())
    return await _command(session, statement, tell)


async def _command(session: Session, statement: Statement, tell: Callable[[Notice], None]) -> Answer:
    if not session.user.is_superuser:
        raise InsufficientPrivilege(
            f'permission denied for user "{session.user.name}"',
            detail="Only users with the privilege superuser may change the node.",
        )
    if session.status == b"T":
        if statement.words()[1:2] != ["publication"]:
            parse_statement(statement.text)  # a mistake in it is told first
        words = " ".join(statement.words()[:2]).upper()
        raise PubsubError(
            f"{words} cannot run inside a transaction block",
            sqlstate="25001",
            hint="Switch on autocommit in the client.",
        )
    if statement.words()[1:2] == ["publication"]:
        state = await session.backend.node.state()
        return Answer(session.backend.publisher.publications.execute(statement.text, statement.tokens, state))
    answer = Answer("")
    async for result in session.backend.node.results(statement.text, tell):
        answer = Answer(result.tag, counts=False)
    return answer


# Transactions: every statement is one of its own, whatever the block


def _block(session: Session, statement: Statement, tell: Callable[[Notice], None]) -> Answer:
    words = statement.words()
    first = words[0]
    if "prepared" in words or "prepare" in words:
        raise FeatureNotSupported("prepared transactions are not supported")
    if first in ("begin", "start"):
        if session.status == b"T":
            tell(Notice("there is already a transaction in progress", "WARNING"))
        session.status = b"T"
        return Answer("START TRANSACTION" if first == "start" else "BEGIN")
    if first == "savepoint" or (first == "release"):
        if session.status == b"I":
            raise PubsubError(f"{first.upper()} can only be used in transaction blocks", sqlstate="25P01")
        return Answer(first.upper())
    if "to" in words:
        # ROLLBACK TO SAVEPOINT
        session.status = b"T"
        return Answer("ROLLBACK")
    failed = session.status == b"E"
    if session.status == b"I":
        tell(Notice("there is no transaction in progress", "WARNING"))
    session.status = b"I"
    session.cursors.clear()
    session.versions = {}
    chained = "chain" in words and "no" not in words
    if chained:
        session.status = b"T"
    return Answer("ROLLBACK" if failed or first in ("rollback", "abort") else "COMMIT")


# SET, RESET, SHOW, DISCARD, DEALLOCATE


def _show_fields(session: Session, statement: Statement) -> tuple[Field, ...]:
    name = _shown(statement)
    if name == "all":
        return tuple(Field(one, TEXT, -1) for one in ("name", "setting", "description"))
    if session.parameters.known(name):
        return (Field(session.parameters.show(name)[0], TEXT, -1),)
    return (Field(name, TEXT, -1),)


def _shown(statement: Statement) -> str:
    words = statement.words()[1:]
    if words[:2] == ["time", "zone"]:
        return "timezone"
    if words[:3] == ["transaction", "isolation", "level"]:
        return "transaction_isolation"
    if words[:2] == ["session", "authorization"]:
        return "session_authorization"
    return "".join(words)


async def _setting(session: Session, statement: Statement) -> Answer:
    words = statement.words()
    parameters = session.parameters
    match words[0]:
        case "show":
            name = _shown(statement)
            fields = _show_fields(session, statement)
            if name == "all":
                listed = [(*one, "") for one in parameters.listed()] + session.backend.node.settings.describe_all()
                return Answer("SHOW", fields, _one_batch(sorted(listed)), counts=False)
            value = parameters.show(name)[1] if parameters.known(name) else session.backend.node.settings.show(name)
            return Answer("SHOW", fields, _one_batch([(value,)]), counts=False)
        case "reset":
            if words[1:] == ["all"]:
                parameters.reset_all()
            else:
                session.report(*parameters.set("timezone" if words[1:2] == ["time"] else "".join(words[1:]), None))
            return Answer("RESET")
        case "discard":
            parameters.reset_all()
            session.prepared.clear()
            session.cursors.clear()
            return Answer(" ".join(words[:2]).upper())
        case "deallocate":
            names = [one for one in words[1:] if one != "prepare"]
            if names == ["all"]:
                session.prepared.clear()
                return Answer("DEALLOCATE ALL")
            if not names or names[0] not in session.prepared:
                raise PubsubError(f'prepared statement "{"".join(names)}" does not exist', sqlstate="26000")
            del session.prepared[names[0]]
            return Answer("DEALLOCATE")
    _set(session, statement)
    return Answer("SET")


def _set(session: Session, statement: Statement) -> None:
    tokens = [token for token in statement.tokens if token.value != ";"][1:]
    words = [token.value for token in tokens]
    if words[:1] in (["session"], ["local"]) and words[1:2] not in (["authorization"], ["characteristics"]):
        tokens, words = tokens[1:], words[1:]
    if words[:2] == ["transaction", "snapshot"]:
        found = session.backend.snapshots.get(words[2]) if len(words) > 2 else None
        if found is None:
            raise PubsubError(f'invalid snapshot identifier: "{"".join(words[2:3])}"', sqlstate="22023")
        session.versions = found
        return
    if words[:1] in (["transaction"], ["constraints"]) or words[:2] == ["session", "characteristics"]:
        return
    if words[:2] == ["time", "zone"]:
        name, rest = "timezone", tokens[2:]
    elif words[:1] == ["names"]:
        name, rest = "client_encoding", tokens[1:]
    elif words[:2] == ["session", "authorization"] or words[:1] == ["role"]:
        if words[-1] in ("default", "none", session.user.name):
            return
        raise InsufficientPrivilege("permission denied to set session authorization")
    else:
        at = next((place for place, word in enumerate(words) if word in ("=", "to")), None)
        if at is None or at == 0:
            raise SqlSyntaxError("syntax error at end of input", statement=statement.text, position=len(statement.text))
        name, rest = "".join(words[:at]), tokens[at + 1 :]
    text = ", ".join(token.value for token in rest if token.value != ",").replace("-, ", "-")
    is_default = len(rest) == 1 and rest[0].kind is Kind.WORD and rest[0].value == "default"
    session.report(*session.parameters.set(name, None if is_default else text))


async def _one_batch(rows: Sequence[tuple[Any, ...]]) -> Batches:
    yield rows


# Cursors


def _cursor(session: Session, name: str) -> Cursor:
    found = session.cursors.get(name)
    if found is None:
        raise PubsubError(f'cursor "{name}" does not exist', sqlstate="34000")
    return found


async def _use_cursor(session: Session, statement: Statement) -> Answer:
    words = statement.words()
    match words[0]:
        case "close":
            if words[1:] == ["all"]:
                session.cursors.clear()
                return Answer("CLOSE CURSOR ALL")
            _cursor(session, words[-1])
            del session.cursors[words[-1]]
            return Answer("CLOSE CURSOR")
        case "declare":
            return await _declare(session, statement)
        case _:
            count, name = _fetch(statement)
            cursor = _cursor(session, name)
            rows = await cursor.take(count)
            if words[0] == "move":
                return Answer(f"MOVE {len(rows)}")
            return Answer("FETCH", cursor.fields, _one_batch(rows))


async def _declare(session: Session, statement: Statement) -> Answer:
    place = next(
        (at for at, token in enumerate(statement.tokens) if token.kind is Kind.WORD and token.value == "for"), None
    )
    if place is None or len(statement.tokens) < 3:
        raise SqlSyntaxError("syntax error at end of input", statement=statement.text, position=len(statement.text))
    between = [token.value for token in statement.tokens[2:place]]
    if session.status == b"I" and "hold" not in between:
        raise PubsubError("DECLARE CURSOR can only be used in transaction blocks", sqlstate="25P01")
    if "scroll" in between and "no" not in between:
        raise FeatureNotSupported("scrollable cursors are not supported")
    name = statement.tokens[1].value
    if name in session.cursors:
        raise PubsubError(f'cursor "{name}" already exists', sqlstate="42P03")
    text = statement.text[statement.tokens[place].end :].rstrip().removesuffix(";")
    fields, rows = await Query(text.strip()).run(await session.environment(), ())
    session.cursors[name] = Cursor(fields, rows)
    return Answer("DECLARE CURSOR")


def _fetch(statement: Statement) -> tuple[int, str]:
    """Return how many rows FETCH or MOVE takes, and of which cursor.  Raises FeatureNotSupported."""
    words = [word for word in statement.words()[1:] if word not in ("from", "in")]
    name = words[-1] if words else ""
    count = 1
    for word in words[:-1]:
        if word == "all":
            count = _ALL
        elif re.fullmatch(r"\d+", word):
            count = int(word)
        elif word not in ("forward", "next"):
            raise FeatureNotSupported(f"FETCH {word.upper()} is not supported: cursors go forward only")
    return count, name


__all__ = ["INT4", "Answer", "Cursor", "Statement", "carry_out", "describe"]
