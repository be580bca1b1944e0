"""Parsing replication commands and pgoutput's options: the walsender's counterpart of commands.py.

`parse_command` first tells whether a text is a replication command at all, because a walsender connected to a database
also takes SQL.  Keywords are upper case; identifiers fold to lower case unless quoted.

Follows repl_gram.y, repl_scanner.l, walsender.c (parseCreateReplSlotOptions, ParseAlterReplSlotOptions), pgoutput.c
(parse_output_parameters, pgoutput_startup) and varlena.c (SplitIdentifierString).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.protocol.commands import (
    PROTOCOL_BASE,
    PROTOCOL_PARALLEL,
    PROTOCOL_STREAMING,
    PROTOCOL_TWO_PHASE,
    OriginFilter,
    Snapshot,
    Streaming,
)
from pubsub.protocol.lsn import Lsn

Option = tuple[str, str | None]
"""An option's name and its argument; None if it has no argument."""


@dataclass(frozen=True, slots=True)
class IdentifySystem:
    pass


@dataclass(frozen=True, slots=True)
class Show:
    setting: str


@dataclass(frozen=True, slots=True)
class ReadReplicationSlot:
    slot: str


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    timeline: int


@dataclass(frozen=True, slots=True)
class CreateReplicationSlot:
    """`plugin` is None for a physical slot; `snapshot` is None if the command does not give it."""

    slot: str
    plugin: str | None
    temporary: bool = False
    snapshot: Snapshot | None = None
    two_phase: bool = False
    failover: bool = False
    reserve_wal: bool = False


@dataclass(frozen=True, slots=True)
class AlterReplicationSlot:
    slot: str
    failover: bool | None = None
    two_phase: bool | None = None


@dataclass(frozen=True, slots=True)
class DropReplicationSlot:
    slot: str
    wait: bool


@dataclass(frozen=True, slots=True)
class StartLogicalReplication:
    slot: str
    lsn: Lsn
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class StartPhysicalReplication:
    slot: str | None
    lsn: Lsn
    timeline: int | None


Command = (
    IdentifySystem
    | Show
    | ReadReplicationSlot
    | TimelineHistory
    | CreateReplicationSlot
    | AlterReplicationSlot
    | DropReplicationSlot
    | StartLogicalReplication
    | StartPhysicalReplication
)


@dataclass(frozen=True, slots=True)
class PgoutputParameters:
    """The options of pgoutput that a subscriber requested."""

    proto_version: int
    publications: tuple[str, ...]
    binary: bool = False
    streaming: Streaming = "off"
    two_phase: bool = False
    messages: bool = False
    origin: OriginFilter = "any"


