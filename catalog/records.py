"""The rows that the catalog returns and takes; they are immutable.  Those of what runs are in catalog.figures.

LSNs are `Lsn`, times are aware datetimes in UTC, sizes bytes, lags seconds.  A row is as of the moment it was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypedDict

from catalog import beside
from catalog.figures import (
    CopyProgress,
    PublisherStatus,
    Registration,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    WorkerStats,
)
from catalog.states import RelState
from pubsub.memory import Memory
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.sql.identifiers import decode_path
from pubsub.sql.layout_rules import Deletes, Mode, Truncate
from pubsub.sql.options import SubscriptionOptions
from pubsub.sql.source import Source

#: pg_type's oid of text.
_TEXT: Final = 25


@dataclass(frozen=True, slots=True)
class NodeRow:
    """The node: its 64-bit system identifier (decimal text) and when it was made."""

    node_id: str
    created: datetime


@dataclass(frozen=True, slots=True)
class DaemonRow:
    """A daemon that has not ended in order; its locks (catalog.home_lock, catalog_lock) show whether it still runs."""

    id: int
    pid: int
    host: str
    home: str
    started: datetime
    memory: Memory | None = None


#: The unit of the work that is the node's and not a subscription's, and the unit of all subscriptions with a source: several of
#: those write one Delta table, and their commits take turns within a process.
OF_NODE: Final = -1
OF_SOURCES: Final = 0


def unit_of(oid: int, source: str | None) -> int:
    """Return the unit of a subscription with this oid and option source."""
    return oid if source is None else OF_SOURCES


@dataclass(frozen=True, slots=True)
class Lease:
    """What one of several daemons does: a unit, which is a subscription's oid or one of the above.

    `leaving`: it is about to end it, so that another one begins.
    """

    unit: int
    daemon: int
    leaving: bool


@dataclass(frozen=True, slots=True)
class NewSubscription:
    """A subscription as CREATE SUBSCRIPTION stores it.  `conninfo` may hold a password, so the repr leaves it out."""

    name: str
    conninfo: str = field(repr=False)
    publications: tuple[str, ...]
    options: SubscriptionOptions
    target: str
    slot_name: str | None
    enabled: bool = True
    publisher_system_identifier: str | None = None
    publisher_timeline: int | None = None
    publisher_database: str | None = None
    owner: str = "pubsub"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A row of pg_subscription, with further columns.

    `generation` rises by one with each alteration, but not when the publisher's identity is stored.  `skip_lsn` is the
    finish LSN of the transaction to skip (0: none).  `dropping`: a DROP SUBSCRIPTION has begun to drop the slot.  `paused`:
    the command during which no worker runs (catalog.pauses).  `publisher_timeline_start` is the LSN where the timeline began
    (None: not known yet); it distinguishes two servers whose timelines have the same number.  `publisher_lost_at`: the
    publisher was found to lack WAL up to here that the subscription has received (None: it was not); nothing is followed
    until that is resolved.
    """

    oid: int
    name: str
    enabled: bool
    conninfo: str = field(repr=False)
    slot_name: str | None
    publications: tuple[str, ...]
    options: SubscriptionOptions
    target: str
    publisher_system_identifier: str | None
    publisher_timeline: int | None
    publisher_database: str | None
    skip_lsn: Lsn
    owner: str
    generation: int
    dropping: bool
    publisher_timeline_start: Lsn | None = None
    publisher_lost_at: Lsn | None = None
    paused: str | None = None


class SubscriptionChanges(TypedDict, total=False):
    """The fields that `Catalog.alter_subscription` takes.

    A function is called with the stored value inside the transaction, since others may have altered it meanwhile.
    """

    name: str
    enabled: bool
    conninfo: str
    slot_name: str | None
    publications: tuple[str, ...] | Callable[[tuple[str, ...]], tuple[str, ...]]
    options: SubscriptionOptions | Callable[[SubscriptionOptions], SubscriptionOptions]
    target: str
    publisher_system_identifier: str | None
    publisher_timeline: int | None
    publisher_database: str | None
    publisher_lost_at: Lsn | None
    skip_lsn: Lsn
    owner: str
    dropping: bool
    paused: str | None


