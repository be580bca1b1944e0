"""A picture of the node at one moment, of which metrics and readiness are made.

Nothing is counted for it: the catalog has what `status` and the views show, the workers have their figures, and the slots
are those that SQL shows.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from apply.worker_statistics import Changes, Distribution, Figures
from catalog.records import State
from pubsub.node.status import NodeStatus, from_state

if TYPE_CHECKING:
    from pubsub.node.node import Node
    from pubsub.server.backend import NodeBackend
    from pubsub.server.doors import Doors
    from walsender.server.service import Service

#: A picture is shown for so many seconds, however many ask: the catalog has new figures once a second.
_FRESH: Final = 1.0
#: The catalog may take so many seconds to answer.
_PATIENCE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Live:
    """An apply worker's figures that the catalog does not have; they begin anew with each worker."""

    lag: Distribution
    commit_seconds: Distribution
    batch_rows: Distribution
    queued_bytes: int
    queue_limit: int
    changes: Mapping[int, Changes]

    @classmethod
    def of(cls, figures: Figures) -> Live:
        """Copy them, so that they stand still."""
        return cls(
            figures.lag.distribution(),
            figures.commit_seconds.distribution(),
            figures.batch_rows.distribution(),
            figures.queued_bytes,
            figures.queue_limit,
            {relid: replace(one) for relid, one in figures.changes.items()},
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What subscribers are served.

    `slots` and `streams` are rows of pg_replication_slots and pg_stat_replication, each with the server that has them:
    "walsender" or "node".  `upstream_position`: up to where the walsender has the upstream server's WAL; None without one.
    `failing`: why none comes now; None while it does.
    """

    slots: Sequence[tuple[str, Mapping[str, Any]]] = ()
    streams: Sequence[tuple[str, Mapping[str, Any]]] = ()
    upstream_position: int | None = None
    failing: str | None = None

    @classmethod
    def of(cls, publisher: Service | None, node: NodeBackend | None = None) -> Served:
        """Look at the walsender, and at the node's own publisher."""
        slots: list[tuple[str, Mapping[str, Any]]] = []
        streams: list[tuple[str, Mapping[str, Any]]] = []
        if publisher is not None:
            from walsender.server.slot_statements import slot_row

            slots += [("walsender", slot_row(publisher, one)) for one in publisher.slots]
            streams += [("walsender", one.stream.row()) for one in publisher.sessions if one.stream is not None]
        if node is not None:
            from pubsub.server.publishing.publisher import slot_row as node_slot_row

            slots += [("node", node_slot_row(one)) for one in node.publisher.slots]
            streams += [("node", one.row()) for one in node.publisher.streams]
        if publisher is None:
            return cls(slots, streams)
        return cls(slots, streams, publisher.feed.received, publisher.feed.failing)


@dataclass(frozen=True, slots=True)
class Picture:
    """The node at one moment.

    `live`: by subscription's oid, where an apply worker runs.  `verify_interval`: the setting, in seconds; 0: never.
    """

    state: State
    status: NodeStatus
    live: Mapping[int, Live]
    served: Served = Served()
    jvm_pid: int | None = None
    verify_interval: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    """The daemon's processor time, by part (processor_time)."""
    leased: frozenset[int] | None = None
    """The oids of the subscriptions that this daemon has, where several share the catalog."""

    def own(self) -> Picture:
        """Return what this daemon answers for: monitors look at the others, too."""
        if self.leased is None:
            return self
        mine = replace(self.state, subscriptions=tuple(s for s in self.state.subscriptions if s.oid in self.leased))
        return replace(self, state=mine, status=from_state(mine, self.status.daemon))


class Pictures:
    """Takes pictures of a daemon's node: one at a time, and at most one a second."""

    def __init__(self, node: Node, doors: Doors | None = None, backend: NodeBackend | None = None) -> None:
        self._node = node
        self._doors = doors
        self._backend = backend
        self._lock = asyncio.Lock()
        self._last: tuple[float, Picture] | None = None

    async def take(self) -> Picture:
        """Return the node's picture, a second old at most.  Raises PubsubError, and TimeoutError."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH:
                async with asyncio.timeout(_PATIENCE):
                    taken = await self._take()
                self._last = time.monotonic(), taken
            return self._last[1]

    async def _take(self) -> Picture:
        state = await self._node.state()
        service = self._node.service
        live = {} if service is None else {oid: Live.of(one) for oid, one in service.figures().items()}
        jvm = service.engine.jvm_pid if service is not None else None
        served = Served.of(self._doors.publisher if self._doors is not None else None, self._backend)
        leased = service.leased if service is not None else None
        spent = service.spent() if service is not None else {}
        every = self._node.settings.verify.interval
        return Picture(state, from_state(state, os.getpid()), live, served, jvm, every, spent, leased)
