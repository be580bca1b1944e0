"""The options of a subscription: PostgreSQL 18's, those that 19 adds, and those of this project.

The options that each statement accepts, the defaults, and the errors' texts are those of subscriptioncmds.c:
parse_subscription_options and define.c: defGetBoolean, defGetString, defGetStreamingMode.  This module imports no
parser, so that the catalog can use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final, Literal

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.nearest import nearest
from pubsub.parameters import INT_MAX, Parameter
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.layout_rules import (
    columns_of,
    conditions_of,
    deletes_of,
    masks_of,
    metadata_of,
    modes_of,
    patterns_of,
    properties_of,
    registers_of,
    renames_of,
    truncate_of,
)
from pubsub.sql.layouts import Layouts
from pubsub.sql.sharing import Sharing, gathered
from pubsub.sql.source import DEFAULT_COLUMN, checked_column, checked_source
from pubsub.sql.typechoices import TypeChoices

Streaming = Literal["off", "on", "parallel"]
Origin = Literal["any", "none"]
OnTableError = Literal["stop", "isolate"]
OnSlotLoss = Literal["stop", "resync"]
NewTables = Literal["ignore", "follow"]
SchemaChanges = Literal["follow", "refuse"]
DroppedColumns = Literal["keep", "drop"]
#: subtwophasestate: disabled; pending, until all tables are ready; enabled (pg_subscription.h).
TwoPhaseState = Literal["d", "p", "e"]
OptionValue = str | int | Decimal | None

#: Options that concern one command only and are not stored.
COMMAND_OPTIONS: Final = frozenset({"connect", "create_slot", "copy_data", "refresh"})

RESTORE_COMMAND: Final = "restore_command"
"""The value of `wal_archive` for an archive that the command of pubsub.toml reads."""
BATCH_ROWS: Final = Parameter("batch_rows", "", 1)
BATCH_BYTES: Final = Parameter("batch_bytes", "B", 64 << 10, 1 << 40)
BATCH_AGE: Final = Parameter("batch_age", "ms", 1)
RECEIVER_TIMEOUT: Final = Parameter("wal_receiver_timeout", "ms", 0)


@dataclass(frozen=True, slots=True)
class Option:
    """One element of a WITH list as it was written (parsenodes.h: DefElem); `value` is None for a bare name."""

    name: str
    value: OptionValue
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """Every option with its value; `specified` names those that the statement gave (subscriptioncmds.c: SubOpts).

    `slot_name` is None for NONE, and also if it was not given and the subscription's own name is used.
    `two_phase_state` and `rebound` are state, not options: how far `two_phase` has been enabled, and whether a command has set
    another publisher, which may be another system.  `batch_bytes` is in bytes, `batch_age` in seconds, and so is
    `wal_receiver_timeout`; None: the setting's.  `types` is the text that TypeChoices parses; `mode`, `deletes`, `truncate`,
    `metadata`, `columns`, `exclude`, `mask`, `rename`, `where`, `partition_by`, `cluster_by`, `table_properties` and `register` are
    those that Layouts parses, and `copy_first` names tables as they do.  `source`: what its rows have in the column `source_column` of
    Delta tables that other subscriptions write, too; None: its tables are its own.  `gather` is the text that says which of its own
    tables are in one Delta table (pubsub.sql.sharing).  `stop_lsn` is the last LSN to apply, inclusive;
    None for no end.  `wal_archive` is a directory of the publisher's WAL segments, or RESTORE_COMMAND; None: there is none.
    `continues_at`, a state: where the slot of the last accepted other system begins, behind everything of the former one.
    `resynced_at`, a state, too: when every table was copied anew because the slot was lost, in seconds since 1970, within the
    last day.
    """

    connect: bool = True
    enabled: bool = True
    create_slot: bool = True
    slot_name: str | None = None
    copy_data: bool = True
    refresh: bool = True
    synchronous_commit: str = "off"
    binary: bool = False
    streaming: Streaming = "parallel"
    two_phase: bool = False
    two_phase_state: TwoPhaseState = "d"
    rebound: bool = False
    continues_at: Lsn = INVALID_LSN
    disable_on_error: bool = False
    password_required: bool = True
    run_as_owner: bool = False
    failover: bool = False
    origin: Origin = "any"
    retain_dead_tuples: bool = False
    max_retention_duration: int = 0
    wal_receiver_timeout: float | None = None
    create_tables: bool = True
    target: str | None = None
    source: str | None = None
    source_column: str = DEFAULT_COLUMN
    gather: str = ""
    types: str = ""
    on_table_error: OnTableError = "stop"
    schema_changes: SchemaChanges = "follow"
    dropped_columns: DroppedColumns = "keep"
    batch_rows: int = 250_000
    batch_bytes: int = 256 * 1024 * 1024
    batch_age: float = 1.0
    stop_lsn: Lsn | None = None
    wal_archive: str | None = None
    on_slot_loss: OnSlotLoss = "stop"
    new_tables: NewTables = "ignore"
    copy_first: str = ""
    partition_by: str = ""
    cluster_by: str = ""
    table_properties: str = ""
    mode: str = ""
    deletes: str = ""
    truncate: str = ""
    metadata: str = ""
    columns: str = ""
    exclude: str = ""
    mask: str = ""
    rename: str = ""
    where: str = ""
    register: str = ""
    comments: bool = False
    resynced_at: tuple[float, ...] = ()
    specified: frozenset[str] = frozenset()

    @property
    def layouts(self) -> Layouts:
        """What the Delta tables are, and how they lie.  Raises nothing: the options were parsed when they were given."""
        return Layouts.parse(
            self.partition_by,
            self.cluster_by,
            self.table_properties,
            self.mode,
            self.columns,
            self.exclude,
            self.mask,
            self.deletes,
            self.metadata,
            self.truncate,
            self.register,
            self.rename,
            self.sharing,
            self.where,
        )

    @property
    def sharing(self) -> Sharing:
        """Which Delta tables are shared with others."""
        return Sharing(self.source_column, self.source, gathered(self.gather))

    def merge(self, changes: SubscriptionOptions) -> SubscriptionOptions:
        """Return these options, replaced by those that `changes` specifies: ALTER SUBSCRIPTION … SET."""
        given = {name: getattr(changes, name) for name in changes.specified}
        return replace(self, **given, specified=self.specified | changes.specified)


#: In the order in which they are printed.
STORED_OPTIONS: Final = (
    "slot_name",
    "synchronous_commit",
    "binary",
    "streaming",
    "two_phase",
    "disable_on_error",
    "password_required",
    "run_as_owner",
    "failover",
    "origin",
    "retain_dead_tuples",
    "max_retention_duration",
    "wal_receiver_timeout",
    "types",
    "on_table_error",
    "schema_changes",
    "dropped_columns",
    "batch_rows",
    "batch_bytes",
    "batch_age",
    "stop_lsn",
    "wal_archive",
    "on_slot_loss",
    "new_tables",
    "copy_first",
    "partition_by",
    "cluster_by",
    "table_properties",
    "mode",
    "deletes",
    "truncate",
    "metadata",
    "columns",
    "exclude",
    "mask",
    "rename",
    "where",
    "register",
    "comments",
)
CREATE_OPTIONS: Final = (
    *("connect", "enabled", "create_slot", "copy_data", "create_tables", "target", "source", "source_column", "gather"),
    *STORED_OPTIONS,
)
#: By the form of ALTER SUBSCRIPTION.  `target`, `source`, its column and `gather` are decided at CREATE: tables do not move.
SET_OPTIONS: Final = (*STORED_OPTIONS, "create_tables")
SET_PUBLICATION_OPTIONS: Final = ("copy_data", "refresh")
#: `copy_data` is accepted without effect, as in PostgreSQL: no table is added.
DROP_PUBLICATION_OPTIONS: Final = ("copy_data", "refresh")
REFRESH_OPTIONS: Final = ("copy_data",)
SKIP_OPTIONS: Final = ("lsn",)


def resolve(options: Iterable[Option], allowed: Iterable[str], statement: str = "") -> SubscriptionOptions:
    """Check the options that a statement gives and fill in the defaults.  Raises in PostgreSQL's words.

    Options that contradict each other are refused; connect = false turns enabled, create_slot and copy_data off.
    """
    allowed = frozenset(allowed)
    given: dict[str, Any] = {}
    for option in options:
        if option.name not in allowed:
            raise _unrecognized(option.name, allowed)
        if option.name in given:
            raise SqlSyntaxError("conflicting or redundant options", statement=statement, position=option.position)
        given[option.name] = _READERS[option.name](option)
    found = SubscriptionOptions(**given, specified=frozenset(given))
    refuse_new_tables_in_two_phase(found)
    refuse_unfollowed_choice(found)
    if "source_column" in given and not found.sharing:
        raise PubsubError("source_column requires a source, or gather", sqlstate="42601")
    refuse_unfit_source(found)
    if not found.connect:
        for name in ("enabled", "create_slot", "copy_data"):
            if given.get(name):
                raise _exclusive("connect = false", f"{name} = true")
        found = replace(found, enabled=False, create_slot=False, copy_data=False)
    if "slot_name" in given and found.slot_name is None and "enabled" in allowed:
        for name in ("enabled", "create_slot"):
            if not getattr(found, name):
                continue
            if name in given:
                raise _exclusive("slot_name = NONE", f"{name} = true")
            raise PubsubError(
                f"subscription with slot_name = NONE must also set {name} = false",
                sqlstate=SqlSyntaxError.default_sqlstate,
            )
    return found


def refuse_new_tables_in_two_phase(options: SubscriptionOptions) -> None:
    """Refuse new_tables = follow with two_phase, in which no table may be added with a copy (AlterSubscription_refresh)."""
    if options.new_tables == "follow" and options.two_phase:
        raise _exclusive("two_phase = true", "new_tables = follow")


def refuse_unfollowed_choice(options: SubscriptionOptions) -> None:
    """Refuse columns, exclude, mask, rename and where with schema_changes = refuse, which goes by names: a new name would let a
    column in, or take one for another.
    """
    for name in ("columns", "exclude", "mask", "rename", "where"):
        if options.schema_changes == "refuse" and getattr(options, name):
            raise _exclusive("schema_changes = refuse", f"{name} = …")


def refuse_unfit_source(options: SubscriptionOptions) -> None:
    """Refuse a source with options that would change the rows of other sources, or name them twice.

    What gather excludes for some tables is refused by table (launcher/published_tables.py).
    """
    if options.gather and options.dropped_columns == "drop":
        raise _exclusive("gather = …", "dropped_columns = drop")
    if options.source is None:
        return
    if options.gather:
        raise _exclusive("source = …", "gather = …")
    if options.dropped_columns == "drop":
        raise _exclusive("source = …", "dropped_columns = drop")
    for name in ("partition_by", "cluster_by", "register"):
        if getattr(options, name):
            raise _exclusive("source = …", f"{name} = …")
    for modes in options.layouts.modes.values():
        if modes != ("mirror",):
            raise _exclusive("source = …", f"mode = {' + '.join(modes)}")


def resolve_skip(options: Iterable[Option], statement: str = "") -> Lsn:
    """Return the finish LSN of ALTER SUBSCRIPTION … SKIP (lsn = …); INVALID_LSN for NONE.  Raises in PostgreSQL's words."""
    lsn: Lsn | None = None
    for option in options:
        if option.name not in SKIP_OPTIONS:
            raise _unrecognized(option.name, SKIP_OPTIONS)
        if lsn is not None:
            raise SqlSyntaxError("conflicting or redundant options", statement=statement, position=option.position)
        text = _string(option)
        if text == "none":
            lsn = INVALID_LSN
        else:
            lsn = Lsn.parse(text)
            if lsn == INVALID_LSN:
                raise PubsubError(f"invalid WAL location (LSN): {text}", sqlstate="22023")
    assert lsn is not None  # the grammar has no empty list
    return lsn