@dataclass(frozen=True, slots=True)
class NewRelation:
    """A table that joins a subscription.  `path` is where its Delta table lies; `definition` is JSON text.

    `known_source`: whose rows of the Delta table are its own, where the definition is to say that only after the copy.
    """

    relid: int
    schema: str
    name: str
    path: str
    state: RelState = RelState.INIT
    lsn: Lsn | None = None
    definition: str | None = None
    estimated_rows: int | None = None
    known_source: str | None = None

    @property
    def whose(self) -> str | None:
        """The source whose rows of the Delta table are its own; None: all are."""
        source = _source_of(self.definition)
        return self.known_source if source is None else source.value


@dataclass(frozen=True, slots=True)
class ForeignCommit:
    """A commit by another writer that can change a table's rows; `operation` and `engine` are as it recorded them."""

    version: int
    operation: str
    engine: str

    def __str__(self) -> str:
        return f"version {self.version}, {self.operation} by {self.engine}"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How copy number `generation` of a table is made, and how far the stream must be followed to complete it.

    `start` is the sync slot's consistent point.  `until` is past every snapshot that the copy used (tablesync.window),
    and equals `start` while it used only the slot's.  `version` is that of the Delta table when the copy began.
    `edges` are the first blocks of its chunks, empty for a table that is copied whole.  `snapshot` is the slot's, in
    the format of pg_current_snapshot().  `fingerprint` covers what must not change until the copy resumes; None: it
    cannot resume.  `attempts` name the data files that the copy's attempts have written.
    """

    generation: int
    start: Lsn
    until: Lsn
    version: int
    edges: tuple[int, ...]
    snapshot: str
    fingerprint: str | None
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionRel:
    """A row of pg_subscription_rel, with further columns.

    `lsn` is where the sync worker stopped (`s`, `r`), or where it was (`f`).  `copy_generation` rises with each copy
    that begins, and with each joining without a copy that follows an earlier stay: no commit of that stay has it.
    `joined_generation` is its value when the table joined.  `definition` is the table as decided at the copy (columns,
    key), JSON text.  `error` is set while the table is stopped or its last worker failed.  `stopped`: the table stopped
    alone (on_table_error = isolate), at the transaction that finished at `error_lsn` if one caused it; only a new copy
    brings it back.  `foreign`: the last commit by another writer since the copy.  `look_again`: how many of REFRESH's
    requests to compare the columns with the publisher's are unanswered.  `known_source`: whose rows of the Delta table are its own, as
    it was when it joined; None: all are.
    """

    subid: int
    relid: int
    schema: str
    name: str
    state: RelState
    lsn: Lsn | None
    copy_generation: int
    sync_slot: str | None
    path: str
    error: str | None
    error_hint: str | None
    definition: str | None
    estimated_rows: int | None
    stopped: bool = False
    error_lsn: Lsn | None = None
    foreign: ForeignCommit | None = None
    look_again: int = 0
    joined_generation: int = 0
    known_source: str | None = None

    @property
    def oid(self) -> Oid:
        """The oid of the published table, which has several relations if Delta tables stand beside its mirror."""
        return beside.oid_of(self.relid)

    @property
    def beside(self) -> Mode | None:
        """In which mode it stands beside the mirror of its table; None: it does not."""
        return beside.mode_of(self.relid)

    @property
    def published_name(self) -> str:
        """The published table's name; `name` has the mode at its end if it stands beside the mirror."""
        return beside.published_name_of(self.relid, self.name)

    @property
    def copied(self) -> bool:
        """Whether a copy has begun since the table joined; if not, its rows are those of the stream alone."""
        return self.copy_generation > self.joined_generation

    @property
    def qualified_name(self) -> str:
        """schema.name, unquoted: for people and for JSON keys, not for SQL."""
        return f"{self.schema}.{self.name}"

    @property
    def mode(self) -> Mode | None:
        """What its Delta table has; None if that is not decided yet."""
        if self.definition is None:
            return self.beside
        known = json.loads(self.definition)
        return "history" if "history" in known else known.get("mode", "mirror")

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that tell the rows of its Delta table apart; () if there are none, or that is not decided yet."""
        key = tuple(json.loads(self.definition or "{}").get("key") or ())
        if self.mode != "scd2":
            return key
        from pubsub.delta.versions import VALID_FROM_LSN

        return (*key, VALID_FROM_LSN)

    @property
    def deletes(self) -> Deletes | None:
        """What becomes of deleted rows in its Delta table; None if that is not decided yet."""
        return None if self.definition is None else json.loads(self.definition).get("deletes", "hard")

    @property
    def truncate(self) -> Truncate | None:
        """What a TRUNCATE does to its Delta table; None if that is not decided yet."""
        return None if self.definition is None else json.loads(self.definition).get("truncate", "follow")

    @property
    def source(self) -> Source | None:
        """Whose rows of the Delta table are its own; None: all, or that is not decided yet."""
        return _source_of(self.definition)

    @property
    def whose(self) -> str | None:
        """The source's own text, which is known when a table joins."""
        return self.known_source if self.source is None else self.source.value

    @property
    def place(self) -> tuple[str, str]:
        """Schema and name by which SELECT knows it: the publisher's, or those of its Delta table if that has several sources."""
        if self.whose is None:
            return self.schema, self.name
        _, schema, name = self.path.rsplit("/", 2)
        return decode_path(schema), decode_path(name)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The columns of its Delta table that say which change made a row, as kind and name."""
        found = [] if self.definition is None else json.loads(self.definition).get("metadata", [])
        return tuple((kind, name) for kind, name in found)

    @property
    def closed(self) -> bool:
        """Whether columns may be left out of its Delta table, and those that are added later are."""
        return self._left_out() is not None

    @property
    def remembers_options(self) -> bool:
        """Whether a copy is to keep to what options have decided of the columns before (column_choice)."""
        return self.closed or not {"naming", "filtering"}.isdisjoint(self._attributes())

    @property
    def left_out(self) -> tuple[str, ...]:
        """The published columns that its Delta table does not get."""
        return tuple(name for _, name, _ in self._left_out() or ())

    @property
    def masked(self) -> tuple[str, ...]:
        """The columns of its Delta table that are masked, also if the publisher has dropped them."""
        known = self._attributes()
        masks = {number for number, _ in known.get("masks", ())}
        return tuple(
            name for number, name, *_ in (*known.get("columns", ()), *known.get("kept", ())) if number in masks
        )

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """The columns that have another name in its Delta table: the publisher's name and that one."""
        found = ((column[1], column[7]) for column in self._attributes().get("columns", ()) if len(column) > 7)
        return tuple((published, name) for name, published in found)

    @property
    def kept_rows(self) -> str | None:
        """The condition of the rows that its Delta table has, as it was given; None: it has all."""
        known = self._attributes().get("where")
        return None if known is None else known["text"]

    @property
    def column_types(self) -> dict[str, tuple[int, int]]:
        """The oids and modifiers of the types of its Delta table's columns at the publisher, by name; text if only that is left."""
        texts = {number for number, rule in self._attributes().get("masks", ()) if rule != "null"}
        return {
            name: (_TEXT, -1) if number in texts else (oid, modifier)
            for number, name, oid, modifier, *_ in self._attributes().get("columns", ())
        }

    def _left_out(self) -> Any:
        return self._attributes().get("left_out")

    def _attributes(self) -> dict[str, Any]:
        """Return what apply.schema_changes.attributes has written."""
        found: dict[str, Any] = json.loads(json.loads(self.definition or "{}").get("attributes") or "{}")
        return found


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that joins a subscription.  `path`: the Delta table of the subscription's sequences; `definition`: as in
    SubscriptionSequence."""

    relid: int
    schema: str
    name: str
    path: str
    definition: str
    state: RelState = RelState.INIT


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """What a sequence was found to be on the publisher: its state there, and its definition; `lsn` is that of its page."""

    last_value: int
    is_called: bool
    lsn: Lsn
    definition: str


@dataclass(frozen=True, slots=True)
class SubscriptionSequence:
    """A sequence of a subscription, which is in state `i` or `r`; it is known by its name, as in PostgreSQL.

    `definition` is the sequence's as JSON text: type, start, increment, bounds, cycle.  `last_value`, `is_called` and `lsn` are
    those of the last synchronization, None before the first.  `asked` counts the commands that asked for one, so that what was
    read before a command does not answer it.  `leaving`: it has left the subscription, and is to leave the Delta table.
    """

    subid: int
    relid: int
    schema: str
    name: str
    state: RelState
    asked: int
    leaving: bool
    path: str
    definition: str
    last_value: int | None
    is_called: bool | None
    lsn: Lsn | None

    @property
    def qualified_name(self) -> str:
        """schema.name, unquoted."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class OriginStatus:
    """A row of pg_replication_origin_status.

    `remote_lsn` is the restart point: every transaction up to it is decided and durable, and the stream restarts there.
    """

    subid: int
    relid: int | None
    remote_lsn: Lsn
    local_lsn: Lsn | None

    @property
    def external_id(self) -> str:
        """The origin's name: pg_<subid>, or pg_<subid>_<relid> (worker.c: ReplicationOriginNameForLogicalRep)."""
        return f"pg_{self.subid}" if self.relid is None else f"pg_{self.subid}_{self.relid}"


