"""The node's picture as the document that the page and `status --watch` show.

It has what `pubsub status --json` has, by the same names, but with the tables in a list of their own: a page of those that are
asked for.  However many tables there are, a document stays small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import parse_qsl

from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.logs import RecentEvents
from pubsub.monitoring.copies import CopyEnds, is_copied
from pubsub.monitoring.history import STEPS, History
from pubsub.monitoring.picture import Picture
from pubsub.monitoring.readiness import obstacles
from pubsub.node.status import STATE_WORDS, SubscriptionStatus, TableStatus, subscription_json, table_json
from pubsub.protocol.copyboth import pg_time_to_datetime
from pubsub.protocol.lsn import Lsn

#: Of the document.  Keys may be added to a version, never renamed or removed.
VERSION: Final = 1
#: So many of each are in one document.
MOST_TABLES: Final = 200
_SUBSCRIPTIONS: Final = 20
_COPIES: Final = 50
#: Slots, and streams.
_MOST: Final = 100
_FOLLOWED: Final = frozenset("sr")
#: Columns of pg_replication_slots.
_SLOT: Final = (
    "slot_name", "plugin", "database", "active", "restart_lsn", "confirmed_flush_lsn", "wal_status",
    "invalidation_reason",
)  # fmt: skip


class Observed:
    """What a process has seen of its node so far: it is kept in memory, and lasts as long as the process."""

    def __init__(self, events: RecentEvents | None = None) -> None:
        self.events = events or RecentEvents()
        self.history = History()
        self.copies = CopyEnds()

    def sample(self, picture: Picture) -> None:
        """Join a picture."""
        self.history.sample(picture)
        self.copies.look(picture.status)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A table, and what of it no status has: when this process last committed to it (microseconds since 2000)."""

    subscription: str
    status: TableStatus
    committed: int | None

    @property
    def troubled(self) -> bool:
        """Whether a person should look at it."""
        status = self.status
        verified = status.verification
        return (
            status.stopped
            or status.error is not None
            or (status.waiting is not None and status.waiting.hint is not None)
            or (verified is not None and (verified.outcome == "failed" or verified.equal is False))
        )

    @property
    def follows(self) -> bool:
        return not self.status.stopped and self.status.state in _FOLLOWED

    @property
    def size(self) -> int | None:
        status = self.status
        return None if status.live_bytes is None else status.live_bytes + (status.retained_bytes or 0)


_SHOWN: Final[Mapping[str, Callable[[_Listed], bool]]] = MappingProxyType(
    {
        "all": lambda one: True,
        "trouble": lambda one: one.troubled,
        "copying": lambda one: not one.follows and not one.status.stopped,
        "following": lambda one: one.follows,
    }
)


def _attention(one: _Listed) -> int:
    return 0 if one.troubled else 1 if is_copied(one.status) else 2 if not one.follows else 3


#: By which tables are ordered, before their names; those of which it is not known come last.
_ORDERS: Final[Mapping[str, Callable[[_Listed], float | None]]] = MappingProxyType(
    {
        "attention": _attention,
        "name": lambda one: 0,
        "rows": lambda one: _descending(one.status.rows),
        "size": lambda one: _descending(one.size),
        "lag": lambda one: _descending(one.status.lag_bytes),
        "committed": lambda one: _descending(one.committed),
    }
)


def _descending(value: float | None) -> float | None:
    return None if value is None else -value


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked for: tables whose names have all words of `search`, of a kind, in an order, from one on."""

    search: str = ""
    show: str = "all"
    order: str = "attention"
    offset: int = 0
    limit: int = 50
    subscriptions: int = 0
    """The first subscription's number."""
    span: str = "hour"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URL's query.  Raises ValueError."""
        given = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=20, strict_parsing=bool(text)))
        unknown = given.keys() - set(cls.__slots__)
        if unknown:
            raise ValueError(f"unknown parameter {min(unknown)!r}")
        for name, known in (("show", _SHOWN), ("order", _ORDERS), ("span", STEPS)):
            if given.get(name) is not None and given[name] not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}")
        numbers: dict[str, int] = {}
        for name in ("offset", "limit", "subscriptions"):
            if name in given:
                digits = given.pop(name)
                if not (digits.isascii() and digits.isdecimal()) or len(digits) > 9:
                    raise ValueError(f"{name} is a number")
                numbers[name] = int(digits)
        if "limit" in numbers:
            numbers["limit"] = min(numbers["limit"], MOST_TABLES)
        return cls(**given, **numbers)  # type: ignore[arg-type]


