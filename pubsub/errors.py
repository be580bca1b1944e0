"""The project's errors, with PostgreSQL's fields and SQLSTATEs.

Every error that a user can see is a `PubsubError`.  Its fields are those of PostgreSQL's error reports (elog.c:
ereport), and it prints as in psql.  Lower layers only raise; the launcher alone decides about an error: retry, stop the
table, or stop the subscription.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

#: The string of CONNECTION, be it closed or not; `open` begins it.
_CONNECTION: Final = re.compile(
    r"""(?P<open>\bCONNECTION\s*)
        (?P<string>E'(?:[^'\\]|''|\\.)*'? | (?:U&)?'(?:[^']|'')*'? | (?P<tag>\$\w*\$).*?(?:(?P=tag)|\Z))""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


def _masked(match: re.Match[str]) -> str:
    """As wide as it was, so that positions in the statement stay."""
    return match["open"] + re.sub(r"[^\n']", "*", match["string"])


class PubsubError(Exception):
    """An error with PostgreSQL's fields.

    `sqlstate` is the five-character code; the class sets its default.  `context` says where it happened (table, LSN).
    Higher layers set `relid` if the error concerns only this table, and `finish_lsn` if it concerns one transaction.
    """

    default_sqlstate: ClassVar[str] = "XX000"

    def __init__(
        self,
        message: str,
        *,
        sqlstate: str | None = None,
        detail: str | None = None,
        hint: str | None = None,
        context: str | None = None,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate or self.default_sqlstate
        self.message = message
        self.detail = detail
        self.hint = hint
        self.context = context
        self.relid: int | None = None
        self.finish_lsn: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return what `PubsubError` makes the error of again, in another process."""
        names = ("message", "sqlstate", "detail", "hint", "context")
        return {name: getattr(self, name) for name in names}

    def report(self, *, verbose: bool = False) -> str:
        """Return the error as in psql: ERROR, DETAIL, HINT, CONTEXT, one line each; `verbose` adds the SQLSTATE."""
        head = f"ERROR:  {self.sqlstate}: {self.message}" if verbose else f"ERROR:  {self.message}"
        rest = [("DETAIL", self.detail), ("HINT", self.hint), ("CONTEXT", self.context)]
        return "\n".join([head, *(f"{label}:  {text}" for label, text in rest if text)])


class ProtocolViolation(PubsubError):
    """Malformed bytes from the peer: the only error that a codec raises for bad input."""

    default_sqlstate = "08P01"


class ConnectionFailure(PubsubError):
    """The connection could not be made, or broke; it is retried."""

    default_sqlstate = "08006"


class FeatureNotSupported(PubsubError):
    """A feature of PostgreSQL that this node lacks or that Delta makes impossible."""

    default_sqlstate = "0A000"


class InvalidValue(PubsubError):
    """A value that the target column cannot hold exactly; it is never rounded or made NULL."""

    default_sqlstate = "22023"


class SqlSyntaxError(PubsubError):
    """A statement that does not parse; `position` is the 0-based offset of the offending character in `statement`."""

    default_sqlstate = "42601"

    def __init__(
        self, message: str, *, statement: str = "", position: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.statement = statement
        self.position = position

    def report(self, *, verbose: bool = False) -> str:
        text = super().report(verbose=verbose)
        if self.position is None:
            return text
        statement = _CONNECTION.sub(_masked, self.statement)
        before = statement[: self.position]
        number = before.count("\n") + 1
        line = statement.split("\n")[number - 1]
        caret = self.position - (before.rfind("\n") + 1)
        prefix = f"LINE {number}: "
        return f"{text}\n{prefix}{line}\n{' ' * (len(prefix) + caret)}^"


class UndefinedObject(PubsubError):
    default_sqlstate = "42704"


class UndefinedTable(PubsubError):
    default_sqlstate = "42P01"


class UndefinedFile(PubsubError):
    default_sqlstate = "58P01"


class DuplicateObject(PubsubError):
    default_sqlstate = "42710"


class InsufficientPrivilege(PubsubError):
    default_sqlstate = "42501"


class ObjectInUse(PubsubError):
    default_sqlstate = "55006"


class NotInPrerequisiteState(PubsubError):
    default_sqlstate = "55000"


class SerializationFailure(PubsubError):
    """Something was changed meanwhile that had to stay as it was; another attempt may succeed."""

    default_sqlstate = "40001"


class ProgramLimitExceeded(PubsubError):
    """A value or message larger than the program's limit."""

    default_sqlstate = "54000"


class DataCorrupted(PubsubError):
    """A checksum, length or state is wrong; none of the data is applied."""

    default_sqlstate = "XX001"


class NoCatalog(PubsubError):
    """There is no catalog, and the caller did not ask to create one."""

    default_sqlstate = "58P01"


class PublisherError(PubsubError):
    """An error reported by the publisher's server, with its own SQLSTATE and texts."""


class StartAgain(PubsubError):
    """The worker must decide again from its origin: not a failure."""

    default_sqlstate = "57P01"


class Overtaken(StartAgain):
    """A table is not what a commit to it was worked out for: a worker of the same subscription, in another process, has written it.

    That process was taken for dead, or has a copy of this node's directory: it may do so again, so the next attempt is not made at
    once.  Nothing of the commit is in the table.
    """

    def __init__(self, relation: str, detail: str) -> None:
        super().__init__(f'the Delta table of "{relation}" was changed by another process', detail=detail)
