"""The grammar of the statements on subscriptions: gram.y of PostgreSQL 18, 19's REFRESH SEQUENCES, and RESYNC TABLE.

A recursive descent over the tokens of one statement.  As in PostgreSQL, an error gives the token that no rule accepts,
and its position: `syntax error at or near "PUBLICATON"`, `syntax error at end of input`.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Final, TypeVar

from pubsub.errors import DuplicateObject, FeatureNotSupported, SqlSyntaxError, UndefinedObject
from pubsub.sql import options as o
from pubsub.sql.identifiers import qualified
from pubsub.sql.keywords import NOT_COLID
from pubsub.sql.lexer import Kind, Token, near, tokenize
from pubsub.sql.options import Option, OptionValue, resolve, resolve_skip
from pubsub.sql.statements import (
    AddPublication,
    AlterAction,
    AlterSubscription,
    Connection,
    CreateSubscription,
    Disable,
    DropPublication,
    DropSubscription,
    Enable,
    Owner,
    RefreshPublication,
    RefreshSequences,
    Rename,
    ResyncTable,
    SetOptions,
    SetPublication,
    Show,
    Skip,
)

SubscriptionStatement = CreateSubscription | AlterSubscription | DropSubscription
_T = TypeVar("_T")
_CURRENT: Final = frozenset({"current_role", "current_user", "session_user"})


#: The forms of SHOW that are not a parameter's name (gram.y: VariableShowStmt).
_SHOW_FORMS: Final = {
    ("time", "zone"): "timezone",
    ("transaction", "isolation", "level"): "transaction_isolation",
    ("session", "authorization"): "session_authorization",
}


class Grammar:
    """The parser of a single statement."""

    def __init__(self, text: str, notices: list[str] | None = None) -> None:
        self._text = text
        self._tokens = tokenize(text, notices)
        self._place = 0

    def words(self, count: int) -> tuple[str, ...]:
        """Return the statement's first `count` tokens in lower case, up to the first that is not a word."""
        found: list[str] = []
        for token in self._tokens[:count]:
            if token.kind is not Kind.WORD:
                break
            found.append(token.value)
        return tuple(found)

    @property
    def empty(self) -> bool:
        """Whether the statement has no tokens but semicolons."""
        return all(token.value == ";" and token.kind is Kind.OPERATOR for token in self._tokens)

    def subscription(self) -> SubscriptionStatement:
        """Parse CREATE, ALTER or DROP SUBSCRIPTION.  Raises SqlSyntaxError, and other PubsubErrors for its options."""
        verb = self._one_of("create", "alter", "drop")
        self._word("subscription")
        match verb:
            case "create":
                statement: SubscriptionStatement | Callable[[], SubscriptionStatement] = self._create()
            case "alter":
                statement = self._alter()
            case _:
                statement = self._drop()
        self.end()
        # Options are checked once the whole statement has parsed, as in PostgreSQL.
        return statement() if callable(statement) else statement

    def show(self) -> Show:
        """Parse SHOW name, SHOW ALL and the spelled-out forms.  Raises SqlSyntaxError."""
        self._word("show")
        leading = self.words(4)[1:]
        if leading[:1] == ("all",):
            self._place += 1
            name = None
        else:
            spelled = next((form for form in _SHOW_FORMS if leading[: len(form)] == form), None)
            self._place += len(spelled or ())
            name = _SHOW_FORMS[spelled] if spelled else self._dotted(self._name())
        self.end()
        return Show(name)

    def end(self) -> None:
        """Accept a semicolon and require the end.  Raises SqlSyntaxError."""
        self._took_operator(";")
        if self._next is not None:
            raise self._error()

    def error_at(self, place: int) -> SqlSyntaxError:
        """Return a syntax error at the token with that number."""
        self._place = place
        return self._error()

    def _create(self) -> Callable[[], CreateSubscription]:
        name = self._name()
        by_server = self._one_of("connection", "server") == "server"
        connection = self._name() if by_server else self._string()
        self._word("publication")
        publications = self._publications()
        given = self._definition() if self._took("with") else []

        def build() -> CreateSubscription:
            if by_server:
                raise _no_servers("CREATE SUBSCRIPTION ... SERVER")
            found = resolve(given, o.CREATE_OPTIONS, self._text)
            return CreateSubscription(name, connection, _distinct(publications), found)

        return build

    def _alter(self) -> Callable[[], AlterSubscription]:
        name = self._name()
        action = self._action()
        return lambda: AlterSubscription(name, action())

    def _action(self) -> Callable[[], AlterAction]:
        match self._one_of(
            "set",
            "connection",
            "server",
            "refresh",
            "add",
            "drop",
            "enable",
            "disable",
            "skip",
            "rename",
            "owner",
            "resync",
        ):
            case "set" if not self._took("publication"):
                given = self._definition()
                return lambda: SetOptions(resolve(given, o.SET_OPTIONS, self._text))
            case "set":
                return self._publication_action(SetPublication)
            case "add":
                self._word("publication")
                return self._publication_action(AddPublication)
            case "drop":
                self._word("publication")
                names, given = self._publications(), self._with()

                def drop() -> DropPublication:
                    found = resolve(given, o.DROP_PUBLICATION_OPTIONS, self._text)
                    return DropPublication(_distinct(names), found.refresh)

                return drop
            case "refresh":
                if self._one_of("publication", "sequences") == "sequences":
                    return RefreshSequences
                given = self._with()
                return lambda: RefreshPublication(resolve(given, o.REFRESH_OPTIONS, self._text).copy_data)
            case "connection":
                conninfo = self._string()
                return lambda: Connection(conninfo)
            case "server":
                self._name()

                def refuse() -> AlterAction:
                    raise _no_servers("ALTER SUBSCRIPTION ... SERVER")

                return refuse
            case "enable":
                return Enable
            case "disable":
                return Disable
            case "skip":
                given = self._definition()
                return lambda: Skip(resolve_skip(given, self._text))
            case "rename":
                self._word("to")
                new_name = self._name()
                return lambda: Rename(new_name)
            case "owner":
                self._word("to")
                owner = self._owner()
                return lambda: owner
            case _:
                self._word("table")
                tables = self._list(self._qualified_name)
                return lambda: ResyncTable(tuple(qualified(names) for names in tables))

    def _publication_action(
        self, kind: type[SetPublication] | type[AddPublication]
    ) -> Callable[[], SetPublication | AddPublication]:
        names, given = self._publications(), self._with()

        def build() -> SetPublication | AddPublication:
            found = resolve(given, o.SET_PUBLICATION_OPTIONS, self._text)
            return kind(_distinct(names), found.refresh, found.copy_data)

        return build

    def _owner(self) -> Owner:
        """Parse gram.y's RoleSpec; refuse PUBLIC and NONE.  Raises SqlSyntaxError and UndefinedObject."""
        token = self._next
        if token is not None and token.kind is Kind.WORD and token.value in _CURRENT:
            self._place += 1
            return Owner(token.value, keyword=True)
        name = self._name()
        if name == "public":
            raise UndefinedObject('role "public" does not exist')
        if name == "none":
            assert token is not None
            error = SqlSyntaxError('role name "none" is reserved', statement=self._text, position=token.start)
            error.sqlstate = "42939"
            raise error
        return Owner(name)

    def _drop(self) -> DropSubscription:
        start = self._place
        if_exists = self._took("if") and self._took("exists")
        if not if_exists:
            self._place = start  # a subscription may be named "if"
        name = self._name()
        cascade = self._took("cascade")
        if not cascade:
            self._took("restrict")
        return DropSubscription(name, if_exists, cascade)

    def _publications(self) -> tuple[str, ...]:
        return tuple(self._list(self._name))

    def _with(self) -> list[Option]:
        return self._definition() if self._took("with") else []

    def _definition(self) -> list[Option]:
        """Parse gram.y's definition."""
        self._operator("(")
        found = self._list(self._option)
        self._operator(")")
        return found

    def _option(self) -> Option:
        """Parse gram.y's def_elem; any word is a name here, reserved or not."""
        token = self._label()
        value = self._value() if self._took_operator("=") else None
        return Option(token.value, value, token.start)

    def _value(self) -> OptionValue:
        """Parse gram.y's def_arg, without the types and operators that no option takes."""
        token = self._next
        if token is None:
            raise self._error()
        if token.kind is Kind.STRING:
            self._place += 1
            return token.value
        if token.kind is Kind.OPERATOR and token.value in "+-":
            self._place += 1
            number = self._number()
            return -number if token.value == "-" else number
        if token.kind is Kind.NUMBER:
            return self._number()
        return self._dotted(self._label().value)

    def _number(self) -> int | Decimal:
        token = self._next
        if token is None or token.kind is not Kind.NUMBER:
            raise self._error()
        self._place += 1
        return int(token.value, 0) if token.value.isalnum() and _is_integer(token.value) else Decimal(token.value)

    def _dotted(self, first: str) -> str:
        parts = [first]
        while self._took_operator("."):
            parts.append(self._label().value)
        return ".".join(parts)

    def _qualified_name(self) -> list[str]:
        parts = [self._name()]
        while self._took_operator("."):
            parts.append(self._label().value)
        return parts

    def _list(self, element: Callable[[], _T]) -> list[_T]:
        found = [element()]
        while self._took_operator(","):
            found.append(element())
        return found

    @property
    def _next(self) -> Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _took(self, word: str) -> bool:
        token = self._next
        found = token is not None and token.kind is Kind.WORD and token.value == word
        self._place += found
        return found

    def _took_operator(self, operator: str) -> bool:
        token = self._next
        found = token is not None and token.kind is Kind.OPERATOR and token.value == operator
        self._place += found
        return found

    def _word(self, word: str) -> None:
        if not self._took(word):
            raise self._error()

    def _one_of(self, *words: str) -> str:
        for word in words:
            if self._took(word):
                return word
        raise self._error()

    def _operator(self, operator: str) -> None:
        if not self._took_operator(operator):
            raise self._error()

    def _name(self) -> str:
        """Parse gram.y's ColId."""
        token = self._next
        if token is None or not (token.kind is Kind.NAME or (token.kind is Kind.WORD and token.value not in NOT_COLID)):
            raise self._error()
        self._place += 1
        return token.value

    def _label(self) -> Token:
        """Parse gram.y's ColLabel."""
        token = self._next
        if token is None or token.kind not in (Kind.NAME, Kind.WORD):
            raise self._error()
        self._place += 1
        return token

    def _string(self) -> str:
        token = self._next
        if token is None or token.kind is not Kind.STRING:
            raise self._error()
        self._place += 1
        return token.value

    def _error(self) -> SqlSyntaxError:
        token = self._next
        if token is None:
            return near("syntax error", self._text, len(self._text), len(self._text))
        return near("syntax error", self._text, token.start, token.end)


def _is_integer(text: str) -> bool:
    return text.isdigit() or text[:2].lower() in ("0x", "0o", "0b")


def _distinct(publications: tuple[str, ...]) -> tuple[str, ...]:
    """Return the publications; refuse a repeated one with DuplicateObject.

    Follows subscriptioncmds.c: check_duplicates_in_publist.
    """
    for place, name in enumerate(publications):
        if name in publications[:place]:
            raise DuplicateObject(f'publication name "{name}" used more than once')
    return publications


def _no_servers(what: str) -> FeatureNotSupported:
    """Return the error for a connection that PostgreSQL 19 takes from a foreign server."""
    return FeatureNotSupported(
        f"{what} is not supported",
        detail="A node has no foreign servers.",
        hint="Use CONNECTION, with a service file (service=...) and a password file.",
    )


def not_supported(words: tuple[str, ...]) -> FeatureNotSupported:
    """Return the error for a PostgreSQL statement that a node does not accept."""
    what = " ".join(words).upper()
    if words[1:] == ("publication",):
        return FeatureNotSupported(f"{what} is not supported on a node that does not publish")
    return FeatureNotSupported(
        f"{what} is not supported", hint="A node takes statements on subscriptions, SHOW and SELECT."
    )
