"""Publications of a node: CREATE, ALTER and DROP PUBLICATION, kept in a file of the node's directory (publicationcmds.c)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from catalog.records import State, SubscriptionRel
from pubsub.errors import DuplicateObject, FeatureNotSupported, PubsubError, SqlSyntaxError, UndefinedObject
from pubsub.node.query import find_relation
from pubsub.reorderbuffer import files
from pubsub.sql.lexer import Kind, Token

FILE: Final = "publications.json"
_ACTIONS: Final = ("insert", "update", "delete", "truncate")
_FIRST_OID: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication.  `tables`: schema, name and the columns, None for all; `publish`: some of insert, update, …"""

    oid: int
    name: str
    all_tables: bool = False
    tables: tuple[tuple[str, str, tuple[str, ...] | None], ...] = ()
    schemas: tuple[str, ...] = ()
    publish: tuple[str, ...] = _ACTIONS

    def columns_of(self, relation: SubscriptionRel) -> tuple[str, ...] | bool | None:
        """Return which columns of a table are published: some, all (None), or False if the table is not.

        One of several sources is not: rows of two may have the same key.
        """
        if relation.whose is not None:
            return False
        for schema, name, columns in self.tables:
            if (schema, name) == (relation.schema, relation.name):
                return columns
        return None if self.all_tables or relation.schema in self.schemas else False


@dataclass(slots=True)
class Publications:
    """The publications of the node in `home`."""

    home: Path
    by_name: dict[str, Publication] = field(default_factory=dict)

    @classmethod
    def load(cls, home: Path) -> Publications:
        path = home / FILE
        found = cls(home)
        if path.exists():
            for one in json.loads(path.read_text("utf-8")):
                tables = tuple((a, b, None if c is None else tuple(c)) for a, b, c in one["tables"])
                one |= {"tables": tables, "schemas": tuple(one["schemas"]), "publish": tuple(one["publish"])}
                found.by_name[one["name"]] = Publication(**one)
        return found

    def _save(self) -> None:
        path = self.home / FILE
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps([asdict(one) for one in self.by_name.values()]), encoding="utf-8")
        files.make_durable(aside, path)

    def execute(self, text: str, tokens: Sequence[Token], state: State) -> str:
        """Carry a statement out; return its tag.  Raises PubsubError."""
        words = _Words(text, [token for token in tokens if token.value != ";"])
        kind = words.next()
        words.expect("publication")
        if kind == "drop":
            return self._drop(words)
        name = words.name()
        if kind == "create":
            if name in self.by_name:
                raise DuplicateObject(f'publication "{name}" already exists')
            oid = max((one.oid for one in self.by_name.values()), default=_FIRST_OID) + 1
            self.by_name[name] = self._defined(Publication(oid, name), words, state)
            self._save()
            return "CREATE PUBLICATION"
        held = self.by_name.get(name)
        if held is None:
            raise UndefinedObject(f'publication "{name}" does not exist')
        self._alter(held, words, state)
        self._save()
        return "ALTER PUBLICATION"

    def _drop(self, words: _Words) -> str:
        missing_ok = words.take("if", "exists")
        names = [words.name()]
        while words.take(","):
            names.append(words.name())
        for name in names:
            if name not in self.by_name and not missing_ok:
                raise UndefinedObject(f'publication "{name}" does not exist')
        for name in names:
            self.by_name.pop(name, None)
        self._save()
        return "DROP PUBLICATION"

    def _defined(self, publication: Publication, words: _Words, state: State) -> Publication:
        if words.take("for"):
            if words.take("all", "tables"):
                publication = replace(publication, all_tables=True)
            else:
                publication = self._objects(publication, words, state)
        if words.take("with"):
            publication = _options(publication, words)
        words.end()
        return publication

    def _objects(self, publication: Publication, words: _Words, state: State) -> Publication:
        tables, schemas = list(publication.tables), list(publication.schemas)
        kind = ""
        while True:
            if words.take("tables", "in", "schema"):
                kind = "schema"
            elif words.take("table"):
                kind = "table"
            if not kind:
                raise words.wrong()
            if kind == "schema":
                schemas.append(words.name())
            else:
                tables.append(_table(words, state))
            if not words.take(","):
                return replace(publication, tables=tuple(tables), schemas=tuple(dict.fromkeys(schemas)))

    def _alter(self, held: Publication, words: _Words, state: State) -> None:
        if words.take("rename", "to"):
            name = words.name()
            if name in self.by_name:
                raise DuplicateObject(f'publication "{name}" already exists')
            del self.by_name[held.name]
            self.by_name[name] = replace(held, name=name)
            return
        action = words.next()
        if action == "set" and words.peek() == "(":
            self.by_name[held.name] = _options(held, words)
            return
        if held.all_tables:
            raise PubsubError(
                f'publication "{held.name}" is defined as FOR ALL TABLES',
                sqlstate="55000",
                detail="Tables or schemas cannot be added to or dropped from FOR ALL TABLES publications.",
            )
        given = self._objects(replace(held, tables=(), schemas=()), words, state)
        names = {(schema, name) for schema, name, _ in given.tables}
        rest = tuple(one for one in held.tables if one[:2] not in names)
        if action == "set":
            changed = given
        elif action == "add":
            if len(rest) < len(held.tables):
                raise DuplicateObject(f'relation "{given.tables[0][1]}" is already member of publication "{held.name}"')
            changed = replace(held, tables=held.tables + given.tables, schemas=held.schemas + given.schemas)
        elif action == "drop":
            if len(rest) + len(names) != len(held.tables):
                raise UndefinedObject(f'relation "{given.tables[0][1]}" is not part of the publication')
            left = tuple(one for one in held.schemas if one not in given.schemas)
            changed = replace(held, tables=rest, schemas=left)
        else:
            raise words.wrong()
        self.by_name[held.name] = changed


