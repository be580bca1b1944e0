"""The statements that a node accepts, as a closed union of immutable records.

`to_sql` returns SQL that parses back to an equal statement; `str()` returns the same with passwords hidden, for logs.
Names are folded as in PostgreSQL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from pubsub.errors import DuplicateObject, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.conninfo import mask_conninfo
from pubsub.sql.identifiers import QualifiedName, quote_identifier, quote_literal
from pubsub.sql.options import Option, SubscriptionOptions, written


@dataclass(frozen=True, slots=True)
class Enable:
    """ENABLE"""


@dataclass(frozen=True, slots=True)
class Disable:
    """DISABLE"""


@dataclass(frozen=True, slots=True)
class Connection:
    """CONNECTION '…', which may hold a password."""

    conninfo: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RefreshPublication:
    """REFRESH PUBLICATION [WITH (copy_data = …)]"""

    copy_data: bool = True


@dataclass(frozen=True, slots=True)
class RefreshSequences:
    """REFRESH SEQUENCES (PostgreSQL 19)"""


@dataclass(frozen=True, slots=True)
class SetPublication:
    """SET PUBLICATION … [WITH (refresh = …, copy_data = …)]"""

    publications: tuple[str, ...]
    refresh: bool = True
    copy_data: bool = True

    def apply(self, current: tuple[str, ...], subscription: str) -> tuple[str, ...]:
        """Return the subscription's publications after this action."""
        return self.publications


@dataclass(frozen=True, slots=True)
class AddPublication:
    """ADD PUBLICATION … [WITH (refresh = …, copy_data = …)]"""

    publications: tuple[str, ...]
    refresh: bool = True
    copy_data: bool = True

    def apply(self, current: tuple[str, ...], subscription: str) -> tuple[str, ...]:
        """Return the publications after it (subscriptioncmds.c: merge_publications).  Raises DuplicateObject."""
        for name in self.publications:
            if name in current:
                raise DuplicateObject(f'publication "{name}" is already in subscription "{subscription}"')
        return current + self.publications


@dataclass(frozen=True, slots=True)
class DropPublication:
    """DROP PUBLICATION … [WITH (refresh = …)]"""

    publications: tuple[str, ...]
    refresh: bool = True

    def apply(self, current: tuple[str, ...], subscription: str) -> tuple[str, ...]:
        """Return the publications after this action (subscriptioncmds.c: merge_publications).

        Raises PubsubError for a name that is not in the subscription, or if no publication would remain.
        """
        for name in self.publications:
            if name not in current:
                raise PubsubError(f'publication "{name}" is not in subscription "{subscription}"', sqlstate="42P17")
        left = tuple(name for name in current if name not in self.publications)
        if not left:
            raise PubsubError("cannot drop all the publications from a subscription", sqlstate="42P17")
        return left


@dataclass(frozen=True, slots=True)
class SetOptions:
    """SET (…); `options.specified` names the options that change."""

    options: SubscriptionOptions


@dataclass(frozen=True, slots=True)
class Skip:
    """SKIP (lsn = …); `lsn` is the finish LSN of the transaction to skip, INVALID_LSN cancels an earlier SKIP."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Rename:
    """RENAME TO …"""

    new_name: str


@dataclass(frozen=True, slots=True)
class Owner:
    """OWNER TO …; `keyword`: `role` is CURRENT_ROLE, CURRENT_USER or SESSION_USER, in lower case."""

    role: str
    keyword: bool = False


@dataclass(frozen=True, slots=True)
class ResyncTable:
    """RESYNC TABLE … (not in PostgreSQL): copy the tables again."""

    tables: tuple[QualifiedName, ...]


AlterAction = (
    Enable
    | Disable
    | Connection
    | RefreshPublication
    | RefreshSequences
    | SetPublication
    | AddPublication
    | DropPublication
    | SetOptions
    | Skip
    | Rename
    | Owner
    | ResyncTable
)


@dataclass(frozen=True, slots=True)
class CreateSubscription:
    """CREATE SUBSCRIPTION; `connection` may hold a password."""

    name: str
    connection: str = field(repr=False)
    publications: tuple[str, ...]
    options: SubscriptionOptions

    @property
    def slot_name(self) -> str | None:
        """The name of the slot: the subscription's name if none was given, None for NONE."""
        return self.options.slot_name if "slot_name" in self.options.specified else self.name

    def __str__(self) -> str:
        return to_sql(self, hide_password=True)


@dataclass(frozen=True, slots=True)
class AlterSubscription:
    """ALTER SUBSCRIPTION"""

    name: str
    action: AlterAction

    def __str__(self) -> str:
        return to_sql(self, hide_password=True)