def document(picture: Picture, observed: Observed, query: Query, ready_lag: float) -> dict[str, Any]:
    """Return the document, of values that JSON has."""
    status = picture.status
    now = status.time.timestamp()
    by_subscription = _tables(picture)
    every = [one for tables in by_subscription for one in tables]
    words = query.search.casefold().split()
    order = _ORDERS[query.order]
    shown = _SHOWN[query.show]
    matching = [one for one in every if shown(one) and all(word in one.status.name.casefold() for word in words)]

    def place(one: _Listed) -> tuple[bool, float, str, str]:
        value = order(one)
        return value is None, value or 0, one.status.name, one.subscription

    matching.sort(key=place)
    first = min(query.subscriptions, max(0, len(status.subscriptions) - 1))
    some = slice(first, first + _SUBSCRIPTIONS)
    copied = [one for one in every if is_copied(one.status)]
    slots = [*_publishers_slots(picture), *_own_slots(picture)]
    # Beyond the last table, the last ones are shown: there may have been more a moment ago.
    offset = (
        query.offset
        if query.offset < len(matching)
        else max(0, (len(matching) - 1) // max(1, query.limit) * query.limit)
    )
    return {
        "version": VERSION,
        "node": status.node,
        "daemon": status.daemon,
        "time": status.time.isoformat(),
        "memory": None if status.memory is None else asdict(status.memory),
        "obstacles": obstacles(status, ready_lag),
        "subscriptions": [
            _subscription(picture, observed, oid, one, tables, query.span, now, ready_lag)
            for oid, one, tables in list(
                zip((s.oid for s in picture.state.subscriptions), status.subscriptions, by_subscription, strict=True)
            )[some]
        ],
        "subscriptions_offset": first,
        "subscriptions_limit": _SUBSCRIPTIONS,
        "subscriptions_total": len(status.subscriptions),
        "tables": [_table(one, observed) for one in matching[offset : offset + query.limit]],
        "tables_offset": offset,
        "tables_limit": query.limit,
        "tables_matching": len(matching),
        "tables_total": len(every),
        "tables_shown": {name: sum(map(test, every)) for name, test in _SHOWN.items()},
        "copies": [_table(one, observed) for one in copied[:_COPIES]],
        "copies_total": len(copied),
        "slots": slots[:_MOST],
        "slots_total": len(slots),
        "streams": [{"server": server, **_texts(row)} for server, row in picture.served.streams[:_MOST]],
        "upstream_lsn": _upstream_lsn(picture),
        "events": [asdict(one) | {"fields": dict(one.fields)} for one in observed.events.newest()],
    }


def _tables(picture: Picture) -> list[list[_Listed]]:
    """Return every subscription's tables."""
    relations: dict[int, list[SubscriptionRel]] = {one.oid: [] for one in picture.state.subscriptions}
    for relation in picture.state.relations:
        if relation.subid in relations:
            relations[relation.subid].append(relation)
    found = []
    for (oid, of_one), status in zip(relations.items(), picture.status.subscriptions, strict=True):
        live = picture.live.get(oid)
        changes = live.changes if live is not None else {}
        found.append(
            [
                _Listed(status.name, table, changes[relation.relid].last if relation.relid in changes else None)
                for relation, table in zip(of_one, status.tables, strict=True)
            ]
        )
    return found


def _subscription(
    picture: Picture,
    observed: Observed,
    oid: int,
    status: SubscriptionStatus,
    tables: Sequence[_Listed],
    span: str,
    now: float,
    ready_lag: float,
) -> dict[str, Any]:
    known = next((one for one in picture.state.statistics if one.subid == oid), None)
    when = known.error_time if known is not None else None
    words, level = _condition(status, tables, picture.status.daemon, ready_lag)
    return {
        **subscription_json(status),
        "condition": words,
        "condition_level": level,
        "error_time": when.isoformat() if when is not None else None,
        "tables_total": len(tables),
        "tables_by_state": dict(Counter("stopped" if one.status.stopped else one.status.state for one in tables)),
        "tables_troubled": sum(one.troubled for one in tables),
        "rows": _sum(one.status.rows for one in tables),
        "live_bytes": _sum(one.status.live_bytes for one in tables),
        "retained_bytes": _sum(one.status.retained_bytes for one in tables),
        "log_bytes": _sum(one.status.log_bytes for one in tables),
        "history": observed.history.document(oid, span, now),
    }


def _condition(
    status: SubscriptionStatus, tables: Sequence[_Listed], daemon: int | None, ready_lag: float
) -> tuple[str, str]:
    """Return a subscription's condition in words, and whether that is good, bad, a warning, or idle."""
    states = {one.status.state for one in tables}
    if not status.enabled:
        return "disabled", "idle"
    if status.error is not None:
        return "failing", "bad"
    if daemon is None:
        return "no daemon runs", "bad"
    if status.lag_unknown_since is not None:
        return "publisher does not answer", "bad"
    if any(one.status.stopped for one in tables):
        return "tables have stopped", "bad"
    if status.received_lsn is None:
        return "starting", "warn"
    if status.lag_seconds is not None and status.lag_seconds > ready_lag:
        return "lagging", "warn"
    if RelState.DATASYNC.value in states:
        return "copying", "warn"
    return ("following", "good") if states <= _FOLLOWED else ("tables are not ready yet", "warn")


def _table(one: _Listed, observed: Observed) -> dict[str, Any]:
    left = observed.copies.seconds_left(one.subscription, one.status) if is_copied(one.status) else None
    return {
        "subscription": one.subscription,
        **table_json(one.status),
        "state_words": "stopped" if one.status.stopped else STATE_WORDS.get(one.status.state, one.status.state),
        "troubled": one.troubled,
        "last_commit": None if one.committed is None else pg_time_to_datetime(one.committed).isoformat(),
        "copy_seconds_left": None if left is None else round(left, 1),
    }


def _sum(values: Any) -> int | None:
    """Return the sum of what is known; None if nothing is."""
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def _publishers_slots(picture: Picture) -> list[dict[str, Any]]:
    """Return the subscriptions' slots on their publishers, as the monitors saw them last."""
    found = []
    for one, status in zip(picture.state.subscriptions, picture.status.subscriptions, strict=True):
        if status.slot is None:
            continue
        found.append(
            {
                "server": "publisher",
                "slot_name": status.slot,
                "subscription": status.name,
                "plugin": "pgoutput",
                "database": one.publisher_database,
                # Our own stream is the only one that uses it.
                "active": None if picture.status.daemon is None else status.received_lsn is not None,
                "restart_lsn": None,
                "confirmed_flush_lsn": None if status.flush_lsn is None else str(status.flush_lsn),
                "wal_status": status.wal_status,
                "retained_wal_bytes": status.retained_wal_bytes,
                "safe_wal_bytes": status.safe_wal_bytes,
                "current_lsn": None if status.publisher_lsn is None else str(status.publisher_lsn),
                "unknown_since": None if status.lag_unknown_since is None else status.lag_unknown_since.isoformat(),
            }
        )
    return found


def _upstream_lsn(picture: Picture) -> str | None:
    position = picture.served.upstream_position
    return None if position is None else str(Lsn(position))


def _own_slots(picture: Picture) -> list[dict[str, Any]]:
    """Return the slots that this node serves."""
    found = []
    for server, row in picture.served.slots:
        restart = row.get("restart_lsn")
        retained = None
        if server == "walsender" and restart is not None and picture.served.upstream_position is not None:
            retained = max(0, picture.served.upstream_position - int(Lsn.parse(restart)))
        found.append(
            {
                "server": server,
                "subscription": None,
                **{name: row.get(name) for name in _SLOT},
                "retained_wal_bytes": retained,
                "safe_wal_bytes": row.get("safe_wal_size"),
                "current_lsn": _upstream_lsn(picture),
                "unknown_since": None,
            }
        )
    return found


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with values that JSON has."""
    return {
        name: value if isinstance(value, (int, float, str)) or value is None else str(value)
        for name, value in row.items()
    }