def _table(words: _Words, state: State) -> tuple[str, str, tuple[str, ...] | None]:
    words.take("only")
    schema, name = "public", words.name()
    if words.take("."):
        schema, name = name, words.name()
    words.take("*")
    relation = find_relation(state, schema, name)
    if relation.whose is not None:
        raise FeatureNotSupported(
            f'cannot add relation "{name}" to publication: its Delta table has the rows of several sources'
        )
    columns: tuple[str, ...] | None = None
    if words.take("("):
        named = [words.name()]
        while words.take(","):
            named.append(words.name())
        words.expect(")")
        columns = tuple(named)
        known = json.loads(relation.definition or "{}")
        for column in columns:
            if column not in (known.get("columns") or columns):
                raise PubsubError(f'column "{column}" of relation "{name}" does not exist', sqlstate="42703")
        missing = [one for one in relation.row_key if one not in columns]
        if missing:
            raise PubsubError(
                f'column list of relation "{name}" lacks columns of its replica identity',
                sqlstate="42P10",
                detail=f"It lacks {', '.join(missing)}.",
            )
    if words.peek() == "where":
        raise FeatureNotSupported("row filters are not supported in publications of Delta tables")
    return relation.schema, relation.name, columns


def _options(publication: Publication, words: _Words) -> Publication:
    words.expect("(")
    while True:
        name = words.name()
        value = words.name() if words.take("=") else "true"
        if name == "publish":
            actions = tuple(one.strip() for one in value.split(",") if one.strip())
            for one in actions:
                if one not in _ACTIONS:
                    raise PubsubError(f'unrecognized value for publication option "publish": "{one}"', sqlstate="42601")
            publication = replace(publication, publish=actions)
        elif name not in ("publish_via_partition_root", "publish_generated_columns"):
            raise PubsubError(f'unrecognized publication parameter: "{name}"', sqlstate="42601")
        if not words.take(","):
            break
    words.expect(")")
    return publication


class _Words:
    """The words of a statement, one after the other."""

    def __init__(self, text: str, tokens: Sequence[Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at].value if self._at < len(self._tokens) else ""

    def take(self, *words: str) -> bool:
        """Step over these words if they come next."""
        found = [token.value for token in self._tokens[self._at : self._at + len(words)]]
        if found != list(words):
            return False
        self._at += len(words)
        return True

    def next(self) -> str:
        word = self.peek()
        self._at += 1
        return word

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.wrong()

    def name(self) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at].kind is Kind.OPERATOR:
            raise self.wrong()
        return self.next()

    def end(self) -> None:
        if self._at < len(self._tokens):
            raise self.wrong()

    def wrong(self) -> SqlSyntaxError:
        if self._at >= len(self._tokens):
            return SqlSyntaxError("syntax error at end of input", statement=self._text, position=len(self._text))
        token = self._tokens[self._at]
        shown = self._text[token.start : token.end]
        return SqlSyntaxError(f'syntax error at or near "{shown}"', statement=self._text, position=token.start)