def written(options: SubscriptionOptions) -> list[Option]:
    """Return the specified options as a statement would give them; `resolve` reads them back."""
    return [
        Option(name, _written(name, getattr(options, name)))
        for name in (*CREATE_OPTIONS, "refresh")
        if name in options.specified
    ]


def _written(name: str, value: Any) -> OptionValue:
    if name == "batch_age":
        return f"{round(value * 1000)}ms"
    if name == "max_retention_duration":
        return int(value)
    if name == "wal_receiver_timeout":
        return "-1" if value is None else f"{round(value * 1000)}ms"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value}B" if name == "batch_bytes" else str(value)


def _unrecognized(name: str, allowed: Iterable[str]) -> PubsubError:
    best = nearest(name, sorted(allowed))
    hint = f'Perhaps you meant the option "{best}".' if best is not None else None
    return PubsubError(f'unrecognized subscription parameter: "{name}"', sqlstate="42601", hint=hint)


def _exclusive(one: str, other: str) -> PubsubError:
    return PubsubError(f"{one} and {other} are mutually exclusive options", sqlstate="42601")


def _string(option: Option) -> str:
    if option.value is None:
        raise PubsubError(f"{option.name} requires a parameter", sqlstate="42601")
    return str(option.value)


def _truth(value: OptionValue) -> bool | None:
    if value is None:
        return True
    if isinstance(value, int):
        return {0: False, 1: True}.get(value)
    return {"true": True, "on": True, "false": False, "off": False}.get(str(value).lower())