@dataclass(frozen=True, slots=True)
class LastCommit:
    """The last transaction that is in Delta: where its commit record begins, and its time there.

    `time` is in microseconds since 2000-01-01 UTC, as in the record.
    """

    lsn: Lsn
    time: int


@dataclass(frozen=True, slots=True)
class PreparedXact:
    """A prepared transaction without an outcome: the publisher's xid and gid, and when it was prepared there.

    `host` and `directory` are where its file is; None: an earlier release did not store that.
    """

    xid: int
    gid: str
    prepared: datetime
    host: str | None = None
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A version of a Delta table that a pinned snapshot names."""

    relation: str
    """The table's qualified name at the publisher, as of then."""
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """Versions that together show one LSN, and that stay readable.  `subscription`: its name as of then.

    `complete`: whether the tables keep them already; a command that was interrupted leaves one that is not.
    """

    name: str
    subscription: str
    lsn: Lsn
    created: datetime
    complete: bool
    tables: tuple[PinnedTable, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A command's request to the daemon: `kind` says what is asked, `payload` is JSON."""

    id: int
    kind: str
    subid: int | None
    payload: dict[str, Any]
    created: datetime


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was carried out: its tag and its text, without passwords."""

    id: int
    tag: str
    statement: str
    executed: datetime


@dataclass(frozen=True, slots=True)
class State:
    """The whole catalog as `status` and the views show it, read in one transaction."""

    node: NodeRow
    daemons: tuple[DaemonRow, ...]
    """One, or those that share the catalog."""
    subscriptions: tuple[Subscription, ...]
    relations: tuple[SubscriptionRel, ...]
    origins: tuple[OriginStatus, ...]
    workers: tuple[WorkerStats, ...]
    copies: tuple[CopyProgress, ...]
    statistics: tuple[SubscriptionStats, ...]
    prepared: tuple[tuple[int, PreparedXact], ...] = ()
    """Each with its subscription's oid."""
    publishers: Mapping[int, PublisherStatus] = field(default_factory=dict)
    """By subscription's oid."""
    rows: tuple[TableRows, ...] = ()
    storage: tuple[TableStorage, ...] = ()
    pinned_snapshots: tuple[PinnedSnapshot, ...] = ()
    verifications: tuple[Verification, ...] = ()
    sequences: tuple[SubscriptionSequence, ...] = ()
    """Without those that have left."""
    registrations: tuple[Registration, ...] = ()
    leases: tuple[Lease, ...] = ()
    """Empty where one daemon does all of the work."""

    @property
    def daemon(self) -> DaemonRow | None:
        """The daemon, or the first of several."""
        return self.daemons[0] if self.daemons else None

    @property
    def last_compared(self) -> Mapping[tuple[int, int, int], datetime]:
        """When the last comparison of each table began, by its subscription, oid and copy.

        A table's turn comes after that of those compared longer ago, or never.  One that got no LSN to be compared at has had none.
        """
        return {
            (one.subid, one.relid, one.generation): one.started for one in self.verifications if one.lsn is not None
        }


def subscriptions_of(state: State, daemon: int) -> tuple[str, ...]:
    """Return the names of the subscriptions that a daemon has."""
    if not state.leases:
        return tuple(one.name for one in state.subscriptions)
    units = {one.unit for one in state.leases if one.daemon == daemon}
    return tuple(one.name for one in state.subscriptions if unit_of(one.oid, one.options.source) in units)


def _source_of(definition: str | None) -> Source | None:
    """Return whose rows of its Delta table a table with this definition has; None: all, or there is no definition yet."""
    if definition is None or '"source"' not in definition:
        return None  # of a thousand tables none is parsed, for each query
    found = json.loads(definition).get("source")
    return None if found is None else Source(*found)