_COMMANDS: Final = {
    *("IDENTIFY_SYSTEM", "SHOW", "READ_REPLICATION_SLOT", "TIMELINE_HISTORY", "CREATE_REPLICATION_SLOT"),
    *("ALTER_REPLICATION_SLOT", "DROP_REPLICATION_SLOT", "START_REPLICATION", "BASE_BACKUP", "UPLOAD_MANIFEST"),
}
_LEGACY_OPTIONS: Final[dict[str, Option]] = {
    "EXPORT_SNAPSHOT": ("snapshot", "export"),
    "NOEXPORT_SNAPSHOT": ("snapshot", "nothing"),
    "USE_SNAPSHOT": ("snapshot", "use"),
    "RESERVE_WAL": ("reserve_wal", None),
    "TWO_PHASE": ("two_phase", None),
}
_KEYWORDS: Final = {
    *_COMMANDS,
    *_LEGACY_OPTIONS,
    *("WAIT", "TIMELINE", "PHYSICAL", "LOGICAL", "SLOT", "TEMPORARY"),
}
_SPACE: Final = " \t\n\r\f\v"
_ASCII_LOWER: Final = str.maketrans({chr(code): chr(code + 32) for code in range(ord("A"), ord("Z") + 1)})
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\n\r\f\v]+)
    | (?P<lsn>[0-9A-Fa-f]+/[0-9A-Fa-f]+)
    | (?P<number>[0-9]+)
    | (?P<word>[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*)
    | "(?P<quoted>(?:[^"]|"")*)"
    | '(?P<string>(?:[^']|'')*)'
    | (?P<mark>[(),;.])""",
    re.VERBOSE,
)
_LIST_ELEMENT: Final = re.compile(rf'[{_SPACE}]*(?:"((?:[^"]|"")*)"|([^",{_SPACE}]+))[{_SPACE}]*(,|\Z)')
_MAX_UINT32: Final = 0xFFFFFFFF
_MAX_UINT64: Final = (1 << 64) - 1
_VERSION_17: Final = 170000
_VERSION_18: Final = 180000
_NAME_BYTES: Final = 63


def parse_command(
    text: str, *, version: int = _VERSION_18, notice: Callable[[PubsubError], None] = lambda _: None
) -> Command | None:
    """Parse a replication command; return None if `text` does not begin like one and is therefore SQL.

    `version`: of the server whose commands are taken.  `notice` is told of names that are cut.

    Raises SqlSyntaxError, PubsubError with PostgreSQL's code for a wrong option, and FeatureNotSupported for
    BASE_BACKUP and UPLOAD_MANIFEST, since this walsender makes no base backups.
    """
    first = re.match(rf"[{_SPACE}]*([A-Za-z_]+)", text)
    if first is None or first[1] not in _COMMANDS:
        return None
    if first[1] == "ALTER_REPLICATION_SLOT" and version < _VERSION_17:
        return None
    parser = _Parser(text, version, notice)
    command = parser.command()
    parser.accept("mark", ";")
    parser.expect("end")
    return command


def parse_pgoutput_options(options: Iterable[Option]) -> PgoutputParameters:
    """Parse START_REPLICATION's options for pgoutput.  Raises PubsubError with pgoutput's own codes and messages."""
    given = _distinct(options)
    names = ("proto_version", "publication_names", "binary", "messages", "streaming", "two_phase", "origin")
    for name in given:
        if name not in names:
            raise PubsubError(f"unrecognized pgoutput option: {name}")
    for name in names[:2]:
        if given.get(name) is None:
            raise PubsubError(f'option "{name}" missing', sqlstate="22023")
    parameters = PgoutputParameters(
        proto_version=_proto_version(given["proto_version"] or ""),
        publications=split_identifiers(given["publication_names"] or ""),
        binary=_boolean(given, "binary") or False,
        streaming=_streaming(given),
        two_phase=_boolean(given, "two_phase") or False,
        messages=_boolean(given, "messages") or False,
        origin=_origin(given),
    )
    _require_version(parameters.proto_version, PROTOCOL_STREAMING, parameters.streaming == "on", "streaming")
    _require_version(
        parameters.proto_version, PROTOCOL_PARALLEL, parameters.streaming == "parallel", "parallel streaming"
    )
    _require_version(parameters.proto_version, PROTOCOL_TWO_PHASE, parameters.two_phase, "two-phase commit")
    return parameters


def split_identifiers(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of identifiers; the inverse of commands.join_identifiers.

    Raises PubsubError (42602) for a malformed or empty list.
    """
    names = []
    position = 0
    while True:
        found = _LIST_ELEMENT.match(text, position)
        if found is None:
            raise PubsubError("invalid publication_names syntax", sqlstate="42602")
        quoted, plain, separator = found.groups()
        names.append(plain.translate(_ASCII_LOWER) if quoted is None else quoted.replace('""', '"'))
        if not separator:
            return tuple(names)
        position = found.end()


def cut_name(name: str) -> str:
    """Return a name as the server cuts it, to 63 bytes (scansup.c: truncate_identifier)."""
    data = name.encode("utf-8", "surrogatepass")
    return name if len(data) <= _NAME_BYTES else data[:_NAME_BYTES].decode("utf-8", "ignore")