def _boolean(option: Option) -> bool:
    found = _truth(option.value)
    if found is None:
        raise PubsubError(f"{option.name} requires a Boolean value", sqlstate="42601")
    return found


def _streaming(option: Option) -> Streaming:
    found = _truth(option.value)
    if found is not None:
        return "on" if found else "off"
    if isinstance(option.value, str) and option.value.lower() == "parallel":
        return "parallel"
    raise PubsubError(f'{option.name} requires a Boolean value or "parallel"', sqlstate="42601")


def _slot_name(option: Option) -> str | None:
    """Check the name as slot.c: ReplicationSlotValidateName does."""
    name = _string(option)
    if name == "none":
        return None
    if not name:
        raise PubsubError(f'replication slot name "{name}" is too short', sqlstate="42602")
    if len(name.encode()) > 63:
        raise PubsubError(f'replication slot name "{name}" is too long', sqlstate="42622")
    if not re.fullmatch("[a-z0-9_]+", name):
        raise PubsubError(
            f'replication slot name "{name}" contains invalid character',
            sqlstate="42602",
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character.",
        )
    return name


def _stop_lsn(option: Option) -> Lsn | None:
    text = _string(option)
    return None if text == "none" else Lsn.parse(text)


def _wal_archive(option: Option) -> str | None:
    text = _string(option)
    if text == "none":
        return None
    if text != RESTORE_COMMAND and not text.startswith("/"):
        raise PubsubError(
            f'invalid value for parameter "wal_archive": "{text}"',
            sqlstate="22023",
            hint="It is the absolute path of a directory, restore_command, or none.",
        )
    return text