@dataclass(frozen=True, slots=True)
class DropSubscription:
    """DROP SUBSCRIPTION; CASCADE is accepted and has no effect, as in PostgreSQL."""

    name: str
    if_exists: bool = False
    cascade: bool = False

    def __str__(self) -> str:
        return to_sql(self, hide_password=True)


@dataclass(frozen=True, slots=True)
class Select:
    """A query as written, without its semicolon; `tables` are the tables it names, without its own WITH queries."""

    sql: str
    tables: tuple[QualifiedName, ...]

    def __str__(self) -> str:
        return self.sql


@dataclass(frozen=True, slots=True)
class Show:
    """SHOW; `name` is in lower case, None for ALL."""

    name: str | None

    def __str__(self) -> str:
        return to_sql(self, hide_password=True)


Statement = CreateSubscription | AlterSubscription | DropSubscription | Select | Show


def command_tag(statement: Statement) -> str:
    """Return the tag that a successful statement prints (cmdtaglist.h); for a query the caller adds the row count."""
    match statement:
        case CreateSubscription():
            return "CREATE SUBSCRIPTION"
        case AlterSubscription():
            return "ALTER SUBSCRIPTION"
        case DropSubscription():
            return "DROP SUBSCRIPTION"
        case Select():
            return "SELECT"
        case Show():
            return "SHOW"
        case _:
            assert_never(statement)


def to_sql(statement: Statement, *, hide_password: bool = False) -> str:
    """Return the statement as SQL; `hide_password` masks the secrets of a connection string."""
    match statement:
        case CreateSubscription(name, connection, publications, options):
            return (
                f"CREATE SUBSCRIPTION {quote_identifier(name)} CONNECTION {_conninfo(connection, hide_password)} "
                f"PUBLICATION {_names(publications)}{_with(written(options))}"
            )
        case AlterSubscription(name, action):
            return f"ALTER SUBSCRIPTION {quote_identifier(name)} {_action(action, hide_password)}"
        case DropSubscription(name, if_exists, cascade):
            exists, behaviour = "IF EXISTS " if if_exists else "", " CASCADE" if cascade else ""
            return f"DROP SUBSCRIPTION {exists}{quote_identifier(name)}{behaviour}"
        case Select(sql):
            return sql
        case Show(name):
            return "SHOW ALL" if name is None else "SHOW " + ".".join(map(quote_identifier, name.split(".")))
        case _:
            assert_never(statement)


def _action(action: AlterAction, hide_password: bool) -> str:
    match action:
        case Enable():
            return "ENABLE"
        case Disable():
            return "DISABLE"
        case Connection(conninfo):
            return f"CONNECTION {_conninfo(conninfo, hide_password)}"
        case RefreshPublication(copy_data):
            return f"REFRESH PUBLICATION{_with(_off(copy_data=copy_data))}"
        case RefreshSequences():
            return "REFRESH SEQUENCES"
        case SetPublication(publications, refresh, copy_data):
            return f"SET PUBLICATION {_names(publications)}{_with(_off(refresh=refresh, copy_data=copy_data))}"
        case AddPublication(publications, refresh, copy_data):
            return f"ADD PUBLICATION {_names(publications)}{_with(_off(refresh=refresh, copy_data=copy_data))}"
        case DropPublication(publications, refresh):
            return f"DROP PUBLICATION {_names(publications)}{_with(_off(refresh=refresh))}"
        case SetOptions(options):
            return f"SET {_list(written(options))}"
        case Skip(lsn):
            return f"SKIP (lsn = {'NONE' if lsn == INVALID_LSN else quote_literal(str(lsn))})"
        case Rename(new_name):
            return f"RENAME TO {quote_identifier(new_name)}"
        case Owner(role, keyword):
            return f"OWNER TO {role.upper() if keyword else quote_identifier(role)}"
        case ResyncTable(tables):
            return f"RESYNC TABLE {', '.join(map(str, tables))}"
        case _:
            assert_never(action)


def _conninfo(conninfo: str, hide_password: bool) -> str:
    return quote_literal(mask_conninfo(conninfo) if hide_password else conninfo).lstrip()


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(map(quote_identifier, names))


def _off(**options: bool) -> list[Option]:
    """Return those of the options that are false; their default is true."""
    return [Option(name, "false") for name, value in options.items() if not value]


def _with(options: list[Option]) -> str:
    return f" WITH {_list(options)}" if options else ""


def _list(options: list[Option]) -> str:
    return "(" + ", ".join(f"{option.name} = {_value(option)}" for option in options) + ")"


def _value(option: Option) -> str:
    return str(option.value) if isinstance(option.value, int) else quote_literal(str(option.value)).lstrip()