class _Parser:
    """A recursive descent parser over the tokens of one command."""

    def __init__(self, text: str, version: int, notice: Callable[[PubsubError], None]) -> None:
        self._text = text
        self._version = version
        self._notice = notice
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterable[tuple[str, str, int]]:
        """Yield (kind, value, position); the kinds are word, keyword, string, number, lsn, mark, end."""
        position = 0
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                if self._text[position] in "'\"":
                    raise SqlSyntaxError("unterminated quoted string", statement=self._text, position=position)
                raise self._error(position)
            kind = str(found.lastgroup)
            value = found[kind]
            if kind == "word":
                if value in _KEYWORDS:
                    kind = "keyword"
                else:
                    value = value.translate(_ASCII_LOWER)
            elif kind == "quoted":
                kind, value = "word", value.replace('""', '"')
            elif kind == "string":
                value = value.replace("''", "'")
            if kind == "word" and value != (cut := cut_name(value)):
                message = f'identifier "{value}" will be truncated to "{cut}"'
                self._notice(PubsubError(message, sqlstate="42622"))
                value = cut
            if kind != "space":
                yield kind, value, position
            position = found.end()
        yield "end", "", len(self._text)

    def _error(self, position: int) -> SqlSyntaxError:
        return SqlSyntaxError("syntax error", statement=self._text, position=position)

    def accept(self, kind: str, value: str | None = None) -> str | None:
        """Consume the next token and return its value if it is of `kind` (and equals `value`); else return None."""
        found_kind, found, _ = self._tokens[self._next]
        if found_kind != kind or (value is not None and found != value):
            return None
        self._next += kind != "end"
        return found

    def expect(self, kind: str, value: str | None = None) -> str:
        found = self.accept(kind, value)
        if found is None:
            raise self._error(self._tokens[self._next][2])
        return found

    def command(self) -> Command:
        match self.expect("keyword"):
            case "IDENTIFY_SYSTEM":
                return IdentifySystem()
            case "SHOW":
                return Show(self._dotted_name())
            case "READ_REPLICATION_SLOT":
                return ReadReplicationSlot(self._dotted_name())
            case "TIMELINE_HISTORY":
                return TimelineHistory(self._timeline())
            case "CREATE_REPLICATION_SLOT":
                return self._create()
            case "ALTER_REPLICATION_SLOT":
                return self._alter()
            case "DROP_REPLICATION_SLOT":
                return DropReplicationSlot(self.expect("word"), self.accept("keyword", "WAIT") is not None)
            case "START_REPLICATION":
                return self._start()
            case other:
                raise FeatureNotSupported(f"{other} is not supported")

    def _create(self) -> CreateReplicationSlot:
        slot = self.expect("word")
        temporary = self.accept("keyword", "TEMPORARY") is not None
        plugin = None
        if not self.accept("keyword", "PHYSICAL"):
            self.expect("keyword", "LOGICAL")
            plugin = self.expect("word")
        given = self._generic_options() if self.accept("mark", "(") else self._legacy_options()
        known = {"snapshot", "two_phase", "reserve_wal", *(("failover",) if self._version >= _VERSION_17 else ())}
        options: dict[str, str | None] = {}
        for option, value in given:
            if option not in known:
                raise PubsubError(f"unrecognized option: {option}")
            if option in options or (option == "reserve_wal") != (plugin is None):
                raise PubsubError("conflicting or redundant options", sqlstate="42601")
            options[option] = value
        return CreateReplicationSlot(
            slot,
            plugin,
            temporary,
            _snapshot(options),
            _boolean(options, "two_phase") or False,
            _boolean(options, "failover") or False,
            _boolean(options, "reserve_wal") or False,
        )

    def _alter(self) -> AlterReplicationSlot:
        slot = self.expect("word")
        self.expect("mark", "(")
        options = _distinct(self._generic_options())
        known = ("failover", "two_phase") if self._version >= _VERSION_18 else ("failover",)
        for option in options:
            if option not in known:
                raise PubsubError(f"unrecognized option: {option}")
        return AlterReplicationSlot(slot, _boolean(options, "failover"), _boolean(options, "two_phase"))

    def _start(self) -> StartLogicalReplication | StartPhysicalReplication:
        slot = self.expect("word") if self.accept("keyword", "SLOT") else None
        if slot is not None and self.accept("keyword", "LOGICAL"):
            lsn = self._lsn()
            options = self._plugin_options() if self.accept("mark", "(") else []
            return StartLogicalReplication(slot, lsn, tuple(options))
        self.accept("keyword", "PHYSICAL")
        lsn = self._lsn()
        return StartPhysicalReplication(slot, lsn, self._timeline() if self.accept("keyword", "TIMELINE") else None)

    def _plugin_options(self) -> list[Option]:
        options: list[Option] = []
        while True:
            options.append((self.expect("word"), self.accept("string")))
            if not self.accept("mark", ","):
                self.expect("mark", ")")
                return options

    def _generic_options(self) -> list[Option]:
        options: list[Option] = []
        while True:
            keyword = self.accept("keyword")
            name = self.expect("word") if keyword is None else keyword.lower()
            value = next((v for kind in ("word", "string", "number") if (v := self.accept(kind)) is not None), None)
            options.append((name, value))
            if not self.accept("mark", ","):
                self.expect("mark", ")")
                return options

    def _legacy_options(self) -> list[Option]:
        options: list[Option] = []
        while True:
            kind, value, _ = self._tokens[self._next]
            if kind != "keyword" or value not in _LEGACY_OPTIONS:
                return options
            self._next += 1
            options.append(_LEGACY_OPTIONS[value])

    def _dotted_name(self) -> str:
        name = self.expect("word")
        while self.accept("mark", "."):
            name += "." + self.expect("word")
        return name

    def _lsn(self) -> Lsn:
        high, low = (_uint32(part, 16) for part in self.expect("lsn").split("/"))
        return Lsn(high << 32 | low)

    def _timeline(self) -> int:
        position = self._tokens[self._next][2]
        timeline = _uint32(self.expect("number"), 10)
        if timeline == 0:
            raise SqlSyntaxError("invalid timeline 0", statement=self._text, position=position)
        return timeline