def _synchronous_commit(option: Option) -> str:
    """Read the value in any spelling of guc_tables.c: synchronous_commit_options, the hidden ones included."""
    text = _string(option)
    hidden = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}
    found = hidden.get(text.lower(), text.lower())
    if found not in ("local", "remote_write", "remote_apply", "on", "off"):
        raise PubsubError(
            f'invalid value for parameter "synchronous_commit": "{text}"',
            sqlstate="22023",
            hint="Available values: local, remote_write, remote_apply, on, off.",
        )
    return found


def _origin(option: Option) -> Origin:
    text = _string(option)
    match text.lower():
        case "none":
            return "none"
        case "any":
            return "any"
    raise PubsubError(f'unrecognized origin value: "{text}"', sqlstate="22023")


def _retain_dead_tuples(option: Option) -> bool:
    """Refuse to retain them: there are none, and what is kept instead is not asked for a conflict's sake."""
    if _boolean(option):
        raise FeatureNotSupported(
            "retain_dead_tuples is not supported",
            detail="A Delta table has no dead tuples: an update of a row that was deleted is the conflict update_missing.",
            hint="Versions of a table from before the deletion can be read for as long as the retention of [housekeeping].",
        )
    return False


def _max_retention_duration(option: Option) -> int:
    """Read it as define.c: defGetInt32 does."""
    value = option.value
    if not isinstance(value, int) or not -INT_MAX - 1 <= value <= INT_MAX:
        raise PubsubError(f"{option.name} requires an integer value", sqlstate="42601")
    if value < 0:
        raise PubsubError(f'option "{option.name}" cannot be negative', sqlstate="22023")
    return value


