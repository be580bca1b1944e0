"""What must hold: at each commit to a table, at each status message, and in the end.

    a version of a table            holds the publisher's rows at the LSN that it claims
    a confirmed position            is at or before the stored origin, and what it covers is in the tables
    a stored origin                 does not go back, unless every table is copied anew
    in the end                      each table holds the publisher's rows; no slot is left but the subscription's; what was staged is
                                    gone; each LSN that a snapshot names is whole

A violation is noted, not raised: an exception would only make the subscriber start again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tests.simulation.lake import Contents
from tests.simulation.publisher import INT8, Server, Slot, State

if TYPE_CHECKING:
    from tests.simulation.world import World

FOREIGN_KEY = 1000
"""Keys from here on are other writers'."""

_ORIGIN = "SELECT remote_lsn FROM pubsub_replication_origin WHERE relid = 0"
_RELATIONS = """
SELECT r.relid, r.state, r.lsn, r.copy_generation, r.path, i.stopped FROM pubsub_subscription_rel r
  LEFT JOIN pubsub_table_incident i ON i.subid = r.subid AND i.relid = r.relid
"""


class Oracle:
    """`violations`: what did not hold, the first one first."""

    def __init__(self, world: World) -> None:
        self.violations: list[str] = []
        self.contents = Contents(world.lake.files)
        self._world = world
        # By table: the versions of its applications; the keys of rows that other writers have deleted, each with the table's version
        # then; whether it may differ until its next copy.
        self.versions: dict[str, dict[str, Lsn]] = {}
        self._deleted: dict[str, dict[int, Lsn]] = {}
        # The tables of which they ever have: versions of before a copy lack the rows still.
        self._lacking: set[str] = set()
        self.differs: set[str] = set()
        self._whole_from: dict[str, Lsn] = {}
        self._checked = INVALID_LSN

    def forget(self, path: str) -> None:
        """Forget a table that was moved away."""
        self.contents.forget(path)
        for known in (self.versions, self._deleted, self._whole_from):
            known.pop(path, None)
        self.differs.discard(path)
        self._lacking.discard(path)

    def require(self, holds: object, what: str) -> None:
        """Note a violation unless `holds`."""
        if not holds and len(self.violations) < 5:
            self.violations.append(what)
            self._world.tell(f"VIOLATION: {what}")

    def committed(self, path: str, version: int, lines: list[dict[str, Any]]) -> None:
        """Check a commit to the table at `path`."""
        self.contents.apply(path, version, lines)
        metadata = json.loads(lines[0]["commitInfo"].get("userMetadata") or "{}")
        app_id = next((line["txn"]["appId"] for line in lines if "txn" in line), None)
        if app_id is None or "/chunk/" in app_id:
            return
        last, held = Lsn(lines[-1]["txn"]["version"]), self.versions.setdefault(path, {})
        relid, generation = map(int, app_id.split("/")[3:])
        earlier = held.get(app_id)
        alters = earlier is not None and last == earlier
        self.require(earlier is None or last >= earlier, f"the version of {path} goes back from {earlier} to {last}")
        self.require(
            generation == max(int(app.rpartition("/")[2]) for app in (app_id, *held)),
            f"an earlier copy of {path} is written: {app_id}",
        )
        if earlier is None:
            self.differs.discard(path)
            self._deleted.pop(path, None)
        held[app_id] = last
        until = Lsn.parse(metadata["until"]) if "until" in metadata else INVALID_LSN
        if until:
            self._whole_from[path] = until
        elif earlier is None:
            self._whole_from.pop(path, None)
        what = "alters" if alters else "holds everything up to"
        self._world.tell(f"version {version} of {_name(path)} {what} {last} (copy {generation})")
        if last < self._whole_from.get(path, INVALID_LSN) or path in self.differs or alters:
            return
        self._compare(path, relid, last)

    def _compare(self, path: str, relid: int, at: Lsn) -> None:
        """Require that the table holds the publisher's rows at `at`: those of the server that has it now, or had it."""
        rows = self.rows(path)
        servers = [server for server in self._world.lineage if relid in server.states and at <= server.end]
        if any(not self._difference(path, rows, server, server.at(relid, at)) for server in servers):
            return
        difference = "nobody has such an LSN"
        if servers:
            difference = self._difference(path, rows, servers[-1], servers[-1].at(relid, at))
        self.require(False, f"{_name(path)} at {at} differs: {difference}")

    def rows(self, path: str, version: int | None = None) -> list[dict[str, Any]]:
        """Return a table's rows, without those of other writers."""
        found = self.contents.rows(path, version)
        return [row for row in found if not (isinstance(row.get("id"), int) and row["id"] >= FOREIGN_KEY)]

    def deletes(self, path: str, key: int) -> None:
        """Note that another writer deletes the row with this key."""
        at = max(self.versions.get(path, {}).values(), default=INVALID_LSN)
        self._deleted.setdefault(path, {}).setdefault(key, at)
        self._lacking.add(path)

    def _missing_keys(self, path: str, relid: int, server: Server) -> set[int]:
        """Return the keys that the table may lack, since another writer has deleted rows: their UPDATEs insert none."""
        missing: set[int] = set()
        for key, since in self._deleted.get(path, {}).items():
            keys = {key}
            for record in server.wal:
                change = record.change
                if record.end > since and change is not None and change.oid == relid and change.old and change.new:
                    old, new = (int(row[1] or 0) for row in (change.old, change.new))
                    keys |= {new} if old in keys else set()
            missing |= keys
        return missing

    def _difference(self, path: str, rows: list[dict[str, Any]], server: Server, state: State) -> str:
        """Return how the rows differ from the publisher's, in the columns that both have."""
        columns = [c for c in state.shape.columns if not rows or c.name in rows[0]]
        deleted = self._missing_keys(path, state.shape.oid, server)

        def published(number: int, text: str | None, kind: int) -> Any:
            return int(text) if text is not None and kind == INT8 else text

        expected = sorted(
            (
                tuple(published(c.number, row.get(c.number, c.missing), c.type) for c in columns)
                for row in state.heap.values()
            ),
            key=repr,
        )
        have = sorted((tuple(_plain(row[c.name]) for c in columns) for row in rows), key=repr)
        if deleted:
            key = [c.number for c in columns].index(1)
            expected = [row for row in expected if row[key] not in deleted]
            have = [row for row in have if row[key] not in deleted]
        if expected == have:
            return ""
        missing, extra = [row for row in expected if row not in have], [row for row in have if row not in expected]
        return f"lacks {missing}, has {extra}" if missing or extra else "has rows twice"

    def stored_origin(self) -> Lsn:
        rows = self._world.store.rows(_ORIGIN)
        return _lsn(rows[0][0]) if rows else INVALID_LSN

    def confirmed(self, slot: Slot, flushed: Lsn) -> None:
        """Check a status message on a slot."""
        if slot.name != "s" or flushed <= slot.confirmed:
            return
        origin = self.stored_origin()
        self.require(flushed <= origin, f"{flushed} is confirmed, but the origin is {origin}")
        server = self._world.server
        for relid, state, lsn, generation, path, stopped in self._world.store.rows(_RELATIONS):
            if state not in "sr" or stopped or path in self.differs or path not in self.versions:
                continue
            held = next((v for app, v in self.versions[path].items() if app.endswith(f"/{relid}/{generation}")), 0)
            held = max(held, _lsn(lsn))
            needed = last_change(server, relid, flushed)
            self.require(
                needed <= held, f"{flushed} is confirmed, but {_name(path)} holds only what is up to {Lsn(held)}"
            )

    async def settled(self) -> None:
        """Check everything, when all is quiet."""
        world = self._world
        server = world.server
        relations = world.store.rows(_RELATIONS)
        for relid, _, _, generation, path, _ in relations:
            self.require(relid in server.states, f"{path} is of no table")
            difference = self._difference(path, self.rows(path), server, server.now(relid))
            self.require(not difference, f"{_name(path)} differs in the end: {difference}")
            for app in self.versions.get(path, {}):
                self.require(
                    int(app.rpartition("/")[2]) <= generation, f"a commit of {path} under no copy's name: {app}"
                )
        self.require(set(server.slots) <= {"s"}, f"slots are left behind: {sorted(set(server.slots) - {'s'})}")
        self._check_snapshots(await world.state())

    def _check_snapshots(self, state: Any) -> None:
        from pubsub.node import snapshot

        subscription = state.subscriptions[0]
        origin = self.stored_origin()
        chance = self._world.chance.random
        relids = {relation.qualified_name: relation.relid for relation in state.relations}
        for at in (origin, *(Lsn(chance.randrange(1000, max(origin, 1001))) for _ in range(2))):
            try:
                found = snapshot.take(state, subscription, at)
            except Exception:
                if at == origin and state.relations and not self.differs:
                    self.require(False, f"there is no snapshot at {at}")
                continue
            for name, (version, path) in found.tables.items():
                if path in self.differs or path in self._lacking:
                    continue
                relid = relids[name]
                rows = self.rows(path, version)
                ends = [s for s in self._world.lineage if found.lsn <= s.end]
                if not any(not self._difference(path, rows, server, server.at(relid, found.lsn)) for server in ends):
                    difference = self._difference(path, rows, ends[-1], ends[-1].at(relid, found.lsn))
                    self.require(False, f"the snapshot of {found.lsn} is not whole: {name} differs: {difference}")


def last_change(server: Server, relid: int, at: Lsn) -> Lsn:
    """Return where the last transaction up to `at` that changed rows of the table ends."""
    states = [state for state in server.states[relid] if state.since <= at]
    for before, state in zip(reversed(states[:-1]), reversed(states), strict=False):
        if before.heap != state.heap:
            return state.since
    return INVALID_LSN


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _lsn(stored: str | None) -> Lsn:
    """Return an LSN as the catalog's database has it."""
    return INVALID_LSN if stored is None else Lsn.parse(stored)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