def _uint32(digits: str, base: int) -> int:
    """Return a number as C reads it into 32 bits: strtoul takes no more than 64 of them."""
    digits = digits.lstrip("0") or "0"
    return min(int(digits, base) if len(digits) <= 20 else _MAX_UINT64, _MAX_UINT64) & _MAX_UINT32


def _distinct(options: Iterable[Option]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, value in options:
        if name in found:
            raise PubsubError("conflicting or redundant options", sqlstate="42601")
        found[name] = value
    return found


def _boolean(options: dict[str, str | None], name: str) -> bool | None:
    """Return a Boolean option, None if it is not given (define.c: defGetBoolean)."""
    if name not in options:
        return None
    match (options[name] or "true").lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
        case _:
            raise PubsubError(f"{name} requires a Boolean value", sqlstate="42601")


def _snapshot(options: dict[str, str | None]) -> Snapshot | None:
    if "snapshot" not in options:
        return None
    match options["snapshot"]:
        case None:
            raise PubsubError("snapshot requires a parameter", sqlstate="42601")
        case "export" | "nothing" | "use" as action:
            return action
        case other:
            message = f'unrecognized value for CREATE_REPLICATION_SLOT option "snapshot": "{other}"'
            raise PubsubError(message, sqlstate="22023")


def _streaming(options: dict[str, str | None]) -> Streaming:
    """Return the streaming option (pg_subscription.h: LOGICALREP_STREAM_*), read like defGetStreamingMode."""
    if (options.get("streaming") or "").lower() == "parallel":
        return "parallel"
    try:
        return "on" if _boolean(options, "streaming") else "off"
    except PubsubError as error:
        raise PubsubError('streaming requires a Boolean value or "parallel"', sqlstate="42601") from error


def _origin(options: dict[str, str | None]) -> OriginFilter:
    if "origin" not in options:
        return "any"
    match (options["origin"] or "").lower():
        case "any" | "none" as origin:
            return origin
        case _:
            raise PubsubError(f'unrecognized origin value: "{options["origin"] or ""}"', sqlstate="22023")


def _proto_version(text: str) -> int:
    if not re.fullmatch(r"\+?[0-9]+", text):
        raise PubsubError("invalid proto_version", sqlstate="22023")
    if len(text.lstrip("+0")) > 10 or int(text) > _MAX_UINT32:
        raise PubsubError(f'proto_version "{text[:40]}" out of range', sqlstate="22023")
    version = int(text)
    if version > PROTOCOL_PARALLEL:
        raise FeatureNotSupported(
            f"client sent proto_version={version} but server only supports protocol {PROTOCOL_PARALLEL} or lower"
        )
    if version < PROTOCOL_BASE:
        raise FeatureNotSupported(
            f"client sent proto_version={version} but server only supports protocol {PROTOCOL_BASE} or higher"
        )
    return version


def _require_version(version: int, needed: int, asked: bool, feature: str) -> None:
    if asked and version < needed:
        raise FeatureNotSupported(
            f"requested proto_version={version} does not support {feature}, need {needed} or higher"
        )