def _receiver_timeout(option: Option) -> float | None:
    text = _string(option)
    return None if text == "-1" else RECEIVER_TIMEOUT.parse(text) / 1000


def _target(option: Option) -> str:
    text = _string(option)
    if not text:
        raise PubsubError('invalid value for parameter "target": ""', sqlstate="22023")
    return text


def _source(option: Option) -> str:
    return checked_source(_string(option))


def _source_column(option: Option) -> str:
    return checked_column(_string(option))


def _kept(parse: Callable[[str], object]) -> Callable[[Option], str]:
    """Return a reader of a text that is kept as it was given, once it is parsed."""

    def read(option: Option) -> str:
        text = _string(option)
        parse(text)
        return text

    return read


def _kept_named(parse: Callable[[str, str], object]) -> Callable[[Option], str]:
    """Return such a reader for a parser that is told the option's name."""
    return lambda option: _kept(partial(parse, option.name))(option)


def _choice(*values: str) -> Callable[[Option], str]:
    def read(option: Option) -> str:
        text = _string(option)
        if text.lower() not in values:
            raise PubsubError(
                f'unrecognized {option.name} value: "{text}"',
                sqlstate="22023",
                hint=f"Available values: {', '.join(values)}.",
            )
        return text.lower()

    return read


def _amount(parameter: Parameter) -> Callable[[Option], int]:
    return lambda option: parameter.parse(_string(option))


def _batch_age(option: Option) -> float:
    return BATCH_AGE.parse(_string(option)) / 1000


_READERS: Final[dict[str, Callable[[Option], Any]]] = {
    **dict.fromkeys(CREATE_OPTIONS, _boolean),
    "refresh": _boolean,
    "slot_name": _slot_name,
    "synchronous_commit": _synchronous_commit,
    "streaming": _streaming,
    "origin": _origin,
    "retain_dead_tuples": _retain_dead_tuples,
    "max_retention_duration": _max_retention_duration,
    "wal_receiver_timeout": _receiver_timeout,
    "target": _target,
    "source": _source,
    "source_column": _source_column,
    "gather": _kept(gathered),
    "types": _kept(TypeChoices.parse),
    "copy_first": _kept_named(patterns_of),
    "partition_by": _kept_named(columns_of),
    "cluster_by": _kept_named(columns_of),
    "table_properties": _kept(properties_of),
    "mode": _kept(modes_of),
    "deletes": _kept(deletes_of),
    "truncate": _kept(truncate_of),
    "metadata": _kept(metadata_of),
    "columns": _kept_named(columns_of),
    "exclude": _kept_named(columns_of),
    "mask": _kept(masks_of),
    "rename": _kept(renames_of),
    "where": _kept(conditions_of),
    "register": _kept(registers_of),
    "new_tables": _choice("ignore", "follow"),
    "on_slot_loss": _choice("stop", "resync"),
    "on_table_error": _choice("stop", "isolate"),
    "schema_changes": _choice("follow", "refuse"),
    "dropped_columns": _choice("keep", "drop"),
    "batch_rows": _amount(BATCH_ROWS),
    "batch_bytes": _amount(BATCH_BYTES),
    "batch_age": _batch_age,
    "stop_lsn": _stop_lsn,
    "wal_archive": _wal_archive,
}
